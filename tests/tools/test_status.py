"""Status matches what a run did, even if some of its files are torn or missing."""

import json
import math
import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from launcher.failures import record_failure
from runtime import exit_codes
from runtime.run_lock import LOCKS, lock_run
from tests.lib.damage import DAMAGES, damage
from tests.lib.forked import checkpoints, run, started
from tests.lib.launch import curve, records
from tests.lib.patience import wait_until
from tests.lib.repository import ROOT
from tools import report, status
from tools.status import QUIET_SECONDS, Status, paragraph, read_status, table

KEYS = {"checkpoint.interval": "4", "training.steps": "12", "training.global_batch_size": "4"}
# Killed before its first checkpoint, so that all steps are repeated.
DIES = KEYS | {"training.steps": "100000", "checkpoint.interval": "100000"}
DIES |= {"lr_scheduler.total_steps": "100000"}


def read(folder: Path, *, later: float = 0.0) -> Status:
    return read_status(folder / "debug_model", time.time() + later)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    run(folder, 1, **KEYS)
    return folder


def test_finished_run(finished: Path) -> None:
    found = read(finished, later=3600)
    assert (found.state, found.why, found.step, found.steps) == ("done", "", 12, 12)
    assert found.loss == curve(finished)[12][0]
    assert found.tokens_per_second == records(finished)[-1]["tokens_per_second"]
    assert (found.checkpoint, found.restarts, found.failures) == (12, 0, 0)
    assert found.checkpoint_age == pytest.approx(3600, abs=600)
    # The hour after the run's end does not count.
    assert found.goodput is not None
    assert 0.1 < found.goodput <= 1.0
    assert found.problems == []


def test_killed_and_resumed_run(tmp_path: Path) -> None:
    metrics = tmp_path / "debug_model" / "metrics.jsonl"
    with started(tmp_path, 1, **DIES) as processes:
        wait_until(lambda: (tmp_path / "debug_model" / "control" / "lock").exists())
        assert read(tmp_path).state == "starting"
        wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 7)
        found = read(tmp_path)
        assert (found.state, found.why) == ("running", "")
        assert found.holder == f"{processes[0].pid} on {socket.gethostname()}"
        assert (found.checkpoint, found.steps) == (None, 100000)
        assert found.line_age is not None
        assert found.line_age < 60
        assert found.goodput is not None
        late = read(tmp_path, later=2 * QUIET_SECONDS)
        assert late.state == "running"
        assert late.why.startswith("no line for 0:20:")
    found = read(tmp_path)
    assert (found.state, found.why) == ("failed", "process died without an outcome")
    lost = records(tmp_path)

    reason = "rank 1 (node7) was killed by SIGKILL"
    control = tmp_path / "debug_model" / "control"
    exit_codes.write_rejection(control, "model.flavor: none")
    assert read(tmp_path).why == "rejected: model.flavor: none"
    exit_codes.write_exit_code(control, exit_codes.FAILED)
    assert read(tmp_path).why == "launcher exited with 1"
    record_failure(control, lines=[reason], codes={0: 1, 1: -9})
    found = read(tmp_path)
    assert (found.state, found.why) == ("failed", f"{reason}; failure 1 of 3")
    assert (found.failures, found.last_failure) == (1, reason)

    run(tmp_path, 1, **KEYS)
    found = read(tmp_path)
    assert (found.state, found.step, found.restarts, found.failures) == ("done", 12, 1, 1)
    lines = records(tmp_path)
    again = lines[len(lost) :]
    assert [line["step"] for line in again] == list(range(1, 13))
    outcome = (tmp_path / "debug_model" / "control" / "outcome").stat().st_mtime
    useful = math.fsum(line["seconds_per_step"] for line in again[1:])
    assert found.goodput == pytest.approx(useful / (outcome - lines[0]["time"]))
    # The steps of the first start are lost, but their time counts.
    assert found.goodput < useful / (outcome - again[0]["time"])


def copy_of(folder: Path, target: Path) -> Path:
    """Copy a run folder, so that a test can damage its files."""
    for path in sorted((folder / "debug_model").rglob("*")):
        if path.is_file():
            copy = target / "debug_model" / path.relative_to(folder / "debug_model")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    return target


def test_run_on_another_host_is_judged_by_its_lines(finished: Path, tmp_path: Path) -> None:
    control = copy_of(finished, tmp_path) / "debug_model" / "control"
    (control / "outcome").unlink()
    (control / "lock").write_text("4711 on elsewhere\n")
    assert read(tmp_path).state == "starting"
    last = json.dumps(records(tmp_path)[-1] | {"step": 13, "time": time.time() + 1})
    with (tmp_path / "debug_model" / "metrics.jsonl").open("a") as file:
        file.write(last + "\n")
    assert read(tmp_path, later=2).state == "running"
    found = read(tmp_path, later=4 * QUIET_SECONDS)
    assert found.state == "unknown"
    assert "elsewhere" in found.why


def test_torn_and_missing_files_are_problems(
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
    found = read(tmp_path)
    assert (found.step, found.checkpoint, found.steps) == (11, 8, None)
    for path in (*torn, folder / "control" / "failures"):
        assert any(text.startswith(str(path)) for text in found.problems), path
    rank_file = checkpoints(tmp_path)[1] / "rank-00000.bin"
    os.truncate(rank_file, 5)
    (folder / "config.toml").unlink()
    found = read(tmp_path)
    assert found.checkpoint == 4
    assert f"{rank_file}: size differs from the manifest" in found.problems
    assert status.main([str(folder)]) == exit_codes.DONE
    assert f"problem: {folder / 'config.toml'}: No such file" in capsys.readouterr().out
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file() and path.name != "lock":
            path.unlink()
    found = read(tmp_path)
    assert (found.step, found.loss, found.checkpoint, found.goodput) == (None, None, None, None)


def test_rejected_start_has_no_problems(tmp_path: Path) -> None:
    control = tmp_path / "debug_model" / "control"
    control.mkdir(parents=True)
    (control / "lock").write_text("pid 1 on nowhere")
    exit_codes.write_rejection(control, "model.flavor: none")
    found = read(tmp_path)
    assert (found.state, found.why) == ("failed", "rejected: model.flavor: none")
    assert found.problems == []


def test_saved_steps_without_a_line_count(finished: Path, tmp_path: Path) -> None:
    log = copy_of(finished, tmp_path) / "debug_model" / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if json.loads(line)["step"] <= 5))
    assert (read(tmp_path).step, read(tmp_path).checkpoint) == (12, 12)


def test_one_run_prints_lines_and_several_a_table(
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
    (found,) = (json.loads(text) for text in captured.out.splitlines())
    assert (found["state"], found["step"], found["checkpoint"]) == ("done", 12, 12)
    assert f"{tmp_path}: not a run folder" in captured.err


def test_what_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "notes.txt").touch()
    others = [tmp_path, tmp_path / "none", file]
    assert status.main([*map(str, others)]) == exit_codes.BAD_CONFIG
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [f"{path}: not a run folder: no control/lock" for path in others]
    assert captured.err.splitlines() == lines


def test_run_whose_nodes_never_met_has_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "control").mkdir()
    reason = "rendezvous of 2 nodes failed: node 1 did not join within 900 s"
    record_failure(tmp_path / "control", lines=[reason], codes={})
    exit_codes.write_exit_code(tmp_path / "control", exit_codes.FAILED)
    assert status.main([str(tmp_path)]) == exit_codes.DONE
    line = f"{tmp_path}: failed ({reason}; failure 1 of 3), step n/a of n/a"
    assert capsys.readouterr().out.splitlines()[0] == line
    (tmp_path / "control" / "failures").unlink()
    exit_codes.write_rejection(tmp_path / "control", "model.flavor: none")
    assert status.main([str(tmp_path)]) == exit_codes.DONE
    line = f"{tmp_path}: failed (rejected: model.flavor: none), step n/a of n/a"
    assert capsys.readouterr().out.splitlines()[0] == line


def test_start_that_a_signal_ended_has_stopped(tmp_path: Path) -> None:
    control = tmp_path / "debug_model" / "control"
    control.mkdir(parents=True)
    exit_codes.write_exit_code(control, exit_codes.PREEMPTED)
    found = read(tmp_path)
    why = "a signal before the first step of the last start"
    assert (found.state, found.why) == ("stopped", why)
    (control / "exit_code").unlink()
    record_failure(control, lines=["a rank died"], codes={0: 1})
    assert read(tmp_path).state == "failed"
    exit_codes.write_exit_code(control, exit_codes.PREEMPTED)
    os.utime(control / "exit_code", (time.time() + 2,) * 2)
    assert (read(tmp_path).state, read(tmp_path).why) == ("stopped", why)


TRAINED = {"seconds_per_step": 1.0, "loss": 2.0}


def write_run(folder: Path, *lines: dict[str, float], holder: str = "4711 on elsewhere") -> Path:
    """Write a run folder whose metrics lines have ages in seconds; return its ``control/``."""
    control = folder / "debug_model" / "control"
    control.mkdir(parents=True)
    (control / "lock").write_text(f"{holder}\n")
    set_age(control / "lock", max((line["age"] for line in lines), default=0.0) + 10)
    times = [
        ({} if {"validation_loss", "layer_rms"} & line.keys() else TRAINED)
        | {"time": time.time() - line["age"]}
        | line
        for line in lines
    ]
    text = "".join(json.dumps(line) + "\n" for line in times)
    (folder / "debug_model" / "metrics.jsonl").write_text(text)
    return control


def set_age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_numbers_are_of_the_newest_line(tmp_path: Path) -> None:
    control = write_run(
        tmp_path,
        {"step": 1, "age": 90, "mfu": 0.1, "tokens_per_second": 1.0},
        {"step": 1, "age": 80, "validation_loss": 5.0},
        {"step": 2, "age": 70, "mfu": 0.2, "tokens_per_second": 2.0, "seconds_left": 3601.0},
        {"step": 2, "age": 60, "validation_loss": 4.0},
    )
    found = read(tmp_path)
    assert found.seconds_left == 3601.0
    assert "left 1:00:01" in paragraph(found)[0]
    assert "1:00:01" in table([found])[1]
    (control / "outcome").write_text(f"{exit_codes.FINISHED.outcome}\n")
    assert read(tmp_path).seconds_left is None
    assert (found.mfu, found.tokens_per_second, found.validation_loss) == (0.2, 2.0, 4.0)
    assert found.line_age == pytest.approx(60, abs=30)


def test_time_left_is_that_of_the_last_start(tmp_path: Path) -> None:
    """A finished run that is extended has an old line, of no time left, until it writes one."""
    control = write_run(tmp_path, {"step": 2, "age": 70, "seconds_left": 0.0})
    (control.parent / "config.toml").write_text("[training]\nsteps = 3000\n")
    assert read(tmp_path).seconds_left == 0.0
    set_age(control / "lock", 60)
    found = read(tmp_path)
    assert (found.state, found.seconds_left) == ("starting", None)
    (control / "outcome").write_text("stopped SIGTERM\n")
    found = read(tmp_path)
    assert (found.state, found.seconds_left) == ("stopped", None)
    assert ", left" not in paragraph(found)[0]


@pytest.mark.parametrize(
    ("lines", "state"),
    [
        # Lines of layers follow the step's.
        ([(1, 3000.0, {}), (2, 1500.0, {}), (2, 1499.9, {"layer_rms": 1.0})], "running"),
        ([(1, 1510.0, {}), (2, 1500.0, {}), (2, 1000.0, {"validation_loss": 1.0})], "unknown"),
        # A job waits for hours for its restart.
        ([(1, 9e4, {}), (2, 9e4 - 9, {}), (3, 700.0, {"restarts": 1})], "unknown"),
        ([(1, 9e4, {}), (2, 9e4 - 90, {}), (3, 700.0, {"restarts": 1})], "running"),
        ([(1, 9e4, {})], "unknown"),
    ],
)
def test_usual_interval_is_of_training_lines_of_one_start(
    lines: list[tuple[int, float, dict[str, float]]], state: str, tmp_path: Path
) -> None:
    made = [{"step": step, "age": age} | values for step, age, values in lines]
    write_run(tmp_path, *made)
    assert read(tmp_path).state == state


def test_undone_validation_is_not_shown(tmp_path: Path) -> None:
    lines = [{"step": step, "age": 50 - step} for step in (1, 2, 3)]
    validations = [{"step": step, "age": 50, "validation_loss": 9.0 - step} for step in (1, 3)]
    before = [lines[0], validations[0], *lines[1:], validations[1]]
    write_run(tmp_path / "before", *before)
    assert read(tmp_path / "before").validation_loss == 6.0
    write_run(tmp_path / "after", *before, {"step": 2, "age": 20})
    assert read(tmp_path / "after").validation_loss == 8.0


