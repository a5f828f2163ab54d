"""Gated delta rule on GPUs by flash-linear-attention's fused chunk kernels."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from kernels.kernel_check import assert_kernel_matches, problem_on_any_rank
from runtime.compat import is_installed
from runtime.log import logger

# Added to the log decay at a document's start, which scales the earlier state by e^-50. A larger
# value would cost float32 digits in the cumulative sums of log decays.
RESET_LOG_DECAY = -50.0

Rule = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Signature of ``kernels.delta_rule.delta_rule``."""


def apply_fused_delta_rule(
    delta_nets: list[nn.Module], *, dtype: torch.dtype | None, n_ranks: int
) -> None:
    """Replace the delta rule by flash-linear-attention's fused chunk kernel.

    Mutates ``inner.rule`` of each module, unless ``dtype`` is not bfloat16, the package is not
    installed, or the results differ from the present rule's on any rank. The heads are sharded over
    ``n_ranks``. Skipped under deterministic algorithms, because autotuning varies between runs.
    """
    nets = [cast(Any, net) for net in delta_nets if hasattr(net.inner, "rule")]
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    if dtype != torch.bfloat16 or not nets or is_deterministic:
        return
    inners = [net.inner for net in nets]
    rule = FusedDeltaRule(inners[0].rule)
    key_dim, value_dim = inners[0].key_dim, inners[0].value_dim
    # Autotuning depends on the number of heads.
    n_heads = max(1, nets[0].state_size // (key_dim * value_dim) // n_ranks)

    # The package supports only some GPUs and Triton releases, and a rank may lack it.
    def check() -> None:
        if not is_installed("fla"):
            raise ModuleNotFoundError("it is not installed (fla-core)")
        check_fused_delta_rule(rule, n_heads, key_dim, value_dim, device="cuda")

    if problem := problem_on_any_rank(check):
        text = "flash-linear-attention disabled, %d layers are slower: %s"
        logger.warning(text, len(nets), problem)
        return
    for inner in inners:
        inner.rule = rule
    logger.info("flash-linear-attention: delta rule of %d layers", len(inners))


class FusedDeltaRule:
    """Dispatch to the fused kernels in bfloat16 without a ``state``, otherwise to ``plain``."""

    def __init__(self, plain: Rule) -> None:
        self.plain = plain

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        document_ids: torch.Tensor | None,
        state: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if state is not None or q.dtype != torch.bfloat16:
            return self.plain(q, k, v, g, beta, document_ids, state)
        if document_ids is not None:
            # The package needs document lengths on the host, which would sync with the device.
            document_ids = document_ids[:, -q.shape[1] :]
            is_start = document_ids[:, 1:] != document_ids[:, :-1]
            g = g + RESET_LOG_DECAY * F.pad(is_start, (1, 0))[..., None]
        results: tuple[torch.Tensor, torch.Tensor] = _rule(q, k, v, g, beta)
        return results


# A custom op, so that torch.compile does not trace into it.
@torch.library.custom_op("shardloom::fused_delta_rule", mutates_args=())
def _rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out, state = _compute(q, k, v, g, beta)
    return out.contiguous(), state.contiguous()


@_rule.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    b, _, h, key_dim = q.shape
    return v.new_empty(v.shape), v.new_empty(b, h, key_dim, v.shape[-1], dtype=torch.float32)


def _compute(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Imported on use, because the import takes seconds.
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(*inputs, output_final_state=True, use_qk_l2norm_in_kernel=True)


@torch.library.custom_op("shardloom::fused_delta_rule_backward", mutates_args=())
def _rule_backward(
    grad_out: torch.Tensor,
    grad_state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Recompute and differentiate: what the package saves for backward differs by release."""
    inputs = [t.detach().requires_grad_() for t in (q, k, v, g, beta)]
    with torch.enable_grad():
        results = _compute(*inputs)
    gradients = torch.autograd.grad(results, inputs, (grad_out, grad_state))
    return cast(Any, tuple(t.contiguous() for t in gradients))


@_rule_backward.register_fake
def _(
    grad_out: torch.Tensor, grad_state: torch.Tensor, *inputs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return cast(Any, tuple(t.new_empty(t.shape) for t in inputs))


def _setup_context(
    ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]
) -> None:
    ctx.save_for_backward(*inputs)


@once_differentiable
def _backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return _rule_backward(*gradients, *ctx.saved_tensors)


_rule.register_autograd(_backward, setup_context=_setup_context)


def check_fused_delta_rule(
    rule: FusedDeltaRule, n_heads: int, key_dim: int, value_dim: int, *, device: str
) -> None:
    """Raise ``ArithmeticError`` unless ``rule`` matches its ``plain`` for these heads."""
    generator = torch.Generator(device).manual_seed(0)
    last_dims = ((key_dim,), (key_dim,), (value_dim,), (), ())
    shapes = [(4, 400, n_heads, *last) for last in last_dims]
    inputs = [torch.randn(shape, generator=generator, device=device) for shape in shapes]
    # Two rows: several documents, and one document over all chunks, the last of which is partial.
    # Each row comes with strong decay, which forgets within a chunk, and with weak decay.
    ids = torch.zeros(2, 400, dtype=torch.int64, device=device)
    for start in (200, 350, 384, 392):
        ids[0, start:] += 1
    ids, shift = ids.repeat(2, 1), torch.tensor([0, 0, 6, 6], device=device)[:, None, None]

    def compute(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        precise = torch.promote_types(q.dtype, torch.float32)
        g = -F.softplus(g.to(precise) - shift)
        return rule(q, k, v, g, beta.sigmoid(), ids)

    # In float64 ``rule`` calls ``plain``, so it is both candidate and reference.
    assert_kernel_matches(compute, compute, inputs)
