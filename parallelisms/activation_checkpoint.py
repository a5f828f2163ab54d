"""Activation checkpointing: backward recomputes activations instead of storing them.

Full, selective and memory budget: https://pytorch.org/blog/activation-checkpointing-techniques/
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache, partial
from types import CodeType
from typing import Any

import torch
import torch.nn as nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from config.job_config import ActivationCheckpoint
from parallelisms.compile import wrap_region
from runtime.compat import configure, find, silence_context_fn
from runtime.log import logger
from runtime.private_names import COPIES, IGNORED, MATMULS, SAVED

# Custom ops of Shardloom, by name, so that their modules need not be imported.
_SAVED_CUSTOM_OPS = {"shardloom::block_attention", "shardloom::fused_delta_rule"}


@cache
def _resolve_ops(names: tuple[str, ...]) -> set[Any]:
    found = (find(f"torch:ops.{name}") for name in names)
    return {op for op in found if op is not None}


@dataclass(frozen=True)
class Recompute:
    """The part of a block that backward recomputes."""

    label: str
    """Text for the log."""
    save_every: int = 0
    """Save attention and every n-th matmul; 0: save nothing."""

    def options(self, *, is_random: bool) -> dict[str, Any]:
        """Return keyword arguments of ``torch.utils.checkpoint.checkpoint``."""
        options: dict[str, Any] = {"preserve_rng_state": is_random}
        if self.save_every:
            options["context_fn"] = partial(_selective_contexts, self.save_every)
        return options


ALL = Recompute("all")
ALL_BUT_MATMULS = Recompute("all but attention and matmuls", save_every=1)
ALL_BUT_HALF = Recompute("all but attention and half of the matmuls", save_every=2)


def apply_activation_checkpoint(
    blocks: nn.ModuleDict,
    *,
    config: ActivationCheckpoint,
    regions: Collection[str],
    frees_weights: bool,
    is_random: bool,
) -> None:
    """Wrap the blocks' forward in ``checkpoint`` as ``config`` says. Mutates ``blocks``; FQNs stay.

    ``regions``: compile regions of a block. Selective recomputation works only inside a graph, so
    it wraps each region; full recomputation wraps the block.
    ``frees_weights``: blocks gather their own weights (SimpleFSDP), which only recomputed blocks
    free. Blocks that ``config`` does not select then recompute all but attention and matmuls.
    ``is_random``: blocks may have random ops such as dropout. Backward then repeats their numbers,
    which needs states of the generator that a CUDA graph cannot capture.
    Raises ``ConfigError`` if mode is "memory_budget" and this PyTorch has no such option.
    """
    # The budget is a global of the compiler, which an earlier run in this process may have set.
    is_budgeted = config.mode == "memory_budget"
    budget = "torch._functorch.config:activation_memory_budget"
    configure(budget, 1.0)
    if is_budgeted:
        configure(budget, config.memory_budget, key="activation_checkpoint.mode")
        text = "activation checkpoint: %d compiled blocks, memory budget = %g"
        logger.info(text, len(blocks), config.memory_budget)
    if config.mode == "selective" or frees_weights:
        _prepare_selective()
    counts = Counter[str]()
    for position, (name, block) in enumerate(blocks.items()):
        # Names are layer indices in the whole model, also in a pipeline stage. A user's own model
        # may have others.
        index = int(name) if name.isdecimal() else position
        recompute = _recompute(config, index) or (ALL_BUT_MATMULS if frees_weights else None)
        if recompute is None:
            continue
        counts[recompute.label] += 1
        options = recompute.options(is_random=is_random)
        if recompute == ALL or not regions:
            block.forward = _checkpointed(options, partial(_forward, block))
            continue
        for path in regions:
            wrap_region(block, path, partial(_checkpointed, options))
    for label, count in counts.items():
        text = "activation checkpoint: %d of %d blocks recompute %s"
        logger.info(text, count, len(blocks), label)


def _prepare_selective() -> None:
    """Complete PyTorch's list of ops that selective recomputation ignores; silence its warning."""
    ignored = find("torch.utils.checkpoint:SAC_IGNORED_OPS")
    if ignored is not None:
        ignored |= _resolve_ops(IGNORED)
    silence_context_fn()


def _checkpointed(options: dict[str, Any], method: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(method, *args, use_reentrant=False, **options, **kwargs)

    # torch.compile caches by code object. PyTorch 2.11 does not check of which method a graph is,
    # and would run the graph of one region for another.
    run.__code__ = _named_code(run.__code__, getattr(method, "__qualname__", ""))
    return run


@cache
def _named_code(code: CodeType, name: str) -> CodeType:
    return code.replace(co_name=f"{code.co_name} {name}")


def _forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call ``forward`` of the block's class at call time, because data parallel changes it."""
    return type(block).forward(block, *args, **kwargs)


def _recompute(config: ActivationCheckpoint, index: int) -> Recompute | None:
    """The recomputation that ``config`` selects for the block at ``index``."""
    if config.mode in ("none", "memory_budget"):
        return None
    if config.mode == "full":
        return ALL
    if config.selective == "op":
        return ALL_BUT_HALF
    return ALL if index % config.selective == 0 else None


def _selective_contexts(every: int) -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(partial(_policy, every, Counter()))


def _policy(
    every: int, matmuls: Counter[bool], ctx: Any, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Save attention and every n-th matmul. n = 2: half the memory, a sixth more compute."""
    if op in _resolve_ops(MATMULS):
        # Not the first: of an odd number the last, w2, is not saved. Nothing needs its output.
        is_saved = matmuls[ctx.is_recompute] % every == every - 1
        matmuls[ctx.is_recompute] += 1
    else:
        is_saved = op in _resolve_ops(SAVED) or op.name() in _SAVED_CUSTOM_OPS
        is_saved = is_saved or _is_copy_to_host(op, args, kwargs)
        # Ops after it would draw other numbers if backward did not repeat its own.
        is_saved = is_saved and not _dropout_p(op, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def _is_copy_to_host(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for copies for which the host waits, such as of the tokens that experts receive."""
    device = kwargs.get("device") if op in _resolve_ops(COPIES) else None
    return device is not None and torch.device(device).type == "cpu" and not args[0].is_cpu


def _dropout_p(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Return the probability with which ``op``, an attention, drops its weights."""
    schema = getattr(op, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else []
    return (dict(zip(names, args, strict=False)) | kwargs).get("dropout_p", 0.0)
