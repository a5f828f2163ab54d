"""Tensors gathered in float8 are bitwise those quantized after the all-gather: weights by FSDP2,
activations and gradients by tensor parallel."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import Replicate

from benchmarks.counting import count_collectives, profiled
from config.job_config import ActivationCheckpoint, Compile, Float8, Optimizer, Parallelism
from data.loader import Microbatch, num_target_tokens
from forward_backward import SPMDRunner
from models.qwen3_next import Qwen3NextArgs
from optim.grad_norm import clip_grad_norm_
from optim.optimizer import build_optimizer
from parallelisms import float8, float8_all_gather, float8_tensor_parallel, parallelize
from parallelisms.comm_volume import step_comm_volume
from parallelisms.float8 import (
    E4M3,
    RECIPES,
    Float8Linear,
    Float8Tensor,
    compute_scale,
    emulated_mm,
    quantize,
)
from parallelisms.float8_all_gather import gathered_in_float8
from parallelisms.materialize import materialize
from runtime.distributed import sum_over
from tests.lib.layouts import (
    CP,
    CPU,
    EP,
    PP,
    REPLICATE,
    RESHARD,
    SCHEDULE,
    TP,
    Layout,
    args_of,
    digest,
    shard_debugmodel,
)
from tests.lib.marks import skip_without_gpus, slow
from tests.lib.parity import whole
from tests.lib.ranks import RankPool
from tests.lib.small_run import Run

STEPS, MICROBATCHES, ROWS, SEQ_LEN = 2, 2, 2, 16
HARDWARE = Float8(recipe="tensorwise", skip_small=False)
# A CPU takes seconds for some GEMMs that are not emulated.
EMULATED = HARDWARE.model_copy(update={"emulate": True})
AOT = Compile(enable=True, backend="aot_eager")
FULL, OP = ActivationCheckpoint(mode="full"), ActivationCheckpoint(mode="selective")


def all_gather_in_float8(enabled: bool) -> AbstractContextManager[Any]:
    if enabled:
        return nullcontext()
    names = "apply_float8_all_gather", "apply_float8_tensor_parallel"
    return patch.multiple(parallelize, **{name: lambda *args, **kwargs: None for name in names})


def amax_of_the_shard_only() -> AbstractContextManager[Any]:
    """Fault: the amax of this rank's shard serves as that of the whole weight."""
    alone = SimpleNamespace(all_reduce=lambda *args, **kwargs: None, ReduceOp=dist.ReduceOp)
    return patch.object(float8_all_gather, "dist", alone)


def quantized_from_float32() -> AbstractContextManager[Any]:
    """Fault: shards are quantized from float32, not from the compute dtype."""
    return patch.object(float8_all_gather, "_rounded", lambda x, mp_policy: x.to(torch.float32))


def amax_of_the_tokens_of_a_rank() -> AbstractContextManager[Any]:
    """Fault: the amax of this rank's tokens serves as that of the whole sequence."""
    return patch.object(float8_tensor_parallel, "Partial", lambda op: Replicate())


@dataclass(frozen=True)
class Trained:
    curve: list[tuple[float, float]]
    """Loss and gradient norm of each step."""
    weights: dict[str, str]
    """Digest of each weight, by FQN."""


def batches_of(generator: torch.Generator, n_rows: int = ROWS) -> list[Microbatch]:
    tokens = torch.randint(250, (MICROBATCHES, n_rows, SEQ_LEN + 1), generator=generator)
    return [Microbatch(rows[:, :-1], rows[:, 1:]) for rows in tokens]


