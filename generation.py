"""Generate text samples from the current weights."""

import math
from collections.abc import Callable

import torch

TEMPERATURE = 0.8
WINDOW_MULTIPLE = 64


def sample(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    prompt: list[int],
    *,
    count: int,
    n_ids: int,
    seq_len: int,
    multiple_of: int,
    seed: int,
) -> list[int]:
    """Sample ``count`` token ids after ``prompt``, all below ``n_ids``, at a fixed temperature.

    Collective, if ``logits_of`` is; all ranks sample the same tokens. ``logits_of`` maps tokens
    (1, s) to logits (1, s, vocab), with s at most ``seq_len`` and a multiple of ``multiple_of``.
    It recomputes the whole window for each token: suitable for short samples only.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    # Pad to one length for all tokens; a causal model ignores the padding.
    total, multiple = len(prompt) + count, math.lcm(WINDOW_MULTIPLE, multiple_of)
    length = min(seq_len, -(-total // multiple) * multiple)
    for _ in range(count):
        window = tokens[-length:]
        padded = torch.tensor([window + [0] * (length - len(window))])
        logits = logits_of(padded)[0, len(window) - 1, :n_ids]
        tokens.append(sample_token(logits, generator, temperature=TEMPERATURE))
    return tokens[len(prompt) :]


def sample_token(
    logits: torch.Tensor,
    generator: torch.Generator,
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> int:
    """Sample a token id from logits (ids,), on the CPU; temperature 0: argmax.

    Candidates are the ``top_k`` most likely ids, and of those the nucleus of probability ``top_p``
    (arXiv 1904.09751). Raises ``ValueError`` for nonfinite logits.
    """
    logits = logits.cpu().double()
    if not logits.isfinite().all():
        raise ValueError("the model's logits are not finite")
    if temperature == 0.0:
        return int(logits.argmax())
    # The largest logit becomes 0, so a low temperature cannot overflow.
    probabilities = ((logits - logits.max()) / temperature).float().softmax(dim=-1)
    if top_k is not None or top_p < 1.0:
        order = probabilities.argsort(descending=True, stable=True)
        candidates = probabilities[order[:top_k]].double()
        n_kept = len(candidates)
        if top_p < 1.0:
            preceding = candidates.cumsum(dim=0) - candidates
            n_kept = int((preceding < top_p * candidates.sum()).sum())
        probabilities[order[n_kept:]] = 0.0
    return int(torch.multinomial(probabilities, 1, generator=generator))
