"""Text that the model writes: a look at what it learned."""

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
    """``count`` tokens after ``prompt``, drawn at a fixed temperature from ids below ``n_ids``.

    ``logits_of`` tokens (1, s), s at most ``seq_len`` and a multiple of ``multiple_of``, are
    (1, s, vocab). A collective under sharding: every rank calls it and draws the same tokens.
    Recomputes the whole window for each token, which suits a look at a model and nothing larger.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    # One length for all; what is causal ignores the padding.
    needed, multiple = len(prompt) + count, math.lcm(WINDOW_MULTIPLE, multiple_of)
    length = min(seq_len, -(-needed // multiple) * multiple)
    for _ in range(count):
        window = tokens[-length:]
        padded = torch.tensor([window + [0] * (length - len(window))])
        logits = logits_of(padded)[0, len(window) - 1, :n_ids].float().cpu()
        probabilities = (logits / TEMPERATURE).softmax(dim=-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return tokens[len(prompt) :]
