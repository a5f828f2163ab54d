"""Fraction of tokens and epochs read from each source of a mixture."""

from collections.abc import Collection

import torch
from torch.distributed.device_mesh import DeviceMesh

from runtime.distributed import sum_over


def source_fractions(
    consumed: list[tuple[int, int]],
    sources: Collection[tuple[str, int | None]],
    batch_mesh: DeviceMesh,
) -> dict[str, float]:
    """Return each source's fraction of all tokens so far, and its epochs, by label. Collective.

    Epochs are of finished documents: how long the one is that a row reads is not known here.
    ``consumed``: this rank's (finished documents, tokens) per source. ``sources``: (label,
    documents per epoch, or None if unknown). {} with a single source.
    """
    if len(sources) == 1:
        return {}
    total = sum_over(torch.tensor(consumed), batch_mesh).tolist()
    n_tokens = sum(tokens for _, tokens in total)
    metrics = {}
    for (label, n_documents), (documents, tokens) in zip(sources, total, strict=True):
        # With best_fit, no token counts before the end of the first window.
        if n_tokens:
            metrics[f"data_share/{label}"] = tokens / n_tokens
        if n_documents is not None:
            metrics[f"data_epochs/{label}"] = documents / n_documents
    return metrics
