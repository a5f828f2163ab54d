"""Float8: GEMMs within the format's error, training that follows float32, the same on any mesh."""

import logging
import math
from dataclasses import replace
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.profiler import profile

from config.job_config import ActivationCheckpoint, Compile, Float8, Optimizer, Parallelism
from data.loader import Microbatch, num_target_tokens
from forward_backward import SPMDRunner
from models import find_model
from models.meta import build_on_meta
from optim.optimizer import build_optimizer
from parallelisms import float8
from parallelisms.float8 import (
    E4M3,
    E5M2,
    RECIPES,
    Float8Linear,
    Float8Tensor,
    apply_float8,
    check_float8,
    compute_scale,
    quantize,
)
from parallelisms.materialize import materialize
from tests.lib.layouts import CPU, MODE, PP, TP, Layout, args_of, shard_debugmodel
from tests.lib.marks import slow
from tests.lib.parity import global_batch, rows_of, whole
from tests.lib.ranks import RankPool

# Half of the last bit, relative to the element; for tiny elements, relative to their scale's amax.
PRECISION = {E4M3: 2**-4, E5M2: 2**-3}
FLOOR = {E4M3: 2**-10 / 448, E5M2: 2**-17 / 57344}
CONFIGS = {name: Float8(recipe=name, skip_small=False) for name in ("tensorwise", "rowwise")}
# A CPU takes seconds for some GEMMs that are not emulated.
EMULATED = {name: config.model_copy(update={"emulate": True}) for name, config in CONFIGS.items()}
# On CPUs, older releases support per-tensor scales only.
ON_CPUS = ["tensorwise", pytest.param("rowwise", marks=pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="needs torch 2.13"))]  # fmt: skip
AOT = Compile(enable=True, backend="aot_eager")
SELECTIVE = ActivationCheckpoint(mode="selective")
Gradients = dict[str, torch.Tensor]


