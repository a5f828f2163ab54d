"""Marks of a report are what the run's files say, and damage to them is reported."""

import json
import time
from pathlib import Path
from random import Random

import pytest

from launcher.failures import record_failure
from metrics.history import ROLLED_BACK
from report.marks import MAX_MARKS, Mark, marks_of
from tests.lib.metrics_files import BEGIN, SECONDS, training_line


def kinds(marks: list[Mark]) -> list[tuple[str, int]]:
    return [(mark.kind, mark.step) for mark in marks]


def lines(*steps: int, **values) -> list[dict]:
    return [training_line(step, Random(step), **values) for step in steps]


def test_checkpoints_and_end(tmp_path: Path) -> None:
    for name in ("step-00000020", "step-00000010", "corrupt-step-00000015-ab12cd34", "step-x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "outcome").write_text("stopped SIGTERM\n")
    marks, problems = marks_of(tmp_path, lines(10, 20, 30))
    expected = [("checkpoint", 10), ("quarantined", 15), ("checkpoint", 20), ("end", 30)]
    assert kinds(marks) == expected
    assert marks[-1].text == "end: stopped SIGTERM"
    assert problems == []


def test_restarts_come_from_the_ledger_or_else_from_metrics(tmp_path: Path) -> None:
    training = [*lines(10, 20), *lines(30, 40, restarts=1, time=BEGIN + 99)]
    marks, _ = marks_of(tmp_path, training)
    assert (kinds(marks), marks[0].time) == ([("restart", 20)], BEGIN + 99)
    (tmp_path / "ledger").mkdir()
    attempts = [(0, 0), (25, 25), (25, 38)]
    heads = [
        {"attempt": str(i), "parent": None, "resumed_from": step, "data_after": after}
        for i, (step, after) in enumerate(attempts)
    ]
    rows = [json.dumps(head, separators=(",", ":")) for head in heads]
    rows.insert(1, json.dumps({"step": 1, "rows": []}))
    (tmp_path / "ledger" / "rank-00000.jsonl").write_text("\n".join([*rows, '{"attempt": torn']))
    marks, _ = marks_of(tmp_path, training)
    assert kinds(marks) == [("restart", 25), ("rollback", 25)]
    assert marks[1].text == "rollback from step 38 to 25; its data are skipped"
    assert marks[0].time == BEGIN + 99


def test_restarts_of_starts_with_and_without_a_ledger_are_counted_once(tmp_path: Path) -> None:
    """The ledger has the second and the fourth of five starts."""
    training = [line for n in range(5) for line in lines(10 * n + 5, 10 * n + 10, restarts=n)]
    (tmp_path / "ledger").mkdir()
    heads = [
        {"attempt": str(step), "parent": None, "resumed_from": step, "data_after": step}
        for step in (10, 30)
    ]
    rows = [json.dumps(head, separators=(",", ":")) for head in heads]
    (tmp_path / "ledger" / "rank-00000.jsonl").write_text("\n".join(rows))
    marks, _ = marks_of(tmp_path, training)
    assert kinds(marks) == [("restart", step) for step in (10, 20, 30, 40)]
    texts = ["restart 1, after step 10", "restart 2, after step 20", "restart from step 30"]
    assert [mark.text for mark in marks[:3]] == texts


def test_rollbacks_without_a_ledger_come_from_metrics(tmp_path: Path) -> None:
    rollbacks = [
        {"step": 10, ROLLED_BACK: 17, "time": BEGIN + 5},
        {"step": 20, ROLLED_BACK: float("inf"), "time": BEGIN + 9},
    ]
    marks, _ = marks_of(tmp_path, lines(10, 20), rollbacks)
    text = "rollback from step 17 to 10; its data are skipped"
    assert marks == [Mark("rollback", 10, text, BEGIN + 5)]


def test_end_is_not_before_the_last_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000037").mkdir(parents=True)
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "outcome").write_text("stopped SIGTERM\n")
    marks, _ = marks_of(tmp_path, lines(10, 20, 30))
    assert kinds(marks) == [("checkpoint", 37), ("end", 37)]


def test_alarms_and_warnings_are_marks(tmp_path: Path) -> None:
    rows = [
        {"step": 12, "time": BEGIN + 6, "kind": "warning", "text": "rank 1 is slow"},
        {
            "step": 10,
            "time": BEGIN + 5,
            "kind": "alarm",
            "text": "ALARM: \x1b[31mthe loss diverges",
        },
        {"step": 12, "time": BEGIN + 6, "kind": "alarm", "text": None},
    ]
    (tmp_path / "alarms.jsonl").write_text("\n".join(map(json.dumps, rows)))
    marks, problems = marks_of(tmp_path, lines(10, 20))
    assert kinds(marks) == [("alarm", 10), ("warning", 12)]
    assert marks[0].text == r"ALARM: \x1b[31mthe loss diverges"
    assert problems == [f"{tmp_path / 'alarms.jsonl'}:3: torn line (1 in all)"]


def test_failures_are_at_the_last_line_before_them(tmp_path: Path) -> None:
    record_failure(tmp_path / "control", lines=["rank 1 was killed"], codes={1: -9})
    now = time.time()
    training = [*lines(10, 20, time=now - 60), *lines(30, time=now + 60)]
    marks, _ = marks_of(tmp_path, training)
    assert kinds(marks) == [("failure", 20)]
    assert marks[0].text == "failed: rank 1 was killed"
    assert marks[0].time == pytest.approx(now, abs=30)


def test_skipped_updates_and_nonfinite_losses(tmp_path: Path) -> None:
    training = [*lines(1), *lines(2, 3, skipped_steps=2), *lines(4, skipped_steps=2, loss=None)]
    marks, _ = marks_of(tmp_path, training)
    assert kinds(marks) == [("skipped", 2), ("skipped", 4)]
    assert marks[0].text == "2 updates skipped since the last line, 2 in all"
    assert marks[1].text == "the loss is not finite"
    assert marks[0].time == BEGIN + 2 * SECONDS


def test_many_marks_of_a_kind_are_bounded_and_reported(tmp_path: Path) -> None:
    training = [line for n in range(1, 2000) for line in lines(n, loss=None)]
    marks, problems = marks_of(tmp_path, training)
    assert len(marks) == MAX_MARKS
    assert marks[-1].step == 1999
    assert "only the last 500 of 1,999 marks of kind skipped" in problems[0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"time": 1}',
        '{"reason": "x", "time": "soon"}',
        '{"reason": "x"',
        "\0",
        "[" * 9999,
    ],
)
def test_damaged_failures_raise_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "failures").write_text(text)
    marks, _ = marks_of(tmp_path, lines(1))
    assert all(mark.kind == "failure" and mark.step == 0 for mark in marks)


def test_texts_of_files_are_escaped_and_short(tmp_path: Path) -> None:
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "outcome").write_text("stopped \x1b[31m\u202e" + "x" * 2000)
    marks, _ = marks_of(tmp_path, lines(1))
    assert marks[0].text.startswith(r"end: stopped \x1b[31m\u202e")
    assert len(marks[0].text) < 500
