"""A run's folder in a report: what is damaged, foreign or missing is a problem and no error."""

import json
import random
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from config import load_config
from launcher.failures import record_failure
from metrics.history import ROLLED_BACK
from report.charts import build_charts
from report.page import build_data, compressed
from report.run import MAX_FILES, MAX_SAMPLES, MAX_TEXT, Run, read_run
from runtime.exit_codes import ROLLED_BACK as ROLLED_BACK_TO
from runtime.provenance import path_of, write_content
from tests.lib.damage import DAMAGES, damage
from tests.lib.metrics_files import lines_of, training_line, write_run
from tools.status import state_of


def read(folder: Path) -> Run:
    return read_run(folder, folder.name, 2e9, state_of)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", list(lines_of(30, validation_freq=10)))


def charts_of(folder: Path) -> dict[str, list[str]]:
    """Labels of the curves by chart."""
    charts, _ = build_charts([read(folder)])
    return {chart.id: [series.label for series in chart.series] for chart in charts}


def test_a_run_is_read(folder: Path) -> None:
    run = read(folder)
    assert (run.name, run.state, run.problems) == ("run", "done", [])
    facts = {name: (value, note) for name, value, note in run.facts}
    assert facts["step"] == ("30", "of 1,000")
    assert facts["tokens"] == ("122.9k", "")
    assert facts["best validation loss"][1] == "at 30"
    assert run.config["training.steps"] == "1000"
    assert run.plan is not None
    charts = charts_of(folder)
    assert charts["loss"] == ["training", "validation"]
    assert charts["lr"] == ["done", "planned"]
    assert charts["grad_norm"] == ["gradient norm", "clipped above 1"]
    assert charts["mfu"] == ["MFU", "MFU, causal"]
    # No update was skipped, there is one source, and no ramp.
    assert not {"skipped", "sources", "batch"} & charts.keys()


def test_a_run_that_stopped_between_lines_is_counted_to_its_end(tmp_path: Path) -> None:
    """Lines of two starts were repeated, and the last steps have none."""
    lines = [training_line(step, Random(step), restarts=3 * (step > 20)) for step in (10, 20, 30)]
    lines.insert(2, {"step": 20, ROLLED_BACK: 24, "time": lines[1]["time"]})
    folder = write_run(tmp_path / "run", lines)
    (folder / "checkpoints" / "step-00000037").mkdir(parents=True)
    (folder / "control").mkdir(exist_ok=True)
    (folder / "control" / "outcome").write_text("stopped SIGTERM\n")
    facts = {name: value for name, value, _ in read(folder).facts}
    assert (facts["step"], facts["restarts"], facts["rollbacks"]) == ("37", "3", "1")


def test_samples_of_steps_that_were_given_up_are_not_shown(folder: Path) -> None:
    samples = [{"step": step, "text": f"text of {step}"} for step in (10, 20, 30)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in samples))
    assert [sample.step for sample in read(folder).samples] == [10, 20, 30]
    (folder / "control").mkdir(exist_ok=True)
    (folder / "control" / "outcome").write_text(f"stopped {ROLLED_BACK_TO}20\n")
    assert [sample.step for sample in read(folder).samples] == [10, 20]


def test_curves_by_source_and_unknown_metrics(folder: Path) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        values = {"data_share/a": 0.5, "z_loss": 0.25, "skipped_steps": 1}
        print(json.dumps(training_line(31, random.Random(0)) | values), file=file)
        by_source = {"validation_loss": 2.0, "validation_loss/a": 1.0, "validation_loss/b": 3.0}
        by_source |= {"validation_bits_per_byte": 1.0, "validation_bits_per_byte/a": 0.5}
        print(json.dumps({"step": 31, "time": 2e9} | by_source), file=file)
    charts = charts_of(folder)
    assert charts["sources"] == ["a", "b"]
    assert charts["bits"] == ["validation", "a"]
    assert charts["shares"] == ["a"]
    assert charts["skipped"] == ["updates"]
    assert charts["other:z_loss"] == ["z_loss"]