def matrix(*shape: int, seed: int) -> torch.Tensor:
    """Matrix with rows and columns of very different magnitudes, and an outlier."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x *= torch.logspace(-3, 1, shape[0])[:, None]
    x[shape[0] // 2, 3] = 50.0
    return x


def quantization_bound(x: torch.Tensor, dtype: torch.dtype, dim: int | None) -> torch.Tensor:
    """Maximum error of each element of ``x`` when quantized to ``dtype``."""
    amax = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    # A power-of-two scale is up to twice the exact one.
    slack = 1 if dim is None else 2
    return torch.maximum(x.abs() * PRECISION[dtype], amax * FLOOR[dtype] * slack) * (1 + 1e-6)


@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_quantization_error_is_within_the_format(dtype: torch.dtype, dim: int | None) -> None:
    x = matrix(32, 48, seed=0)
    scale = compute_scale(x, dtype, dim)
    rounded = quantize(x, scale, dtype)
    error = (rounded.double() * scale.double() - x).abs()
    assert (error <= quantization_bound(x, dtype, dim)).all()
    assert (rounded.float().abs() <= torch.finfo(dtype).max).all()
    if dim is not None:
        assert (scale.log2() == scale.log2().round()).all()
    # A scale that is far too large would lose bits.
    largest = (rounded.double().abs() / torch.finfo(dtype).max).amax(dim=dim or (0, 1))
    assert largest.max() > 0.49


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30, math.inf, math.nan])
@pytest.mark.parametrize("dim", [None, 1])
def test_extreme_values_survive_quantization(value: float, dim: int | None) -> None:
    x = torch.full((16, 16), 1e-3)
    x[2] = value
    scale = compute_scale(x, E4M3, dim)
    row = (quantize(x, scale, E4M3).float() * scale)[2]
    if math.isfinite(value):
        # Beside 1e-3, a scale of the whole tensor leaves nothing of 1e-30.
        atol = 1e-8 if dim is None else 0.0
        assert torch.allclose(row, x[2], rtol=PRECISION[E4M3], atol=atol)
    else:
        assert not row.isfinite().any()


def check_gemms(config: Float8) -> None:
    """Compare the forward and both backward GEMMs with float64, within the quantization bound."""
    k, n, tokens, recipe = 64, 48, 32, RECIPES[config.recipe]
    linear = nn.Linear(k, n, bias=False, dtype=torch.float64)
    linear.weight.data.copy_(matrix(n, k, seed=1))
    x, g = matrix(tokens, k, seed=2).requires_grad_(), matrix(tokens, n, seed=3)
    found = Float8Linear(linear, recipe, is_emulated=config.emulate)
    out = found(x[None])[0]
    out.backward(g)
    w, xd = linear.weight.detach(), x.detach()
    assert x.grad is not None
    assert found.weight.grad is not None
    for what, got, a, b, dtype in (
        ("output", out.detach(), xd, w.t(), E4M3),
        ("gradient of x", x.grad, g, w, recipe.gradient_dtype),
        ("gradient of the weight", found.weight.grad, g.t(), xd, recipe.gradient_dtype),
    ):
        a_error = quantization_bound(a, dtype, 1 if recipe.is_rowwise else None)
        b_error = quantization_bound(b, E4M3, 0 if recipe.is_rowwise else None)
        bound = a_error @ b.abs() + a.abs() @ b_error + a_error @ b_error
        # The error of float32 accumulation.
        bound += 1e-5 * a.abs() @ b.abs()
        assert ((got - a @ b).abs() <= bound).all(), f"{what} exceeds the error bound"
        # A GEMM in higher precision by mistake would make this test pass trivially.
        assert (got - a @ b).norm() / (a @ b).norm() > 1e-3, what


@pytest.mark.parametrize("recipe", ON_CPUS)
def test_gemms_are_within_the_error_of_the_format(recipe: str) -> None:
    check_gemms(CONFIGS[recipe])


@pytest.mark.parametrize("recipe", RECIPES)
def test_emulated_gemms_are_within_the_error_of_the_format(recipe: str) -> None:
    check_gemms(EMULATED[recipe])


@pytest.mark.parametrize("recipe", ON_CPUS)
def test_wrong_scale_fails_the_error_bound(recipe: str) -> None:
    original = torch._scaled_mm

    def too_large(a: Any, b: Any, scale_a: torch.Tensor, **keys: Any) -> torch.Tensor:
        return original(a, b, scale_a=scale_a * 1.3, **keys)

    def swapped(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return quantize(x, scale.flip(0, 1) if scale.ndim else scale * 2, dtype)

    with patch.object(float8, "scaled_mm", lambda: too_large), pytest.raises(AssertionError):
        check_gemms(CONFIGS[recipe])
    with patch.object(float8, "quantize", swapped), pytest.raises(AssertionError):
        check_gemms(CONFIGS[recipe])


@pytest.mark.parametrize("recipe", ON_CPUS)
def test_operands_have_the_layout_of_cublas(recipe: str) -> None:
    """cuBLAS requires this layout; CPUs accept any."""
    original, calls = torch._scaled_mm, []

    def checked(a: torch.Tensor, b: torch.Tensor, **keys: Any) -> torch.Tensor:
        assert (a.stride(1), b.stride(0)) == (1, 1), "not contiguous along k"
        assert a.shape[1] % 16 == b.shape[1] % 16 == 0
        assert {a.dtype, b.dtype} != {E5M2}
        shapes = [tuple(keys[name].shape) for name in ("scale_a", "scale_b")]
        want = [(a.shape[0], 1), (1, b.shape[1])] if recipe == "rowwise" else [(), ()]
        assert shapes == want
        assert all(keys[name].is_contiguous() for name in ("scale_a", "scale_b"))
        assert keys["out_dtype"] == torch.bfloat16
        calls.append(keys["use_fast_accum"])
        return original(a, b, **keys)

    linear = nn.Linear(64, 48, bias=False, dtype=torch.bfloat16)
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    with patch.object(float8, "scaled_mm", lambda: checked):
        Float8Linear(linear, RECIPES[recipe], is_emulated=False)(x).sum().backward()
    assert calls == [True, False, False]


@pytest.mark.parametrize(("recipe", "count"), [("tensorwise", 3), ("rowwise", 6)])
def test_scales_are_computed_once(recipe: str, count: int) -> None:
    """Tensorwise, two GEMMs share the scale of each of three matrices; rowwise, none is shared."""
    linear = nn.Linear(64, 48, bias=False)
    x = torch.randn(2, 16, 64, requires_grad=True)
    with profile() as profiler:
        Float8Linear(linear, RECIPES[recipe], is_emulated=True)(x).sum().backward()
    assert sum(event.name == "aten::amax" for event in profiler.events() or []) == count


def check_sharded_linears() -> None:
    """Replicated weights are skipped; x is redistributed as the weight's placement requires."""
    mesh = init_device_mesh("cpu", (2,))
    block = nn.ModuleDict(
        {"sharded": nn.Linear(64, 32, bias=False), "replicated": nn.Linear(64, 32, bias=False)}
    )
    for name, placement in (("sharded", Shard(0)), ("replicated", Replicate())):
        linear = cast(nn.Linear, block[name])
        linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [placement]))
    blocks = nn.ModuleDict({"0": block})
    apply_float8(blocks, blocks, config=EMULATED["tensorwise"])
    assert not isinstance(block["replicated"], Float8Linear)
    found = []
    x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0))
    for sharding in (Replicate(), Shard(1)):
        leaf = distribute_tensor(x, mesh, [sharding]).requires_grad_()
        block["sharded"](leaf).full_tensor().square().sum().backward()
        assert isinstance(leaf.grad, DTensor)
        found.append(leaf.grad.full_tensor())
    assert torch.equal(*found)


def test_replicated_weights_are_skipped(ranks: RankPool) -> None:
    ranks.run(check_sharded_linears, 2)


def model_of(name: str, flavor: str, n_layers: int = 2) -> tuple[nn.Module, nn.ModuleDict]:
    """Model on the meta device, and its blocks."""
    spec, args = find_model(name, flavor)
    model = build_on_meta(spec, replace(args, n_layers=n_layers), torch.float32)
    return model, spec.blocks(model)


def test_skipped_layers_are_logged_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        model, blocks = model_of("llama3", "8B")
        config = Float8(recipe="tensorwise", skip=["layers.1.attention.wo"])
        apply_float8(model, blocks, config=config)
    converted = {
        f"{layer}.{name}"
        for layer, block in blocks.items()
        for name, module in block.named_modules()
        if isinstance(module, Float8Linear)
    }
    of_each = ("attention.wq", "attention.wo", *(f"feed_forward.w{i}" for i in (1, 2, 3)))
    assert converted == {f"{i}.{w}" for i in (0, 1) for w in of_each} - {"1.attention.wo"}
    text = caplog.text
    assert (
        "attention.wk (4096 -> 1024 on a rank: too small to get faster) of 2 blocks: "
        "not converted to tensorwise" in text
    )
    reason = "attention.wo (float8.skip 'layers.1.attention.wo') of 1 blocks: not converted"
    assert reason in text
    assert "feed_forward.w1 of 2 blocks: converted to tensorwise" in text


def test_what_else_reads_a_gathered_tensor_is_an_error() -> None:
    x = Float8Tensor(torch.zeros(16, 16).to(E4M3), torch.ones(()), torch.bfloat16)
    for read in (torch.relu, lambda x: x + 1, lambda x: 1 + x, lambda x: torch.cat([x, x])):
        with pytest.raises(NotImplementedError, match=r"gathered in float8.*float8\.skip"):
            read(x)


def test_routers_are_skipped() -> None:
    for name in ("qwen3_moe", "qwen3_next"):
        # Of a multiple of 16 experts, because other layers are skipped for their size.
        spec, args = find_model(name, "debugmodel", {"n_experts": 16})
        model = build_on_meta(spec, replace(args, n_layers=2), torch.float32)
        blocks = spec.blocks(model)
        apply_float8(model, blocks, config=CONFIGS["rowwise"])
        kinds = {fqn: type(module) for fqn, module in blocks.named_modules()}
        assert kinds["0.feed_forward.router"] is not Float8Linear
        assert Float8Linear in kinds.values()


def test_recipe_or_skip_without_effect_raises() -> None:
    with pytest.raises(ValueError, match="all linear layers are skipped"):
        check_float8(*model_of("llama3", "debugmodel"), config=Float8(recipe="tensorwise"))
    for entry, skip in (("wx", ["wx", "wo"]), ("w", ["w"]), ("9.attention", ["9.attention"])):
        with pytest.raises(ValueError, match=f"float8.skip.*'{entry}'"):
            check_float8(*model_of("llama3", "8B"), config=Float8(recipe="tensorwise", skip=skip))


