"""The gated delta rule on a GPU by the kernels of flash-linear-attention, where it is installed."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from runtime.compat import is_installed
from runtime.kernel_check import check_kernel
from runtime.log import logger

# Added to the decay where a document starts: it leaves e^-50 of the state before. A larger one
# would cost the sums of decays, which are in float32, digits of what follows.
FORGET = -50.0

Rule = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""As ``models/delta_rule.py``'s."""


def use_fused_delta_rule(
    delta_nets: list[nn.Module], *, dtype: torch.dtype | None, n_ranks: int
) -> None:
    """Have the ``inner`` of each module compute its rule by one kernel for a pass over all chunks.

    Mutates the modules, unless they compute in another ``dtype`` than bfloat16, the package is not
    there, or its results differ from what they compute now with the heads of one of ``n_ranks``
    that share them. Its kernels are chosen by their speed at each start, so it is not used where
    runs must be repeatable.
    """
    nets = [cast(Any, net) for net in delta_nets if hasattr(net.inner, "rule")]
    is_repeated = torch.are_deterministic_algorithms_enabled()
    if dtype != torch.bfloat16 or not nets or is_repeated or not is_installed("fla"):
        return
    inners = [net.inner for net in nets]
    rule = FusedDeltaRule(inners[0].rule)
    key_dim, value_dim = inners[0].key_dim, inners[0].value_dim
    # Kernels are chosen by the number of heads, too.
    n_heads = max(1, nets[0].state_size // (key_dim * value_dim) // n_ranks)
    try:
        check_fused_delta_rule(rule, n_heads, key_dim, value_dim, device="cuda")
    # The package works on some GPUs and releases of Triton: training goes without it elsewhere.
    except Exception as error:
        logger.warning("gated delta nets: not by flash-linear-attention: %s", error)
        return
    for inner in inners:
        inner.rule = rule
    logger.info("gated delta nets: by flash-linear-attention in %d layers", len(inners))


class FusedDeltaRule:
    """``plain`` or, in bfloat16 and without a ``state``, the same by the package's kernels."""

    def __init__(self, plain: Rule) -> None:
        self.plain = plain

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        document_ids: torch.Tensor | None,
        state: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if state is not None or q.dtype != torch.bfloat16:
            return self.plain(q, k, v, decay, beta, document_ids, state)
        if document_ids is not None:
            # The package wants documents on the host, which would have to wait for the device.
            document_ids = document_ids[:, -q.shape[1] :]
            is_start = document_ids[:, 1:] != document_ids[:, :-1]
            decay = decay + FORGET * F.pad(is_start, (1, 0))[..., None]
        results: tuple[torch.Tensor, torch.Tensor] = _rule(q, k, v, decay, beta)
        return results


# One operation, or compilers would look into it.
@torch.library.custom_op("shardloom::fused_delta_rule", mutates_args=())
def _rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out, state = _compute(q, k, v, decay, beta)
    return out.contiguous(), state.contiguous()


@_rule.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    b, _, h, key_dim = q.shape
    return v.new_empty(v.shape), v.new_empty(b, h, key_dim, v.shape[-1], dtype=torch.float32)


def _compute(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Seconds to import, so only where it is used.
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(*inputs, output_final_state=True, use_qk_l2norm_in_kernel=True)


@torch.library.custom_op("shardloom::fused_delta_rule_backward", mutates_args=())
def _rule_backward(
    of_out: torch.Tensor,
    of_state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Its gradients. What the package keeps for them differs by release, so it computes again."""
    inputs = [t.detach().requires_grad_() for t in (q, k, v, decay, beta)]
    with torch.enable_grad():
        results = _compute(*inputs)
    gradients = torch.autograd.grad(results, inputs, (of_out, of_state))
    return cast(Any, tuple(t.contiguous() for t in gradients))


@_rule_backward.register_fake
def _(
    of_out: torch.Tensor, of_state: torch.Tensor, *inputs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return cast(Any, tuple(t.new_empty(t.shape) for t in inputs))


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs)


@once_differentiable
def _backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return _rule_backward(*gradients, *ctx.saved_tensors)


_rule.register_autograd(_backward, setup_context=_keep)


def check_fused_delta_rule(
    rule: FusedDeltaRule, n_heads: int, key_dim: int, value_dim: int, *, device: str
) -> None:
    """Raise ``ArithmeticError`` unless it computes what its ``plain`` does, for these heads."""
    generator = torch.Generator(device).manual_seed(0)
    lasts = ((key_dim,), (key_dim,), (value_dim,), (), ())
    shapes = [(4, 400, n_heads, *last) for last in lasts]
    drawn = [torch.randn(shape, generator=generator, device=device) for shape in shapes]
    # A row of several documents, and a row of one across all chunks, the last of which is not full.
    # Both come once with strong decay, which forgets within a chunk, and once with weak decay.
    ids = torch.zeros(2, 400, dtype=torch.int64, device=device)
    for start in (200, 350, 384, 392):
        ids[0, start:] += 1
    ids, less = ids.repeat(2, 1), torch.tensor([0, 0, 6, 6], device=device)[:, None, None]

    def compute(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        precise = torch.promote_types(q.dtype, torch.float32)
        decay = -F.softplus(decay.to(precise) - less)
        return rule(q, k, v, decay, beta.sigmoid(), ids)

    # In float64 the rule calls ``plain``: it is both what is checked and what is right.
    check_kernel(compute, compute, drawn)
