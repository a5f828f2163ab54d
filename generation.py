"""Generate text samples from the current weights."""

import math
from collections.abc import Callable

import torch

TEMPERATURE = 0.8
WINDOW_MULTIPLE = 64


def sample_batch(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    prompts: list[list[int]],
    *,
    count: int,
    n_ids: int,
    length: int,
    seeds: list[int],
) -> list[list[int] | None]:
    """Sample ``count`` token ids after each prompt, all below ``n_ids``, at a fixed temperature.

    None for a prompt whose logits were not finite. Collective, if ``logits_of`` is; all ranks
    sample the same tokens. ``logits_of`` maps tokens (b, ``length``) to logits (b, length, vocab).
    It recomputes the whole windows for each token: suitable for short samples only.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    rows = [list(prompt) for prompt in prompts]
    is_finite = [True] * len(rows)
    for _ in range(count):
        windows = [row[-length:] for row in rows]
        padded = torch.tensor([window + [0] * (length - len(window)) for window in windows])
        logits = logits_of(padded)
        for index, (row, generator) in enumerate(zip(rows, generators, strict=True)):
            own = logits[index, len(windows[index]) - 1, :n_ids]
            # All ranks go on to the last token, because each one is a collective.
            is_finite[index] &= bool(own.isfinite().all())
            token = 0
            if is_finite[index]:
                token = sample_token(own, generator, temperature=TEMPERATURE)
            row.append(token)
    sampled = [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
    return [tokens if ok else None for tokens, ok in zip(sampled, is_finite, strict=True)]


def window_length(prompts: list[list[int]], count: int, *, seq_len: int, multiple_of: int) -> int:
    """Length to which all windows are padded, for all tokens; a causal model ignores the rest."""
    total, multiple = max(map(len, prompts)) + count, math.lcm(WINDOW_MULTIPLE, multiple_of)
    return min(seq_len, -(-total // multiple) * multiple)


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