def trained(
    name: str,
    layout: Layout,
    compute_dtype: str,
    enabled: bool,
    device_type: str = "cpu",
    fault: Any = nullcontext,
    n_rows: int = ROWS,
) -> tuple[list[int], Trained]:
    """Numbers of parameters and of modules' inputs and outputs gathered in float8, and the result
    of steps with evaluations between."""
    torch.compiler.reset()
    is_gpu = device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if is_gpu else CPU
    args = args_of(name, n_layers=4 if SCHEDULE in layout.parallelism else 2)
    if isinstance(args, Qwen3NextArgs):
        # With fewer, the layer of the heads' decays has no multiple of 16 features on a rank.
        args = replace(args, n_key_heads=4, n_value_heads=16)
    with all_gather_in_float8(enabled):
        found = shard_debugmodel(name, args, layout, compute_dtype=compute_dtype, device=device)
    materialize(found.module, device, seed=7)
    parameters, runner = list(found.module.parameters()), found.runner()
    optimizer = build_optimizer(found.module, Optimizer(lr=1e-2))
    mesh, curve = found.dims.batch_mesh, []
    generator = torch.Generator().manual_seed(mesh.get_local_rank())
    with fault():
        for _ in range(STEPS):
            runner.evaluate(batches_of(generator, n_rows))
            batches = batches_of(generator, n_rows)
            loss = runner.forward_backward(batches, mesh.size() * num_target_tokens(batches)).sum()
            norm = clip_grad_norm_(parameters, 1.0, pp_mesh=found.dims.pp_mesh)
            optimizer.step()
            optimizer.zero_grad()
            curve.append((sum_over(loss, mesh).item(), norm.item()))
    named = found.module.named_parameters()
    weights = {fqn: digest(whole(p.detach()).cpu()) for fqn, p in named}
    hooked = [
        getattr(vars(module).get(name), "__module__", "") == float8_tensor_parallel.__name__
        for module in found.module.modules()
        for name in ("all_gather_input", "reduce_scatter_output")
    ]
    # A stage has a part of the layers.
    n_hooked = [sum(hooked[0::2]), sum(hooked[1::2])] if TP in layout.parallelism else []
    return [gathered_in_float8(found.module), *n_hooked], Trained(curve, weights)


def with_and_without(
    name: str, layout: Layout, plain: Layout, compute_dtype: str, *rest: Any
) -> list[tuple[list[int], Trained]]:
    """Results of ``layout`` with float8 all-gather, and of ``plain`` without."""
    # In one call, the second run finds what DTensor has cached in the first.
    return [trained(name, each, compute_dtype, each is layout, *rest) for each in (layout, plain)]


def check_equal(ranks: RankPool, name: str, layout: Layout, *rest: Any) -> None:
    # aot_eager runs the operators of eager code.
    plain = replace(layout, compile=Compile())
    found = ranks.run(with_and_without, layout.world_size, name, layout, plain, *rest)
    for (gathered, got), (not_gathered, want) in found:
        assert min(gathered) > max(not_gathered) == 0
        assert len(set(want.curve)) == STEPS
        assert got == want


@pytest.mark.parametrize(
    ("name", "layout", "compute_dtype"),
    [
        ("qwen3", Layout(2), "bfloat16"),
        ("qwen3", Layout(2), "float32"),
        # Shards of unequal sizes.
        ("llama3", Layout(3, recompute=FULL), "bfloat16"),
        ("llama3", Layout(4, {REPLICATE: 2, RESHARD: "never"}), "bfloat16"),
        ("llama3", Layout(2, compile=AOT), "bfloat16"),
        slow("llama3", Layout(3), "bfloat16"),
        slow("llama3", Layout(4, {REPLICATE: 2}), "bfloat16"),
        slow("llama3", Layout(2, {RESHARD: "never"}), "bfloat16"),
        slow("llama3", Layout(2, recompute=FULL), "bfloat16"),
        slow("qwen3", Layout(2, recompute=OP, compile=AOT), "bfloat16"),
        slow("llama3", Layout(4, {CP: 2}), "bfloat16"),
        slow("llama3", Layout(4, {PP: 2}), "bfloat16"),
        slow("qwen3", Layout(4, {TP: 2}), "bfloat16"),
        ("llama3", Layout(4, {TP: 2, PP: 2}), "bfloat16"),
        ("qwen3", Layout(2, {TP: 2}, recompute=OP, compile=AOT), "bfloat16"),
        ("qwen3_next", Layout(2, {TP: 2}), "bfloat16"),
        slow("qwen3", Layout(4, {TP: 2}, recompute=OP, compile=AOT), "bfloat16"),
        slow("llama3", Layout(4, {TP: 4}), "bfloat16"),
        slow("llama3", Layout(4, {TP: 2, CP: 2}), "bfloat16"),
        ("qwen3_moe", Layout(4, {EP: 2}), "bfloat16"),
    ],
    ids=str,
)
def test_float8_all_gather_is_bitwise_equal(
    ranks: RankPool, name: str, layout: Layout, compute_dtype: str
) -> None:
    check_equal(ranks, name, replace(layout, float8=EMULATED), compute_dtype)


def test_single_sequences(ranks: RankPool) -> None:
    """A gather along dim 1 is then a view of a collective's result, which is still awaited."""
    layout = Layout(2, {TP: 2}, float8=EMULATED)
    check_equal(ranks, "llama3", layout, "bfloat16", "cpu", nullcontext, 1)


@pytest.mark.parametrize("layout", [slow(Layout(2, {TP: 2}, compile=Compile(enable=True)))])
def test_inductor_follows(ranks: RankPool, layout: Layout) -> None:
    """It rounds to bfloat16 what is gathered, and not what it quantizes."""
    layout = replace(layout, float8=EMULATED)
    ((_, got), (_, want)), *_ = ranks.run(
        with_and_without, layout.world_size, "qwen3", layout, replace(layout), "bfloat16"
    )
    for step, expected in zip(got.curve, want.curve, strict=True):
        assert step == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("config", [EMULATED, HARDWARE], ids=["emulated", "scaled_mm"])
def test_gemms_are_those_of_a_weight_quantized_later(config: Float8) -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(shape, generator=generator) for shape in ((48, 64), (32, 64), (32, 48))]
    weight, x, g = (matrix.bfloat16() for matrix in matrices)
    linear = nn.Linear(64, 48, bias=False)
    found = []
    scale = compute_scale(weight, E4M3)
    for parameter in (weight, Float8Tensor(quantize(weight, scale, E4M3), scale, weight.dtype)):
        linear.weight = nn.Parameter(parameter)
        leaf = x.clone().requires_grad_()
        out = Float8Linear(linear, RECIPES["tensorwise"], is_emulated=config.emulate)(leaf)
        out.backward(g)
        found.append((out.detach(), leaf.grad, linear.weight.grad))
    for got, want in zip(*found, strict=True):
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, want)


def misaligned_scales() -> int:
    """Number of scales at an address that cuBLAS cannot read, of all that GEMMs were given."""
    found = []

    def recording_mm(*args: Any, scale_a: torch.Tensor, scale_b: torch.Tensor, **kw: Any) -> Any:
        found.extend(scale.data_ptr() % 16 for scale in (scale_a, scale_b))
        return emulated_mm(*args, scale_a=scale_a, scale_b=scale_b, **kw)

    with patch.object(float8, "emulated_mm", recording_mm):
        trained("qwen3", Layout(2, float8=EMULATED), "bfloat16", True)
    assert len(found) > 100
    return len(found) - found.count(0)


def test_scales_are_aligned(ranks: RankPool) -> None:
    assert ranks.run(misaligned_scales, 2) == [0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "layout",
    [
        Layout(2),
        Layout(4, {REPLICATE: 2}),
        Layout(2, recompute=OP),
        Layout(2, {TP: 2}),
        Layout(4, {TP: 2}),
    ],
)
def test_float8_all_gather_is_bitwise_equal_on_gpus(ranks: RankPool, layout: Layout) -> None:
    skip_without_gpus(layout.world_size)
    check_equal(ranks, "qwen3", replace(layout, float8=HARDWARE), "bfloat16", "cuda")


def with_faults(layout: Layout, faults: list[Any]) -> list[Trained]:
    return [trained("qwen3", layout, "bfloat16", True, "cpu", fault)[1] for fault in faults]


@pytest.mark.parametrize(
    ("layout", "faults"),
    [
        (Layout(2), [amax_of_the_shard_only, quantized_from_float32]),
        (Layout(2, {TP: 2}), [amax_of_the_tokens_of_a_rank]),
    ],
)
def test_wrong_scales_change_the_curve(ranks: RankPool, layout: Layout, faults: list[Any]) -> None:
    layout = replace(layout, float8=EMULATED)
    want, *found = ranks.run(with_faults, 2, layout, [nullcontext, *faults])[0]
    for got in found:
        assert got.curve != want.curve
        assert got.weights != want.weights


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, {"fsdp_cpu_offload": True}),
        slow(Layout(4, {RESHARD: 2})),
        Layout(2, {PP: 2, SCHEDULE: "Interleaved1F1B"}),
        Layout(2, float8=EMULATED.model_copy(update={"recipe": "rowwise"})),
    ],
    ids=str,
)
def test_unsupported_layouts_gather_without_float8(ranks: RankPool, layout: Layout) -> None:
    if layout.float8.recipe == "none":
        layout = replace(layout, float8=EMULATED)
    for gathered, found in ranks.run(
        trained, layout.world_size, "llama3", layout, "bfloat16", True
    ):
        assert gathered == [0]
        assert len(set(found.curve)) == STEPS


