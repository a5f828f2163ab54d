"""Counted memory and communication of the sharding modes equal a closed form."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.counting import Counts, count_collectives, count_memory, mark, profiled
from benchmarks.sharding import Mode, build, count_mode, precision
from config.job_config import Parallelism
from models import TransformerArgs, find_model
from models.meta import build_on_meta
from parallelisms.comm_volume import step_comm_volume
from parallelisms.parallel_dims import resolve_degrees
from tests.lib.layouts import CPU, MODE, REDUCE, REPLICATE, RESHARD
from tests.lib.ranks import RankPool

RANKS = 2
MICROBATCHES = 2
ARGS = TransformerArgs(
    dim=64, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=16, hidden_dim=128, vocab_size=256,
    max_seq_len=16,
)  # fmt: skip
SIMPLE = {MODE: "simple_fsdp"}

# Bytes that each of two ranks sends to gather a unit, half of it; reducing sends as many.
EMBEDDING = 4 * ARGS.vocab_size * ARGS.dim / RANKS
LAST = EMBEDDING + 4 * ARGS.dim / RANKS
BLOCKS = ARGS.n_layers * 4 * (3 * 64 * 64 + 3 * 64 * 128 + 2 * 64) / RANKS
MODEL = EMBEDDING + BLOCKS + LAST
UNITS = ARGS.n_layers + 2
# Number of parameters inside and outside of blocks.
INSIDE, OUTSIDE = 9 * ARGS.n_layers, 3


def per_step(calls: int, size: float) -> tuple[int, float]:
    return MICROBATCHES * calls, MICROBATCHES * size


REDUCED = {"reduce_scatter": per_step(UNITS, MODEL)}
EXPECTED: list[tuple[dict[str, Any], dict[str, tuple[int, float]]]] = [
    ({MODE: "ddp"}, {"all_reduce": (UNITS, 2 * MODEL)}),
    # The last unit is not resharded, and an embedding's backward needs no weights.
    ({}, REDUCED | {"all_gather": per_step(2 * UNITS - 2, 2 * MODEL - LAST - EMBEDDING)}),
    ({RESHARD: "always"}, REDUCED | {"all_gather": per_step(2 * UNITS - 1, 2 * MODEL - EMBEDDING)}),
    ({RESHARD: "never"}, REDUCED | {"all_gather": (UNITS, MODEL)}),
    ({RESHARD: "never", REDUCE: "last_microbatch"}, {
        "all_gather": (UNITS, MODEL), "reduce_scatter": (UNITS, MODEL)
    }),
    # Only blocks are recomputed, so only their weights are gathered again.
    (SIMPLE, {
        "all_gather": per_step(2 * INSIDE + OUTSIDE, MODEL + BLOCKS),
        "reduce_scatter": per_step(INSIDE + OUTSIDE, MODEL),
    }),
    (SIMPLE | {RESHARD: "never"}, {
        "all_gather": per_step(INSIDE + OUTSIDE, MODEL),
        "reduce_scatter": per_step(INSIDE + OUTSIDE, MODEL),
    }),
]  # fmt: skip


def test_collectives_match_the_closed_form(ranks: RankPool) -> None:
    """Both with real ranks and with the fake process group."""
    modes = [Mode(name=str(parallelism), parallelism=parallelism) for parallelism, _ in EXPECTED]
    real = ranks.run(_collectives, RANKS, modes)
    assert real[0] == real[1]
    with fake_process_group(RANKS):
        for mode, counted, (_, expected) in zip(modes, real[0], EXPECTED, strict=True):
            assert counted == expected, mode
            counts = count_mode(mode, ARGS, CPU, microbatches=MICROBATCHES)
            assert without_zeros(counts.calls, counts.sent) == expected, mode


def _collectives(modes: list[Mode]) -> list[dict[str, tuple[int, float]]]:
    found = []
    for mode in modes:
        step = build(mode, ARGS, CPU, microbatches=MICROBATCHES).step
        step()
        counted = count_collectives(profiled(step), resolve_degrees(mode.settings, RANKS))
        found.append(without_zeros(*counted))
    return found


def counted(parallelism: dict[str, Any]) -> Counts:
    mode = Mode(name="", parallelism=parallelism)
    return count_mode(mode, ARGS, CPU, microbatches=MICROBATCHES)


def without_zeros(calls: dict[str, int], sent: dict[str, float]) -> dict[str, tuple[int, float]]:
    return {kind: (calls[kind], sent[kind]) for kind in calls if calls[kind] and kind != "scalar"}


@pytest.mark.parametrize("reshard", ["default", "never"])
@pytest.mark.parametrize("mesh", [{}, {REPLICATE: 2}], ids=["fsdp", "hsdp"])
def test_simple_fsdp_needs_no_more_memory_than_fsdp2(mesh: dict[str, Any], reshard: str) -> None:
    with fake_process_group(4):
        keys = mesh | {RESHARD: reshard}
        fsdp2, simple = (counted(keys | mode) for mode in ({}, SIMPLE))
    assert (simple.parameters, simple.optimizer) == (fsdp2.parameters, fsdp2.optimizer)
    assert simple.peak <= fsdp2.peak


@pytest.mark.parametrize(
    ("keys", "skipped"),
    [
        ({}, LAST + EMBEDDING),
        ({RESHARD: "always"}, EMBEDDING),
        ({RESHARD: "never"}, 0),
        ({RESHARD: 2}, EMBEDDING),
        ({REPLICATE: 2}, LAST + EMBEDDING),
        ({REPLICATE: 2} | SIMPLE, LAST + EMBEDDING),
        ({MODE: "ddp"}, 0),
    ],
    ids=str,
)
def test_estimated_bytes_match_counted_bytes(keys: dict[str, Any], skipped: float) -> None:
    """The estimate includes gathers that backward skips."""
    with fake_process_group(4):
        sent = counted(keys).sent
    degrees = resolve_degrees(Parallelism(**keys), 4)
    estimate = step_comm_volume(
        Parallelism(**keys),
        precision(CPU),
        n_parameters=int(MODEL * RANKS / 4),
        n_shards=degrees.dp_shard,
        n_replicas=degrees.dp_replicate,
        n_microbatches=MICROBATCHES,
    )
    group = keys.get(RESHARD) if isinstance(keys.get(RESHARD), int) else degrees.dp_shard
    skipped_bytes = MICROBATCHES * skipped * RANKS * (1 - 1 / group)
    assert sent["all_gather"] == pytest.approx(estimate.all_gather - skipped_bytes)
    assert sent["reduce_scatter"] == pytest.approx(estimate.reduce_scatter)
    assert sent["all_reduce"] == pytest.approx(estimate.all_reduce)


def test_each_rank_holds_one_shard() -> None:
    model = build_on_meta(find_model("llama3", "debugmodel")[0], ARGS, torch.float32)
    tensors = list(model.parameters())
    whole = 4 * sum(tensor.numel() for tensor in tensors)
    assert whole == RANKS * MODEL
    with fake_process_group(RANKS):
        for parallelism, shards in (({MODE: "ddp"}, 1), (SIMPLE, RANKS)):
            counts = counted(parallelism)
            assert counts.parameters == whole / shards
            # Two moments and a float32 step count per tensor.
            assert counts.optimizer == 2 * whole / shards + 4 * len(tensors)
            assert whole / shards <= counts.gradients < 1.1 * whole / shards


def test_gradients_are_what_backward_keeps() -> None:
    kept = []

    def step() -> None:
        mark("forward begins")
        activation = torch.empty(1000, dtype=torch.uint8)
        mark("forward ends")
        kept.append(torch.empty(300, dtype=torch.uint8))
        temporary = torch.empty(20, dtype=torch.uint8)
        del activation, temporary
        mark("backward ends")

    assert count_memory(profiled(step), CPU) == (300, 1020)


@contextmanager
def fake_process_group(n_ranks: int) -> Iterator[None]:
    """Initialize rank 0 of a fake process group, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
