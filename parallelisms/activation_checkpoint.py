"""Activation checkpointing: recompute in backward instead of storing."""

from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
import torch._functorch.config
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from config.job_config import ActivationCheckpoint
from parallelisms.pieces import wrap_piece
from runtime.log import logger

_aten = torch.ops.aten
_SAVED_OPS = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    # Within documents; the latter where the block around it is not compiled.
    torch.ops.higher_order.flex_attention,
    torch.ops.higher_order.inductor_compiled_code,
    # Recomputing a collective costs more than its result.
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_to_all_single.default,
}
# Ours, by name: what defines them need not be imported.
_SAVED_OF_OURS = {"shardloom::block_attention", "shardloom::fused_delta_rule"}
# FSDP tells profilers of gathers inside a block, of experts, more often in backward.
_profiler = torch.ops.profiler
SAC_IGNORED_OPS |= {
    _profiler._record_function_enter_new.default,
    _profiler._record_function_exit._RecordFunction,
}


def apply_activation_checkpoint(
    blocks: nn.ModuleDict,
    *,
    config: ActivationCheckpoint,
    pieces: Collection[str],
    frees_weights: bool,
) -> None:
    """Wrap the blocks as ``config`` says. Mutates ``blocks``; FQNs gain a wrapper's name.

    ``pieces``: methods that a block consists of and that are compiled one by one. What is kept can
    be chosen only inside a graph, so they are wrapped, unless the whole block is recomputed.
    ``frees_weights``: blocks that gather their weights themselves let go of them only if they are
    recomputed. Blocks that ``config`` leaves alone then recompute what is cheap.
    """
    # The compiler's, of every graph; so a run in a process that had another sets it back.
    is_budgeted = config.mode == "memory_budget"
    torch._functorch.config.activation_memory_budget = config.memory_budget if is_budgeted else 1.0
    if is_budgeted:
        text = "activation checkpoint: graphs of %d blocks keep at most %g of their activations"
        logger.info(text, len(blocks), config.memory_budget)
    counts = Counter[str]()
    for name, block in blocks.items():
        # Names are the numbers of layers, of the whole model in a pipeline's stage too.
        what = _recomputed(config, int(name)) or (ALL_BUT_MATMULS if frees_weights else "")
        if not what:
            continue
        counts[what] += 1
        if what == ALL or not pieces:
            blocks[name] = checkpoint_wrapper(block, **_OPTIONS[what])
            continue
        for path in pieces:
            wrap_piece(block, path, partial(_recomputing, _OPTIONS[what]))
    for what, count in counts.items():
        text = "activation checkpoint: %d of %d blocks recompute %s"
        logger.info(text, count, len(blocks), what)


def _recomputing(options: dict[str, Any], method: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return checkpoint(method, *args, use_reentrant=False, **options)

    return run


def _recomputed(config: ActivationCheckpoint, index: int) -> str:
    """What ``config`` wants of the block of that index; "" is nothing."""
    if config.mode in ("none", "memory_budget"):
        return ""
    if config.mode == "full":
        return ALL
    if config.selective == "op":
        return ALL_BUT_HALF
    return ALL if index % config.selective == 0 else ""


def _saving_matmuls(every: int) -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(partial(_policy, every, Counter()))


def _policy(
    every: int, matmuls: Counter[bool], ctx: Any, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Save attention and every n-th matmul. Every second: half the memory, a sixth of the work."""
    if op in (_aten.mm.default, _aten._grouped_mm.default, _aten._scaled_mm.default):
        is_saved = matmuls[ctx.is_recompute] % every == 0
        matmuls[ctx.is_recompute] += 1
    else:
        is_saved = op in _SAVED_OPS or op.name() in _SAVED_OF_OURS
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


ALL = "all"
ALL_BUT_MATMULS = "all but attention and matmuls"
ALL_BUT_HALF = "all but attention and half of the matmuls"
# Nothing in the models is random, so no RNG state is kept.
_OPTIONS: dict[str, dict[str, Any]] = {
    ALL: {"preserve_rng_state": False},
    ALL_BUT_MATMULS: {"preserve_rng_state": False, "context_fn": partial(_saving_matmuls, 1)},
    ALL_BUT_HALF: {"preserve_rng_state": False, "context_fn": partial(_saving_matmuls, 2)},
}
