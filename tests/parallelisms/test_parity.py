"""Any mesh matches one device: cells that together have every pair of options (``tests.lib``)."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from itertools import combinations
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel

from models import transformer_sharding
from tests.lib.cells import FAST, FULL, NAMED, Cell, cost, is_valid
from tests.lib.covering import covered
from tests.lib.parity import Reference, assert_cell_matches_one_device, check_cell, reference_of
from tests.lib.ranks import RankPool

ADAM = "torch.optim:Adam"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" in metafunc.fixturenames:
        is_full = metafunc.config.getoption("full")
        metafunc.parametrize("cell", [*NAMED, *(FULL if is_full else FAST).cells], ids=str)


def test_cell_matches_one_device(
    ranks: RankPool, cell: Cell, request: pytest.FixtureRequest
) -> None:
    # Shown if the test fails.
    print(f"reproduce: ./run_tests.sh -n 0 '{request.node.nodeid}'")
    assert_cell_matches_one_device(ranks, cell)


def check_with_rowwise_embedding(cell: Cell, reference: Reference) -> list[str]:
    style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    with patch.object(transformer_sharding, "vocabulary_to_sequence", style):
        return check_cell(cell, reference)


def test_embedding_with_a_style_of_pytorch_learns_if_compiled(ranks: RankPool) -> None:
    """As in a model of the user's. Its output is still being communicated."""
    cell = Cell(tensor=2, compile=True)
    ranks.run(check_with_rowwise_embedding, 2, cell, reference_of(cell))


def test_array_has_every_pair_of_options() -> None:
    dimensions = FAST.dimensions
    rows, impossible = FAST.array
    exact = [asdict(cell) for cell in NAMED if cell.compute_dtype == "float64"]
    found = set().union(*(covered(row, 2) for row in (*rows, *exact)))
    for first, second in combinations(dimensions, 2):
        for a in dimensions[first]:
            for b in dimensions[second]:
                pair = frozenset({(first, a), (second, b)})
                assert (pair in found) != (pair in impossible), sorted(map(str, pair))
    # No cell that is sampled at random has a pair that was given up as impossible.
    draw, seen = random.Random(0), 0
    for _ in range(5_000):
        row = {name: draw.choice([values[0], *values]) for name, values in dimensions.items()}
        if (cell := Cell(**row)).world_size <= FAST.max_ranks and is_valid(cell):
            assert not covered(row, 2) & impossible
            seen += 1
    assert seen > 100


def test_cells_have_more_pairs_than_lists_had() -> None:
    """Six lists by hand had 950 pairs in 157 cells."""
    cells = [*NAMED, *FAST.cells]
    pairs = set().union(*(covered(asdict(cell), 2) for cell in cells))
    assert len(pairs) > 1150
    assert len(cells) < 65


@pytest.mark.parametrize("mode", ["fsdp2", "simple_fsdp"])
def test_weights_with_fewer_rows_than_ranks_shard_columns(ranks: RankPool, mode: str) -> None:
    cell = Cell(data_parallel=mode, shard=4, narrow=True)
    found = assert_cell_matches_one_device(ranks, cell)
    assert found == [f"layers.{n}.attention.{w}.weight" for n in (0, 1) for w in ("wk", "wv")]


@pytest.mark.parametrize(
    "each",
    [
        Cell(model="qwen3_moe", shard=2, tensor=2, expert=2, frozen="norm experts"),
        Cell(model="qwen3_moe", shard=2, expert=2, optimizer="muon", frozen="experts.w2 wq"),
        Cell(model="qwen3", pipeline="1F1B 2", tied=True, frozen="tok_embeddings layers.0."),
        Cell(model="qwen3", pipeline="1F1B 2", frozen="tok_embeddings layers.0.", optimizer=ADAM),
        Cell(model="qwen3_next", tensor=2, frozen="conv a_log dt_bias wk"),
        Cell(model="qwen3", data_parallel="simple_fsdp", shard=2, tensor=2, frozen="norm w1"),
        Cell(model="qwen3", pipeline="1F1B 2", data_parallel="ddp", frozen="tok_embeddings norm"),
    ],
    ids=str,
)
def test_frozen_parameters_stay_frozen(ranks: RankPool, each: Cell) -> None:
    assert_cell_matches_one_device(ranks, each)


def average_gradients() -> AbstractContextManager:
    return patch.object(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None)


def count_replicas_twice() -> AbstractContextManager:
    return patch(
        "optim.grad_norm.sharding_groups",
        lambda grad: tuple(grad.device_mesh.get_all_groups()),
    )


def without_reduce_scatter() -> AbstractContextManager:
    return patch("parallelisms.simple_fsdp.Partial", Replicate)


def without_all_reduce() -> AbstractContextManager:
    """Gradients are not all-reduced; losses and norms, which are scalars, are."""
    original = dist.all_reduce

    def only_scalars(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if tensor.ndim == 0:
            original(tensor, *args, **kwargs)

    return patch.object(dist, "all_reduce", only_scalars)


def error_with(
    fault: Callable[[], AbstractContextManager], cell: Cell, reference: Reference
) -> str:
    """Return the error of ``check_cell`` with ``fault``; "" if there is none. Collective."""
    try:
        with fault():
            check_cell(cell, reference)
    except AssertionError as error:
        return str(error)
    return ""


def is_mode(mode: str) -> Callable[[Cell], bool]:
    return lambda cell: cell.data_parallel == mode and cell.shard > 1


def has_replicas(cell: Cell) -> bool:
    return cell.data_parallel == "fsdp2" and cell.replicate > 1


@pytest.mark.parametrize(
    ("fault", "is_affected"),
    [
        (average_gradients, is_mode("fsdp2")),
        (average_gradients, is_mode("ddp")),
        (count_replicas_twice, has_replicas),
        (count_replicas_twice, lambda cell: cell.tensor > 1),
        (without_reduce_scatter, is_mode("simple_fsdp")),
        (without_all_reduce, has_replicas),
        (without_all_reduce, is_mode("ddp")),
    ],
)
def test_array_detects_wrong_gradient_reduction(
    ranks: RankPool,
    fault: Callable[[], AbstractContextManager],
    is_affected: Callable[[Cell], bool],
) -> None:
    cell = min(filter(is_affected, FAST.cells), key=cost)
    errors = ranks.run(error_with, cell.world_size, fault, cell, reference_of(cell))
    # Not the loss, whose own sum is right.
    assert all(error.startswith("norm is off by") for error in errors), cell
