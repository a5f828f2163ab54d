"""Activation checkpointing: recompute in backward instead of storing."""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch.nn as nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from config.job_config import ActivationCheckpoint
from parallelisms.pieces import wrap_piece
from runtime.compat import configure, find, silence_context_fn
from runtime.log import logger
from runtime.private_names import IGNORED, MATMULS, SAVED

# Operations of ours, by name, so that the files that define them need not be imported.
_SAVED_OF_OURS = {"shardloom::block_attention", "shardloom::fused_delta_rule"}


@cache
def _operations(names: tuple[str, ...]) -> set[Any]:
    found = (find(f"torch:ops.{name}") for name in names)
    return {operation for operation in found if operation is not None}


@dataclass(frozen=True)
class Recompute:
    """What backward recomputes of a block."""

    what: str
    """For the log."""
    save_every: int = 0
    """Attention and every n-th matmul are saved; 0: nothing is."""

    @cached_property
    def options(self) -> dict[str, Any]:
        """For PyTorch's ``checkpoint``."""
        # Nothing in the models is random, so no RNG state is kept.
        options: dict[str, Any] = {"preserve_rng_state": False}
        if self.save_every:
            ignored = find("torch.utils.checkpoint:SAC_IGNORED_OPS")
            if ignored is not None:
                ignored |= _operations(IGNORED)
            silence_context_fn()
            options["context_fn"] = partial(_saving_matmuls, self.save_every)
        return options


ALL = Recompute("all")
ALL_BUT_MATMULS = Recompute("all but attention and matmuls", save_every=1)
ALL_BUT_HALF = Recompute("all but attention and half of the matmuls", save_every=2)


def apply_activation_checkpoint(
    blocks: nn.ModuleDict,
    *,
    config: ActivationCheckpoint,
    pieces: Collection[str],
    frees_weights: bool,
) -> None:
    """Have the blocks' forward recompute what ``config`` says. Mutates ``blocks``; FQNs stay.

    ``pieces``: methods that a block consists of and that are compiled one by one. What is kept can
    be chosen only inside a graph, so each is recomputed by itself, unless the whole block is.
    ``frees_weights``: blocks that gather their own weights free them only if they are recomputed,
    so those that ``config`` leaves alone then recompute what is cheap.
    """
    # A global of the compiler: reset even if unused, as an earlier run may have changed it.
    is_budgeted = config.mode == "memory_budget"
    budget = "torch._functorch.config:activation_memory_budget"
    configure(budget, 1.0)
    if is_budgeted:
        configure(budget, config.memory_budget, key="activation_checkpoint.mode")
        text = "activation checkpoint: graphs of %d blocks keep at most %g of their activations"
        logger.info(text, len(blocks), config.memory_budget)
    counts = Counter[str]()
    for name, block in blocks.items():
        # Names are the numbers of layers, of the whole model in a pipeline's stage too.
        recompute = _recompute(config, int(name)) or (ALL_BUT_MATMULS if frees_weights else None)
        if recompute is None:
            continue
        counts[recompute.what] += 1
        if recompute == ALL or not pieces:
            block.forward = _recomputing(recompute.options, partial(_forward, block))
            continue
        for path in pieces:
            wrap_piece(block, path, partial(_recomputing, recompute.options))
    for what, count in counts.items():
        text = "activation checkpoint: %d of %d blocks recompute %s"
        logger.info(text, count, len(blocks), what)


def _recomputing(options: dict[str, Any], method: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **named: Any) -> Any:
        return checkpoint(method, *args, use_reentrant=False, **options, **named)

    return run


def _forward(block: nn.Module, *args: Any, **named: Any) -> Any:
    """Call the forward of the class that data parallel has given the block by then."""
    return type(block).forward(block, *args, **named)


def _recompute(config: ActivationCheckpoint, index: int) -> Recompute | None:
    """What the block of that index is to recompute by ``config``."""
    if config.mode in ("none", "memory_budget"):
        return None
    if config.mode == "full":
        return ALL
    if config.selective == "op":
        return ALL_BUT_HALF
    return ALL if index % config.selective == 0 else None


def _saving_matmuls(every: int) -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(partial(_policy, every, Counter()))


def _policy(
    every: int, matmuls: Counter[bool], ctx: Any, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Save attention and every n-th matmul. Every second: half the memory, a sixth more work."""
    if op in _operations(MATMULS):
        is_saved = matmuls[ctx.is_recompute] % every == 0
        matmuls[ctx.is_recompute] += 1
    else:
        is_saved = op in _operations(SAVED) or op.name() in _SAVED_OF_OURS
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE
