"""Initial weights: bitwise equal on any mesh, and with the stated distribution."""

import math
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from config.job_config import ActivationCheckpoint, Compile
from models import find_model
from models.meta import build_on_meta
from models.transformer import FeedForward, Transformer, rope_cache
from parallelisms import materialize as subject
from parallelisms.materialize import fill_trunc_normal, materialize
from runtime.dtensor import to_local
from tests.lib.layouts import (
    CP,
    CPU,
    METHOD,
    MODE,
    PP,
    REPLICATE,
    SCHEDULE,
    TP,
    Layout,
    digest,
    shard_debugmodel,
    small_args,
)
from tests.lib.marks import slow
from tests.lib.ranks import RankPool

SEED = 7
ROWS, COLUMNS, STD = 2048, 1024, 0.02
# Std of a standard normal truncated at 3: sqrt(1 - 6 phi(3) / (2 Phi(3) - 1)).
TRUNCATED_STD = 0.98658
MODELS = [("llama3", "debugmodel"), ("llama3", "debugmodel_tied"), ("qwen3", "debugmodel")]
Fault = Callable[[], AbstractContextManager]


# The slow ones are larger layouts of a kind, or combine two kinds.
LAYOUTS = [
    Layout(1),
    Layout(2),
    Layout(3),
    slow(Layout(4)),
    slow(Layout(2, {REPLICATE: 2})),
    Layout(4, {REPLICATE: 2}),
    Layout(2, {TP: 2}),
    Layout(4, {TP: 2}),
    Layout(4, {TP: 4}),
    slow(Layout(4, {TP: 2, REPLICATE: 2})),
    Layout(2, recompute=ActivationCheckpoint(mode="full"), compile=Compile(enable=True)),
    Layout(1, {MODE: "ddp"}),
    slow(Layout(4, {MODE: "ddp"})),
    Layout(4, {MODE: "ddp", TP: 2}),
    Layout(1, {MODE: "simple_fsdp"}),
    Layout(2, {MODE: "simple_fsdp"}),
    slow(Layout(4, {MODE: "simple_fsdp"})),
    Layout(4, {MODE: "simple_fsdp", REPLICATE: 2}),
    Layout(4, {MODE: "simple_fsdp", TP: 2}),
    slow(Layout(4, {MODE: "simple_fsdp", TP: 2, REPLICATE: 2})),
    Layout(2, {CP: 2}),
    Layout(4, {CP: 2, TP: 2}),
    slow(Layout(4, {CP: 2, MODE: "simple_fsdp"})),
    slow(Layout(4, {CP: 2})),
    slow(Layout(4, {CP: 4, METHOD: "allgather"})),
    slow(Layout(4, {CP: 2, REPLICATE: 2})),
    slow(Layout(4, {CP: 2, MODE: "ddp"})),
    slow(Layout(8, {CP: 2, TP: 2, REPLICATE: 2})),
]
INTERLEAVED = {PP: 2, SCHEDULE: "Interleaved1F1B"}
FULL, COMPILED = ActivationCheckpoint(mode="full"), Compile(enable=True)
# Layers of the models in pipeline tests.
STAGED_LAYERS = 4
PIPELINES = [
    Layout(2, {PP: 2}),
    Layout(2, INTERLEAVED),
    Layout(3, {PP: 3}),
    Layout(4, {PP: 2, TP: 2}),
    Layout(4, {PP: 2, CP: 2}),
    Layout(4, {PP: 2, MODE: "simple_fsdp"}),
    slow(Layout(4, INTERLEAVED | {TP: 2})),
    slow(Layout(4, INTERLEAVED | {CP: 2, METHOD: "allgather"})),
    slow(Layout(4, {PP: 4})),
    slow(Layout(4, {PP: 2})),
    slow(Layout(4, {PP: 2, REPLICATE: 2})),
    slow(Layout(4, {PP: 2, MODE: "ddp"})),
    slow(Layout(2, {PP: 2}, recompute=FULL, compile=COMPILED)),
    slow(Layout(8, {PP: 2, CP: 2, TP: 2})),
    slow(Layout(8, INTERLEAVED | {CP: 2, TP: 2})),
]


def digests(model: nn.Module) -> dict[str, str]:
    return {fqn: digest(p) for fqn, p in model.named_parameters()}


def one_process(name: str, flavor: str, seed: int = SEED, n_layers: int = 2) -> dict[str, str]:
    spec, _ = find_model(name, flavor)
    model = build_on_meta(spec, small_args(name, flavor, n_layers), torch.float32)
    materialize(model, CPU, seed=seed)
    return digests(model)


def initialize(layout: Layout, fault: Fault = nullcontext) -> dict[tuple[str, str], dict[str, str]]:
    """Digests of each model's parameters, as this rank sees them."""
    found = {}
    for name, flavor in MODELS:
        model = shard_debugmodel(name, small_args(name, flavor), layout).module
        with fault():
            materialize(model, CPU, seed=SEED)
        found[name, flavor] = digests(model)
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_weights_on_any_mesh_equal_one_process(ranks: RankPool, layout: Layout) -> None:
    want = {model: one_process(*model) for model in MODELS}
    for found in ranks.run(initialize, layout.world_size, layout):
        assert found == want


@dataclass(frozen=True)
class Staged:
    """Digests of the stages on a pipeline rank."""

    pp_rank: int
    parameters: dict[str, str]
    buffers: list[str]
    """Digests of the stages' buffers."""


def initialize_stages(layout: Layout, fault: Fault = nullcontext) -> dict[tuple[str, str], Staged]:
    found = {}
    for name, flavor in MODELS:
        sharded = shard_debugmodel(name, small_args(name, flavor, STAGED_LAYERS), layout)
        with fault():
            materialize(sharded.module, CPU, seed=SEED)
        held = {id(parameter) for parameter in sharded.module.parameters()}
        for stage in sharded.stages:
            assert all(id(parameter) in held for parameter in stage.parameters())
        found[name, flavor] = Staged(
            sharded.dims.pp_mesh.get_local_rank(),
            digests(sharded.module),
            [digest(buffer) for stage in sharded.stages for buffer in stage.buffers()],
        )
    return found


@pytest.mark.parametrize("layout", PIPELINES, ids=str)
def test_weights_of_stages_equal_one_process(ranks: RankPool, layout: Layout) -> None:
    """A tied weight is on the first and last stage; all stages have the same rope table."""
    found = ranks.run(initialize_stages, layout.world_size, layout)
    assert {small_args(*model).tie_embeddings for model in MODELS} == {False, True}
    for name, flavor in MODELS:
        want = one_process(name, flavor, n_layers=STAGED_LAYERS)
        table = digest(rope_cache(small_args(name, flavor)).float())
        ranks_by_fqn = defaultdict(set)
        for rank in found:
            staged = rank[name, flavor]
            assert staged.parameters.items() <= want.items()
            assert set(staged.buffers) == {table}
            for fqn in staged.parameters:
                ranks_by_fqn[fqn].add(staged.pp_rank)
        last = layout.parallelism[PP] - 1
        shared = {0, last} if small_args(name, flavor).tie_embeddings else {0}
        assert ranks_by_fqn.keys() == want.keys()
        assert ranks_by_fqn.pop("tok_embeddings.weight") == shared
        assert {len(each) for each in ranks_by_fqn.values()} == {1}


def random_ops() -> AbstractContextManager:
    def fill(parameter: torch.Tensor, *, std: float, key: int) -> None:
        generator = torch.Generator().manual_seed(key)
        to_local(parameter).normal_(std=std, generator=generator)

    return patch.object(subject, "fill_trunc_normal", fill)


def index_within_shard() -> AbstractContextManager:
    def local_indices(parameter: torch.Tensor) -> list[torch.Tensor]:
        return [torch.arange(size) for size in to_local(parameter).shape]

    return patch.object(subject, "_global_indices", local_indices)


@pytest.mark.parametrize("fault", [random_ops, index_within_shard])
def test_weights_that_depend_on_shards_are_detected(ranks: RankPool, fault: Fault) -> None:
    one, two = (ranks.run(initialize, n, Layout(n), fault)[0] for n in (1, 2))
    for model in MODELS:
        differ = {fqn for fqn in one[model] if one[model][fqn] != two[model][fqn]}
        assert differ == {fqn for fqn in one[model] if "norm" not in fqn}


def layer_names_within_stage() -> AbstractContextManager:
    """Fault: the last of two stages numbers its layers from 0."""
    original = subject._key

    def key(seed: int, fqn: str) -> int:
        return original(
            seed, fqn.replace("layers.2.", "layers.0.").replace("layers.3.", "layers.1.")
        )

    return patch.object(subject, "_key", key)


def test_weights_that_depend_on_stages_are_detected(ranks: RankPool) -> None:
    found = ranks.run(initialize_stages, 2, Layout(2, {PP: 2}), layer_names_within_stage)
    for model in MODELS:
        want = one_process(*model, n_layers=STAGED_LAYERS)
        for rank, layers in zip(found, [(), ("2", "3")], strict=True):
            got = rank[model].parameters
            differ = {fqn for fqn in got if got[fqn] != want[fqn]}
            assert differ == {
                fqn for fqn in got if fqn.split(".")[1] in layers and "norm" not in fqn
            }


def fill_meshes() -> None:
    """Fill an uneven 3-D tensor with every placement on 2 x 2 ranks."""
    shape = (5, 7, 3)
    whole = torch.empty(shape)
    fill_trunc_normal(whole, std=1.0, key=SEED)
    mesh = init_device_mesh("cpu", (2, 2))
    choices = [Replicate(), Shard(0), Shard(1), Shard(2)]
    for placements in product(choices, choices):
        sharded = distribute_tensor(torch.zeros(shape), mesh, placements)
        fill_trunc_normal(sharded, std=1.0, key=SEED)
        assert torch.equal(sharded.full_tensor(), whole), placements


def test_elements_are_equal_for_any_placement(ranks: RankPool) -> None:
    ranks.run(fill_meshes, 4)


