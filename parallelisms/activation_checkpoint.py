"""Activation checkpointing: recompute in backward instead of storing."""

from collections import Counter
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from config.job_config import ActivationCheckpoint
from runtime.log import logger

_aten = torch.ops.aten
_SAVED_OPS = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    # Recomputing a collective costs more than its result.
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def apply_activation_checkpoint(blocks: nn.ModuleDict, *, config: ActivationCheckpoint) -> None:
    """Wrap the blocks as ``config`` says. Mutates ``blocks``; FQNs gain a wrapper's name."""
    if config.mode == "none":
        return
    by_op = config.mode == "selective" and config.selective == "op"
    every = config.selective if isinstance(config.selective, int) else 1
    if config.mode == "full":
        every = 1
    options: dict[str, Any] = {"context_fn": _selective_contexts} if by_op else {}
    wrapped = 0
    for index, (name, block) in enumerate(blocks.items()):
        if index % every == 0:
            # Nothing in the models is random, so no RNG state is kept.
            blocks[name] = checkpoint_wrapper(block, preserve_rng_state=False, **options)
            wrapped += 1
    what = "selected ops of" if by_op else "the whole of"
    logger.info("activation checkpoint: recompute %s %d of %d blocks", what, wrapped, len(blocks))


def _selective_contexts() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(partial(_policy, Counter()))


def _policy(
    matmuls: Counter[bool], ctx: Any, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Save attention and every second matmul: half the memory for a sixth of the products."""
    if op is _aten.mm.default:
        matmuls[ctx.is_recompute] += 1
        is_saved = matmuls[ctx.is_recompute] % 2 == 1
    else:
        is_saved = op in _SAVED_OPS
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE
