"""Runs with a batch size ramp consume the same tokens in the same order on any mesh."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from optim.router_bias import ExpertBalancer
from tests.lib.forked import codes, log, nothing, run, started
from tests.lib.launch import curve, records
from tests.lib.layouts import PP, REPLICATE, Layout
from tests.lib.ledgers import sequences
from tools import check_ledger

RAMP = "[{steps = 3, global_batch_size = 2}, {steps = 2, global_batch_size = 4}]"
# Global batch size of each step. The ramp ends, and changes, in the middle of a pass over 8 rows.
SIZES, SEQ_LEN = (2, 2, 2, 4, 4, 8, 8, 8), 32
KEYS = {
    "training.steps": str(len(SIZES)),
    "training.local_batch_size": "1",
    "training.batch_size_ramp": RAMP,
    "metrics.enable_ledger": "true",
    "lr_scheduler.total_steps": "20",
}
ELASTIC = {"debug.deterministic": "elastic"}
VALIDATED = {"validation.enable": "true", "validation.freq": "4"}
Plant = Callable[[], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run(folder, 1, **KEYS, **ELASTIC, **VALIDATED)
    return folder


def validation_curve(folder: Path) -> dict[int, float]:
    return {r["step"]: r["validation_loss"] for r in records(folder) if "validation_loss" in r}


def against(folder: Path, want: Path) -> int:
    return check_ledger.main([str(folder / "debug_model"), "--against", str(want / "debug_model")])


def order_of(folder: Path) -> list[list[int]]:
    return sequences(check_ledger.replay(folder / "debug_model"))


def test_metrics_count_tokens_of_each_step(whole: Path) -> None:
    lines = [record for record in records(whole) if "loss" in record]
    tokens = [SEQ_LEN * sum(SIZES[: n + 1]) for n in range(len(SIZES))]
    assert [line["tokens"] for line in lines] == tokens
    for line, size in zip(lines, SIZES, strict=True):
        tokens_per_step = line["tokens_per_second"] * line["seconds_per_step"]
        assert tokens_per_step == pytest.approx(SEQ_LEN * size)


def test_order_and_validation_equal_those_without_a_ramp(whole: Path, tmp_path: Path) -> None:
    run(tmp_path, 1, **KEYS | VALIDATED | {"training.batch_size_ramp": "[]", "training.steps": "5"})
    got, want = order_of(whole), order_of(tmp_path)
    assert len(got) == sum(SIZES)
    assert got == want[: len(got)]
    assert validation_curve(whole)[0] == pytest.approx(validation_curve(tmp_path)[0], rel=1e-12)


@pytest.mark.parametrize(
    ("layout", "keys"),
    [
        (Layout(1), {"training.local_batch_size": "2"}),
        (Layout(2), ELASTIC),
        (Layout(2, {REPLICATE: 2}), {}),
        (Layout(2, {PP: 2}), {"training.local_batch_size": "2"}),
    ],
    ids=str,
)
def test_mesh_does_not_change_the_run(
    whole: Path, tmp_path: Path, layout: Layout, keys: dict[str, str]
) -> None:
    parallelism = {f"parallelism.{key}": str(value) for key, value in layout.parallelism.items()}
    run(tmp_path, layout.world_size, **KEYS | VALIDATED | parallelism | keys)
    assert against(tmp_path, whole) == 0
    if keys == ELASTIC:
        assert curve(tmp_path) == curve(whole)
    assert list(curve(tmp_path)) == list(curve(whole))
    for step, values in curve(whole).items():
        assert curve(tmp_path)[step] == pytest.approx(values, rel=1e-9), step
    assert validation_curve(tmp_path) == pytest.approx(validation_curve(whole), rel=1e-9)


@pytest.mark.parametrize("last", [1, 4, 6])
def test_stopped_run_resumes_on_other_ranks(whole: Path, tmp_path: Path, last: int) -> None:
    assert sum(SIZES[:last]) % 8 != 0
    run(tmp_path, 1, **KEYS | ELASTIC | {"training.steps": str(last)})
    run(tmp_path, 2, **KEYS | ELASTIC)
    assert f"resumed from step {last} " in log(tmp_path)
    assert against(tmp_path, whole) == 0
    assert curve(tmp_path) == curve(whole)


def test_ramp_may_change_on_resume(whole: Path, tmp_path: Path) -> None:
    run(tmp_path, 1, **KEYS | {"training.steps": "4"})
    # A larger local batch than before.
    other = {"training.batch_size_ramp": "[]", "training.local_batch_size": "4"}
    run(tmp_path, 2, **KEYS | other)
    assert "changed since the checkpoint: training.batch_size_ramp" in log(tmp_path)
    # What is done counts by the former ramp.
    assert f"8 steps, {sum((*SIZES[:4], 8, 8, 8, 8)) * SEQ_LEN:,} tokens" in log(tmp_path)
    assert check_ledger.main([str(tmp_path / "debug_model")]) == 0
    assert order_of(tmp_path)[: sum(SIZES)] == order_of(whole)
    assert len(order_of(tmp_path)) == sum((*SIZES[:4], 8, 8, 8, 8))


def first_step(folder: Path, plant: Plant = nothing, **keys: str) -> tuple[float, float]:
    with started(folder, 1, plant=plant, **KEYS | {"training.steps": "1"} | keys) as processes:
        assert codes(processes) == {0}, log(folder)
    return curve(folder)[1]


def weight_aux_loss_by_full_batch() -> None:
    ExpertBalancer.set_batch_fraction = lambda self, share: None  # type: ignore[method-assign]


def test_balance_loss_weight_does_not_depend_on_batch_size(tmp_path: Path) -> None:
    keys = {"model.name": "qwen3_moe", "experts.balance_loss": "1.0"}
    # Both runs train the same sequences in step 1.
    alone = {"training.batch_size_ramp": "[]", "training.global_batch_size": "2"}
    want = first_step(tmp_path / "alone", **keys | alone)
    assert first_step(tmp_path / "ramp", **keys) == want
    wrong = first_step(tmp_path / "wrong", weight_aux_loss_by_full_batch, **keys)
    assert wrong[0] == want[0]
    assert wrong[1] != pytest.approx(want[1], rel=1e-4)


def test_data_ends_when_all_rows_have_ended(tmp_path: Path) -> None:
    """With small batches, most rows run out of data long before the last one."""
    texts = ["short", "brief " * 60, "tiny", "little", "word", "and", "so", "on"]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines) + "\n")
    source = f'[{{path = "{tmp_path}/texts.jsonl", repeat = false}}]'
    keys = {"data.sources": source, "data.validation_percent": "0.0"}
    keys |= {"training.steps": "1000", "lr_scheduler.total_steps": "1000"}
    found = []
    for name, ramp in (("ramp", "[{steps = 900, global_batch_size = 1}]"), ("whole", "[]")):
        run(tmp_path / name, 1, **KEYS | keys | {"training.batch_size_ramp": ramp})
        assert "stopped by the end of the data" in log(tmp_path / name)
        assert check_ledger.main([str(tmp_path / name / "debug_model")]) == 0
        found.append(records(tmp_path / name)[-1]["tokens"])
    assert found[0] == found[1] > 300
