"""The whole program as users start it: real launcher, real ranks, real files, real signals."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SMALL = {
    "training.seq_len": "32",
    "training.local_batch_size": "2",
    "training.global_batch_size": "8",
    "training.dtype": "float64",
    "metrics.log_freq": "1",
    "metrics.enable_tensorboard": "false",
    "validation.freq": "1000",
    "validation.steps": "1",
    "validation.sample_tokens": "0",
    "lr_scheduler.warmup_steps": "2",
    "lr_scheduler.total_steps": "12",
}


def start(folder: Path, n_ranks: int, **overrides: str) -> subprocess.Popen[str]:
    keys = SMALL | {"job.output_dir": str(folder)} | overrides
    arguments = [part for key, value in keys.items() for part in (f"--{key}", value)]
    environment = os.environ | {"PYTHON": sys.executable, "NGPU": str(n_ranks)}
    return subprocess.Popen(
        [ROOT / "run_train.sh", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(folder: Path, n_ranks: int, **overrides: str) -> str:
    process = start(folder, n_ranks, **overrides)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


def records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "debug_model" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def curve(folder: Path) -> dict[int, tuple[float, float]]:
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in records(folder) if "loss" in r}


def wait_for_steps(folder: Path, process: subprocess.Popen[str]) -> None:
    metrics = folder / "debug_model" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 5:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no steps in two minutes"
        time.sleep(0.1)


def interrupt(folder: Path, number: signal.Signals, *, whole_session: bool) -> tuple[int, str]:
    """Start a long run and stop it once it has made a few steps."""
    process = start(folder, 2, **{"training.steps": "100000", "lr_scheduler.total_steps": "100000"})
    wait_for_steps(folder, process)
    (os.killpg if whole_session else os.kill)(process.pid, number)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    run(folder, 2, **{"training.steps": "6"})
    return folder


def test_extended_run_continues_bitwise(uninterrupted: Path, tmp_path: Path) -> None:
    run(tmp_path, 2, **{"training.steps": "3"})
    output = run(tmp_path, 2, **{"training.steps": "6"})
    assert "resumed from step 3" in output
    assert curve(tmp_path) == curve(uninterrupted)


def test_ranks_that_are_not_shown_have_logs(uninterrupted: Path, tmp_path: Path) -> None:
    logs = min((uninterrupted / "debug_model" / "logs").iterdir())
    assert [path.name for path in logs.iterdir()] == ["rank-1.out"]
    assert "done: 6 steps" in (logs / "rank-1.out").read_text()
    assert logs.stat().st_mode & 0o777 == 0o700
    refused = start(tmp_path, 2, **{"data.source": "files", "data.path": "nowhere"})
    assert refused.wait(120) == 2
    assert not (tmp_path / "debug_model").exists()


def test_finished_run_does_nothing(uninterrupted: Path) -> None:
    before = records(uninterrupted)
    assert "done: 6 steps" in run(uninterrupted, 2, **{"training.steps": "6"})
    assert records(uninterrupted) == before


def test_resolved_config_runs_again(uninterrupted: Path, tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHON": sys.executable,
        "NGPU": "2",
        "CONFIG_FILE": str(uninterrupted / "debug_model" / "config.toml"),
    }
    command = [ROOT / "run_train.sh", "--job.output_dir", str(tmp_path)]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=240)
    assert curve(tmp_path) == curve(uninterrupted)


@pytest.mark.parametrize(
    ("number", "whole_session"),
    [
        pytest.param(signal.SIGTERM, False, id="SIGTERM-to-launcher"),
        # test_launch.py has all signals to the launcher, test_resume.py to the ranks.
        pytest.param(signal.SIGUSR1, False, id="SIGUSR1-to-launcher", marks=pytest.mark.slow),
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
    overrides = {"training.steps": str(step + 2), "lr_scheduler.total_steps": "100000"}
    resumed = run(tmp_path, 2, **overrides)
    assert f"resumed from step {step} " in resumed
    assert sorted(curve(tmp_path)) == list(range(1, step + 3))


def test_second_run_of_the_same_job_is_refused(tmp_path: Path) -> None:
    first = start(tmp_path, 1, **{"training.steps": "100000", "lr_scheduler.total_steps": "100000"})
    wait_for_steps(tmp_path, first)
    second = start(tmp_path, 2, **{"training.steps": "6"})
    # Less than the launcher grants ranks to save: the one that was not refused ends by itself.
    output, _ = second.communicate(timeout=25)
    assert second.returncode == 2, output
    assert "job.name" in output
    os.kill(first.pid, signal.SIGTERM)
    assert first.wait(120) == 75


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    broken = {"optimizer.lr": "1e300", "lr_scheduler.warmup_steps": "0", "training.steps": "6"}
    process = start(tmp_path, 1, **broken)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 93, output
    assert "not finite" in output
    assert not list((tmp_path / "debug_model").glob("checkpoints/step-*"))


def test_log_line_says_what_users_look_for(uninterrupted: Path) -> None:
    keys = {"loss", "grad_norm", "lr", "tokens_per_second", "mfu", "mfu_causal", "memory_gib"}
    steps = [record for record in records(uninterrupted) if "loss" in record]
    assert all(keys | {"step", "data_wait"} <= record.keys() for record in steps)
    assert {(record["skipped_steps"], record["bad_records"]) for record in steps} == {(0, 0)}
    validated = [record for record in records(uninterrupted) if "validation_loss" in record]
    assert [record["step"] for record in validated] == [0, 6]


def test_help_explains_every_key() -> None:
    environment = os.environ | {"PYTHON": sys.executable}
    command = [ROOT / "run_train.sh", "--help"]
    text = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout
    assert len(re.findall(r"^  --\w+\.\w+", text, flags=re.MULTILINE)) > 50
