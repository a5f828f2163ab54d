"""Calls of operators, and their FLOPs by kind."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from kernels.delta_rule import CHUNK

# Matmuls that have a peak, or a share of it, of their own; all others are of kind "matmul".
FLOAT8_MATMUL, DELTA_RULE = "float8 matmul", "delta rule"


@dataclass(eq=False)
class Call:
    """A call of an operator, and what came of it."""

    phase: str
    func: Any
    args: Any
    kwargs: Any
    result: Any
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    is_new: bool = False
    """It allocated an output."""

    @cached_property
    def name(self) -> str:
        return self.func.name().partition("::")[2].partition(".")[0]


def flops_of(call: Call) -> tuple[str, float]:
    """Kind of the operator's FLOPs, and their number; ("", 0) for one that only moves bytes."""
    packet = call.func.overloadpacket
    if "scaled_dot_product" in call.name:
        return "attention", attention_flops(call.name, call.args)
    if "fused_delta_rule" in call.name:
        return DELTA_RULE, delta_rule_flops(call.name, call.args)
    if call.name == "_grouped_mm":
        # Rows by the weights of their expert; or, for the gradient of weights, a sum over rows.
        return "matmul", 2 * call.args[0].numel() * call.args[1].shape[-1]
    if packet not in flop_registry:
        return "", 0
    kind = FLOAT8_MATMUL if call.name == "_scaled_mm" else "matmul"
    return kind, flop_registry[packet](*call.args, **call.kwargs, out_val=call.result)


def delta_rule_flops(name: str, args: Any) -> int:
    """FLOPs of the chunkwise delta rule (section 3.3 of arXiv 2412.06464) by its matmuls.

    Backward computes forward again, and twice as much.
    """
    q, v = (args[2], args[4]) if "backward" in name else (args[0], args[2])
    (b, s, h, k), value = q.shape, v.shape[-1]
    per_position = 2 * (CHUNK * (3 * k + 2 * value) + 3 * k * value)
    return (3 if "backward" in name else 1) * b * s * h * per_position


def attention_flops(name: str, args: Any) -> int:
    """FLOPs of causal attention: 2 matmuls forward, 5 backward, for the keys that are visible."""
    q, k = args[1:3] if "backward" in name else args[:2]
    (b, h, n_queries, head_dim), n_keys = q.shape, k.shape[2]
    visible = n_queries * n_keys - n_queries**2 // 2
    return (10 if "backward" in name else 4) * b * h * head_dim * visible
