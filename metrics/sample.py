"""Text that the model writes: a look at what it learned."""

import math
import re
from collections.abc import Callable

import torch

TEMPERATURE = 0.8
WINDOW_MULTIPLE = 64


def printable(text: str) -> str:
    """With escapes for the control characters that a terminal obeys, except tabs and newlines."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: repr(found[0])[1:-1], text)


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

    ``logits_of``: tokens (1, s) to logits (1, s, vocab), with s at most ``seq_len`` and a multiple
    of ``multiple_of``. A collective under sharding: every rank calls it and draws the same tokens.
    Recomputes the whole window for each token, which suits a look at a model and nothing larger.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    # One length for all tokens; a causal model ignores the padding.
    needed, multiple = len(prompt) + count, math.lcm(WINDOW_MULTIPLE, multiple_of)
    length = min(seq_len, -(-needed // multiple) * multiple)
    for _ in range(count):
        window = tokens[-length:]
        padded = torch.tensor([window + [0] * (length - len(window))])
        logits = logits_of(padded)[0, len(window) - 1, :n_ids]
        tokens.append(draw(logits, generator, temperature=TEMPERATURE))
    return tokens[len(prompt) :]


def draw(
    logits: torch.Tensor,
    generator: torch.Generator,
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> int:
    """An id drawn by its logit (ids,), on the CPU; at temperature 0 the likeliest.

    Drawn from the fewest of the ``top_k`` likeliest that have ``top_p`` of their probability: the
    nucleus of arXiv 1904.09751. Raises ``ValueError`` for logits that are not finite.
    """
    logits = logits.cpu().double()
    if not logits.isfinite().all():
        raise ValueError("the model's logits are not finite")
    if temperature == 0.0:
        return int(logits.argmax())
    # The largest becomes 0, which it stays however low the temperature.
    probabilities = ((logits - logits.max()) / temperature).float().softmax(dim=-1)
    if top_k is not None or top_p < 1.0:
        order = probabilities.argsort(descending=True, stable=True)
        likeliest = probabilities[order[:top_k]].double()
        n_kept = len(likeliest)
        if top_p < 1.0:
            likelier = likeliest.cumsum(dim=0) - likeliest
            n_kept = int((likelier < top_p * likeliest.sum()).sum())
        probabilities[order[n_kept:]] = 0.0
    return int(torch.multinomial(probabilities, 1, generator=generator))
