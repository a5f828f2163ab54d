"""The whole program as users start it: real launcher, real ranks, real files, real signals."""

import os
import pty
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from config import load_config
from optim.schedule import lr_factor
from runtime.imports import import_variables
from runtime.provenance import attempt_numbers, read_attempt, read_content
from tests.lib import forked
from tests.lib.launch import LONG, curve, records, run, start, wait_for_steps
from tests.lib.marks import slow
from tests.lib.patience import PATIENCE_SECONDS
from tests.lib.repository import ROOT
from tests.lib.warm import SHARDLOOM
from tools.status import read_status

# Forked ranks with these keys train as those of run_train.sh.
AS_LAUNCHED = {"activation_checkpoint.mode": "selective", "validation.enable": "true"}


def interrupt(folder: Path, number: signal.Signals, *, whole_session: bool) -> tuple[int, str]:
    """Start a long run and stop it once it has made a few steps."""
    process = start(folder, 2, **LONG)
    wait_for_steps(folder, process)
    (os.killpg if whole_session else os.kill)(process.pid, number)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, output


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    run(folder, 2, **{"training.steps": "6"})
    return folder


def test_extended_run_continues_bitwise(uninterrupted: Path, tmp_path: Path) -> None:
    forked.run(tmp_path, 2, **AS_LAUNCHED, **{"training.steps": "3"})
    output = run(tmp_path, 2, **{"training.steps": "6"})
    assert "resumed from step 3" in output
    # The first start had no launcher.
    assert "changed since attempt 1: variable NGPU: absent to 2" in output
    provenance = tmp_path / "debug_model" / "provenance"
    before, after = (read_attempt(provenance, number) for number in (1, 2))
    assert (before.resumed_from, after.resumed_from) == (None, 3)
    packages = [read_content(provenance, one.software)["packages"] for one in (before, after)]
    assert packages[0] == packages[1]
    assert before.config != after.config
    lines = read_status(tmp_path / "debug_model", time.time()).provenance_lines
    assert "  since attempt 1: training.steps: 3 to 6" in lines
    assert curve(tmp_path) == curve(uninterrupted)


def test_ranks_that_are_not_shown_have_logs(uninterrupted: Path, tmp_path: Path) -> None:
    logs = min((uninterrupted / "debug_model" / "logs").iterdir())
    assert sorted(path.name for path in logs.iterdir()) == ["rank-0.out", "rank-1.out"]
    assert "done: 6 steps" in (logs / "rank-1.out").read_text()
    assert logs.stat().st_mode & 0o777 == 0o700
    refused = start(tmp_path, 2, **{"data.source": "files", "data.path": "nowhere"})
    assert refused.wait(PATIENCE_SECONDS) == 2
    assert not (tmp_path / "debug_model").exists()


def test_start_records_its_provenance(uninterrupted: Path) -> None:
    folder = uninterrupted / "debug_model" / "provenance"
    assert attempt_numbers(folder)[0] == 1
    attempt = read_attempt(folder, 1)
    assert attempt.command[1:3] == ["train", "debug_model"]
    assert "--training.steps" in attempt.command
    assert attempt.working_directory == os.getcwd()
    assert attempt.world_size == 2
    assert [(node.hosts, node.ranks) for node in attempt.nodes] == [([socket.gethostname()], 2)]
    assert attempt.variables["NGPU"] == "2"
    assert read_content(folder, attempt.software)["packages"]["torch"] == version("torch")
    resolved = read_content(folder, attempt.config)
    assert resolved["training"]["steps"] == 6
    assert (attempt.commit != "") == (ROOT / ".git").exists()


def test_finished_run_does_nothing(uninterrupted: Path) -> None:
    before = records(uninterrupted)
    forked.run(uninterrupted, 2, **AS_LAUNCHED, **{"training.steps": "6"})
    assert "done: 6 steps" in forked.log(uninterrupted)
    assert records(uninterrupted) == before


@pytest.mark.usefixtures("warm_starts")
def test_resolved_config_runs_again(uninterrupted: Path, tmp_path: Path) -> None:
    config = uninterrupted / "debug_model" / "config.toml"
    environment = os.environ | import_variables(os.environ)
    environment |= {"NGPU": "2", "CONFIG_FILE": str(config)}
    # As run_train.sh does.
    command = [sys.executable, SHARDLOOM, "train", "--job.output_dir", str(tmp_path)]
    subprocess.run(
        command, env=environment, check=True, capture_output=True, timeout=PATIENCE_SECONDS
    )
    assert curve(tmp_path) == curve(uninterrupted)


@pytest.mark.parametrize(
    ("number", "whole_session"),
    [
        # test_launch.py has all signals to the launcher, test_resume.py to the ranks.
        slow(signal.SIGTERM, False, id="SIGTERM-to-launcher"),
        slow(signal.SIGUSR1, False, id="SIGUSR1-to-launcher"),
        pytest.param(signal.SIGINT, True, id="Ctrl-C"),
    ],
)
def test_stopped_run_saves_and_resumes(
    tmp_path: Path, number: signal.Signals, whole_session: bool
) -> None:
    code, output = interrupt(tmp_path, number, whole_session=whole_session)
    assert code == 75, output
    assert "Traceback" not in output
    run_folder = tmp_path / "debug_model"
    assert (run_folder / "control/outcome").read_text() == f"stopped {number.name}\n"
    step = int((run_folder / "control/progress").read_text())
    assert [p.name for p in (run_folder / "checkpoints").iterdir()] == [f"step-{step:08d}"]
    resumed = run(tmp_path, 2, **LONG | {"training.steps": str(step + 2)})
    assert f"resumed from step {step} " in resumed
    assert sorted(curve(tmp_path)) == list(range(1, step + 3))


