"""The whole program on any mesh: the model that it trains is the same, in float64."""

from pathlib import Path

import pytest

from tests.reliability.forked import curve, log, run

STEPS = {"training.steps": "6"}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_ranks")
    run(folder, 2, **STEPS)
    return folder


def assert_same_curve(folder: Path, want: Path) -> None:
    got = curve(folder)
    assert list(got) == list(range(1, 7))
    for step, values in curve(want).items():
        assert got[step] == pytest.approx(values, rel=1e-9), f"step {step}"


@pytest.mark.parametrize(
    ("n_ranks", "overrides"),
    [
        (1, {}),
        (4, {"parallelism.tensor_parallel_degree": "2"}),
        (4, {"parallelism.data_parallel_replicate_degree": "2"}),
        (2, {"parallelism.data_parallel": "ddp"}),
        (2, {"parallelism.data_parallel": "simple_fsdp"}),
    ],
    ids=["one-device", "tp2", "replicate2", "ddp", "simple_fsdp"],
)
def test_any_mesh_trains_the_same_model(
    two_ranks: Path, tmp_path: Path, n_ranks: int, overrides: dict[str, str]
) -> None:
    run(tmp_path, n_ranks, **STEPS, **overrides)
    assert_same_curve(tmp_path, two_ranks)


def test_a_run_changes_its_mesh_on_resume(two_ranks: Path, tmp_path: Path) -> None:
    kept = {"parallelism.fsdp_reshard_after_forward": "never"}
    tp = {"parallelism.tensor_parallel_degree": "2"}
    for steps, n_ranks, mode, keys in (
        ("2", 2, "simple_fsdp", {}),
        ("3", 4, "fsdp2", tp),
        ("4", 1, "ddp", {}),
        ("6", 2, "fsdp2", kept),
    ):
        keys = {"training.steps": steps, "parallelism.data_parallel": mode} | keys
        run(tmp_path, n_ranks, **keys)
    assert "resumed from step 4" in log(tmp_path)
    assert_same_curve(tmp_path, two_ranks)