@pytest.mark.parametrize("entry", ["layers.1", "1.attention", "layers.1.attention.wo"])
def test_skip_names_whole_parts_of_fqns(entry: str) -> None:
    model, blocks = model_of("llama3", "8B", n_layers=12)
    check_float8(model, blocks, config=(config := Float8(recipe="tensorwise", skip=[entry])))
    apply_float8(model, blocks, config=config)
    kinds = {fqn: type(module) for fqn, module in model.named_modules()}
    assert kinds["layers.1.attention.wo"] is nn.Linear
    assert kinds["layers.11.attention.wo"] is kinds["layers.10.attention.wo"] is Float8Linear


def check_stages() -> None:
    config = EMULATED["tensorwise"].model_copy(update={"skip": ["layers.2", "layers.3"]})
    model = shard_debugmodel("llama3", args_of("llama3", 4), Layout(2, {PP: 2}, float8=config))
    found = [fqn for fqn, m in model.module.named_modules() if isinstance(m, Float8Linear)]
    assert (len(found) > 0) == (dist.get_rank() == 0)


def test_skipped_layers_may_be_those_of_one_stage(ranks: RankPool) -> None:
    ranks.run(check_stages, 2)


N_SLOTS = 4
LAYOUTS = [
    Layout(2),
    Layout(2, {MODE: "simple_fsdp"}),
    Layout(2, {MODE: "ddp"}),
    Layout(2, recompute=ActivationCheckpoint(mode="full")),
    Layout(2, {PP: 2}),
    # test_float8_all_gather.py compiles sharded ones.
    Layout(1, recompute=SELECTIVE, compile=AOT),
]
SLOW_LAYOUTS = [
    Layout(4),
    Layout(2, recompute=SELECTIVE, compile=AOT),
    Layout(2, recompute=SELECTIVE),
    Layout(2, compile=AOT),
    Layout(2, {MODE: "simple_fsdp"}, compile=AOT),
]


def gradients(name: str, layout: Layout, n_shards: int = 1) -> Gradients:
    """Gradients of ``N_SLOTS`` microbatches, the same on any number of ranks.

    ``n_shards``: one rank runs the GEMMs of that many tensor parallel ranks.
    """
    torch.compiler.reset()
    args = args_of(name, n_layers=2)
    found = shard_debugmodel(name, args, layout, dtype="float64")
    materialize(found.module, CPU, seed=7)
    if n_shards > 1:
        split_gemms(found.module, n_shards)
    batch = global_batch(args.vocab_size, False)
    mesh = found.dims.batch_mesh
    slots = [rows_of(batch, slice(slot, slot + 1)) for slot in range(N_SLOTS)]
    local = slots[mesh.get_local_rank() :: mesh.size()]
    found.runner().forward_backward(local, num_target_tokens(slots))
    grads = {fqn: p.grad for fqn, p in found.module.named_parameters()}
    return {fqn: whole(grad) for fqn, grad in grads.items() if grad is not None}


def split_gemms(model: nn.Module, n_shards: int) -> None:
    """Run the GEMMs of ``n_shards`` tensor parallel ranks on one rank. Mutates ``model``."""
    for fqn, linear in model.named_modules():
        if isinstance(linear, Float8Linear):
            is_rowwise = fqn.endswith(("wo", "w2"))
            linear.multiply = partial(split_gemm, linear.multiply, n_shards, is_rowwise)