def test_slowest_rank_of_a_point_is_one_that_was_slow(folder: Path) -> None:
    lines = [
        training_line(
            step, random.Random(step), slowest_rank=(3, 60)[step % 2],
            slowest_over_median=1.0 + 0.5 * (step % 2),
        )
        for step in range(1, 9001)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    charts, _ = build_charts([read(folder)])
    (series,) = (s for chart in charts for s in chart.series if s.style == "text")
    assert len(series.points.mean) < 9000
    assert set(series.points.mean) == {60}


def test_marks_of_a_run_without_a_time_have_none(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text("")
    record_failure(folder / "control", lines=["planted"], codes={0: 1})
    marks = build_data([read(folder)], now=2e9)["marks"]
    assert [mark["time"] for mark in marks if mark["kind"] == "failure"] == [None]


def test_what_no_run_recorded_is_named(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "mfu": null}\n')
    charts, notes = build_charts([read(folder)])
    assert [chart.id for chart in charts] == ["loss", "lr"]
    assert any(note.startswith("MFU: ") for note in notes)


@pytest.mark.parametrize(
    "line",
    [
        "[]", "{}", '"x"', "null", '{"step": -1}', '{"step": true}', '{"step": 1.5}',
        '{"step": 1, "loss": "x"}', '{"step": 1, "loss": [1]}', '{"step": 1, "loss": NaN}',
        '{"step": 1, "loss": 1e999}', '{"step": 99999999999999999999}', '{"step": 1', "[" * 9999,
        "\0", '{"step": 1, "loss": {"a": 1}}',
    ],
)  # fmt: skip
def test_a_foreign_line_is_skipped_and_reported(folder: Path, line: str) -> None:
    before = read(folder)
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:20], line, *lines[20:]]))
    run = read(folder)
    assert run.history == before.history
    assert run.problems == [f"{path}:21: torn line (1 in all)"]


@pytest.mark.parametrize(
    "values",
    [
        {"loss": 1e308, "grad_norm": -1e308}, {"time": -1e300}, {"time": 1e300},
        {"tokens": -5, "restarts": 2**62}, {"step": 2**62}, {"step": 0}, {"tokens": None},
        {"loss": None, "lr": None, "seconds_per_step": None, "time": None},
        {"seconds_per_step": 0.0, "tokens_per_second": -1.0, "mfu": 1e300}, {"x" * 9999: 1.0},
    ],
)  # fmt: skip
def test_extreme_values_are_shown(folder: Path, values: dict[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        print(json.dumps(training_line(31, random.Random(0)) | values), file=file)
        print(json.dumps({"step": 32, "loss": 1.0}), file=file)
    run = read(folder)
    assert run.problems == []
    compressed(build_data([run], 2e9))


# The line is an object, without what makes it a failure.
READABLE = {("a time that is text", "control/failures")}


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "config.toml", "samples.jsonl", "control/failures", "control/outcome"]
)
def test_damage_is_a_problem(folder: Path, name: str, kind: str) -> None:
    path = folder / name
    if not path.exists():
        path.write_text('{"step": 1, "text": "x", "prompt": "y", "seed": 1}\n')
    damage(path, kind)
    run = read(folder)
    compressed(build_data([run], 2e9))
    # An empty file is as good as none, and an outcome is any text.
    is_read = kind == "empty" or name == "control/outcome" or (kind, name) in READABLE
    assert is_read or any(str(path) in problem for problem in run.problems)


def test_samples_and_provenance(folder: Path) -> None:
    good = [
        {"step": step, "prompt": "def ", "text": "x\n" * step, "seed": 1} for step in range(1000)
    ]
    bad = [{"step": "1", "text": "x"}, {"step": 1, "text": 2}, {"step": -1, "text": "x"}, {}]
    lines = "\n".join(json.dumps(record) for record in [*good[:5], *bad, *good[5:]])
    (folder / "samples.jsonl").write_text(lines)
    provenance = folder / "provenance"
    provenance.mkdir()
    nested = json.loads('{"a": ' * 500 + "1" + "}" * 500)
    record = {
        "git": {"commit": "c0ffee", "dirty": False},
        "argv": ["x", "--y", 1],
        "big": "y" * 9999,
    }
    (provenance / "start-1.json").write_text(json.dumps(record | {"deep": nested}))
    (provenance / "start-2.json").write_text("[1")
    run = read(folder)
    assert len(run.samples) == MAX_SAMPLES
    assert (run.samples[0].step, run.samples[-1].step) == (0, 999)
    assert run.samples[-1].prompt == "def "
    rows = run.provenance["start-1.json"]
    assert (rows["git.commit"], rows["git.dirty"], rows["argv"]) == ("c0ffee", "false", "x --y 1")
    assert len(rows["big"]) < MAX_TEXT + 50
    assert run.problems == [
        f"{folder / 'samples.jsonl'}:6: torn line (4 in all)",
        f"{folder / 'samples.jsonl'}: {MAX_SAMPLES} of 1,000 samples are shown",
        f"{provenance / 'start-2.json'}: no JSON object",
    ]


