"""What status says of a run is what the run did, whatever is left of its files."""

import fcntl
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime import exit_codes
from runtime.control import lock_run
from runtime.failures import record_failure
from tests.reliability.forked import checkpoints, curve, run, started
from tests.test_train import records
from tools import status
from tools.status import QUIET_SECONDS, Status, is_locked, read_status

KEYS = {"checkpoint.interval": "4", "training.steps": "12", "training.global_batch_size": "4"}
# Dies before its first checkpoint, so that all of its steps are made again.
DIES = KEYS | {"training.steps": "100000", "checkpoint.interval": "100000"}
DIES |= {"lr_scheduler.total_steps": "100000"}


def read(folder: Path, *, later: float = 0.0) -> Status:
    return read_status(folder / "debug_model", time.time() + later)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    run(folder, 1, **KEYS)
    return folder


def test_a_finished_run(finished: Path) -> None:
    told = read(finished, later=3600)
    assert (told.state, told.why, told.step, told.steps) == ("done", "", 12, 12)
    assert told.loss == curve(finished)[12][0]
    assert told.tokens_per_second == records(finished)[-1]["tokens_per_second"]
    assert (told.checkpoint, told.restarts, told.failures) == (12, 0, 0)
    assert told.checkpoint_age == pytest.approx(3600, abs=600)
    # It ended an hour ago: that hour is not the run's.
    assert told.goodput is not None
    assert 0.1 < told.goodput <= 1.0
    assert told.problems == []


def test_a_run_that_is_killed_and_resumed(tmp_path: Path) -> None:
    metrics = tmp_path / "debug_model" / "metrics.jsonl"
    with started(tmp_path, 1, **DIES) as processes:
        wait_for(lambda: (tmp_path / "debug_model" / "control" / "lock").exists())
        assert read(tmp_path).state == "starting"
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 7)
        told = read(tmp_path)
        assert (told.state, told.why) == ("running", "")
        assert told.holder == f"{processes[0].pid} on {socket.gethostname()}"
        assert (told.checkpoint, told.steps) == (None, 100000)
        assert told.line_age is not None
        assert told.line_age < 60
        assert told.goodput is not None
        late = read(tmp_path, later=2 * QUIET_SECONDS)
        assert late.state == "running"
        assert late.why.startswith("no line for 0:20:")
    told = read(tmp_path)
    assert (told.state, told.why) == ("failed", "its process is gone without a word")
    lost = records(tmp_path)

    reason = "rank 1 (node7) was ended by SIGKILL"
    control = tmp_path / "debug_model" / "control"
    exit_codes.report(control, exit_codes.BAD_CONFIG)
    assert read(tmp_path).why == "its configuration was refused"
    exit_codes.report(control, exit_codes.FAILED)
    assert read(tmp_path).why == "its launcher ended with 1"
    record_failure(control, lines=[reason], codes={0: 1, 1: -9})
    told = read(tmp_path)
    assert (told.state, told.why) == ("failed", f"{reason}; attempt 1 of 3")
    assert (told.failures, told.last_failure) == (1, reason)

    run(tmp_path, 1, **KEYS)
    told = read(tmp_path)
    assert (told.state, told.step, told.restarts, told.failures) == ("done", 12, 1, 1)
    lines = records(tmp_path)
    again = lines[len(lost) :]
    assert [line["step"] for line in again] == list(range(1, 13))
    outcome = (tmp_path / "debug_model" / "control" / "outcome").stat().st_mtime
    useful = math.fsum(line["seconds_per_step"] for line in again[1:])
    assert told.goodput == pytest.approx(useful / (outcome - lines[0]["time"]))
    # What the first start did is lost, and the time of it is not.
    assert told.goodput < useful / (outcome - again[0]["time"])


def copy_of(folder: Path, target: Path) -> Path:
    """A run's folder whose files can be spoiled."""
    for path in sorted((folder / "debug_model").rglob("*")):
        if path.is_file():
            copy = target / "debug_model" / path.relative_to(folder / "debug_model")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    return target


def test_a_run_on_another_host_is_known_by_its_lines(finished: Path, tmp_path: Path) -> None:
    control = copy_of(finished, tmp_path) / "debug_model" / "control"
    (control / "outcome").unlink()
    (control / "lock").write_text("4711 on elsewhere\n")
    assert read(tmp_path).state == "starting"
    last = json.dumps(records(tmp_path)[-1] | {"step": 13, "time": time.time() + 1})
    with (tmp_path / "debug_model" / "metrics.jsonl").open("a") as file:
        file.write(last + "\n")
    assert read(tmp_path, later=2).state == "running"
    told = read(tmp_path, later=4 * QUIET_SECONDS)
    assert told.state == "unknown"
    assert "elsewhere" in told.why


def test_torn_and_missing_files_are_named(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_of(finished, tmp_path)
    folder = tmp_path / "debug_model"
    newest = checkpoints(tmp_path)[0]
    torn = [folder / "metrics.jsonl", folder / "config.toml", newest / "manifest.json"]
    for path in torn:
        path.write_bytes(path.read_bytes()[:-30])
    (folder / "control" / "failures").write_bytes(b"\xff\xfe{")
    (folder / "control" / "outcome").write_text("")
    told = read(tmp_path)
    assert (told.step, told.checkpoint, told.steps) == (11, 8, None)
    for path in (*torn, folder / "control" / "failures"):
        assert any(text.startswith(str(path)) for text in told.problems), path
    rank_file = checkpoints(tmp_path)[1] / "rank-00000.bin"
    os.truncate(rank_file, 5)
    (folder / "config.toml").unlink()
    told = read(tmp_path)
    assert told.checkpoint == 4
    assert f"{rank_file}: its size is not what was saved" in told.problems
    assert status.main([str(folder)]) == exit_codes.DONE
    assert f"problem: {folder / 'config.toml'}: No such file" in capsys.readouterr().out
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file() and path.name != "lock":
            path.unlink()
    told = read(tmp_path)
    assert (told.step, told.loss, told.checkpoint, told.goodput) == (None, None, None, None)


def test_a_start_that_was_refused_is_no_torn_run(tmp_path: Path) -> None:
    control = tmp_path / "debug_model" / "control"
    control.mkdir(parents=True)
    (control / "lock").write_text("pid 1 on nowhere")
    exit_codes.report(control, exit_codes.BAD_CONFIG)
    told = read(tmp_path)
    assert (told.state, told.why) == ("failed", "its configuration was refused")
    assert told.problems == []


def test_steps_without_a_line_count_once_they_are_saved(finished: Path, tmp_path: Path) -> None:
    log = copy_of(finished, tmp_path) / "debug_model" / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if json.loads(line)["step"] <= 5))
    assert (read(tmp_path).step, read(tmp_path).checkpoint) == (12, 12)


def test_one_run_gets_lines_and_more_get_a_table(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = finished / "debug_model", copy_of(finished, tmp_path) / "debug_model"
    assert status.main([str(one)]) == exit_codes.DONE
    out = capsys.readouterr().out
    assert out.startswith(f"{one}: done, step 12 of 12\n")
    assert "checkpoint: step 12" in out
    assert status.main([str(one), str(other)]) == exit_codes.DONE
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["run", str(one), str(other)]
    (other / "config.toml").unlink()
    status.main([str(one), str(other)])
    assert f"\nproblem: {other / 'config.toml'}: No such file" in capsys.readouterr().out
    assert status.main([str(one), str(tmp_path), "--json"]) == exit_codes.BAD_CONFIG
    captured = capsys.readouterr()
    (told,) = (json.loads(text) for text in captured.out.splitlines())
    assert (told["state"], told["step"], told["checkpoint"]) == ("done", 12, 12)
    assert f"{tmp_path}: not a run's folder" in captured.err


def made(folder: Path, *lines: dict[str, float], holder: str = "4711 on elsewhere") -> Path:
    """A run's folder whose lines are of so many seconds ago; its ``control/``."""
    control = folder / "debug_model" / "control"
    control.mkdir(parents=True)
    (control / "lock").write_text(f"{holder}\n")
    age(control / "lock", max((line["age"] for line in lines), default=0.0) + 10)
    facts = [{"seconds_per_step": 1.0, "time": time.time() - line["age"]} | line for line in lines]
    text = "".join(json.dumps(line) + "\n" for line in facts)
    (folder / "debug_model" / "metrics.jsonl").write_text(text)
    return control


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_numbers_are_the_newest(tmp_path: Path) -> None:
    made(
        tmp_path,
        {"step": 1, "age": 90, "mfu": 0.1, "tokens_per_second": 1.0, "validation_loss": 5.0},
        {"step": 2, "age": 60, "mfu": 0.2, "tokens_per_second": 2.0, "validation_loss": 4.0},
    )
    told = read(tmp_path)
    assert (told.mfu, told.tokens_per_second, told.validation_loss) == (0.2, 2.0, 4.0)
    assert told.line_age == pytest.approx(60, abs=30)


def test_a_run_is_quiet_by_its_own_measure(tmp_path: Path) -> None:
    """One whose steps are slow may be quiet for longer, one that has begun anew is not yet."""
    quick = made(tmp_path / "quick", {"step": 1, "age": 101}, {"step": 2, "age": 100})
    made(tmp_path / "slow", {"step": 1, "age": 1300}, {"step": 2, "age": 1000})
    assert [read(tmp_path / name).state for name in ("quick", "slow")] == ["running"] * 2
    for name, later in (("quick", 501), ("slow", 2001)):
        assert read(tmp_path / name, later=later - 60).state == "running"
        assert read(tmp_path / name, later=later).state == "unknown"
    age(quick / "lock", 0)
    assert read(tmp_path / "quick", later=501).state == "starting"


def test_a_failure_before_the_newest_line_is_past(tmp_path: Path) -> None:
    control = made(tmp_path, {"step": 3, "age": 20})
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time.time() - 3600))
    told = [{"attempt": 1, "reason": "a rank died"}, {"outcome": "stopped SIGTERM"}]
    text = "".join(json.dumps({"time": stamp} | record) + "\n" for record in told)
    (control / "failures").write_text(text)
    found = read(tmp_path)
    assert (found.state, found.why, found.failures) == ("running", "", 1)
    assert found.last_failure == "a rank died"
    assert found.last_failure_age == pytest.approx(3600, abs=60)


