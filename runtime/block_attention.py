"""Causal attention of short sequences on CPUs.

PyTorch's kernel there is far slower than matrix products, most of all in backward. Here attention
is matrix products and one softmax. A block of queries has scores only for the keys up to its last
position, which saves nearly half of the work. The probabilities, b h s s / 2 of them, are kept for
backward: too many for longer sequences, where PyTorch's kernel is nearly as fast anyway.
"""

from typing import Any, cast

import torch
import torch.nn as nn
from torch.autograd.function import once_differentiable

from runtime.compat import softmax_backward
from runtime.kernel_check import check_kernel
from runtime.log import logger

BLOCK = 128
LONGEST = 512


def use_block_attention(
    attentions: list[nn.Module],
    *,
    has_fast_float32: bool,
    heads: tuple[int, int],
    head_dim: int,
) -> None:
    """Have the ``inner`` of each module compute short sequences by blocks, in bfloat16 and, if
    ``has_fast_float32``, in float32: with MKL's matmuls there is little to gain.

    Mutates the modules, unless that differs from what they compute now, with ``heads`` of queries
    and of keys.
    """
    if not attentions:
        return
    dtypes = (torch.bfloat16, torch.float32) if has_fast_float32 else (torch.bfloat16,)
    inners = [BlockAttention(cast(nn.Module, a.inner), dtypes) for a in attentions]
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 2 * BLOCK, h, head_dim) for h in (heads[0], heads[1], heads[1])]
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    by_blocks, plain = inners[0], inners[0].plain
    try:
        check_kernel(lambda *qkv: by_blocks(*qkv, None), lambda *qkv: plain(*qkv, None), drawn)
    # A model of a user's own may attend in a way of its own.
    except Exception as error:
        logger.warning("attention: not by blocks: %s", error)
        return
    for attention, inner in zip(attentions, inners, strict=True):
        attention.inner = inner


class BlockAttention(nn.Module):
    """``plain`` or, where that is faster, the same by ``block_attention``."""

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
        """As ``plain``."""
        if document_ids is None and q.dtype in self.dtypes and _suits_blocks(q, k):
            return block_attention(q, k, v)
        out: torch.Tensor = self.plain(q, k, v, document_ids)
        return out


def _suits_blocks(q: torch.Tensor, k: torch.Tensor) -> bool:
    s = q.shape[1]
    is_short = s == k.shape[1] and s <= LONGEST and s % BLOCK == 0
    # A DTensor is not a plain tensor.
    return is_short and q.is_cpu and type(q) is torch.Tensor


def block_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of q (b, s, h, k) on k and v (b, s, h_kv, k); s is a multiple of BLOCK.

    Scores and their softmax are in float32 at least; probabilities and their gradients are rounded
    to the dtype of q, in which they are multiplied, as in PyTorch's kernel.
    """
    out: torch.Tensor = _attend(q, k, v)[0]
    return out


# One operation, so that it can be kept as a whole where others are recomputed.
@torch.library.custom_op("shardloom::block_attention", mutates_args=())
@torch.autocast("cpu", enabled=False)
def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the probabilities of all blocks, flat, one after the other."""
    h_kv, scale = k.shape[2], q.shape[-1] ** -0.5
    blocks, keys, values = _in_blocks(q, h_kv), _by_head(k), _by_head(v)
    wide = torch.promote_types(q.dtype, torch.float32)
    wide_blocks, wide_keys = blocks.to(wide) * scale, keys.to(wide).transpose(1, 2)
    out, kept = torch.empty_like(blocks), _empty_kept(q)
    future = torch.full((BLOCK, BLOCK), float("-inf"), dtype=wide).triu_(1)
    for i, probabilities in enumerate(_split(kept, blocks)):
        end = (i + 1) * BLOCK
        scores = torch.bmm(wide_blocks[i], wide_keys[..., :end])
        scores.unflatten(1, (-1, BLOCK))[..., -BLOCK:].add_(future)
        probabilities.copy_(scores.softmax(-1))
        torch.bmm(probabilities, values[:, :end], out=out[i])
    return _from_blocks(out, q).contiguous(), kept


@_attend.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), _empty_kept(q)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, output[1])


# The kept probabilities count as constants: a second derivative would be wrong.
@once_differentiable
def _backward(ctx: Any, of_out: torch.Tensor, _: None) -> tuple[torch.Tensor, ...]:
    q, k, v, kept = ctx.saved_tensors
    h_kv, scale = k.shape[2], q.shape[-1] ** -0.5
    blocks, keys, values = _in_blocks(q, h_kv), _by_head(k), _by_head(v)
    of_outs, of_blocks = _in_blocks(of_out, h_kv), []
    wide = torch.promote_types(q.dtype, torch.float32)
    of_keys, of_values = (torch.zeros_like(keys, dtype=wide) for _ in range(2))
    for i, probabilities in enumerate(_split(kept, blocks)):
        end = (i + 1) * BLOCK
        of_values[:, :end] += torch.bmm(probabilities.transpose(1, 2), of_outs[i])
        of_scores = torch.bmm(of_outs[i], values[:, :end].transpose(1, 2))
        of_scores = softmax_backward(of_scores, probabilities)
        of_keys[:, :end] += torch.bmm(of_scores.transpose(1, 2), blocks[i])
        of_blocks.append(torch.bmm(of_scores, keys[:, :end]))
    of_q = _from_blocks(torch.stack(of_blocks) * scale, q)
    return of_q, _from_heads(of_keys.mul_(scale), k), _from_heads(of_values, v)


_attend.register_autograd(_backward, setup_context=_keep)


def _in_blocks(x: torch.Tensor, h_kv: int) -> torch.Tensor:
    """x (b, s, h, k) to (n, b h_kv, h / h_kv BLOCK, k): heads that share keys in one matrix."""
    b, s, h, k = x.shape
    x = x.reshape(b, s // BLOCK, BLOCK, h_kv, h // h_kv, k).permute(1, 0, 3, 4, 2, 5)
    return x.reshape(s // BLOCK, b * h_kv, h // h_kv * BLOCK, k)


def _from_blocks(blocks: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    b, s, h, k = like.shape
    parts = blocks.view(s // BLOCK, b, -1, BLOCK, k).permute(1, 0, 3, 2, 4)
    return parts.reshape(b, s, h, k)


def _by_head(x: torch.Tensor) -> torch.Tensor:
    """x (b, s, h_kv, k) to (b h_kv, s, k)."""
    return x.transpose(1, 2).flatten(0, 1)


def _from_heads(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return x.to(like.dtype).unflatten(0, (like.shape[0], -1)).transpose(1, 2)


def _empty_kept(q: torch.Tensor) -> torch.Tensor:
    b, s, h, _ = q.shape
    return q.new_empty(b * h * s * (s + BLOCK) // 2)


def _split(kept: torch.Tensor, blocks: torch.Tensor) -> list[torch.Tensor]:
    """The probabilities of each block: (b h_kv, rows, keys up to its last)."""
    n, batch, rows, _ = blocks.shape
    parts = kept.split([batch * rows * BLOCK * (i + 1) for i in range(n)])
    return [part.view(batch, rows, -1) for part in parts]