def test_steps_after_a_rollback_do_not_count(tmp_path: Path) -> None:
    lines = [{"step": step, "age": 100 - step} for step in (1, 2, 3, 4)]
    control = write_run(tmp_path, *lines)
    (control / "outcome").write_text(f"stopped {exit_codes.ROLLED_BACK}2\n")
    set_age(control / "outcome", 89)
    found = read(tmp_path)
    assert (found.step, found.why) == (2, "rolled back to step 2")
    assert found.goodput == pytest.approx(1 / 10, rel=0.1)
    exit_codes.write_rejection(control, "model.flavor: none")
    assert (read(tmp_path).step, read(tmp_path).why) == (2, "rejected: model.flavor: none")
    (run,) = report.read_runs([control.parent])
    assert run.facts[0] == ("step", "2", "")


def test_goodput_of_a_failure_within_a_second_of_its_last_line(tmp_path: Path) -> None:
    control = write_run(tmp_path, {"step": 1, "age": 1.0}, {"step": 2, "age": 0.0})
    record_failure(control, lines=["a rank died"], codes={0: 1})
    found = read(tmp_path, later=60)
    assert found.state == "failed"
    assert found.goodput is not None
    assert found.goodput <= 1.01


def test_quiet_depends_on_the_time_of_a_line(tmp_path: Path) -> None:
    """A run with slow steps may be quiet for longer; a new start resets the time."""
    quick = write_run(tmp_path / "quick", {"step": 1, "age": 101}, {"step": 2, "age": 100})
    write_run(tmp_path / "slow", {"step": 1, "age": 1300}, {"step": 2, "age": 1000})
    assert [read(tmp_path / name).state for name in ("quick", "slow")] == ["running"] * 2
    for name, later in (("quick", 501), ("slow", 2001)):
        assert read(tmp_path / name, later=later - 60).state == "running"
        assert read(tmp_path / name, later=later).state == "unknown"
    set_age(quick / "lock", 0)
    assert read(tmp_path / "quick", later=501).state == "starting"


def test_failure_before_the_newest_line_is_over(tmp_path: Path) -> None:
    control = write_run(tmp_path, {"step": 3, "age": 20})
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time.time() - 3600))
    failures = [{"attempt": 1, "reason": "a rank died"}, {"outcome": "stopped SIGTERM"}]
    text = "".join(json.dumps({"time": stamp} | record) + "\n" for record in failures)
    (control / "failures").write_text(text)
    found = read(tmp_path)
    assert (found.state, found.why, found.failures) == ("running", "", 1)
    assert found.last_failure == "a rank died"
    assert found.last_failure_age == pytest.approx(3600, abs=60)


@pytest.mark.skipif(not LOCKS.exists(), reason="needs Linux")
def test_outcome_belongs_to_the_start_that_wrote_it(tmp_path: Path) -> None:
    control = write_run(tmp_path, {"step": 3, "age": 200})
    (control / "outcome").write_text("stopped SIGTERM\n")
    set_age(control / "outcome", 100)
    assert (read(tmp_path).state, read(tmp_path).why) == ("stopped", "SIGTERM")
    with lock_run(control):
        assert read(tmp_path).state == "starting"
        set_age(control / "outcome", 0)
        assert read(tmp_path).state == "stopped"
    set_age(control / "outcome", 100)
    record_failure(control, lines=["no room"], codes={0: 1})
    assert (read(tmp_path).state, read(tmp_path).why) == ("failed", "no room; failure 1 of 3")


@pytest.mark.parametrize("is_failure", [True, False])
def test_start_elsewhere_is_not_judged_by_the_end_of_the_one_before(
    is_failure: bool, tmp_path: Path
) -> None:
    control = write_run(tmp_path, {"step": 3, "age": 900})
    if is_failure:
        record_failure(control, lines=["no room"], codes={0: 1})
        record = json.loads((control / "failures").read_text())
        record["time"] = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time.time() - 900))
        (control / "failures").write_text(json.dumps(record) + "\n")
    else:
        (control / "outcome").write_text("stopped SIGUSR1\n")
        set_age(control / "outcome", 900)
    (control / "lock").write_text("4711 on elsewhere\n")
    set_age(control / "lock", 300)
    assert (read(tmp_path).state, read(tmp_path).why) == ("starting", "")


