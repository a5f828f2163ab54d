"""FlexAttention (arXiv 2412.05496) for document masks and context parallelism on GPUs.

Skips fully masked blocks and needs no dense s x s mask.
"""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.nn as nn
from torch.nn.attention.flex_attention import BlockMask, FlexKernelOptions, flex_attention

from kernels.kernel_check import problem_on_any_rank
from kernels.sdpa import check_attention
from runtime.compat import inductor_options, raise_recompile_limit
from runtime.log import logger

BLOCK = 128
"""Block size of queries and of keys."""
# Of the check, of training, and with and without gradients of validation and samples.
MOST_SHAPES = 64
HALF = (torch.bfloat16, torch.float16)
# For fewer than 128 queries the default is the decoding kernel. It puts heads that share keys into
# one block, and fails if that exceeds 128 rows (2.13; pytorch/pytorch#185349).
KERNEL_OPTIONS: FlexKernelOptions = {"FORCE_USE_FLEX_ATTENTION": True}

AttendWithin = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def apply_flex_attention(
    attentions: list[nn.Module],
    *,
    dtype: torch.dtype | None,
    heads: tuple[int, int],
    head_dim: int,
) -> None:
    """Use FlexAttention in each module whose attention is masked by more than causality.

    Mutates ``inner`` of each module, unless ``dtype`` is not half precision, or FlexAttention fails
    or differs from the present ``inner`` on any rank. ``heads``: numbers of query and of key heads.
    """
    if dtype not in HALF or not attentions:
        return
    raise_recompile_limit(MOST_SHAPES)
    # Compiled blocks inline it into their graphs. As one compile region, its output can be saved by
    # selective activation checkpointing.
    compiled = torch.compile(
        attend_within,
        dynamic=False,
        options=inductor_options(wrap_inductor_compiled_regions=True),
    )
    inners = [FlexAttention(cast(nn.Module, a.inner), compiled) for a in attentions]
    problem = problem_on_any_rank(
        lambda: check_flex_attention(inners[0], heads=heads, head_dim=head_dim, device="cuda")
    )
    if problem:
        logger.warning("FlexAttention failed, using SDPA with a dense mask: %s", problem)
        return
    for attention, inner in zip(attentions, inners, strict=True):
        attention.inner = inner
    logger.info("FlexAttention: masked attention of %d layers", len(inners))


class FlexAttention(nn.Module):
    """Dispatch to FlexAttention in half precision with a document or CP mask, else ``plain``."""

    def __init__(self, plain: nn.Module, attend_within: AttendWithin) -> None:
        super().__init__()
        self.plain, self.attend_within = plain, attend_within

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, document_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend like ``InnerAttention``, but each document's positions must be contiguous."""
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
    """Causal attention within documents: q (b, h, s_q, k), k and v (b, h_kv, s, k) to q's shape.

    The queries are the last s_q of the s positions; ``document_ids`` (b, s).
    """
    mask = block_mask(document_ids, q.shape[2])
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=KERNEL_OPTIONS)


def block_mask(document_ids: torch.Tensor, n_queries: int, block: int = BLOCK) -> BlockMask:
    """Build the ``BlockMask`` of the last ``n_queries`` from document starts, in O(s + blocks^2).

    ``document_ids`` (b, s); documents are contiguous.
    """
    s, device = document_ids.shape[1], document_ids.device
    offset, positions = s - n_queries, torch.arange(s, device=device)
    is_next = document_ids[:, 1:] == document_ids[:, :-1]
    starts = torch.zeros_like(document_ids)
    starts[:, 1:] = positions[1:].masked_fill(is_next, 0)
    # First key that each query attends to.
    starts = starts.cummax(dim=1).values[:, offset:]
    first = torch.arange(0, n_queries, block, device=device)
    last = (first + block).clamp(max=n_queries) - 1
    key = torch.arange(0, s, block, device=device)  # the first of each block
    # The dim of heads comes first. Inserted in the results, the compiler gives it the stride 0, by
    # which FlexAttention's kernel finds a sequence's blocks.
    starts_of_heads = starts[:, None]
    lowest, highest = starts_of_heads[..., first, None], starts_of_heads[..., last, None]
    # (b, 1, query blocks, key blocks): starts and positions are monotonic.
    is_visible = (key + block > lowest) & (key <= (last + offset)[:, None])
    is_full = (key >= highest) & (key + block <= (first + offset + 1)[:, None])
    is_full &= (first + block <= n_queries)[:, None]

    def mask_mod(
        b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        return (k <= q + offset) & (k >= starts[b, q])

    return BlockMask.from_kv_blocks(
        *_block_indices(is_visible & ~is_full),
        *_block_indices(is_full),
        BLOCK_SIZE=block,
        mask_mod=mask_mod,
        seq_lengths=(n_queries, s),
    )


def _block_indices(selected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Count (b, 1, i) and indices (b, 1, i, j), selected ones first, of (b, 1, i, j)."""
    indices = selected.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return selected.sum(-1, dtype=torch.int32), indices.to(torch.int32)


def check_flex_attention(
    inner: FlexAttention, *, heads: tuple[int, int], head_dim: int, device: str
) -> None:
    """Raise ``ArithmeticError`` unless ``inner`` matches its ``plain``."""
    ids = torch.tensor([[0] * 200 + [1] * 150 + [2] * 34, [0] * 384], device=device)

    def attend(n_queries: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q = q[:, :, -n_queries:]
        return inner(*(t.transpose(1, 2) for t in (q, k, v)), ids).transpose(1, 2)

    for n_queries in (384, 100):
        last = partial(attend, n_queries)
        # In float64 ``inner`` calls ``plain``, so it is both candidate and reference.
        check_attention(last, last, heads=heads, head_dim=head_dim, device=device)
