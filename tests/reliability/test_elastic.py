"""Elastic determinism: another data-parallel degree changes no bit of a run.

Whatever a step has is compared: loss, gradient norm, and at the end weights and optimizer state.
Dims divide by little, so shards are uneven, empty or of columns, and end within a vector register.
"""

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from checkpoint.states import OptimizerState
from config.job_config import ActivationCheckpoint, Compile, Optimizer, Parallelism, Training
from data.loader import Batch
from models import TransformerArgs, find_model
from models.meta import build_on_meta
from optim.grad_norm import clip_grad_norm_
from optim.loss import IGNORED
from optim.optimizer import build_optimizer
from optim.padded_adamw import PaddedAdamW
from parallelisms.elastic import GradientTree, apply_elastic
from parallelisms.gradient_reduction import begin_microbatch
from parallelisms.materialize import canonical_fqn, materialize
from parallelisms.mixed_precision import mixed_precision_policy
from parallelisms.parallel_dims import ParallelDims
from parallelisms.parallelize import parallelize
from runtime.distributed import sum_in_order, sum_over
from tests.layouts import CPU, RESHARD, TP, Layout
from tests.ranks import RankPool
from train import loss_sum

STEPS, SLOTS, ROWS, SEQ_LEN = 10, 8, 2, 16
DEGREES = (1, 2, 4, 8)
FLOAT32 = Training(mixed_precision_param="float32")
MIXED = Training(mixed_precision_param="bfloat16")
ROUNDED = Training(mixed_precision_param="bfloat16", mixed_precision_reduce="bfloat16")
Fault = Callable[[], AbstractContextManager]

# What a run came to, by name: the losses, the norms, and a digest of each tensor at the end.
Run = dict[str, Any]


def run(
    name: str,
    layout: Layout,
    training: Training,
    steps: int = STEPS,
    faults: tuple[Fault, ...] = (),
) -> Run:
    """Train as ``train.py`` does with debug.determinism elastic, but for ``faults``."""
    torch.compiler.reset()
    with ExitStack() as stack:
        for fault in faults:
            stack.enter_context(fault())
        model, dims = build(name, layout, training)
        parameters = {canonical_fqn(fqn): p for fqn, p in model.named_parameters()}
        optimizer = build_optimizer(model, Optimizer(lr=1e-2), is_elastic=True)
        policy = mixed_precision_policy(training, CPU)
        tree = GradientTree(list(parameters.values()), policy.reduce_dtype)
        parallelism = Parallelism(**layout.parallelism)
        losses, norms = [], []
        for step in range(steps):
            batches = global_batch(step)
            losses.append(accumulate(model, parallelism, batches, dims.batch_mesh, tree))
            norms.append(clip_grad_norm_(list(parameters.values()), 1.0, is_exact=True).item())
            optimizer.step()
            optimizer.zero_grad()
        tensors = {fqn: p.detach() for fqn, p in parameters.items()}
        tensors |= OptimizerState([model], [optimizer]).state_dict()
    return {"losses": losses, "norms": norms} | {fqn: digest(t) for fqn, t in tensors.items()}


def build(name: str, layout: Layout, training: Training) -> tuple[nn.Module, ParallelDims]:
    spec, _ = find_model(name, "debugmodel")
    parallelism = Parallelism(**layout.parallelism)
    dims = ParallelDims.build(parallelism, layout.world_size, "cpu")
    model = build_on_meta(spec, args_of(name, dims.degrees.tp), getattr(torch, training.dtype))
    parallelize(
        model,
        dims,
        facts=spec,
        parallelism=parallelism,
        activation_checkpoint=layout.recompute,
        compile=layout.compile,
        mp_policy=mixed_precision_policy(training, CPU),
    )
    apply_elastic(model)
    materialize(model, CPU, seed=7)
    return model, dims


def args_of(name: str, tp: int) -> TransformerArgs:
    args = find_model(name, "debugmodel")[1]
    args = replace(args, n_layers=2, max_seq_len=SEQ_LEN, dim=100, hidden_dim=90, vocab_size=330)
    if name == "qwen3" and tp == 1:
        # Two rows: of 4 ranks each has columns of them, of 8 ranks most have nothing.
        args = replace(args, n_kv_heads=1, head_dim=2)
    return args


