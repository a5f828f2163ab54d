"""Block attention: causal attention of short sequences on CPUs by batched matmuls.

PyTorch's CPU kernel is far slower than matmuls, especially in backward. Each block of queries
computes scores only for keys up to its last position, which saves nearly half of the work. Backward
needs the b h s s / 2 saved probabilities: too much memory for longer sequences, where PyTorch's
kernel is nearly as fast.
"""

from typing import Any, cast

import torch
import torch.nn as nn
from torch.autograd.function import once_differentiable

from kernels.kernel_check import assert_kernel_matches
from runtime.compat import softmax_backward
from runtime.log import logger

BLOCK = 128
MAX_SEQ_LEN = 512


def apply_block_attention(
    attentions: list[nn.Module],
    *,
    has_fast_float32: bool,
    heads: tuple[int, int],
    head_dim: int,
) -> None:
    """Use block attention for short sequences in bfloat16 and, if ``has_fast_float32``, float32.

    Mutates ``inner`` of each module, unless the results differ from the present ``inner``'s.
    ``heads``: numbers of query and of key heads. With MKL's float32 matmuls it gains little.
    """
    if not attentions:
        return
    dtypes = (torch.bfloat16, torch.float32) if has_fast_float32 else (torch.bfloat16,)
    inners = [BlockAttention(cast(nn.Module, a.inner), dtypes) for a in attentions]
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 2 * BLOCK, h, head_dim) for h in (heads[0], heads[1], heads[1])]
    qkvs = [torch.randn(shape, generator=generator) for shape in shapes]
    candidate, plain = inners[0], inners[0].plain
    try:
        assert_kernel_matches(
            lambda *qkv: candidate(*qkv, None), lambda *qkv: plain(*qkv, None), qkvs
        )
    except Exception as error:
        logger.warning("block attention disabled: %s", error)
        return
    for attention, inner in zip(attentions, inners, strict=True):
        attention.inner = inner


class BlockAttention(nn.Module):
    """Dispatch to ``block_attention`` where it is faster, otherwise to ``plain``."""

    def __init__(self, plain: nn.Module, dtypes: tuple[torch.dtype, ...]) -> None:
        super().__init__()
        self.plain, self.dtypes = plain, dtypes

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        document_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention with the contract of ``InnerAttention``."""
        if document_ids is None and q.dtype in self.dtypes and _is_supported(q, k):
            return block_attention(q, k, v)
        out: torch.Tensor = self.plain(q, k, v, document_ids)
        return out


def _is_supported(q: torch.Tensor, k: torch.Tensor) -> bool:
    s = q.shape[1]
    is_short = s == k.shape[1] and s <= MAX_SEQ_LEN and s % BLOCK == 0
    # A DTensor is not a plain tensor.
    return is_short and q.is_cpu and type(q) is torch.Tensor


def block_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of q (b, s, h, k), k and v (b, s, h_kv, k); s is a multiple of BLOCK.

    Scores and softmax are in float32 or more. Probabilities and their gradients are rounded to q's
    dtype for the matmuls, as in PyTorch's kernel.
    """
    out: torch.Tensor = _attend(q, k, v)[0]
    return out


# A custom op, so that selective activation checkpointing can save its output.
@torch.library.custom_op("shardloom::block_attention", mutates_args=())
@torch.autocast("cpu", enabled=False)
def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, and the flat probabilities of all blocks one after the other."""
    h_kv, scale = k.shape[2], q.shape[-1] ** -0.5
    blocks, keys, values = _to_blocks(q, h_kv), _to_heads(k), _to_heads(v)
    wide = torch.promote_types(q.dtype, torch.float32)
    wide_blocks, wide_keys = blocks.to(wide) * scale, keys.to(wide).transpose(1, 2)
    out, saved = torch.empty_like(blocks), _empty_probabilities(q)
    future = torch.full((BLOCK, BLOCK), float("-inf"), dtype=wide).triu_(1)
    for i, probabilities in enumerate(_split_probabilities(saved, blocks)):
        end = (i + 1) * BLOCK
        scores = torch.bmm(wide_blocks[i], wide_keys[..., :end])
        scores.unflatten(1, (-1, BLOCK))[..., -BLOCK:].add_(future)
        probabilities.copy_(scores.softmax(-1))
        torch.bmm(probabilities, values[:, :end], out=out[i])
    return _from_blocks(out, q).contiguous(), saved


@_attend.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), _empty_probabilities(q)


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, output[1])


# The saved probabilities are constants to autograd, so a second derivative would be wrong.
@once_differentiable
def _backward(ctx: Any, grad_out: torch.Tensor, _: None) -> tuple[torch.Tensor, ...]:
    q, k, v, saved = ctx.saved_tensors
    h_kv, scale = k.shape[2], q.shape[-1] ** -0.5
    blocks, keys, values = _to_blocks(q, h_kv), _to_heads(k), _to_heads(v)
    grad_outs, grad_blocks = _to_blocks(grad_out, h_kv), []
    wide = torch.promote_types(q.dtype, torch.float32)
    grad_keys, grad_values = (torch.zeros_like(keys, dtype=wide) for _ in range(2))
    for i, probabilities in enumerate(_split_probabilities(saved, blocks)):
        end = (i + 1) * BLOCK
        grad_values[:, :end] += torch.bmm(probabilities.transpose(1, 2), grad_outs[i])
        grad_scores = torch.bmm(grad_outs[i], values[:, :end].transpose(1, 2))
        grad_scores = softmax_backward(grad_scores, probabilities)
        grad_keys[:, :end] += torch.bmm(grad_scores.transpose(1, 2), blocks[i])
        grad_blocks.append(torch.bmm(grad_scores, keys[:, :end]))
    grad_q = _from_blocks(torch.stack(grad_blocks) * scale, q)
    return grad_q, _from_heads(grad_keys.mul_(scale), k), _from_heads(grad_values, v)


_attend.register_autograd(_backward, setup_context=_setup_context)


def _to_blocks(x: torch.Tensor, h_kv: int) -> torch.Tensor:
    """Map x (b, s, h, k) to (n, b h_kv, h / h_kv BLOCK, k): one matrix per key head and block."""
    b, s, h, k = x.shape
    x = x.reshape(b, s // BLOCK, BLOCK, h_kv, h // h_kv, k).permute(1, 0, 3, 4, 2, 5)
    return x.reshape(s // BLOCK, b * h_kv, h // h_kv * BLOCK, k)


def _from_blocks(blocks: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    b, s, h, k = like.shape
    parts = blocks.view(s // BLOCK, b, -1, BLOCK, k).permute(1, 0, 3, 2, 4)
    return parts.reshape(b, s, h, k)


def _to_heads(x: torch.Tensor) -> torch.Tensor:
    """Map x (b, s, h_kv, k) to (b h_kv, s, k)."""
    return x.transpose(1, 2).flatten(0, 1)


def _from_heads(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return x.to(like.dtype).unflatten(0, (like.shape[0], -1)).transpose(1, 2)


def _empty_probabilities(q: torch.Tensor) -> torch.Tensor:
    b, s, h, _ = q.shape
    return q.new_empty(b * h * s * (s + BLOCK) // 2)


def _split_probabilities(saved: torch.Tensor, blocks: torch.Tensor) -> list[torch.Tensor]:
    """Return views of each block's probabilities: (b h_kv, rows, keys up to its last)."""
    n, batch, rows, _ = blocks.shape
    parts = saved.split([batch * rows * BLOCK * (i + 1) for i in range(n)])
    return [part.view(batch, rows, -1) for part in parts]
