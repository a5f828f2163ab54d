"""Text that the model writes: a look at what it learned."""

import torch
import torch.nn as nn

TEMPERATURE = 0.8
WINDOW_MULTIPLE = 64


@torch.no_grad()
def sample(
    model: nn.Module, prompt: list[int], *, count: int, n_ids: int, seq_len: int, seed: int
) -> list[int]:
    """``count`` tokens after ``prompt``, drawn at a fixed temperature from ids below ``n_ids``.

    A collective under sharding: every rank calls it and draws the same tokens. Recomputes the whole
    window for each token, which suits a look at a model and nothing larger.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    # One length for all, which tensor parallel ranks divide; what is causal ignores the padding.
    needed = len(prompt) + count
    length = min(seq_len, -(-needed // WINDOW_MULTIPLE) * WINDOW_MULTIPLE)
    for _ in range(count):
        window = tokens[-length:]
        padded = torch.tensor([window + [0] * (length - len(window))], device=device)
        logits = model(padded)[0, len(window) - 1, :n_ids].float().cpu()
        probabilities = (logits / TEMPERATURE).softmax(dim=-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return tokens[len(prompt) :]