def global_batch(step: int) -> list[Batch]:
    """Each slot has its own count of valid labels."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(330, (SLOTS, ROWS, SEQ_LEN + 1), generator=generator)
    labels = tokens[..., 1:].clone()
    for slot, count in enumerate(torch.randint(SEQ_LEN, (SLOTS,), generator=generator)):
        labels[slot, :, :count] = IGNORED
    return [Batch(tokens[slot, :, :-1], labels[slot], None, None) for slot in range(SLOTS)]


def accumulate(
    model: nn.Module,
    parallelism: Parallelism,
    batches: list[Batch],
    batch_mesh: DeviceMesh,
    tree: GradientTree,
) -> float:
    """Forward and backward of this rank's slots, as ``data/loader.py`` deals them; the loss."""
    n_tokens = sum((batch.labels != IGNORED).sum() for batch in batches)
    losses = []
    mine = batches[batch_mesh.get_local_rank() :: batch_mesh.size()]
    for batch in mine:
        is_last = batch is mine[-1]
        begin_microbatch(model, parallelism, is_last=is_last)
        loss = loss_sum(model, batch, CPU) / n_tokens
        loss.backward()
        tree.end_microbatch(is_last=is_last)
        losses.append(loss.detach())
    return sum_in_order(torch.stack(losses), batch_mesh).item()


def digest(tensor: torch.Tensor) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return hashlib.sha256(whole.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def differences(
    ranks: RankPool, degrees: tuple[int, ...], function: Callable, **keys: Any
) -> set[str]:
    """What is not the same on that many data-parallel ranks as on the fewest of ``degrees``."""
    layout = keys.pop("layout", Layout(1))
    found = []
    for degree in degrees:
        spread = replace(layout, world_size=degree * layout.world_size)
        runs = ranks.run(partial(function, layout=spread, **keys), spread.world_size)
        assert all(each == runs[0] for each in runs), "the ranks of one run disagree"
        found.append(runs[0])
    want = found[0]
    assert all(each.keys() == want.keys() for each in found)
    assert len(set(want["losses"])) == len(set(want["norms"])) > 1
    return {name for each in found for name in want if each[name] != want[name]}


@pytest.mark.row(15, "Elastic: another data-parallel degree, bitwise")
def test_the_degree_changes_no_bit(ranks: RankPool, seen: Callable[[str], None]) -> None:
    for name in ("llama3", "qwen3"):
        assert not differences(ranks, DEGREES, run, name=name, training=FLOAT32)
    seen("2 models, 10 steps on 1, 2, 4 and 8 ranks: losses, norms, weights, optimizer state")


@pytest.mark.parametrize(
    ("training", "layout"),
    [
        (MIXED, Layout(1)),
        (ROUNDED, Layout(1)),
        (Training(dtype="bfloat16"), Layout(1)),
        (Training(dtype="float64"), Layout(1)),
        (MIXED, Layout(1, recompute=ActivationCheckpoint(mode="selective"))),
        (MIXED, Layout(1, recompute=ActivationCheckpoint(mode="full"))),
        (FLOAT32, Layout(1, compile=Compile(enable=True, backend="aot_eager"))),
        (FLOAT32, Layout(1, {RESHARD: "never"})),
        (MIXED, Layout(2, {TP: 2})),
    ],
    ids=lambda value: str(value) if isinstance(value, Layout) else f"{value.dtype}",
)
def test_nor_does_it_with(ranks: RankPool, training: Training, layout: Layout) -> None:
    degrees = (1, 4)
    keys = {"name": "qwen3", "training": training, "layout": layout, "steps": 4}
    assert not differences(ranks, degrees, run, **keys)


def default_reduction() -> AbstractContextManager:
    return patch.object(FSDPModule, "set_custom_reduce_scatter", lambda self, comm: None)


def one_after_the_other() -> AbstractContextManager:
    return patch.object(GradientTree, "end_microbatch", lambda self, is_last: None)


def ordinary_norm() -> AbstractContextManager:
    def of(parameters: list[nn.Parameter], max_norm: float, *, is_exact: bool) -> torch.Tensor:
        return clip(parameters, max_norm)

    clip = clip_grad_norm_
    return patch(f"{__name__}.clip_grad_norm_", of)


def ordinary_optimizer() -> AbstractContextManager:
    return patch.object(PaddedAdamW, "step", torch.optim.AdamW.step)


def sums_of_ranks() -> AbstractContextManager:
    def of_sums(values: torch.Tensor, mesh: Any) -> torch.Tensor:
        return sum_over(values.sum(), mesh)

    return patch(f"{__name__}.sum_in_order", of_sums)


@pytest.mark.parametrize(
    ("fault", "seen_in"),
    [
        (default_reduction, "norms"),
        (one_after_the_other, "norms"),
        (ordinary_norm, "norms"),
        (ordinary_optimizer, "state.norm.weight.exp_avg_sq"),
        (sums_of_ranks, "losses"),
    ],
)
def test_a_fault_changes_some(ranks: RankPool, fault: Fault, seen_in: str) -> None:
    keys = {"name": "llama3", "training": FLOAT32, "faults": (fault,), "steps": 4}
    assert seen_in in differences(ranks, (1, 4), run, **keys)
