"""Simulates a training step of one rank, by ``train.py``'s own code, without memory or peers.

Tensors are fake: they have shapes and no data. The process group is fake too: it has any number of
ranks, and its collectives return at once.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from build_model import ShardedModel, build_sharded_model
from data.loader import Microbatch
from data.step_batches import StepBatch
from kernels.fused_delta_rule import FusedDeltaRule
from models.gated_delta_net import InnerDeltaNet
from models.moe import MoE
from models.transformer import unshared_heads
from optim import chunked_adamw, loss, one_pass_adamw
from optim.one_pass_adamw import ParameterState
from parallelisms.expert_parallel import AllToAllDispatcher
from parallelisms.materialize import allocate
from parallelisms.parallel_dims import ParallelDims
from planner.recorder import StepRecorder, current_graph_task
from planner.step_record import (
    BACKWARD,
    BUFFERS,
    FORWARD,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    RECOMPUTE,
    Group,
    StepRecord,
)
from run_spec import RunSpec
from runtime import norms
from runtime.compat import find, has
from runtime.dtensor import to_local
from runtime.private_names import PRIVATE
from train_step import TrainStep

CPU = torch.device("cpu")


def simulate_step(
    run: RunSpec,
    world_size: int,
    rank: int,
    *,
    weights: Sequence[float],
    n_more: int = 0,
    recorder_type: type[StepRecorder] = StepRecorder,
) -> StepRecord:
    """Return the record of an optimizer step of ``rank``, after the first.

    ``weights``: how many microbatches each one that is run stands for. ``n_more``: layers of each
    stage that a shallower model, to which this one is compared, does not have. Creates and destroys
    the default process group.
    """
    # These probe with data, which later they have not.
    for path in (path for path in PRIVATE if "_foreach_" in path):
        has(path)
    with fake_ranks(rank, world_size):
        dims = ParallelDims.build(run.config.parallelism, world_size, CPU.type)
        model = build_gpu_model(run, dims)
        for moe in run.model_spec.moes(model.module):
            assume_balance(cast(MoE, moe))
        assume_fused(model.module)
        groups, vocab_size = groups_of(model), local_vocabulary(model)
        recorder = recorder_type(groups, vocab_size, has_stages=dims.degrees.pp > 1)
        for stage, module in enumerate(model.stages):
            blocks = list(run.model_spec.blocks(module).values())
            mark_blocks(recorder, blocks, f"stage {stage}", n_more=n_more)
        with recorder.recording():
            allocate(model.module, CPU)
            batch = planned_batch(run, len(weights))
        step = TrainStep(run, model)
        return record_step(step, model, recorder, batch=batch, weights=weights)


def build_gpu_model(run: RunSpec, dims: ParallelDims) -> ShardedModel:
    """Build the model of ``run`` with kernels that keep as much memory as those of GPUs."""
    spec = run.model_spec

    def apply_kernels(module: nn.Module, dtype: torch.dtype | None) -> None:
        for attention in spec.attentions(module):
            attention.inner = _FlashAttention()
        for moe in spec.moes(module):
            cast(MoE, moe).experts.grouped_device_type = CPU.type
        for norm in (each for each in module.modules() if isinstance(each, nn.RMSNorm)):
            # A GPU's kernel keeps only its inputs; a CPU's operators keep float32 copies.
            forward = partial(_forward, norm)
            norm.forward = partial(  # type: ignore[method-assign]
                checkpoint, forward, use_reentrant=False, preserve_rng_state=False
            )

    return build_sharded_model(
        spec, run.model_args, run.config, dims, CPU, apply_kernels=apply_kernels
    )


def assume_balance(moe: MoE) -> None:
    """Make a rank of expert parallel receive as many tokens as it sends. Mutates ``moe``."""

    def split(dispatcher: AllToAllDispatcher, inputs: tuple[Any, ...]) -> None:
        n, degree = len(inputs[0]), dispatcher.degree
        sent = [n // degree + (rank < n % degree) for rank in range(degree)]
        received = [sent[dist.get_rank(dispatcher.group)]] * degree
        dispatcher.split_sizes = lambda *_: [sent, received]  # type: ignore[method-assign]

    if isinstance(moe.dispatcher, AllToAllDispatcher):
        moe.dispatcher.register_forward_pre_hook(split)


def assume_fused(model: nn.Module) -> None:
    """Use flash-linear-attention's kernels, which a fake tensor does not run. Mutates ``model``."""
    for inner in (each for each in model.modules() if isinstance(each, InnerDeltaNet)):
        inner.rule = FusedDeltaRule(inner.rule)


def mark_blocks(
    recorder: StepRecorder, blocks: Sequence[nn.Module], stage: str, *, n_more: int
) -> None:
    """Mark where forward and backward of each block begin, and forward ends. Adds hooks.

    Names count from the nearer end; the ``n_more`` blocks in the middle have none.
    """
    n_front = (len(blocks) - n_more) // 2

    def add_hooks(block: nn.Module, name: str) -> None:
        def begin_forward(*_: object) -> None:
            recorder.is_in_block = True
            phase = FORWARD if current_graph_task() < 0 else RECOMPUTE
            recorder.mark(name and f"{name} {phase}")

        def begin_backward(_: object) -> None:
            recorder.is_in_block = True
            recorder.mark(name and f"{name} {BACKWARD}")

        def end_forward(_: nn.Module, inputs: object, out: torch.Tensor) -> None:
            if current_graph_task() < 0:
                recorder.is_in_block = False
            if out.requires_grad:
                out.register_hook(begin_backward)

        block.register_forward_pre_hook(begin_forward)
        block.register_forward_hook(end_forward)

    for index, block in enumerate(blocks):
        place = index if index < n_front else index - len(blocks)
        is_middle = n_front <= index < n_front + n_more
        add_hooks(block, "" if is_middle else f"{stage} block {place}")


