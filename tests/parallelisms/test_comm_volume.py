"""Tests of data parallelism's communication volume, and of the warning that depends on it."""

import logging
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import build_model
from config import load_config
from config.job_config import Parallelism
from parallelisms import comm_volume as subject
from parallelisms.comm_volume import CommVolume, step_comm_volume, warn_if_comm_bound
from parallelisms.parallel_dims import ParallelDims
from run_spec import resolve
from tests.lib.ranks import RankPool

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PARAMETERS = 1_000


def volume(n_shards: int, n_replicas: int, n_microbatches: int, **keys: Any) -> CommVolume:
    return step_comm_volume(
        Parallelism(**keys),
        MIXED,
        n_parameters=PARAMETERS,
        n_shards=n_shards,
        n_replicas=n_replicas,
        n_microbatches=n_microbatches,
    )


@pytest.mark.parametrize(
    ("keys", "ranks", "gathered", "scattered", "reduced"),
    [
        # Bytes per parameter in a step of 3 microbatches on 4 ranks.
        ({}, (4, 1), 3 * 2 * 2 * 3 / 4, 3 * 4 * 3 / 4, 0),
        ({"fsdp_reshard_after_forward": "never"}, (4, 1), 2 * 3 / 4, 3 * 4 * 3 / 4, 0),
        ({"fsdp_reshard_after_forward": 2}, (4, 1), 3 * 2 * (3 / 4 + 1 / 2), 3 * 4 * 3 / 4, 0),
        ({"fsdp_reduce_gradients": "last_microbatch"}, (4, 1), 3 * 2 * 2 * 3 / 4, 4 * 3 / 4, 0),
        ({}, (2, 2), 3 * 2 * 2 / 2, 3 * 4 / 2, 2 * 4 / 2 / 2),
        ({"data_parallel": "ddp"}, (1, 4), 0, 0, 2 * 4 * 3 / 4),
        ({"data_parallel": "simple_fsdp"}, (2, 2), 3 * 2 * 2 / 2, 3 * 4 / 2, 3 * 2 * 4 / 2 / 2),
        (
            {"data_parallel": "simple_fsdp", "fsdp_reshard_after_forward": "never"},
            (4, 1),
            3 * 2 * 3 / 4,
            3 * 4 * 3 / 4,
            0,
        ),
        ({}, (1, 1), 0, 0, 0),
    ],
)
def test_volume_matches_closed_form(
    keys: dict[str, Any],
    ranks: tuple[int, int],
    gathered: float,
    scattered: float,
    reduced: float,
) -> None:
    found = volume(*ranks, n_microbatches=3, **keys)
    want = (PARAMETERS * gathered, PARAMETERS * scattered, PARAMETERS * reduced)
    assert (found.all_gather, found.reduce_scatter, found.all_reduce) == pytest.approx(want)


def warnings(bandwidth: float, n_tokens: int, n_float8: int, tp: int) -> list[str]:
    """Return the warnings on one of very many ranks, at ``bandwidth`` bytes per second."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    parallelism = Parallelism(tensor_parallel_degree=tp)
    dims = ParallelDims.build(parallelism, 2, "cpu")

    def volume_of_many_ranks(*args: Any, **kwargs: Any) -> CommVolume:
        return step_comm_volume(*args, **kwargs | {"n_shards": 1_000_000})

    subject.logger.addHandler(handler)
    with (
        patch.object(subject, "_bus_bandwidth", lambda mesh: bandwidth),
        patch.object(subject, "step_comm_volume", volume_of_many_ranks),
        patch.object(subject, "gathered_in_float8", lambda model: n_float8),
    ):
        warn_if_comm_bound(
            nn.Linear(100_000, 80_000, bias=False, device="meta"),
            dims,
            parallelism,
            MIXED,
            n_tokens=n_tokens,
            n_microbatches=2,
            flops_per_token=6 * 8e9,
            peak_flops=1e15,
        )
    subject.logger.removeHandler(handler)
    return records


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("bandwidth", "needed", "n_float8"),
    [(450e9, 1630, 0), (350e9, 2095, 0), (50e9, 14667, 0), (50e9, 11000, 8_000_000_000)],
)
def test_warning_names_tokens_that_hide_communication(
    ranks: RankPool, bandwidth: float, needed: int, n_float8: int, tp: int
) -> None:
    """8 bytes per parameter, 6 in float8, against 6 FLOPs per parameter and token at 550 TFLOP/s.

    Tensor parallel divides both.
    """
    (few, *_) = ranks.run(warnings, 2, bandwidth, needed - 1, n_float8, tp)
    (enough, *_) = ranks.run(warnings, 2, bandwidth, needed + 1, n_float8, tp)
    assert len(few) == 1
    assert f"step, {needed:,} would" in few[0]
    assert enough == []


def measured_bandwidth() -> float:
    dims = ParallelDims.build(Parallelism(tensor_parallel_degree=2), 4, "cpu")
    return subject._bus_bandwidth(dims.fsdp_mesh)


def test_bandwidth_is_measured_and_equal_on_all_ranks(ranks: RankPool) -> None:
    first, *others = ranks.run(measured_bandwidth, 4)
    assert others == [first] * 3
    assert 1e7 < first < 1e12


def measured_peaks(first: float | None, second: float | None) -> list[float]:
    """Peaks with which a rank measures the bandwidth; ``first`` is that of rank 0's GPU."""
    run = resolve(load_config(Path("debug_model"), []), world_size=2)
    dims = ParallelDims.build(run.config.parallelism, 2, "cpu")
    peaks: list[float] = []
    with (
        patch.object(build_model, "peak_flops", lambda *_: (first, second)[dist.get_rank()]),
        patch.object(
            build_model, "warn_if_comm_bound", lambda *_, **keys: peaks.append(keys["peak_flops"])
        ),
    ):
        build_model.build_model(run, dims, torch.device("cpu"))
    return peaks


@pytest.mark.parametrize(("first", "second"), [(1e15, None), (None, 1e15), (1e15, 2e15)])
def test_all_ranks_measure_or_none_if_their_gpus_differ(
    ranks: RankPool, first: float | None, second: float | None
) -> None:
    assert ranks.run(measured_peaks, 2, first, second) == [[first] if first else []] * 2
