"""AdamW that reads and writes weights, moments and remainders once, whatever their dtypes.

A remainder has the 16 bits by which a bfloat16 weight differs from a float32 one. With it, updates
too small for bfloat16 add up as they do in float32, for 2 bytes per parameter.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from runtime.compat import foreach
from runtime.torch_device import gpu_has_bfloat16

# Elements updated at once without a compiler: each operation makes a copy, in float32 of 64 MiB.
CHUNK = 1 << 24


class ParameterState(NamedTuple):
    """This rank's tensors of one parameter."""

    step: torch.Tensor
    """Updates made, 0-d."""
    tensors: list[torch.Tensor]
    """Weight, gradient, both moments, and the int16 remainder if it has one; of one shape."""


def one_pass_adamw(
    states: Sequence[ParameterState], group: Mapping[str, Any], found_inf: torch.Tensor | None
) -> None:
    """Update parameters with the options of their ``group``. Mutates ``states``.

    A ``found_inf`` (0-d) other than 0 skips the update. Never waits for the device.
    """
    steps = [state.step for state in states]
    is_skipped = (
        steps[0].new_zeros(()) if found_inf is None else (found_inf != 0).to(steps[0].dtype)
    )
    # A list, because one tensor to add to all would be read by the host.
    foreach("add_", steps, [1 - is_skipped] * len(steps))
    # The first update, if it is skipped, would divide by zero.
    counts = torch.stack(steps).double().clamp(min=1.0)
    (beta1, beta2), lr = group["betas"], group["lr"]
    if isinstance(lr, torch.Tensor):
        lr = lr.double()
    dtype = torch.promote_types(states[0].tensors[0].dtype, torch.float32)
    columns = [
        lr / (1 - beta1**counts),
        (1 - beta2**counts).rsqrt(),
        torch.ones_like(counts) - lr * group["weight_decay"],
        is_skipped.expand_as(counts),
    ]
    # A row has 16 bytes or 32: kernels copy what is not aligned.
    factors = torch.stack(columns, dim=1).to(dtype)
    # Inductor raises an error for bfloat16 that a GPU only emulates.
    is_compiled = counts.is_cuda and gpu_has_bfloat16()
    update = _compiled_update() if is_compiled else _update_in_chunks
    for state, own in zip(states, factors, strict=True):
        flat = [tensor.detach().view(-1) for tensor in state.tensors]
        if flat[0].numel():
            update(flat, own, beta1, beta2, group["eps"])


def read_weight(weight: torch.Tensor, remainder: torch.Tensor | None) -> torch.Tensor:
    """The weight in float32 or more, with its remainder if it has one."""
    if remainder is None:
        return weight.to(torch.promote_types(weight.dtype, torch.float32))
    high = weight.view(torch.int16).to(torch.int32) << 16
    return (high + remainder).view(torch.float32)


def write_weight(
    value: torch.Tensor, *, weight: torch.Tensor, remainder: torch.Tensor | None
) -> None:
    """Round ``value`` to the nearest ``weight``, and store what is left. Mutates both.

    With a remainder halves are rounded away from zero, so that it is never 2**15.
    """
    if remainder is None:
        weight.copy_(value)
        return
    bits = value.view(torch.int32)
    high = (bits + 0x8000) >> 16
    weight.copy_(high.to(torch.int16).view(torch.bfloat16))
    remainder.copy_(bits - (high << 16))


def _update(
    tensors: Sequence[torch.Tensor],
    factors: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Update weights and moments, and remainders if there is a fifth tensor. Mutates ``tensors``.

    ``factors``: learning rate over the first moment's bias correction, inverse root of the second
    one's, 1 - learning rate x weight decay, and 1 if the update is skipped.
    """
    weight, gradient, exp_avg, exp_avg_sq, *others = tensors
    remainder = others[0] if others else None
    step_size, inverse_root, decay, is_skipped = factors.unbind()
    old = read_weight(weight, remainder)
    wide = gradient.to(factors.dtype)
    mean = exp_avg.to(factors.dtype) * beta1 + wide * (1 - beta1)
    square = exp_avg_sq.to(factors.dtype) * beta2 + wide * wide * (1 - beta2)
    new = old * decay - step_size * mean / (square.sqrt() * inverse_root + eps)
    new = torch.where(is_skipped != 0, old, new)
    exp_avg.copy_(torch.where(is_skipped != 0, exp_avg, mean.to(exp_avg.dtype)))
    exp_avg_sq.copy_(torch.where(is_skipped != 0, exp_avg_sq, square.to(exp_avg_sq.dtype)))
    write_weight(new, weight=weight, remainder=remainder)


def _update_in_chunks(tensors: Sequence[torch.Tensor], *options: Any) -> None:
    for chunk in zip(*(tensor.split(CHUNK) for tensor in tensors), strict=True):
        _update(chunk, *options)


@cache
def _compiled_update() -> Callable[..., None]:
    """One kernel for each combination of dtypes."""
    return torch.compile(_update, fullgraph=True, dynamic=True)