def split_gemm(
    linear: Any, n_shards: int, is_rowwise: bool, x: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    if is_rowwise:
        pairs = zip(x.chunk(n_shards, dim=-1), weight.chunk(n_shards, dim=1), strict=True)
        return sum(linear(*pair) for pair in pairs)
    return torch.cat([linear(x, shard) for shard in weight.chunk(n_shards)], dim=-1)


@pytest.fixture(scope="module")
def unsharded(ranks: RankPool) -> dict[str, Gradients]:
    """Gradients by recipe; "none" is without float8."""
    configs = {"none": Float8()} | EMULATED
    layouts = {recipe: Layout(1, float8=config) for recipe, config in configs.items()}
    return {name: ranks.run(gradients, 1, "qwen3", layout)[0] for name, layout in layouts.items()}


@pytest.mark.parametrize(
    ("layout", "recipe"),
    [
        *((layout, "tensorwise") for layout in LAYOUTS),
        (Layout(2), "rowwise"),
        *(slow(layout, "tensorwise") for layout in SLOW_LAYOUTS),
        *(slow(layout, "rowwise") for layout in LAYOUTS[1:]),
    ],
    ids=str,
)
def test_sharded_gradients_equal_unsharded(
    ranks: RankPool, unsharded: dict[str, Gradients], layout: Layout, recipe: str
) -> None:
    """Each microbatch has its own scales, so equal microbatches are compared, in float64."""
    layout, want = replace(layout, float8=EMULATED[recipe]), unsharded[recipe]
    for got in ranks.run(gradients, layout.world_size, "qwen3", layout):
        assert distance(got, want) < 1e-9
    assert distance(want, unsharded["none"]) > 1e-2


@pytest.mark.parametrize(
    ("name", "layout", "recipe"),
    [
        ("qwen3", Layout(2, {TP: 2}, recompute=SELECTIVE, compile=AOT), "rowwise"),
        ("qwen3", Layout(4, {TP: 4}), "tensorwise"),
        ("qwen3_next", Layout(2, {TP: 2}), "tensorwise"),
        ("qwen3", Layout(4, {TP: 2}), "tensorwise"),
        slow("qwen3", Layout(2, {TP: 2}, recompute=SELECTIVE), "rowwise"),
        slow("qwen3", Layout(2, {TP: 2}, compile=AOT), "tensorwise"),
        slow("qwen3", Layout(2, {TP: 2}), "rowwise"),
        slow("qwen3", Layout(4, {TP: 2, MODE: "simple_fsdp"}), "tensorwise"),
        slow("qwen3", Layout(4, {TP: 2, MODE: "ddp"}), "tensorwise"),
        slow("qwen3", Layout(4, {TP: 2, PP: 2}), "tensorwise"),
        slow("qwen3", Layout(4, {TP: 2}, compile=AOT), "tensorwise"),
    ],
    ids=str,
)
def test_tensor_parallel_ranks_scale_their_shards(
    ranks: RankPool, name: str, layout: Layout, recipe: str
) -> None:
    """Each shard has its own scales, as if one rank had multiplied shard by shard."""
    degree, config = layout.parallelism[TP], EMULATED[recipe]
    # With fewer heads than ranks each holds half a head: 24 rows are not a multiple of 16.
    skipped = config.model_copy(update={"skip": ["wk", "wv"] * (degree == 4)})
    layout, alone = replace(layout, float8=config), Layout(1, float8=skipped)
    (want,), (unsplit,) = (
        ranks.run(gradients, 1, name, alone, n_shards) for n_shards in (degree, 1)
    )
    for got in ranks.run(gradients, layout.world_size, name, layout):
        assert distance(got, want) < 1e-9
    if recipe == "rowwise":
        # Power-of-two scales change only elements that are too small for their scale.
        assert distance(want, unsplit) < 1e-5
    else:
        assert distance(want, unsplit) > 1e-3


def distance(got: Gradients, want: Gradients) -> float:
    """Largest relative error of the gradients in ``got``, which may be those of one stage."""
    errors = [(got[fqn] - want[fqn]).norm() / want[fqn].norm() for fqn in got]
    return float(max(errors))


def losses_of(config: Float8, compute_dtype: str, steps: int) -> list[float]:
    """Losses of a small model that memorizes a text of few words."""
    args = replace(args_of("qwen3", n_layers=2), max_seq_len=64)
    layout = Layout(1, float8=config)
    found = shard_debugmodel("qwen3", args, layout, dtype="float32", compute_dtype=compute_dtype)
    materialize(found.module, CPU, seed=7)
    optimizer = build_optimizer(found.module, Optimizer(lr=3e-3))
    runner = SPMDRunner(found.module, parallelism=Parallelism(), device=CPU)
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(args.vocab_size, (8, 16), generator=generator)
    losses = []
    for _ in range(steps):
        tokens = words[torch.randint(8, (4, 4), generator=generator)].flatten(1)
        batch = Microbatch(tokens[:, :-1][:, :48], tokens[:, 1:][:, :48])
        losses.append(runner.forward_backward([batch], num_target_tokens([batch])).sum().item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_training_follows_float32(ranks: RankPool) -> None:
    (want,) = ranks.run(losses_of, 1, Float8(), "float32", 60)
    assert want[-1] < 0.35 * want[0], "training does not reduce the loss"
    for recipe in RECIPES:
        (got,) = ranks.run(losses_of, 1, EMULATED[recipe], "bfloat16", 60)
        distance = max(abs(a - b) for a, b in zip(got, want, strict=True))
        assert distance < 0.1, f"{recipe}, {distance}: {got[::10]} and {want[::10]}"