def test_the_newest_attempts_and_their_files_are_shown(folder: Path) -> None:
    provenance = folder / "provenance"
    kinds = ("config", "software")
    for number in range(1, 101):
        files = {k: write_content(provenance, k, "toml", f"n = {number}\n") for k in kinds}
        path_of(provenance, number).write_text(json.dumps(files))
    run = read(folder)
    newest = range(100, 100 - MAX_FILES // 3, -1)
    records = [run.provenance[f"attempt-{number:05d}.json"] for number in newest]
    assert all(record[kind] in run.provenance for record in records for kind in kinds)
    assert len(run.provenance) == MAX_FILES
    assert run.problems == [f"{provenance}: the newest {MAX_FILES} of 300 files are shown"]


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(FileNotFoundError, match="not a run: no line in metrics"):
            read(folder)


def test_a_configuration_of_another_version_has_a_plan(folder: Path) -> None:
    path = folder / "config.toml"
    text = path.read_text().replace("[training]", "[training]\nfuture_key = 1\n")
    path.write_text(text + "\n[future_table]\nkey = 2\n")
    run = read(folder)
    assert run.plan is not None
    assert run.config["future_table.key"] == "2"
    assert run.problems == []
    path.write_text(text.replace("steps = 1000", 'steps = "many"', 1))
    run = read(folder)
    assert run.plan is None
    assert "no plan of the learning rate" in run.problems[0]


def test_config_rows_have_defaults(folder: Path) -> None:
    rows = {row["key"]: row for row in build_data([read(folder)], 2e9)["config"]}
    assert rows["training.global_batch_size"]["default"] == "unset"
    assert rows["training.global_batch_size"]["values"] == ["16"]
    assert load_config(folder / "config.toml", []).training.global_batch_size == 16


def test_layers_are_curves_apart_from_validation(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for step in (5, 15, 25):
        at = next(i for i, line in enumerate(lines) if line["step"] == step) + 1
        values = {f"layer_grad_norm/{layer}": step * (layer + 1.0) for layer in range(48)}
        lines.insert(at, {"step": step, "time": 2e9} | values | {"layer_dead_experts/3": 0.25})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    charts, notes = build_charts([read(folder)])
    by_id = {chart.id: chart for chart in charts}
    series = by_id["layer_grad"].series
    layers = [int(each.label) for each in series]
    # A chart has 24 curves: from the first layer to the last, two apart or three.
    assert (layers[0], layers[-1], len(layers)) == (0, 47, 24)
    assert {b - a for a, b in pairwise(layers)} == {2, 3}
    assert series[0].axis.steps == [5, 15, 25]
    assert series[-1].points.mean == [48.0 * step for step in (5, 15, 25)]
    assert "Gradients of layers: 24 of 48 curves are shown" in notes
    assert by_id["layer_dead"].series[0].points.mean == [25.0] * 3
    validation = next(each for each in by_id["loss"].series if each.label == "validation")
    assert validation.axis.steps == [10, 20, 30]
    assert None not in validation.points.mean


def test_of_one_s_own_schedule_only_the_batch_size_is_planned(folder: Path) -> None:
    path = folder / "config.toml"
    path.write_text(path.read_text().replace('"cosine"', '"my_schedule:factor"'))
    run = read(folder)
    assert run.plan is not None
    assert (run.plan.lr, run.max_norm, run.problems) == ([], 1.0, [])
    (lr,) = (chart for chart in build_charts([run])[0] if chart.id == "lr")
    assert [each.label for each in lr.series if each.style == "plan"] == []
