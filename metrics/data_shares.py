"""How much of what was read came from each source of a mixture."""

from collections.abc import Collection

import torch
from torch.distributed.device_mesh import DeviceMesh

from runtime.distributed import sum_over


def data_shares(
    consumed: list[tuple[int, int]],
    sources: Collection[tuple[str, int | None]],
    batch_mesh: DeviceMesh,
) -> dict[str, float]:
    """Of each source, by its label: its share of all tokens so far, and how often it was read.

    ``consumed``: this rank's documents and tokens. ``sources``: labels, and documents of an epoch
    where they are known. {} where there is one source. A collective.
    """
    if len(sources) == 1:
        return {}
    total = sum_over(torch.tensor(consumed), batch_mesh).tolist()
    n_tokens = max(1, sum(tokens for _, tokens in total))
    found = {}
    for (label, n_documents), (documents, tokens) in zip(sources, total, strict=True):
        found[f"data_share/{label}"] = tokens / n_tokens
        if n_documents is not None:
            found[f"data_epochs/{label}"] = documents / n_documents
    return found