@pytest.mark.parametrize("end", exit_codes.FAILURES, ids=lambda end: end.reason)
def test_run_that_ended_by_its_loss_has_failed(end: exit_codes.StopReason, tmp_path: Path) -> None:
    control = write_run(tmp_path, {"step": 3, "age": 200})
    (control / "outcome").write_text(f"{end.outcome}\n")
    assert (read(tmp_path).state, read(tmp_path).why) == ("failed", end.reason)


@pytest.mark.parametrize(
    ("outcome", "state", "why"),
    [
        ("done", "done", "a later start was rejected: model.flavor: none"),
        (
            exit_codes.STOP_FILE.outcome,
            "stopped",
            "stop file; a later start was rejected: model.flavor: none",
        ),
        # This run should have gone on.
        ("stopped SIGTERM", "failed", "rejected: model.flavor: none"),
    ],
)
def test_a_start_that_is_rejected_leaves_a_run_that_has_ended(
    outcome: str, state: str, why: str, tmp_path: Path
) -> None:
    control = write_run(tmp_path, {"step": 9, "age": 100})
    (control / "outcome").write_text(f"{outcome}\n")
    set_age(control / "outcome", 90)
    before = read(tmp_path)
    assert before.state == outcome.partition(" ")[0]
    exit_codes.write_rejection(control, "model.flavor: none")
    found = read(tmp_path)
    assert (found.state, found.why) == (state, why)
    if found.state == before.state:
        assert found.goodput == before.goodput


def test_the_last_alarm_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path, {"step": 9, "age": 10}).parent
    assert (read_status(folder, time.time()).alarms, "alarms" in shown(folder, capsys)) == (
        0,
        False,
    )
    lines = [("alarm", "ALARM: first"), ("alarm", "ALARM: the loss diverges"), ("warning", "slow")]
    (folder / "alarms.jsonl").write_text(
        "".join(
            json.dumps({"step": 3, "time": time.time() - 120, "kind": kind, "text": text}) + "\n"
            for kind, text in lines
        )
    )
    ago = r"0:02:\d\d ago"
    text = rf"  alarms 2, the last {ago}: the loss diverges\n  warnings 1, the last {ago}: slow\n"
    assert re.search(text, shown(folder, capsys))


def shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert status.main([str(folder)]) == exit_codes.DONE
    return capsys.readouterr().out


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_to_one_run_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    healthy = write_run(tmp_path / "healthy", {"step": 1, "age": 10}).parent
    control = write_run(tmp_path / "damaged", {"step": 1, "age": 10})
    for file in ("metrics.jsonl", "config.toml", "alarms.jsonl"):
        damage(control.parent / file, name)
    for file in ("failures", "outcome", "exit_code", "progress"):
        damage(control / file, name)
    assert status.main([str(control.parent), str(healthy)]) == exit_codes.DONE
    out = capsys.readouterr().out.splitlines()
    assert out[2].startswith(f"{healthy}  ")
    problems = [line for line in out if line.startswith(f"problem: {control.parent}")]
    assert 1 <= len(problems) <= 5, "a line for each file"
    assert status.main([str(control.parent), str(healthy), "--json"]) == exit_codes.DONE


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
def test_alerts_of_the_page_select_what_needs_a_look() -> None:
    page = (ROOT / "docs" / "howto" / "status.md").read_text()
    found = re.search(r"^needs_a_look='(.*?)'$", page, re.DOTALL | re.MULTILINE)
    assert found is not None
    fine = {"state": "running", "why": "", "last_alarm_age": None}
    bad = [{"state": "failed"}, {"state": "unknown"}, {"why": "no line"}, {"last_alarm_age": 9.5}]
    bad += [{"last_failure_age": 300}]
    good = [{}, {"last_alarm_age": 601}, {"state": "stopped", "why": "SIGTERM"}, {"state": "done"}]
    lines = "".join(json.dumps(fine | {"run": run} | run) + "\n" for run in [*good, *bad])
    done = subprocess.run(
        ["jq", "-c", f"{found[1]} | .run"], input=lines, capture_output=True, text=True, check=True
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == bad