def test_stop_file_of_before_is_deleted_and_one_written_while_ranks_start_is_obeyed(
    tmp_path: Path,
) -> None:
    control, logs = (tmp_path / "debug_model" / name for name in ("control", "logs"))
    control.mkdir(parents=True)
    (control / "stop").touch()
    process = start(tmp_path, 2, **LONG)
    # The launcher makes it just before it starts the ranks, which import PyTorch for seconds.
    while not logs.exists():
        assert process.poll() is None
        time.sleep(0.01)
    (control / "stop").unlink()
    (control / "stop").touch()
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, output
    assert (control / "outcome").read_text() == "stopped stop file\n"
    # The next start does not obey it again.
    output = run(tmp_path, 2, **{"training.steps": "2"})
    assert "control/stop is from before this start: removed" in output
    assert (control / "outcome").read_text() == "done\n"


VALIDATED = LONG | {"validation.enable": "true", "validation.freq": "2"}


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_steps")
    run(folder, 2, **VALIDATED | {"training.steps": "2"})
    return folder


@pytest.mark.parametrize("total", [4, 6])
def test_stop_ends_a_validation_that_the_next_start_repeats(
    two_steps: Path, tmp_path: Path, total: int
) -> None:
    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    # A minute and more for the validation after step 4.
    longer = {"training.steps": str(total), "validation.steps": "1000"}
    process = start(tmp_path, 2, **VALIDATED | longer)
    # Two validations and four steps.
    wait_for_steps(tmp_path, process, n_lines=6)
    control = tmp_path / "debug_model" / "control"
    (control / "stop").touch()
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, output
    assert "validation: stopped" in output
    assert (control / "outcome").read_text() == "stopped stop file\n"
    assert (control / "progress").read_text() == "4\n"
    run(tmp_path, 2, **VALIDATED | {"training.steps": str(total)})
    assert (control / "outcome").read_text() == "done\n"
    events = [(r["step"], "validation_loss" in r) for r in records(tmp_path)]
    validations = [(step, True) for step in range(0, total + 1, 2)]
    assert events == sorted([*validations, *((step, False) for step in range(1, total + 1))])


def test_run_whose_terminal_closes_saves(tmp_path: Path) -> None:
    terminal, other_end = pty.openpty()
    metrics = tmp_path / "debug_model" / "metrics.jsonl"
    process = start(tmp_path, 1, terminal=other_end, **LONG)
    os.close(other_end)
    deadline = time.monotonic() + PATIENCE_SECONDS
    try:
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 5:
            assert time.monotonic() < deadline
            # Otherwise the terminal would be full, and the run would wait.
            if select.select([terminal], [], [], 0.1)[0]:
                os.read(terminal, 1 << 16)
        os.close(terminal)
        assert process.wait(PATIENCE_SECONDS) == 75
    finally:
        process.kill()
    assert (tmp_path / "debug_model/control/outcome").read_text() == "stopped SIGHUP\n"
    assert len(list((tmp_path / "debug_model/checkpoints").iterdir())) == 1


def test_second_run_of_the_same_job_is_refused(tmp_path: Path) -> None:
    begin = time.monotonic()
    first = start(tmp_path, 1, **LONG)
    wait_for_steps(tmp_path, first)
    startup = time.monotonic() - begin
    second = start(tmp_path, 2, **{"training.steps": "6"})
    # Less than the launcher grants ranks to save: the one that was not refused ends by itself.
    output, _ = second.communicate(timeout=2 * startup + 15)
    assert second.returncode == 2, output
    assert "job.name" in output
    os.kill(first.pid, signal.SIGTERM)
    assert first.wait(PATIENCE_SECONDS) == 75


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    broken = {"optimizer.lr": "1e300", "lr_scheduler.warmup_steps": "0", "training.steps": "6"}
    process = start(tmp_path, 1, **broken)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 93, output
    assert "not finite" in output
    assert not list((tmp_path / "debug_model").glob("checkpoints/step-*"))


def test_log_line_says_what_users_look_for(uninterrupted: Path) -> None:
    keys = {"loss", "grad_norm", "lr", "tokens_per_second", "mfu", "mfu_causal", "memory_gib"}
    steps = [record for record in records(uninterrupted) if "loss" in record]
    assert all(keys | {"step", "data_wait"} <= record.keys() for record in steps)
    assert {(record["skipped_steps"], record["bad_records"]) for record in steps} == {(0, 0)}
    config = load_config(uninterrupted / "debug_model" / "config.toml", [])
    factors = [lr_factor(n, config.lr_scheduler, total_steps=12) for n in range(1, 7)]
    assert [record["lr"] for record in steps] == [config.optimizer.lr * f for f in factors]
    validated = [record for record in records(uninterrupted) if "validation_loss" in record]
    assert [record["step"] for record in validated] == [0, 6]
