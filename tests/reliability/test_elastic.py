"""Elastic determinism: the data-parallel degree does not change a bit of a run.

Compares loss and gradient norm of every step, and the final weights and optimizer state. Dims have
few divisors, so that shards are uneven, empty or along columns, and end inside a vector register.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from build_model import build_sharded_model
from checkpoint.states import OptimizerState
from config import JobConfig
from config.job_config import ActivationCheckpoint, Compile, Debug, Optimizer, Parallelism, Training
from data.loader import Microbatch, num_target_tokens
from forward_backward import SPMDRunner
from models import TransformerArgs, find_model
from optim.chunked_adamw import ChunkedAdamW
from optim.grad_norm import clip_grad_norm_
from optim.optimizer import build_optimizer
from parallelisms.elastic import PairwiseGradientAccumulator
from parallelisms.mixed_precision import mixed_precision_policy
from parallelisms.parallel_dims import ParallelDims
from runtime.distributed import sum_in_order, sum_over
from runtime.labels import IGNORE_INDEX
from tests.lib.layouts import CPU, RESHARD, TP, Layout
from tests.lib.marks import slow
from tests.lib.ranks import RankPool

STEPS, SLOTS, ROWS, SEQ_LEN = 5, 8, 2, 16
DEGREES = (1, 2, 4, 8)
FLOAT32 = Training(mixed_precision_param="float32")
MIXED = Training(mixed_precision_param="bfloat16")
ROUNDED = Training(mixed_precision_param="bfloat16", mixed_precision_reduce="bfloat16")
ONE = Layout(1)
Fault = Callable[[], AbstractContextManager]
# Results of a run by name: losses, norms and a digest of each final tensor.
Run = dict[str, Any]


def run(
    name: str,
    layout: Layout,
    training: Training,
    steps: int = STEPS,
    faults: tuple[Fault, ...] = (),
) -> Run:
    """Train as ``train.py`` does with debug.deterministic = "elastic", with ``faults`` applied."""
    torch.compiler.reset()
    with ExitStack() as stack:
        for fault in faults:
            stack.enter_context(fault())
        model, dims = build(name, layout, training)
        parameters = dict(model.named_parameters())
        optimizer = build_optimizer(model, Optimizer(lr=1e-2), is_elastic=True)
        policy = mixed_precision_policy(training, CPU)
        accumulator = PairwiseGradientAccumulator(list(parameters.values()), policy.reduce_dtype)
        parallelism = Parallelism(**layout.parallelism)
        runner = SPMDRunner(model, parallelism=parallelism, device=CPU, accumulator=accumulator)
        losses, norms = [], []
        for step in range(steps):
            batches = global_batch(step)
            # The same assignment as in data/loader.py.
            own = batches[dims.batch_mesh.get_local_rank() :: dims.batch_mesh.size()]
            parts = runner.forward_backward(own, num_target_tokens(batches))
            losses.append(sum_in_order(parts, dims.data_mesh).item())
            norms.append(clip_grad_norm_(list(parameters.values()), 1.0, is_exact=True).item())
            optimizer.step()
            optimizer.zero_grad()
        tensors = {fqn: p.detach() for fqn, p in parameters.items()}
        tensors |= OptimizerState(model, optimizer).state_dict()
    return {"losses": losses, "norms": norms} | {fqn: digest(t) for fqn, t in tensors.items()}


def build(name: str, layout: Layout, training: Training) -> tuple[nn.Module, ParallelDims]:
    spec, _ = find_model(name, "debugmodel")
    config = JobConfig(
        training=training,
        parallelism=Parallelism(**layout.parallelism),
        activation_checkpoint=layout.recompute,
        compile=layout.compile,
        float8=layout.float8,
        debug=Debug(seed=7, deterministic="elastic"),
    )
    dims = ParallelDims.build(config.parallelism, layout.world_size, "cpu")
    sharded = build_sharded_model(spec, args_of(name, dims.degrees.tp), config, dims, CPU)
    sharded.materialize()
    return sharded.module, dims


def args_of(name: str, tp: int) -> TransformerArgs:
    args = find_model(name, "debugmodel")[1]
    args = replace(args, n_layers=1, max_seq_len=SEQ_LEN, dim=100, hidden_dim=90, vocab_size=330)
    if name == "qwen3" and tp == 1:
        # wk and wv have two rows: 4 ranks shard their columns, of 8 ranks most have empty shards.
        args = replace(args, n_kv_heads=1, head_dim=2)
    return args


def global_batch(step: int) -> list[Microbatch]:
    """Random microbatches, each with another number of target tokens."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(330, (SLOTS, ROWS, SEQ_LEN + 1), generator=generator)
    labels = tokens[..., 1:].clone()
    for slot, count in enumerate(torch.randint(SEQ_LEN, (SLOTS,), generator=generator)):
        labels[slot, :, :count] = IGNORE_INDEX
    return [Microbatch(tokens[slot, :, :-1], labels[slot]) for slot in range(SLOTS)]