@pytest.mark.skipif(not status.LOCKS.exists(), reason="needs Linux")
def test_an_outcome_is_of_the_start_that_told_it(tmp_path: Path) -> None:
    control = made(tmp_path, {"step": 3, "age": 200})
    (control / "outcome").write_text("stopped SIGTERM\n")
    age(control / "outcome", 100)
    assert (read(tmp_path).state, read(tmp_path).why) == ("stopped", "SIGTERM")
    with lock_run(control):
        assert read(tmp_path).state == "starting"
        age(control / "outcome", 0)
        assert read(tmp_path).state == "stopped"
    age(control / "outcome", 100)
    record_failure(control, lines=["no room"], codes={0: 1})
    assert (read(tmp_path).state, read(tmp_path).why) == ("failed", "no room; attempt 1 of 3")


@pytest.mark.parametrize(
    ("device", "process", "inode", "held"),
    [(0, "1", 0, True), (1, "4711", 0, True), (1, "1", 0, False), (0, "4711", 1, False)],
)
def test_a_lock_is_known_by_its_file_and_its_device_or_holder(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: int,
    process: str,
    inode: int,
    held: bool,
) -> None:
    """Some file systems have another device in the list than for those who ask for a file's."""
    lock = made(tmp_path) / "lock"
    facts = lock.stat()
    where = f"{os.major(facts.st_dev) + device:02x}:{os.minor(facts.st_dev):02x}"
    line = f"1: FLOCK  ADVISORY  WRITE {process} {where}:{facts.st_ino + inode} 0 EOF\n"
    (tmp_path / "locks").write_text(line)
    monkeypatch.setattr(status, "LOCKS", tmp_path / "locks")
    assert is_locked(lock) == held
    (tmp_path / "locks").write_text(line.replace("1: ", "1: -> "))
    assert not is_locked(lock), "it only waits"


@pytest.mark.skipif(not status.LOCKS.exists(), reason="needs Linux")
def test_who_looks_keeps_no_run_away(tmp_path: Path) -> None:
    def shared(lock: Path) -> bool:
        """What looks harmless."""
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            time.sleep(1e-4)
            return False

    lock_run(tmp_path).close()
    assert not is_locked(tmp_path / "lock")
    with lock_run(tmp_path):
        assert is_locked(tmp_path / "lock")
    assert refused_beside(is_locked, tmp_path) == 0
    assert refused_beside(shared, tmp_path) > 0


def refused_beside(look: Callable[[Path], bool], control: Path) -> int:
    """Of many starts of a run, how many ``look`` beside them keeps away."""
    is_over = threading.Event()

    def look_on() -> None:
        while not is_over.is_set():
            try:
                look(control / "lock")
            except BlockingIOError:
                continue

    thread = threading.Thread(target=look_on)
    thread.start()
    refused = 0
    for _ in range(500):
        try:
            lock_run(control).close()
        except ValueError:
            refused += 1
    is_over.set()
    thread.join()
    return refused
