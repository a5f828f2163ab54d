"""Any mesh matches one device: logits, loss, gradients, and weights after training.

In float64 rounding cannot hide a wrong factor. Ranks and microbatches have unequal numbers of valid
labels, so averaging over them would give a wrong result.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from config.job_config import ActivationCheckpoint, Compile, Optimizer, Parallelism
from data.loader import Microbatch, num_target_tokens
from forward_backward import SPMDRunner
from models import TransformerArgs, find_model
from models.meta import build_on_meta
from models.qwen3_moe import Qwen3MoeArgs
from models.qwen3_next import Qwen3NextArgs
from optim.grad_norm import clip_grad_norm_
from optim.loss import IGNORE_INDEX
from optim.muon import hidden_matrices
from optim.optimizer import build_optimizer
from parallelisms.materialize import materialize
from runtime.distributed import sum_in_order, sum_over
from tests.layouts import (
    CP,
    CPU,
    METHOD,
    MODE,
    PP,
    REDUCE,
    REPLICATE,
    RESHARD,
    SCHEDULE,
    TP,
    Layout,
    shard_debugmodel,
)
from tests.ranks import RankPool

ROWS, SEQ_LEN = 36, 16
MAX_NORM, TOLERANCE = 0.05, 1e-9
# Microbatches of each step. If compiled, all steps have one shape.
ACCUMULATION, COMPILED, PIPELINED = (1, 3, 1), (3,) * 3, (6,) * 3
OPTIMIZER = Optimizer(lr=1e-2)
MODELS = [("llama3", False), ("llama3", True), ("qwen3", False), ("qwen3", True)]
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble")
LAST = {REDUCE: "last_microbatch"}

FSDP2 = [
    Layout(world_size, {RESHARD: reshard} | reduce)
    for world_size, reshard, reduce in product(
        (1, 2, 4), ("default", "always", "never"), ({}, LAST)
    )
]
SIMPLE_FSDP = [
    Layout(world_size, {MODE: "simple_fsdp", RESHARD: reshard})
    for world_size, reshard in product((1, 2, 4), ("default", "never"))
]
DDP = [Layout(world_size, {MODE: "ddp"}) for world_size in (1, 2, 4)]
MATRIX = [
    *FSDP2,
    Layout(4, {RESHARD: 2}),
    Layout(2, {REPLICATE: 2}),
    Layout(4, {REPLICATE: 2}),
    Layout(4, {REPLICATE: 2} | LAST),
    *SIMPLE_FSDP,
    Layout(2, {MODE: "simple_fsdp", REPLICATE: 2}),
    Layout(4, {MODE: "simple_fsdp", REPLICATE: 2}),
    *DDP,
    # Divides no dim.
    Layout(3),
]
TENSOR_PARALLEL = [
    Layout(2, {TP: 2}),
    Layout(4, {TP: 2}),
    Layout(4, {TP: 2, REPLICATE: 2}),
    Layout(4, {TP: 2, MODE: "simple_fsdp"}),
    Layout(4, {TP: 2, MODE: "simple_fsdp", REPLICATE: 2}),
    Layout(4, {TP: 2, MODE: "ddp"}),
    # Fewer kv heads than ranks.
    Layout(4, {TP: 4}),
]
GATHER = {METHOD: "allgather"}
CONTEXT_PARALLEL = [
    Layout(world_size, keys | method)
    for world_size, keys in [
        (2, {CP: 2}),
        # Fewer kv heads than ranks.
        (4, {CP: 4}),
        (4, {CP: 2}),
        (4, {CP: 2, REPLICATE: 2}),
        (4, {CP: 2, MODE: "ddp"}),
        (4, {CP: 2, MODE: "simple_fsdp"}),
        (4, {CP: 2, TP: 2}),
        (8, {CP: 2, TP: 2}),
        (8, {CP: 2, TP: 2, REPLICATE: 2}),
    ]
    for method in ({}, GATHER)
]
PIPELINES = [
    *(Layout(2, {PP: 2, SCHEDULE: schedule}) for schedule in SCHEDULES),
    Layout(4, {PP: 4}),
    *(Layout(4, {PP: 2, SCHEDULE: schedule}) for schedule in SCHEDULES),
    Layout(4, {PP: 2, RESHARD: "always"}),
    Layout(4, {PP: 2, SCHEDULE: "Interleaved1F1B", RESHARD: "always"}),
    Layout(4, {PP: 2, REPLICATE: 2}),
    Layout(4, {PP: 2, MODE: "ddp"}),
    Layout(4, {PP: 2, MODE: "simple_fsdp"}),
    Layout(4, {PP: 2, SCHEDULE: "Interleaved1F1B", MODE: "simple_fsdp"}),
    Layout(4, {PP: 2, TP: 2}),
    Layout(4, {PP: 2, CP: 2}),
    Layout(4, {PP: 2, CP: 2} | GATHER),
    Layout(8, {PP: 2, TP: 2}),
    Layout(8, {PP: 2, CP: 2}),
    Layout(8, {PP: 2, CP: 2, TP: 2}),
    Layout(8, {PP: 2, CP: 2, TP: 2, SCHEDULE: "Interleaved1F1B"} | GATHER),
    Layout(8, {PP: 2, REPLICATE: 2, TP: 2}),
    *(
        Layout(4, {PP: 2, SCHEDULE: "InterleavedZeroBubble"} | keys)
        for keys in ({TP: 2}, {CP: 2}, {REPLICATE: 2}, {MODE: "ddp"})
    ),
]
LAYOUTS = [*MATRIX, *TENSOR_PARALLEL, *CONTEXT_PARALLEL, *PIPELINES]
# Fast tests without tied weights: each kind of layout, some pairs of kinds.
UNTIED = [
    Layout(1, {RESHARD: "default"}),
    Layout(2, {RESHARD: "default"}),
    Layout(2, {RESHARD: "never"} | LAST),
    Layout(3),
    Layout(4, {REPLICATE: 2}),
    Layout(2, {MODE: "simple_fsdp", RESHARD: "default"}),
    Layout(2, {MODE: "ddp"}),
    Layout(4, {TP: 2}),
    Layout(2, {CP: 2}),
    Layout(2, {CP: 2} | GATHER),
    Layout(4, {CP: 2, TP: 2}),
    Layout(2, {PP: 2, SCHEDULE: "1F1B"}),
    Layout(2, {PP: 2, SCHEDULE: "InterleavedZeroBubble"}),
    Layout(4, {PP: 2, CP: 2} | GATHER),
]
# Slow tests with tied weights: fast layouts cover each of their kinds, and most pairs of kinds.
SLOW_IF_TIED = [
    *(layout for layout in FSDP2 if layout.world_size != 2 and "default" not in str(layout)),
    *(Layout(world_size, {RESHARD: "default"} | LAST) for world_size in (1, 4)),
    *(Layout(1, {MODE: "simple_fsdp", RESHARD: reshard}) for reshard in ("default", "never")),
    *(Layout(4, {MODE: "simple_fsdp", RESHARD: reshard}) for reshard in ("default", "never")),
    Layout(2, {MODE: "simple_fsdp", REPLICATE: 2}),
    *(Layout(world_size, {MODE: "ddp"}) for world_size in (1, 4)),
    Layout(4, {TP: 2, MODE: "simple_fsdp", REPLICATE: 2}),
    Layout(4, {CP: 2, REPLICATE: 2} | GATHER),
    Layout(4, {CP: 2, MODE: "ddp"}),
    Layout(4, {CP: 2, MODE: "simple_fsdp"} | GATHER),
    Layout(8, {CP: 2, TP: 2} | GATHER),
    *(Layout(8, {CP: 2, TP: 2, REPLICATE: 2} | method) for method in ({}, GATHER)),
    *(Layout(4, {PP: 2, SCHEDULE: schedule}) for schedule in ("GPipe", "Interleaved1F1B")),
    Layout(4, {PP: 2, RESHARD: "always"}),
    Layout(4, {PP: 2, MODE: "simple_fsdp"}),
    *(Layout(8, {PP: 2} | keys) for keys in ({TP: 2}, {CP: 2}, {CP: 2, TP: 2})),
    Layout(8, {PP: 2, REPLICATE: 2, TP: 2}),
    *(
        Layout(4, {PP: 2, SCHEDULE: "InterleavedZeroBubble"} | keys)
        for keys in ({CP: 2}, {REPLICATE: 2})
    ),
]
FULL, SELECTIVE = ActivationCheckpoint(mode="full"), ActivationCheckpoint(mode="selective")
AOT = Compile(enable=True, backend="aot_eager")
BUDGET = ActivationCheckpoint(mode="memory_budget", memory_budget=0.3)
MIN_CUT = Compile(enable=True, backend="aot_eager_decomp_partition")
VARIANTS = [
    Layout(2, recompute=FULL),
    Layout(2, recompute=SELECTIVE),
    Layout(2, recompute=ActivationCheckpoint(mode="selective", selective=3)),
    Layout(4, {TP: 2}, recompute=SELECTIVE),
    Layout(2, compile=AOT),
    Layout(2, recompute=BUDGET, compile=MIN_CUT),
    Layout(2, {"fsdp_forward_prefetch": 2, "fsdp_backward_prefetch": 2}),
    Layout(2, {"fsdp_cpu_offload": True}),
    Layout(2, {MODE: "simple_fsdp"}, recompute=FULL),
    Layout(2, {MODE: "simple_fsdp"}, recompute=SELECTIVE),
    Layout(2, {MODE: "simple_fsdp"}, recompute=ActivationCheckpoint(mode="selective", selective=3)),
    Layout(2, {MODE: "simple_fsdp"}, compile=AOT, recompute=SELECTIVE),
    Layout(4, {MODE: "simple_fsdp", TP: 2}, compile=AOT),
    Layout(2, {MODE: "ddp"}, recompute=SELECTIVE),
    Layout(2, {MODE: "ddp"}, compile=AOT),
    *(Layout(2, {CP: 2} | method, recompute=FULL) for method in ({}, GATHER)),
    Layout(2, {CP: 2}, recompute=SELECTIVE, compile=AOT),
    Layout(2, {CP: 2} | GATHER, recompute=FULL, compile=AOT),
    Layout(4, {CP: 2, TP: 2}, compile=AOT),
    Layout(2, {PP: 2}, recompute=FULL),
    Layout(2, {PP: 2, SCHEDULE: "Interleaved1F1B"}, recompute=SELECTIVE, compile=AOT),
    Layout(4, {PP: 2, "fsdp_cpu_offload": True}),
]
# Compiling is slow. One or two of the layouts above cover what each of these combines.
SLOW_VARIANTS = [
    Layout(2, {CP: 2}, recompute=BUDGET, compile=MIN_CUT),
    Layout(2, {PP: 2}, recompute=BUDGET, compile=MIN_CUT),
    Layout(2, {MODE: "simple_fsdp"}, compile=AOT),
    Layout(2, {CP: 2} | GATHER, recompute=SELECTIVE, compile=AOT),
    Layout(2, {CP: 2}, recompute=FULL, compile=AOT),
    *(Layout(4, {TP: tp}, compile=AOT) for tp in (2, 4)),
    Layout(4, {CP: 2, MODE: "simple_fsdp"}, compile=AOT),
    Layout(4, {PP: 2, TP: 2}, recompute=SELECTIVE, compile=AOT),
    Layout(4, {PP: 2, SCHEDULE: "Interleaved1F1B"}, recompute=SELECTIVE, compile=AOT),
]


def args_of(name: str, is_tied: bool, has_narrow_keys: bool, n_layers: int) -> TransformerArgs:
    """Args of a small model; with narrow keys, wk and wv have fewer than four rows."""
    args = find_model(name, "debugmodel")[1]
    args = replace(args, n_layers=n_layers, max_seq_len=SEQ_LEN, tie_embeddings=is_tied)
    if isinstance(args, Qwen3NextArgs):
        args = replace(args, attention_every=2)
    if isinstance(args, Qwen3MoeArgs):
        args = replace(args, balance_weight=0.01)
    return replace(args, n_kv_heads=1, head_dim=2) if has_narrow_keys else args


@cache
def global_batch(vocab_size: int, document_mask: bool) -> Microbatch:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocab_size, (ROWS, SEQ_LEN + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for row in range(ROWS):
        labels[row, : 5 * row % SEQ_LEN] = IGNORE_INDEX
    positions = document_ids = None
    if document_mask:
        index = torch.arange(SEQ_LEN).expand(ROWS, -1)
        starts = torch.randint(1, SEQ_LEN, (ROWS, 1), generator=generator)
        document_ids = (index >= starts).long()
        positions = torch.where(index >= starts, index - starts, index)
    return Microbatch(tokens[:, :-1].contiguous(), labels, positions, document_ids)


def rows_of(batch: Microbatch, rows: slice) -> Microbatch:
    return Microbatch(*(None if tensor is None else tensor[rows] for tensor in batch))


@dataclass
class Step:
    loss: torch.Tensor
    norm: torch.Tensor
    gradients: dict[str, torch.Tensor]


@cache
def one_device(
    name: str, args: TransformerArgs, document_mask: bool, config: Optimizer = OPTIMIZER
) -> tuple[list[torch.Tensor], list[Step], dict[str, torch.Tensor]]:
    """Train the plain model on the whole batch: logits before and after, steps, final weights."""
    batch = global_batch(args.vocab_size, document_mask)
    spec, _ = find_model(name, "debugmodel")
    model = build_on_meta(spec, args, torch.float64)
    materialize(model, CPU, seed=7)
    matrices = hidden_matrices(spec.blocks(model), spec.moes(model))
    optimizer = build_optimizer(model, config, matrices=matrices)
    runner = SPMDRunner(model, parallelism=Parallelism(), device=CPU)
    logits, steps = [runner.logits(batch)], []
    for _ in ACCUMULATION:
        loss = runner.forward_backward([batch], num_target_tokens([batch])).sum()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        gradients = {fqn: cloned(p.grad) for fqn, p in model.named_parameters()}
        steps.append(Step(loss, norm, gradients))
        optimizer.step()
        optimizer.zero_grad()
    logits.append(runner.logits(batch))
    return logits, steps, {fqn: p.detach() for fqn, p in model.named_parameters()}


def cloned(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.clone()


def check_layout(
    name: str,
    is_tied: bool,
    layout: Layout,
    *,
    document_mask: bool = False,
    has_narrow_keys: bool = False,
    device: torch.device = CPU,
    config: Optimizer = OPTIMIZER,
) -> list[str]:
    """Compare with one device; return the FQNs of parameters not sharded over dim 0."""
    stages = layout.parallelism.get(PP, 1) * (2 if "Interleaved" in str(layout) else 1)
    args = args_of(name, is_tied, has_narrow_keys, n_layers=max(2, stages))
    batch = global_batch(args.vocab_size, document_mask)
    want_logits, want_steps, want_weights = one_device(name, args, document_mask, config)
    # Compilations of other tests in this process count toward the recompile limit.
    torch.compiler.reset()
    sharded = shard_debugmodel(name, args, layout, dtype="float64", device=device)
    model, dims = sharded.module, sharded.dims
    materialize(model, device, seed=7)
    # Collected now, because forward temporarily replaces them by whole weights.
    parameters = dict(model.named_parameters())
    spec, _ = find_model(name, "debugmodel")
    matrices = hidden_matrices(spec.blocks(model), spec.moes(model))
    optimizer = build_optimizer(model, config, matrices=matrices, weight_mesh=dims.weight_mesh)
    runner = sharded.runner()
    degree, rank = dims.batch_mesh.size(), dims.batch_mesh.get_local_rank()
    accumulation = COMPILED if layout.compile.enable else ACCUMULATION
    accumulation = PIPELINED if stages > 1 else accumulation
    # One shape, because each shape is compiled separately.
    rows_per_forward = ROWS // degree // (accumulation[0] if layout.compile.enable else 1)

    def check_logits(want: torch.Tensor) -> None:
        for start in range(rank * ROWS // degree, (rank + 1) * ROWS // degree, rows_per_forward):
            rows = slice(start, start + rows_per_forward)
            assert_close(runner.logits(rows_of(batch, rows)), want[rows], "logits")

    check_logits(want_logits[0])
    for step, (count, want) in enumerate(zip(accumulation, want_steps, strict=True)):
        n_rows = ROWS // (degree * count)
        starts = range(rank * n_rows, ROWS, degree * n_rows)
        microbatches = [rows_of(batch, slice(start, start + n_rows)) for start in starts]
        assert len(microbatches) == count
        n_tokens = int(sum_over(torch.tensor(num_target_tokens(microbatches)), dims.batch_mesh))
        if step == 0:
            parts = runner.evaluate(microbatches) / n_tokens
            assert_close(sum_in_order(parts, dims.data_mesh), want.loss, "validation loss")
        losses = runner.forward_backward(microbatches, n_tokens)
        assert_close(sum_in_order(losses, dims.data_mesh), want.loss, "loss")
        norm = clip_grad_norm_(
            list(parameters.values()),
            MAX_NORM,
            pp_mesh=dims.pp_mesh,
            tied_duplicates=runner.tied_duplicates,
        )
        assert_close(norm, want.norm, "norm")
        # The first two steps cover all kinds of accumulation.
        if step < 2:
            for fqn, parameter in parameters.items():
                assert parameter.grad is not None
                assert_close(whole(parameter.grad), want.gradients[fqn], fqn)
        optimizer.step()
        optimizer.zero_grad()
    check_logits(want_logits[1])
    not_on_dim0 = []
    for fqn, parameter in parameters.items():
        assert_close(whole(parameter), want_weights[fqn], fqn)
        assert isinstance(parameter, DTensor) or layout.world_size == 1
        if isinstance(parameter, DTensor) and Shard(0) not in parameter.placements:
            not_on_dim0.append(fqn)
    return not_on_dim0


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_close(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    error = (got.cpu() - want).norm() / want.norm()
    assert error < TOLERANCE, f"{what} is off by {error:.1e}"


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def is_fast(name: str, is_tied: bool, layout: Layout) -> bool:
    if (name, is_tied) == ("qwen3", True):
        return layout not in SLOW_IF_TIED
    return (name, is_tied) == ("llama3", False) and layout in UNTIED


CASES = [(*model, layout) for model, layout in product(MODELS, LAYOUTS)]
assert all(layout in LAYOUTS for layout in [*UNTIED, *SLOW_IF_TIED])


@pytest.mark.parametrize(
    ("name", "is_tied", "layout"),
    [case if is_fast(*case) else slow(*case) for case in CASES],
    ids=str,
)
def test_layout_matches_one_device(
    ranks: RankPool, name: str, is_tied: bool, layout: Layout
) -> None:
    ranks.run(check_layout, layout.world_size, name, is_tied, layout)


@pytest.mark.parametrize("layout", [*VARIANTS, *map(slow, SLOW_VARIANTS)], ids=str)
def test_variant_matches_one_device(ranks: RankPool, layout: Layout) -> None:
    ranks.run(check_layout, layout.world_size, "qwen3", True, layout)


@pytest.mark.parametrize(
    "layout", [Layout(2), Layout(4, {TP: 2}), Layout(2, {MODE: "simple_fsdp"})], ids=str
)
def test_documents_match_one_device(ranks: RankPool, layout: Layout) -> None:
    check = partial(check_layout, document_mask=True)
    ranks.run(check, layout.world_size, "qwen3", True, layout)


@pytest.mark.parametrize("mode", ["fsdp2", "simple_fsdp"])
def test_weights_with_fewer_rows_than_ranks_shard_columns(ranks: RankPool, mode: str) -> None:
    layout = Layout(4, {MODE: mode})
    check = partial(check_layout, has_narrow_keys=True)
    found = ranks.run(check, 4, "llama3", False, layout)[0]
    assert found == [f"layers.{n}.attention.{w}.weight" for n in (0, 1) for w in ("wk", "wv")]


def average_gradients() -> AbstractContextManager:
    return patch.object(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None)


def count_replicas_twice() -> AbstractContextManager:
    return patch(
        "optim.grad_norm._sharding_groups",
        lambda grad: tuple(grad.device_mesh.get_all_groups()),
    )


def without_reduce_scatter() -> AbstractContextManager:
    return patch("parallelisms.simple_fsdp.Partial", Replicate)


def without_all_reduce() -> AbstractContextManager:
    """Fault: gradients are not all-reduced; losses and norms, which are scalars, are."""
    original = dist.all_reduce

    def only_scalars(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if tensor.ndim == 0:
            original(tensor, *args, **kwargs)

    return patch.object(dist, "all_reduce", only_scalars)


def check_fault(fault: Callable[[], AbstractContextManager], layout: Layout) -> str:
    """Error of ``check_layout`` on a model trained with ``fault``; "" if there is none."""
    try:
        with fault():
            check_layout("llama3", False, layout)
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("fault", "layout", "seen"),
    [
        (average_gradients, Layout(2), "norm is off by 5.0e-01"),
        (average_gradients, Layout(2, {MODE: "ddp"}), "norm is off by 5.0e-01"),
        (count_replicas_twice, Layout(2, {REPLICATE: 2}), "norm is off by 4.1e-01"),
        (count_replicas_twice, Layout(2, {TP: 2}), "norm is off by"),
        (without_reduce_scatter, Layout(2, {MODE: "simple_fsdp"}), "norm is off by"),
        (without_all_reduce, Layout(4, {REPLICATE: 2}), "norm is off by"),
        (without_all_reduce, Layout(2, {MODE: "ddp"}), "norm is off by"),
    ],
)
def test_wrong_gradient_reduction_is_detected(
    ranks: RankPool, fault, layout: Layout, seen: str
) -> None:
    assert all(seen in text for text in ranks.run(check_fault, layout.world_size, fault, layout))
