"""Masked attention on a GPU by FlexAttention (arXiv 2412.05496): blocks that are masked as a whole
are skipped, and no mask of s x s is ever in memory."""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.nn as nn
from torch.nn.attention.flex_attention import BlockMask, FlexKernelOptions, flex_attention

from runtime.attention import check_attention
from runtime.compat import inductor_options
from runtime.log import logger

BLOCK = 128
"""Queries, and keys, that the kernel computes or skips together."""
HALF = (torch.bfloat16, torch.float16)
# For fewer than 128 queries it would take a kernel for inference, which puts heads that share keys
# into one block and fails where that is larger than 128 (2.13; pytorch/pytorch#185349).
ONE_KERNEL: FlexKernelOptions = {"FORCE_USE_FLEX_ATTENTION": True}

AttendWithin = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def use_flex_attention(
    attentions: list[nn.Module],
    *,
    dtype: torch.dtype | None,
    heads: tuple[int, int],
    head_dim: int,
) -> None:
    """Have the ``inner`` of each module compute on this GPU only what is not masked.

    Mutates the modules, unless they compute in another ``dtype`` than half precision, or
    FlexAttention fails here or differs from what they compute now, with ``heads`` of queries and of
    keys.
    """
    if dtype not in HALF:
        return
    # If blocks are not compiled, this alone is; if they are, it is part of their graphs. As one
    # operation it can be kept, where others are recomputed.
    compiled = torch.compile(
        attend_within,
        dynamic=False,
        options=inductor_options(wrap_inductor_compiled_regions=True),
    )
    inners = [FlexAttention(cast(nn.Module, a.inner), compiled) for a in attentions]
    try:
        check_flex_attention(inners[0], heads=heads, head_dim=head_dim, device="cuda")
    # Its compiler may be missing or too old, in more ways than can be listed, so it is tried; what
    # was there before computes the same.
    except Exception as error:
        logger.warning("attention: with masks of s x s, for FlexAttention failed: %s", error)
        return
    for attention, inner in zip(attentions, inners, strict=True):
        attention.inner = inner
    logger.info("attention: FlexAttention where it is masked, in %d layers", len(inners))


class FlexAttention(nn.Module):
    """``plain`` or, in half precision and masked by more than causality, the same by
    ``attend_within``."""

    def __init__(self, plain: nn.Module, attend_within: AttendWithin) -> None:
        super().__init__()
        self.plain, self.attend_within = plain, attend_within

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, document_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """As ``plain``; each document's positions must be contiguous."""
        is_causal = document_ids is None and q.shape[1] == k.shape[1]
        if is_causal or q.dtype not in HALF:
            return self.plain(q, k, v, document_ids)
        if document_ids is None:
            document_ids = torch.zeros(k.shape[:2], dtype=torch.int64, device=k.device)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.attend_within(q, k, v, document_ids).transpose(1, 2)


def attend_within(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, document_ids: torch.Tensor
) -> torch.Tensor:
    """Causal attention within documents of q (b, h, s_q, k), the last of s positions, on k and v
    (b, h_kv, s, k); ``document_ids`` (b, s)."""
    mask = block_mask(document_ids, q.shape[2])
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=ONE_KERNEL)


def block_mask(document_ids: torch.Tensor, n_queries: int, block: int = BLOCK) -> BlockMask:
    """Which blocks of keys the last ``n_queries`` see in part, and which in full.

    Computed from where documents start, without a look at each of s x s positions.
    """
    s, device = document_ids.shape[1], document_ids.device
    offset, places = s - n_queries, torch.arange(s, device=device)
    is_next = document_ids[:, 1:] == document_ids[:, :-1]
    starts = torch.zeros_like(document_ids)
    starts[:, 1:] = places[1:].masked_fill(is_next, 0)
    # The first key that each query sees.
    starts = starts.cummax(dim=1).values[:, offset:]
    first = torch.arange(0, n_queries, block, device=device)
    last = (first + block).clamp(max=n_queries) - 1
    key = torch.arange(0, s, block, device=device)  # the first of each block
    # (b, blocks of queries, blocks of keys): neither starts nor places ever go back.
    is_seen = (key + block > starts[:, first, None]) & (key <= (last + offset)[:, None])
    is_full = (key >= starts[:, last, None]) & (key + block <= (first + offset + 1)[:, None])
    is_full &= (first + block <= n_queries)[:, None]

    def sees(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q + offset) & (k >= starts[b, q])

    return BlockMask.from_kv_blocks(
        *_numbers(is_seen & ~is_full),
        *_numbers(is_full),
        BLOCK_SIZE=block,
        mask_mod=sees,
        seq_lengths=(n_queries, s),
    )


def _numbers(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many are chosen (b, i, j) in each row (b, 1, i), and all j, chosen first (b, 1, i, j)."""
    numbers = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[:, None], numbers.to(torch.int32)[:, None]


def check_flex_attention(
    inner: FlexAttention, *, heads: tuple[int, int], head_dim: int, device: str
) -> None:
    """Raise ``ArithmeticError`` unless it computes what its ``plain`` does."""
    ids = torch.tensor([[0] * 200 + [1] * 150 + [2] * 34, [0] * 384], device=device)

    def attend(n_queries: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q = q[:, :, -n_queries:]
        return inner(*(t.transpose(1, 2) for t in (q, k, v)), ids).transpose(1, 2)

    for n_queries in (384, 100):
        last = partial(attend, n_queries)
        # In float64 it calls ``plain``: one function is both what is checked and what is right.
        check_attention(last, last, heads=heads, head_dim=head_dim, device=device)