def test_block_size_changes_no_element() -> None:
    whole, blocks = torch.empty(100, 30), torch.empty(100, 30)
    fill_trunc_normal(whole, std=1.0, key=SEED)
    with patch.object(subject, "CPU_BLOCK_ELEMENTS", 70):
        fill_trunc_normal(blocks, std=1.0, key=SEED)
    assert torch.equal(whole, blocks)


@pytest.mark.parametrize(("name", "flavor"), MODELS)
def test_weights_depend_on_seed_and_fqn(name: str, flavor: str) -> None:
    first, again, other = (one_process(name, flavor, seed=seed) for seed in (1, 1, 2))
    matrices = {fqn for fqn in first if "norm" not in fqn}
    assert first == again
    assert {fqn for fqn in first if first[fqn] != other[fqn]} == matrices
    assert len({first[fqn] for fqn in matrices}) == len(matrices)


def test_unfilled_parameter_is_named() -> None:
    model = build_on_meta(find_model(*MODELS[0])[0], small_args(*MODELS[0]), torch.float32)
    forgets_w1 = patch.object(FeedForward, "init_weights", lambda self, fill, std: None)
    with forgets_w1, pytest.raises(ValueError, match=r"layers\.1\.feed_forward\.w3\.weight"):
        materialize(model, CPU, seed=SEED)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex64])
def test_unfilled_buffer_is_named(dtype: torch.dtype) -> None:
    model = build_on_meta(find_model(*MODELS[0])[0], small_args(*MODELS[0]), torch.float32)
    for name in ("filled", "mask"):
        block = model.get_submodule("layers.1")
        block.register_buffer(name, torch.ones(4, 4, dtype=dtype, device="meta").tril())
    fill_blocks = Transformer.init_weights

    def init_weights(self: Transformer, fill: Callable) -> None:
        fill_blocks(self, fill)
        self.get_buffer("layers.1.filled").zero_()

    fills_one = patch.object(Transformer, "init_weights", init_weights)
    with fills_one, pytest.raises(ValueError, match=r"not fill layers\.1\.mask$"):
        materialize(model, CPU, seed=SEED)


def test_only_numbers_of_the_default_generator_are_an_error() -> None:
    model = nn.Linear(4, 4, bias=False)
    for generator in (torch.Generator(), None):

        def init_weights(fill: Callable, generator: torch.Generator | None = generator) -> None:
            model.weight.copy_(torch.randn(4, 4, generator=generator))

        model.init_weights = init_weights  # type: ignore[assignment]
        is_error = pytest.raises(ValueError, match="init_weights calls randn, whose values")
        with is_error if generator is None else nullcontext(), torch.no_grad():
            materialize(model, CPU, seed=SEED)


def test_generator_is_splitmix64() -> None:
    """Compare with the published first outputs for the seed 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    got = subject._uniform(torch.arange(1, 5), 1234567)
    assert got.tolist() == [((z >> 11) + 0.5) / 2**53 for z in published]


def test_distribution_is_a_normal_truncated_at_three_std() -> None:
    x = filled("w", seed=0) / STD
    n = x.numel()
    low = 0.5 * math.erfc(3 / math.sqrt(2))
    assert x.abs().max() <= 3.0
    assert x.abs().max() > 2.999
    assert abs(x.mean()) < 4 * TRUNCATED_STD / math.sqrt(n)
    assert x.std().item() == pytest.approx(TRUNCATED_STD, rel=4 / math.sqrt(2 * n))
    # 256 equally likely bins: chi-squared is within 4 standard deviations of its mean.
    uniform = (torch.special.ndtr(x) - low) / (1 - 2 * low)
    counts = torch.histc(uniform, bins=256, min=0, max=1)
    chi_squared = ((counts - n / 256) ** 2 / (n / 256)).sum()
    assert abs(chi_squared - 255) < 4 * math.sqrt(2 * 255)


@pytest.mark.parametrize("lag", [1, 2, 3, COLUMNS, COLUMNS + 1, 2 * COLUMNS])
def test_neighbors_are_independent(lag: int) -> None:
    x = filled("w", seed=0).flatten()
    assert_uncorrelated(x[:-lag], x[lag:])


@pytest.mark.parametrize(("fqn", "seed"), [("v", 0), ("w", 1), ("layers.1.w", 0)])
def test_names_and_seeds_are_independent(fqn: str, seed: int) -> None:
    assert_uncorrelated(filled("w", seed=0), filled(fqn, seed=seed))


@cache
def filled(fqn: str, seed: int) -> torch.Tensor:
    """Matrix of 2M elements as ``materialize`` fills it."""
    tensor = torch.empty(ROWS, COLUMNS)
    fill_trunc_normal(tensor, std=STD, key=subject._key(seed, fqn))
    return tensor.double()


def assert_uncorrelated(first: torch.Tensor, second: torch.Tensor) -> None:
    for f in (torch.Tensor.clone, torch.abs):
        pair = torch.stack([f(first).flatten(), f(second).flatten()])
        assert abs(torch.corrcoef(pair)[0, 1]) < 4 / math.sqrt(first.numel())
