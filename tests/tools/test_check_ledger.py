"""Damaged ledgers and comparisons of two ledgers."""

import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from runtime import exit_codes
from tests.lib import ledgers
from tests.lib.damage import DAMAGES, damage
from tests.lib.ledgers import Program, Start, source
from tests.lib.loaders import build
from tools import check_ledger
from tools.check_ledger import LedgerEntry, Lineage, replay


def violations_after(program: Program, rank: int, edit: Callable[[list[str]], None]) -> list[str]:
    path = program.folder / "ledger" / f"rank-{rank:05d}.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    edit(lines)
    path.write_text("".join(lines))
    return replay(program.folder).violations


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda lines: lines.pop(3), "step 4 without step 3"),
        (lambda lines: lines.insert(3, lines[3]), "step 3 again"),
        (lambda lines: lines.__setitem__(3, lines[3][:50] + "\n"), "line 4: torn, and not the"),
        (lambda lines: lines.__setitem__(2, lines[2].replace("0x1", "0x2")), "differ in loss"),
        (lambda lines: lines.__setitem__(2, lines[2].replace('norm":"0', 'norm":"-0')),
         "differ in grad_norm"),
        (lambda lines: lines.__setitem__(0, lines[0].replace(":8", ":9")), "differ in n_rows"),
        (lambda lines: lines.pop(0), "line 1: torn"),
        (lambda lines: lines.append(lines[0]), "begins twice"),
        (lambda lines: lines.__setitem__(5, lines[5].replace("[1,", "[9,")), "row 9 is not in"),
    ],
)  # fmt: skip
def test_damaged_ledger_reports_violation(
    tmp_path: Path, edit: Callable[[list[str]], None], expected: str
) -> None:
    program = Program(tmp_path).run(Start(2, last=6))
    assert violations_after(program, 1, lambda lines: None) == []
    violations = violations_after(program, 1, edit)
    assert expected in "\n".join(violations)
    assert len(set(violations)) == len(violations)


def test_step_missing_on_one_rank_does_not_count(tmp_path: Path) -> None:
    program = Program(tmp_path).run(Start(2, last=6))
    assert violations_after(program, 1, lambda lines: lines.pop()) == []
    assert sorted(replay(tmp_path).steps) == [1, 2, 3, 4, 5]
    assert violations_after(program, 1, lambda lines: lines.__delitem__(slice(4, None))) == [
        "step 4: rank 1 did not log it, but other ranks went on",
        "step 5: rank 1 did not log it, but other ranks went on",
    ]


def test_attempt_without_rank0_is_a_violation(tmp_path: Path) -> None:
    program = Program(tmp_path).run(Start(2, last=3))
    assert "attempt attempt0: no line from rank 0" in violations_after(program, 0, list.clear)
    # Killed before any rank trained a step.
    program = Program(tmp_path / "killed").run(Start(2, last=0))
    assert violations_after(program, 0, list.clear) == []


def test_only_first_violations_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = Program(tmp_path).run(Start(1, last=30))
    violations = violations_after(program, 0, lambda lines: lines.__delitem__(slice(2, None, 2)))
    assert check_ledger.main([str(tmp_path)]) == 1
    _, *shown, rest = capsys.readouterr().out.splitlines()
    assert shown == violations[: check_ledger.SHOWN_VIOLATIONS]
    assert rest == f"and {len(violations) - len(shown)} more"


def test_two_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = (
        Program(tmp_path / str(world)).run(Start(world, last=6)).folder for world in (1, 4)
    )
    command = [str(one), "--against", str(other)]
    assert check_ledger.main(command) == 0
    summary = (
        "steps 1..6 of both: the same tokens; loss equal bit for bit; grad_norm equal bit for bit"
    )
    assert summary in capsys.readouterr().out
    assert check_ledger.main([*command[1:], command[0]]) == 0
    assert summary in capsys.readouterr().out

    for path in (other / "ledger").iterdir():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[3]["grad_norm"] = (float.fromhex(lines[3]["grad_norm"]) + 2.0).hex()
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert check_ledger.main(command) == 0
    assert "grad_norm differs by 2 at most, at step 3" in capsys.readouterr().out

    unlike = Program(tmp_path / "unlike").run(
        Start(1, last=6), loaders=lambda degree, cls: [build(source(seed=6))]
    )
    assert check_ledger.main([str(unlike.folder), "--against", str(one)]) == 1
    assert "steps 1..6 of both: different tokens" in capsys.readouterr().out


def test_runs_without_a_common_step_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of them was killed before its first step."""
    folders = [Program(tmp_path / str(last)).run(Start(1, last=last)).folder for last in (3, 0)]
    for one, other in (folders, folders[::-1]):
        assert check_ledger.main([str(one), "--against", str(other)]) == exit_codes.FAILED
        assert "no step of both: nothing was compared" in capsys.readouterr().out


def test_common_steps_are_named() -> None:
    rows = np.zeros((1, 6), np.int64)
    one, other = (
        Lineage({step: LedgerEntry(step, rows, 1.0, 1.0) for step in range(first, 7)})
        for first in (1, 4)
    )
    assert check_ledger.compare(one, other)[1].startswith("steps 4..6 of both: the same tokens")


def test_row_missing_in_one_run_is_a_difference() -> None:
    rows = np.arange(2)[:, None].repeat(6, axis=1)
    one, both = (Lineage({1: LedgerEntry(1, part, 1.0, 1.0)}) for part in (rows[:1], rows))
    for pair in ((one, both), (both, one)):
        assert check_ledger.compare(*pair)[0] == ["step 1, row 1: the tokens differ"]


def test_nonfinite_losses_are_logged_and_compared(tmp_path: Path) -> None:
    values = iter([1.0, float("nan"), 2.0, 1.0, float("nan"), float("nan")])
    with patch.object(ledgers, "value", lambda taken: next(values)):
        lineages = [replay(Program(tmp_path / name).run(Start(1, last=3)).folder) for name in "ab"]
    assert [lineage.violations for lineage in lineages] == [[], []]
    summary = check_ledger.compare(*lineages)[1]
    assert "loss differs by inf at most, at step 3" in summary


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "required: RUN_FOLDER"),
        (["--against", "a"], "required: RUN_FOLDER"),
        (["a", "b"], "unrecognized arguments: b"),
    ],
)
def test_wrong_command_line_is_rejected(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_ledger.main(arguments) == exit_codes.BAD_CONFIG
    assert expected in capsys.readouterr().err


def test_run_without_ledger_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_ledger.main([str(tmp_path)]) == 2
    assert "metrics.enable_ledger" in capsys.readouterr().err


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_file_is_a_violation(tmp_path: Path, name: str) -> None:
    program = Program(tmp_path).run(Start(2, last=6))
    damage(program.folder / "ledger" / "rank-00001.jsonl", name)
    assert replay(program.folder).violations


def test_ledger_that_ends_before_the_newest_checkpoint_is_a_violation(tmp_path: Path) -> None:
    program = Program(tmp_path).run(Start(2, last=6))
    for step in (6, 7):
        (program.folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True, exist_ok=True)
        problems = [text for text in replay(program.folder).violations if "ledger ends" in text]
        assert len(problems) == (step == 7)
