"""Ledgers of runs with real loaders that are killed, resumed and rolled back."""

import json
import zlib
from collections.abc import Callable
from functools import reduce
from itertools import islice, pairwise
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from checkpoint.checkpointer import merge
from data.batch_size import Ramp
from data.loader import Microbatch, MicrobatchLoader
from data.mixture import RowState
from metrics.ledger import AttemptHeader, Ledger
from tests.lib.ledgers import Program, Start, State, sequences, source
from tests.lib.loaders import ROWS, SEQ_LEN, CountsPrefetched, CountsTaken, build
from tools import check_ledger
from tools.check_ledger import Lineage, replay


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Lineage:
    program = Program(tmp_path_factory.mktemp("uninterrupted")).run(Start(1, last=30))
    return replay(program.folder)


def all_violations(program: Program, reference: Lineage) -> list[str]:
    lineage = replay(program.folder)
    # A history may end before its first step, and then there is nothing to compare.
    differences = check_ledger.compare(lineage, reference)[0] if lineage.steps else []
    return lineage.violations + differences


def test_spans_are_contiguous_and_match_the_documents(uninterrupted: Lineage) -> None:
    assert sorted(uninterrupted.steps) == list(range(1, 31))
    assert uninterrupted.violations == []
    texts = source()
    for row in range(ROWS):
        spans = [entry.rows[row].tolist() for entry in uninterrupted.steps.values()]
        assert spans[0][:3] == [row, 0, 0]
        assert all(a[3:5] == b[1:3] for a, b in pairwise(spans))
        # All tokens of documents up to the last place are in the sequences.
        document, place = spans[-1][3:5]
        own = islice(texts.documents(row, ROWS, 0), document)
        assert sum(len(t.split()) + 2 for t in own if t) + place == len(spans) * SEQ_LEN


HISTORIES = {
    "never stopped": [Start(2, last=9)],
    "killed before its first step": [Start(2, 0), Start(2, last=4)],
    "killed and resumed": [Start(2, last=7), Start(2, last=9, resumed_from=4)],
    "killed in a step": [
        Start(4, last=7, in_step=3), Start(2, last=9, resumed_from=7, in_step=1),
        Start(4, last=12, resumed_from=6),
    ],
    "other worlds": [
        Start(4, last=5), Start(1, last=8, resumed_from=4), Start(8, last=9, resumed_from=8),
        Start(2, last=20, resumed_from=9),
    ],
    "rolled back": [
        Start(2, last=10), Start(2, last=12, resumed_from=10), Start(2, last=8, resumed_from=4),
        Start(1, last=15, resumed_from=8),
    ],
    "tensor parallel": [Start(4, last=5, tp=2), Start(4, last=9, resumed_from=3, tp=4)],
}  # fmt: skip


@pytest.mark.parametrize("history", HISTORIES)
def test_history_is_verified(
    tmp_path: Path, uninterrupted: Lineage, history: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program, starts = Program(tmp_path), HISTORIES[history]
    for start in starts:
        program.run(start)
    assert all_violations(program, uninterrupted) == []
    assert check_ledger.main([str(tmp_path)]) == 0
    expected = f"steps 1..{starts[-1].last}: every row of every step consumed exactly once"
    attempts = f"{len(starts)} attempt{'s' * (len(starts) > 1)}"
    assert f"{expected} by {attempts}\n" in capsys.readouterr().out


def test_random_history_is_verified(
    tmp_path: Path, uninterrupted: Lineage, trials: Callable[[int], int]
) -> None:
    for seed in range(trials(20)):
        rng = np.random.default_rng(seed)
        program, last = Program(tmp_path / str(seed)), 0
        for _ in range(8):
            resumed = int(rng.integers(max(0, last - 2), last, endpoint=True))
            last = int(rng.integers(resumed, resumed + 3, endpoint=True))
            world = int(rng.choice([1, 2, 4]))
            program.run(Start(world, last, resumed, in_step=int(rng.integers(0, world))))
            write_torn_line(program, rng)
        assert all_violations(program, uninterrupted) == []


# Rows 0 to 3, 4 to 7, 0 to 3, and so on: an odd number of steps ends in the middle of the rows.
RAMPS: dict[str, tuple[Ramp, list[Start]]] = {
    "never stopped": (((5, 4),), [Start(2, last=9)]),
    "over at once": (((1, 2),), [Start(2, last=9)]),
    "killed in it": (((3, 2), (4, 4)), [
        Start(2, last=3, in_step=1), Start(1, last=5, resumed_from=2), Start(2, 9, resumed_from=5),
    ]),
    "killed after it, on more ranks than its rows": (((3, 4),), [
        Start(4, last=6), Start(8, last=9, resumed_from=5), Start(1, last=12, resumed_from=8),
    ]),
    "rolled back": (((9, 4),), [
        Start(2, last=7), Start(2, last=5, resumed_from=3), Start(4, last=12, resumed_from=4),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("history", RAMPS)
def test_history_with_ramp_is_verified(
    tmp_path: Path, uninterrupted: Lineage, history: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ramp, starts = RAMPS[history]
    program = Program(tmp_path, ramp=ramp)
    for start in starts:
        program.run(start)
    assert check_ledger.main([str(tmp_path)]) == 0
    assert "every row of every step consumed exactly once" in capsys.readouterr().out
    got = sequences(replay(tmp_path))
    assert got == sequences(uninterrupted)[: len(got)]


def test_data_skipped_in_a_ramp_are_reported(tmp_path: Path) -> None:
    program = Program(tmp_path, ramp=((20, 2),)).run(Start(2, last=9))
    program.run(Start(2, last=14, resumed_from=4), data_after=9)
    # Resumes in the middle of the rows, some of which are still before the skipped data.
    program.run(Start(1, last=30, resumed_from=11))
    lineage = replay(tmp_path)
    assert (lineage.violations, lineage.skipped) == ([], {4: 5})


def write_torn_line(program: Program, rng: np.random.Generator) -> None:
    """Write part of a line, as a rank killed while writing."""
    files = sorted((program.folder / "ledger").iterdir())
    with files[rng.integers(len(files))].open("a") as file:
        file.write('{"step":7,"rows":[[0,'[: rng.integers(1, 20)])


def test_data_skipped_on_purpose_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = Program(tmp_path).run(Start(2, last=9))
    program.run(Start(2, last=8, resumed_from=4), data_after=9)
    assert check_ledger.main([str(tmp_path)]) == 0
    assert "by 2 attempts; data of 5 steps skipped on purpose" in capsys.readouterr().out
    # Rolled back to the same step again: the data of the second attempt are skipped too.
    program.run(Start(2, last=8, resumed_from=4), data_after=8)
    assert replay(tmp_path).skipped == {4: 5 + 4}
    # Resumed from that step or an earlier one without skipping, the data are read.
    for back in (4, 3):
        program.run(Start(2, last=8, resumed_from=back))
        lineage = replay(tmp_path)
        assert (lineage.violations, lineage.skipped) == ([], {})
    assert check_ledger.main([str(tmp_path)]) == 0
    assert "by 5 attempts\n" in capsys.readouterr().out


def test_data_skipped_to_unfinished_step_are_a_violation(tmp_path: Path) -> None:
    program = Program(tmp_path).run(Start(2, last=9))
    program.saved[12] = program.saved[9]
    program.run(Start(2, last=8, resumed_from=4), data_after=12)
    assert "resumed from step 4, but step 12 was never finished" in replay(tmp_path).violations[0]


# Faults of the program


@pytest.mark.parametrize(
    ("first", "data_of", "expected"),
    [
        (6, None, "step 6 without step 5"),
        (4, None, "step 4 again, but attempt attempt1 was already past it"),
        (5, 5, "row 0 of step 5 starts at "),
        (5, 3, "row 0 of step 5 starts at "),
        (5, 0, "row 0 of step 5 starts at (0, 0), but its previous read ended at "),
    ],
    ids=["step + 1", "step - 1", "data + 1", "data - 1", "data not restored"],
)
def test_wrong_resume_is_a_violation(
    tmp_path: Path, first: int, data_of: int | None, expected: str
) -> None:
    program = Program(tmp_path).run(Start(2, last=7))
    program.run(Start(2, last=9, resumed_from=4), first_step=first, data_of=data_of)
    assert expected in replay(tmp_path).violations[0]


@pytest.mark.parametrize("fault", [CountsPrefetched, CountsTaken])
def test_uncommitted_data_position_is_a_violation(tmp_path: Path, fault: type) -> None:
    program = Program(tmp_path, fault).run(Start(2, last=7))
    # Batches taken for a step that was never finished.
    for reader in program.readers:
        next(reader)
    program.saved[7] = "attempt0", reduce(merge, [r.state_dict() for r in program.readers])
    program.run(Start(2, last=9, resumed_from=7))
    violations = replay(tmp_path).violations
    assert "row 0 of step 8 starts at " in violations[0]
    assert isinstance(reader, fault)


class ForgetsNextRow(MicrobatchLoader):
    """Fault: a resumed run starts at the first row."""

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state | {"next_row": 0})


class RestartsRowsEachStep(MicrobatchLoader):
    """Fault: every step starts at the first row."""

    def commit(self, microbatches: list[Microbatch]) -> None:
        super().commit(microbatches)
        state = self.state_dict() | {"next_row": 0}
        self._prefetched.clear()
        self.load_state_dict(state)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (ForgetsNextRow, "step 6: row 0 is not in the global batch"),
        (RestartsRowsEachStep, "step 2: row 0 is not in the global batch"),
    ],
)
def test_rows_skipped_in_a_ramp_are_a_violation(tmp_path: Path, fault: type, expected: str) -> None:
    program = Program(tmp_path, fault, ramp=((20, 4),))
    program.run(Start(1, last=5)).run(Start(1, last=9, resumed_from=5))
    assert replay(tmp_path).violations[0] == expected


def test_row_not_in_the_next_ramp_step_must_continue_later(tmp_path: Path) -> None:
    program = Program(tmp_path, ramp=((20, 4),)).run(Start(1, last=4))
    path = program.folder / "ledger" / "rank-00000.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[3]["rows"][0][2] += 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert replay(tmp_path).violations[0].startswith("row 0 of step 3 starts at ")


def test_ramp_that_was_not_followed_is_a_violation(tmp_path: Path) -> None:
    program = Program(tmp_path, ramp=((2, 4),)).run(Start(1, last=4))
    path = program.folder / "ledger" / "rank-00000.jsonl"
    path.write_text(path.read_text().replace('"ramp":[[2,4]]', '"ramp":[[3,4]]'))
    assert replay(tmp_path).violations[0] == "step 3: row 4 is not in the global batch"
    program = Program(tmp_path / "ranks", ramp=((2, 4),)).run(Start(2, last=4))
    path = program.folder / "ledger" / "rank-00001.jsonl"
    path.write_text(path.read_text().replace('"ramp":[[2,4]]', '"ramp":[[3,4]]'))
    assert replay(program.folder).violations == ["attempt attempt0: ranks 0 and 1 differ in ramp"]


def test_ledger_without_ramp_key_is_read(tmp_path: Path) -> None:
    program = Program(tmp_path).run(Start(1, last=4))
    path = program.folder / "ledger" / "rank-00000.jsonl"
    assert '"ramp":[]' in path.read_text()
    path.write_text(path.read_text().replace(',"ramp":[]', ""))
    assert len(replay(tmp_path).steps) == 4
    assert replay(tmp_path).violations == []


def test_rank_dependent_order_is_a_violation(tmp_path: Path, uninterrupted: Lineage) -> None:
    def shuffled_by_rank(degree: int, cls: type) -> list[MicrobatchLoader]:
        sources = [source(seed=5 + rank) for rank in range(degree)]
        for each in sources:
            each.fingerprint = sources[0].fingerprint
        return [build(each, degree, rank) for rank, each in enumerate(sources)]

    program = Program(tmp_path).run(Start(2, last=4), loaders=shuffled_by_rank)
    found = all_violations(program, uninterrupted)
    # One row of each microbatch belongs to the other rank.
    rows = [f"step {s}, row {r}: the tokens differ" for s in range(1, 5) for r in range(1, ROWS, 2)]
    assert found == rows


def test_row_read_by_two_ranks_is_a_violation(tmp_path: Path) -> None:
    def all_first(degree: int, cls: type) -> list[MicrobatchLoader]:
        return [build(source(), degree, 0) for _ in range(degree)]

    violations = replay(Program(tmp_path).run(Start(2, 1), loaders=all_first).folder).violations
    assert "step 1: two ranks have row 0" in violations
    assert "step 1: row 1 was read by no rank" in violations


def test_ranks_of_one_place_with_other_rows_are_a_violation(tmp_path: Path) -> None:
    program = Program(tmp_path).run(Start(2, last=2, tp=2))
    path = tmp_path / "ledger" / "rank-00001.jsonl"
    path.write_text(path.read_text().replace("[0,0,0,", "[0,0,1,"))
    assert (
        "step 1: ranks 0 and 1 share rows, but read different ones" in replay(tmp_path).violations
    )
    assert program.saved


def test_resume_from_abandoned_branch_is_a_violation(tmp_path: Path) -> None:
    program = Program(tmp_path).run(Start(1, last=10))
    abandoned = program.saved[10]
    program.run(Start(1, last=7, resumed_from=4))
    program.run(Start(1, last=12, resumed_from=10))
    assert "attempt attempt2 resumed from step 10, but step 10 was never finished" in (
        replay(tmp_path).violations
    )
    program = Program(tmp_path / "longer").run(Start(1, last=10))
    program.run(Start(1, last=11, resumed_from=4))
    program.saved[10] = abandoned
    program.run(Start(1, last=12, resumed_from=10))
    assert (
        "from step 10 of attempt attempt0, but it was trained again by attempt1"
        in (replay(program.folder).violations[0])
    )


def test_line_is_flushed_at_once_and_fsynced_by_sync(tmp_path: Path) -> None:
    attempt = AttemptHeader(
        attempt="a", parent=None, resumed_from=0, data_after=0, world_size=1, rank=0, dp_rank=0,
        n_rows=1,
    )  # fmt: skip
    ledger = Ledger(tmp_path / "ledger", attempt)
    for step in (1, 2):
        ledger.log(step, [], loss=0.1, grad_norm=0.3)
        assert len((tmp_path / "ledger" / "rank-00000.jsonl").read_text().splitlines()) == 1 + step
    with patch("runtime.run_folder.os.fsync") as fsync:
        ledger.sync()
    fsync.assert_called_once()
    entry = replay(tmp_path).steps[2]
    assert (entry.loss, entry.grad_norm) == (0.1, 0.3)
    assert (tmp_path / "ledger").stat().st_mode & 0o777 == 0o700


def test_crc_covers_every_token(tmp_path: Path) -> None:
    tokens = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN)
    start, end, other = (RowState((n,), (0,), 0, 0, token) for n, token in ((0, 0), (1, 2), (3, 4)))
    spans = ((0, start, end), (1, start, other))

    def crcs(sequence: torch.Tensor, name: str) -> list[int]:
        attempt = AttemptHeader(
            attempt=name, parent=None, resumed_from=0, data_after=0, world_size=1, rank=0,
            dp_rank=0, n_rows=2,
        )  # fmt: skip
        ledger = Ledger(tmp_path / name / "ledger", attempt)
        batch = Microbatch(
            sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous(), None, None, spans
        )
        ledger.log(1, [batch], loss=1.0, grad_norm=1.0)
        ledger.close()
        return replay(tmp_path / name).steps[1].rows[:, 5].tolist()

    before = crcs(tokens, "before")
    assert before == [zlib.crc32(row.numpy().tobytes()) for row in tokens]
    for column in range(SEQ_LEN):
        other = tokens.clone()
        other[1, column] += 1
        after = crcs(other, f"after{column}")
        assert after[0] == before[0]
        assert after[1] != before[1]


def test_ledger_with_the_former_name_of_dp_rank_is_read(tmp_path: Path) -> None:
    program = Program(tmp_path).run(Start(1, last=4))
    path = program.folder / "ledger" / "rank-00000.jsonl"
    assert '"dp_rank":' in path.read_text()
    path.write_text(path.read_text().replace('"dp_rank":', '"place":'))
    assert len(replay(tmp_path).steps) == 4
    assert replay(tmp_path).violations == []