def digest(tensor: torch.Tensor) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return hashlib.sha256(whole.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def differences(
    ranks: RankPool, degrees: Sequence[int], *, layout: Layout = ONE, **keys: Any
) -> set[str]:
    """Names of results that differ between these data-parallel degrees."""
    found = []
    for degree in degrees:
        spread = replace(layout, world_size=degree * layout.world_size)
        runs = ranks.run(partial(run, layout=spread, **keys), spread.world_size)
        assert all(each == runs[0] for each in runs), "the ranks of one run disagree"
        found.append(runs[0])
    first = found[0]
    assert len(set(first["losses"])) == len(set(first["norms"])) == len(first["norms"])
    assert all(each.keys() == first.keys() for each in found)
    return {name for each in found for name in first if each[name] != first[name]}


@pytest.mark.row(15, "Elastic: another data-parallel degree, bitwise")
def test_degree_does_not_change_a_bit(
    ranks: RankPool, record_result: Callable[[str], None]
) -> None:
    for name in ("llama3", "qwen3"):
        assert not differences(ranks, DEGREES, name=name, training=FLOAT32)
    record_result(
        f"2 models, {STEPS} steps of {SLOTS} microbatches on {DEGREES} ranks: all bits equal"
    )


@pytest.mark.parametrize(
    ("training", "layout"),
    [
        pytest.param(ROUNDED, ONE, id="reduced in bfloat16"),
        pytest.param(MIXED, replace(ONE, recompute=ActivationCheckpoint(mode="full")), id="full"),
        pytest.param(MIXED, Layout(2, {TP: 2}), id="tensor parallel"),
        slow(MIXED, replace(ONE, recompute=ActivationCheckpoint(mode="selective")), id="selective"),
        slow(MIXED, replace(ONE, compile=Compile(enable=True, backend="aot_eager")), id="compiled"),
        slow(FLOAT32, Layout(1, {RESHARD: "never"}), id="never resharded"),
        slow(Training(dtype="bfloat16"), ONE, id="bfloat16"),
        slow(Training(dtype="float64"), ONE, id="float64"),
    ],
)
def test_degree_does_not_change_a_bit_in_other_modes(
    ranks: RankPool, training: Training, layout: Layout
) -> None:
    keys = {"name": "qwen3", "training": training, "layout": layout, "steps": 2}
    # Tensor parallel ranks come on top.
    assert not differences(ranks, (1, 4 // layout.world_size), **keys)


def default_reduction() -> AbstractContextManager:
    return patch.object(FSDPModule, "set_custom_reduce_scatter", lambda self, comm: None)


def sequential_accumulation() -> AbstractContextManager:
    return patch.object(PairwiseGradientAccumulator, "end_microbatch", lambda self, is_last: None)


def ordinary_norm() -> AbstractContextManager:
    def of(parameters: list[nn.Parameter], max_norm: float, *, is_exact: bool) -> torch.Tensor:
        return clip(parameters, max_norm)

    clip = clip_grad_norm_
    return patch(f"{__name__}.clip_grad_norm_", of)


def ordinary_optimizer() -> AbstractContextManager:
    return patch.object(ChunkedAdamW, "step", torch.optim.AdamW.step)


def sum_over_ranks() -> AbstractContextManager:
    def of_sums(values: torch.Tensor, mesh: Any) -> torch.Tensor:
        return sum_over(values.sum(), mesh["batch"])

    return patch(f"{__name__}.sum_in_order", of_sums)


@pytest.mark.parametrize(
    ("fault", "seen_in"),
    [
        (default_reduction, "norms"),
        (sequential_accumulation, "norms"),
        (ordinary_norm, "norms"),
        (ordinary_optimizer, ".exp_avg_sq"),
        (sum_over_ranks, "losses"),
    ],
)
def test_fault_changes_results(ranks: RankPool, fault: Fault, seen_in: str) -> None:
    """The weights that round otherwise depend on the CPU's vectors."""
    keys = {"name": "llama3", "training": FLOAT32, "faults": (fault,), "steps": 2}
    assert any(name.endswith(seen_in) for name in differences(ranks, (1, 4), **keys))