def all_gather_bytes(layout: Layout, enabled: bool) -> tuple[float, int, float]:
    """A step's all-gather bytes, its number of all-reduces, and the expected saving in bytes."""
    args = args_of("llama3")
    with all_gather_in_float8(enabled):
        found = shard_debugmodel("llama3", args, layout, compute_dtype="bfloat16")
    materialize(found.module, CPU, seed=7)
    runner = found.runner()
    batches = batches_of(torch.Generator().manual_seed(0))

    def step() -> None:
        runner.forward_backward(batches, num_target_tokens(batches))

    step()
    calls, sent = count_collectives(profiled(step), found.dims.degrees)
    n_parameters = sum(p.numel() for p in found.module.parameters())
    expected = [
        step_comm_volume(
            found.config.parallelism,
            found.mp_policy,
            n_parameters=n_parameters,
            n_float8=n_float8,
            n_shards=layout.world_size,
            n_replicas=1,
            n_microbatches=MICROBATCHES,
        ).all_gather
        for n_float8 in (0, gathered_in_float8(found.module))
    ]
    return sent["all_gather"], calls["all_reduce"], expected[0] - expected[1]


@pytest.mark.parametrize(("reshard", "reductions"), [("always", MICROBATCHES), ("never", 1)])
def test_float8_weight_is_gathered_as_one_byte(
    ranks: RankPool, reshard: str, reductions: int
) -> None:
    """All scales take one small all-reduce each time that weights are gathered."""
    layout = Layout(2, {RESHARD: reshard}, float8=EMULATED)
    (sent, calls, saving), (before, baseline_calls, _) = (
        ranks.run(all_gather_bytes, 2, layout, enabled)[0] for enabled in (True, False)
    )
    assert saving > 0.2 * before
    assert before - sent == saving
    assert (calls, baseline_calls) == (reductions, 0)


def train_after_loading(
    folder: Path, optimizer: Optimizer, enabled: bool
) -> list[tuple[list[float], dict[str, str]]]:
    """Losses after loading a checkpoint, which is saved if there is none, and all state; twice."""
    with all_gather_in_float8(enabled):
        run = Run(folder, Layout(2, float8=EMULATED), optimizer=optimizer)
    if run.checkpointer.load_latest() is None:
        train_on(run)
        run.checkpointer.begin(2)
        run.checkpointer.finish()
    found = [(train_on(run), run.digests())]
    for tensor in run.model_state.state_dict().values():
        local = tensor.to_local()
        assert (tensor.dtype, type(local), vars(local)) == (torch.float32, torch.Tensor, {})
    # Load into weights that were gathered before.
    assert run.checkpointer.load_latest() == 2
    return [*found, (train_on(run), run.digests())]


def train_on(run: Run) -> list[float]:
    runner, losses = SPMDRunner(run.model, parallelism=Parallelism(), device=CPU), []
    for batch in batches_of(torch.Generator().manual_seed(0)):
        short = Microbatch(batch.tokens[:, :8] % 61, batch.labels[:, :8] % 61)
        losses.append(runner.forward_backward([short], num_target_tokens([short])).sum().item())
        run.optimizer.step()
        run.optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    "optimizer",
    [Optimizer(), Optimizer(name="muon", state_dtype="bfloat16")],
    ids=["adamw", "muon"],
)
def test_checkpoints_do_not_depend_on_float8_all_gather(
    ranks: RankPool, tmp_path: Path, optimizer: Optimizer
) -> None:
    saved, loaded = (
        ranks.run(train_after_loading, 2, tmp_path, optimizer, enabled) for enabled in (True, False)
    )
    assert len({str(losses) for rank in saved + loaded for losses, _ in rank}) == 1
    assert saved == loaded
    assert saved[0][0] == saved[0][1]