def _forward(module: nn.Module, *args: Any) -> Any:
    """Call ``forward`` of the module's class at call time, because data parallel changes it."""
    return type(module).forward(module, *args)


class _FlashAttention(nn.Module):
    """Attention without a dense mask, as FlashAttention and FlexAttention compute it."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, document_ids: torch.Tensor | None
    ) -> torch.Tensor:
        k, v = unshared_heads(q, k, v)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)


def record_step(
    step: TrainStep,
    model: ShardedModel,
    recorder: StepRecorder,
    *,
    batch: StepBatch,
    weights: Sequence[float],
) -> StepRecord:
    """Run the first two steps of ``model``; return the record of the second.

    The first allocates lasting state.
    """
    recorder.label(map(to_local, model.module.parameters()), PARAMETERS)
    recorder.label(map(to_local, model.module.buffers()), BUFFERS)
    forwards = iter(weights)

    def begin_microbatch(*_: object) -> None:
        recorder.begin_forward(next(forwards, 1.0))

    def label_gradients(*_: object) -> None:
        gradients = (p.grad for p in model.module.parameters() if p.grad is not None)
        recorder.label(map(to_local, gradients), GRADIENTS)

    for stage in model.stages:
        # Before FSDP's hooks, which gather weights.
        stage.register_forward_pre_hook(begin_microbatch, prepend=True)
    step.optimizer.register_step_pre_hook(label_gradients)
    # As few microbatches as a schedule allows.
    first = replace(batch, microbatches=batch.microbatches[-model.dims.degrees.pp :])
    for number, each in enumerate((first, batch), start=1):
        forwards = iter(weights)
        recorder.restart()
        with gpu_updates(recorder), recorder.recording():
            step(number, each)
        states = (value for state in step.optimizer.state.values() for value in state.values())
        tensors = (value for value in states if isinstance(value, torch.Tensor))
        recorder.label(map(to_local, tensors), OPTIMIZER)
    return recorder.record()


def planned_batch(run: RunSpec, n_microbatches: int) -> StepBatch:
    """Return a step's batch on this rank, of so many microbatches."""
    size, seq_len = run.microbatch_size, run.config.training.seq_len
    microbatches = [
        Microbatch(*torch.zeros(2, size, seq_len, dtype=torch.int64)) for _ in range(n_microbatches)
    ]
    n_sequences = run.global_batch_size
    return StepBatch(microbatches, 0.0, n_sequences, n_sequences * seq_len, is_end_of_data=False)


def groups_of(model: ShardedModel) -> dict[str, list[Group]]:
    """Return the mesh dims of this rank by the name of their process group.

    Those over all ranks share one.
    """
    meshes = [model.dims.weight_mesh, model.dims.data_mesh]
    meshes += [p.device_mesh for p in model.module.parameters() if isinstance(p, DTensor)]
    groups: dict[str, list[Group]] = defaultdict(list)
    for mesh in dict.fromkeys(meshes):
        for dim in mesh.mesh_dim_names or ():
            group = mesh.get_group(dim)
            ranks = tuple(dist.get_process_group_ranks(group))
            if all(each.dim != dim for each in groups[group.group_name]):
                groups[group.group_name].append(Group(dim, ranks, dist.get_world_size()))
    return groups


def local_vocabulary(model: ShardedModel) -> int:
    """Size of this rank's shard of the vocabulary, the last dim of its logits."""
    return model.args.vocab_size // model.dims.degrees.tp


@contextmanager
def fake_ranks(rank: int, world_size: int) -> Iterator[None]:
    """Context in which this process is ``rank`` of ``world_size`` ranks, without the others."""
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    try:
        yield
    finally:
        # DTensor keeps meshes of the group, which equal those of the next one.
        clear = find("torch.distributed.tensor.debug:_clear_sharding_prop_cache")
        if clear is not None:
            clear()
        dist.destroy_process_group()


@contextmanager
def gpu_updates(recorder: StepRecorder) -> Iterator[None]:
    """Context in which the loss has the chunks of a GPU, and AdamW updates in one kernel."""
    for_row_chunks = loss.for_row_chunks

    def for_first_chunk(
        function: Any, rows: torch.Tensor, row_max: torch.Tensor, per_row: torch.Tensor, *_: Any
    ) -> None:
        """Run one chunk, which stands for all of them."""
        n, weight = min(len(rows), max(1, loss.CHUNK // rows.shape[1])), recorder.weight
        recorder.weight *= len(rows) / n
        for_row_chunks(function, rows[:n], row_max[:n], per_row[:n], False)
        recorder.weight = weight

    def update_states(states: Sequence[ParameterState]) -> list[Any]:
        for state in states:
            recorder.count_kernel([to_local(tensor) for tensor in state.tensors])
        return []

    with (
        patch.object(loss, "CPU_CHUNK", loss.CHUNK),
        patch.object(norms, "PIECE", sys.maxsize),
        patch.object(loss, "for_row_chunks", for_first_chunk),
        patch.object(chunked_adamw, "_chunks", update_states),
        patch.object(one_pass_adamw, "_update_in_chunks", recorder.count_kernel),
    ):
        yield
