"""Selection and checks of a Slurm job's run, without Slurm."""

import io
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomli

from config import ConfigError, load_config
from config.job_config import Job
from launcher.failures import record_end, record_failure
from launcher.launch import head_ports
from runtime import exit_codes, run_lock
from runtime.run_folder import remove_stop_file
from runtime.run_lock import lock_run
from tests.lib.repository import ROOT
from tools import slurm_begin
from tools.cli import toml_text
from tools.slurm_begin import main, overrides_of
from tools.status import read_status

CONFIG = ROOT / "train_configs" / "debug_model.toml"
JOB = {"SLURM_JOB_NUM_NODES": "2", "NGPU": "1"}
ROLLED_BACK = f"stopped {exit_codes.ROLLED_BACK}4"


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in ``tmp_path``, where outputs/ may be created."""
    monkeypatch.chdir(tmp_path)


def begin(
    capsys: pytest.CaptureFixture[str], *overrides: str, **environment: str
) -> tuple[int, list[str], str]:
    code = main([str(CONFIG), *overrides], JOB | environment)
    captured = capsys.readouterr()
    *texts, rest = captured.out.split("\0")
    assert rest == ""
    return code, texts, captured.err


def test_arguments_are_printed_verbatim(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    hostile = f"--job.output_dir={tmp_path}/a b\n'\"$(x)`y`;*\\"
    code, texts, _ = begin(capsys, "--job.name", "one", hostile)
    assert code == exit_codes.DONE
    folder = f"{hostile.partition('=')[2]}/one"
    assert texts[:1] + texts[3:] == [folder, str(CONFIG), "--job.name", "one", hostile]


def test_arguments_are_printed_as_the_bytes_that_bash_passed(monkeypatch: pytest.MonkeyPatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stdout)
    assert main([str(CONFIG), "--job.name=one", "--job.output_dir=\u00fc"], JOB) == exit_codes.DONE
    folder, *_, override, _ = stdout.buffer.getvalue().split(b"\0")
    assert (folder, override) == (b"\xc3\xbc/one", b"--job.output_dir=\xc3\xbc")


@pytest.mark.usefixtures("warm_starts")
def test_a_model_of_one_s_own_may_print(tmp_path: Path):
    (tmp_path / "printing_model.py").write_text("from models.llama3 import SPEC\nprint('Hello')\n")
    arguments = [str(CONFIG), "--model.name=printing_model:SPEC"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tools.slurm_begin", *arguments],
        env=os.environ | JOB | {"PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
        check=True,
    )
    folder, _, _, *texts = done.stdout.split("\0")
    assert [folder, *texts] == ["outputs/debug_model", *arguments, ""]
    assert done.stderr == "Hello\n"


def test_relative_output_dir_stays_relative(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert begin(capsys, "--job.name", "never")[1][0] == "outputs/never"
    modes = {
        path: (tmp_path / path).stat().st_mode & 0o777
        for path in ("outputs", "outputs/never", "outputs/never/control")
    }
    (tmp_path / "other").mkdir()
    # The output folder may be shared, but only its owner can read a run.
    ordinary = (tmp_path / "other").stat().st_mode & 0o777
    assert list(modes.values()) == [ordinary, 0o700, 0o700]
    assert ordinary != 0o700


@pytest.mark.parametrize(
    ("overrides", "environment", "message"),
    [
        (["--optimizer.lrr", "1"], {}, "optimizer.lrr: unknown key"),
        (["--job.output_dir", "/proc/none"], {}, "job.output_dir: "),
        (["--parallelism.tensor_parallel_degree", "3"], {}, "does not divide 2 ranks"),
        ([], {"NGPU": "none"}, "NGPU"),
        ([], {"LOG_RANK": "2"}, "LOG_RANK: 2: a node's ranks are 0 to"),
        ([], {"SWEEP": "no such file", "SLURM_ARRAY_TASK_ID": "0"}, "no such file"),
    ],
)
def test_invalid_run_is_rejected(
    overrides: list[str],
    environment: dict[str, str],
    message: str,
    capsys: pytest.CaptureFixture[str],
):
    code, texts, error = begin(capsys, *overrides, **environment)
    assert (code, texts) == (exit_codes.BAD_CONFIG, [])
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("environment", "code"),
    [
        # 8 + 1 GPUs may divide what 8 + 8 do not.
        ({"SLURM_GPUS": "9"}, exit_codes.DONE),
        ({}, exit_codes.BAD_CONFIG),
        ({"SLURM_GPUS": "8", "SLURM_JOB_NUM_NODES": "1"}, exit_codes.BAD_CONFIG),
        ({"SLURM_GPUS": "9", "NGPU": "8"}, exit_codes.BAD_CONFIG),
    ],
)
def test_launchers_check_gpus_that_nodes_have_unequal_numbers_of(
    environment: dict[str, str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"NGPU": "", "SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": ""} | environment
    degree = "--parallelism.tensor_parallel_degree=3"
    assert begin(capsys, degree, **keys)[0] == code


def test_only_first_start_clears_exit_code_and_requeues(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    control = tmp_path / "debug_model" / "control"
    folder = f"--job.output_dir={tmp_path}"
    for environment, left in (({"SLURM_RESTART_COUNT": "1"}, ["requeues"]), ({}, ["old_stop"])):
        control.mkdir(parents=True, exist_ok=True)
        exit_codes.write_exit_code(control, 75)
        (control / "requeues").touch()
        assert begin(capsys, folder, **environment)[0] == exit_codes.DONE
        assert sorted({p.name for p in control.iterdir()} - {"lock"}) == left


@pytest.mark.parametrize(
    ("outcome", "why"),
    [("", "stop file"), ("stopped SIGTERM", "stop file"), (ROLLED_BACK, "rolled back to step 4")],
)
def test_stop_file_ends_a_requeued_job(
    outcome: str, why: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    control = tmp_path / "debug_model" / "control"
    control.mkdir(parents=True)
    (control / "stop").touch()
    record_failure(control, lines=["a rank died"], codes={0: 1})
    exit_codes.write_exit_code(control, exit_codes.FAILED)
    (control / "outcome").write_text(outcome)
    os.utime(control / "outcome", (0, 0))
    if outcome == ROLLED_BACK:
        record_end(control, outcome)
        (control / "outcome").write_text(outcome)
    folder = f"--job.output_dir={tmp_path}"
    code, texts, error = begin(capsys, folder, SLURM_RESTART_COUNT="1")
    assert (code, texts) == (exit_codes.DONE, [])
    assert "stop" in error
    found = read_status(tmp_path / "debug_model", time.time() + 1)
    assert (found.state, found.why) == ("stopped", why)
    # A new submission resumes the run.
    assert begin(capsys, folder)[1]


@pytest.mark.parametrize("outcome", ["", "stopped SIGUSR1", ROLLED_BACK])
def test_restart_does_not_obey_a_stop_file_from_before_its_job(
    outcome: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    """Whatever ended the run before; its ranks delete the file, if they get that far."""
    control = tmp_path / "debug_model" / "control"
    control.mkdir(parents=True)
    (control / "stop").touch()
    (control / "outcome").write_text(outcome)
    os.utime(control / "outcome", (0, 0))
    folder = f"--job.output_dir={tmp_path}"
    assert begin(capsys, folder)[1]
    assert begin(capsys, folder, SLURM_RESTART_COUNT="1")[1]
    # Written again, it is meant for the restart.
    os.utime(control / "stop", (1, 1))
    assert not begin(capsys, folder, SLURM_RESTART_COUNT="1")[1]


def test_restart_does_not_obey_a_stop_file_that_ended_the_run_before(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    """As of a job whose first start had not come so far that it removed the file."""
    control, folder = tmp_path / "debug_model" / "control", f"--job.output_dir={tmp_path}"
    control.mkdir(parents=True)
    (control / "stop").touch()
    (control / "outcome").write_text(f"{exit_codes.STOP_FILE.outcome}\n")
    os.utime(control / "stop", (0, 0))
    code, texts, _ = begin(capsys, folder, SLURM_RESTART_COUNT="1")
    assert code == exit_codes.DONE
    remove_stop_file(control, texts[2])
    assert not (control / "stop").exists()
    (control / "stop").touch()
    os.utime(control / "outcome", (0, 0))
    assert begin(capsys, folder, SLURM_RESTART_COUNT="1")[1] == []


def test_rejected_restart_is_a_failure_of_the_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    """Even if the configuration cannot be read: it was changed while the job was queued."""
    control = tmp_path / "debug_model" / "control"
    control.mkdir(parents=True)
    (control / "lock").touch()
    (control / "outcome").write_text("stopped SIGTERM")
    os.utime(control / "outcome", (0, 0))
    exit_codes.write_exit_code(control, exit_codes.PREEMPTED)
    keys = [f"--job.output_dir={tmp_path}", "--optimizer.lrr=1"]
    code, texts, error = begin(capsys, *keys, SLURM_RESTART_COUNT="1")
    assert (code, texts) == (exit_codes.BAD_CONFIG, [])
    assert "optimizer.lrr: unknown key" in error
    found = read_status(tmp_path / "debug_model", time.time() + 1)
    assert found.state == "failed"
    assert found.why.startswith("rejected: command line: optimizer.lrr: unknown key")


def test_first_start_names_an_old_stop_file(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    control, folder = tmp_path / "debug_model" / "control", f"--job.output_dir={tmp_path}"
    assert begin(capsys, folder)[1][2] == ""
    (control / "stop").touch()
    old = begin(capsys, folder)[1][2]
    # Another job may be about to obey it.
    assert (control / "stop").exists()
    (control / "stop").touch()
    remove_stop_file(control, old)
    assert (control / "stop").exists(), "a request that was repeated"
    remove_stop_file(control, begin(capsys, folder)[1][2])
    assert not (control / "stop").exists()


def test_port_that_is_taken_is_not_chosen(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    folder = f"--job.output_dir={tmp_path}"
    job = {"SLURM_JOB_ID": str(os.getpid())}
    _, (_, free, *_), _ = begin(capsys, folder, **job)
    with socket.create_server(("", int(free))):
        _, (_, other, *_), _ = begin(capsys, folder, **job)
        assert int(other) in set(head_ports(job)) - {int(free)}
        # The user's own port is not exchanged for another.
        assert begin(capsys, folder, MASTER_PORT=free)[1][1] == free


def test_run_locked_by_another_job_is_not_touched(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(slurm_begin, "LOCK_SECONDS", 0.5)
    control = tmp_path / "debug_model" / "control"
    control.mkdir(parents=True)
    exit_codes.write_exit_code(control, 75)
    with lock_run(control):
        for environment in ({}, {"SLURM_RESTART_COUNT": "1"}):
            code, _, error = begin(capsys, f"--job.output_dir={tmp_path}", **environment)
            assert code == exit_codes.BAD_CONFIG
            assert "is writing to" in error
    assert exit_codes.read_exit_code(control) == 75


def test_requeued_job_waits_for_the_lock(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    control = tmp_path / "debug_model" / "control"
    control.mkdir(parents=True)
    lock = lock_run(control)
    monkeypatch.setattr(run_lock, "WAIT_SECONDS", 0.0)
    monkeypatch.setattr(slurm_begin.time, "sleep", lambda seconds: lock.close())
    folder = f"--job.output_dir={tmp_path}"
    assert begin(capsys, folder)[0] == exit_codes.BAD_CONFIG
    assert not lock.closed
    assert begin(capsys, folder, SLURM_RESTART_COUNT="1")[0] == exit_codes.DONE


def sweep(folder: Path, text: str) -> Path:
    path = folder / "sweep.toml"
    path.write_text(text)
    return path


def test_sweep_overrides_win_and_name_the_run(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    path = sweep(tmp_path, "[[runs]]\n[[runs]]\n[runs.optimizer]\nlr = 0.25\n")
    asked = ["--optimizer.lr", "0.5", "--job.name", "mine"]
    code, texts, _ = begin(capsys, *asked, SWEEP=str(path), SLURM_ARRAY_TASK_ID="1")
    assert code == exit_codes.DONE
    config = load_config(Path(texts[3]), texts[4:])
    assert (config.optimizer.lr, config.job.name) == (0.25, "mine-1")
    assert texts[0] == "outputs/mine-1"
    sweep(tmp_path, "[[runs]]\njob.name = 'its_own'\n")
    texts = begin(capsys, *asked, SWEEP=str(path), SLURM_ARRAY_TASK_ID="0")[1]
    assert load_config(Path(texts[3]), texts[4:]).job.name == "its_own"


def test_sweep_overrides_entries_of_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    path = sweep(tmp_path, "[[runs]]\nmodel.args = {n_layers = 4, rope_theta = 1e4}\n")
    # The file has entries of its own.
    file = tmp_path / "run.toml"
    file.write_text("[model.args]\nn_layers = 2\nn_heads = 8\n")
    asked = [str(file), "--model.args.hidden_dim", "512"]
    environment = {"SWEEP": str(path), "SLURM_ARRAY_TASK_ID": "0"}
    assert main(asked, JOB | environment) == exit_codes.DONE
    texts = capsys.readouterr().out.split("\0")[:-1]
    assert load_config(file, texts[4:]).model.args == {
        "n_layers": 4, "n_heads": 8, "hidden_dim": 512, "rope_theta": 1e4
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "task", "message"),
    [
        ("", "0", "must have"),
        ("runs = []", "0", "must have"),
        ("runs = 3", "0", "must have"),
        ("[[runs]]\n[other]\n", "0", "must have"),
        ("[[runs", "0", "sweep.toml"),
        ("[[runs]]", "1", "no runs[1], only 0 to 0"),
        ("[[runs]]\n[[runs]]", None, "--array=0-1"),
        ("runs = [1]", "0", "runs[0] is not a table"),
        ("[[runs]]\nlr = 1", "0", "runs[0].lr"),
        ("[[runs]]\n[[runs]]\noptimizer.lrr = 1", "1", "runs[1]: optimizer.lrr: unknown key"),
        ("[[runs]]\noptimizer.lr = 'x'", "0", "runs[0]: optimizer.lr"),
        ("[[runs]]\nmodel.args = 3", "0", "runs[0]: model.args"),
        ("[[runs]]\nmodel.args.'a.b' = 3", "0", "runs[0]: '--model.args.a.b' is not"),
        ("[[runs]]\njob.output_dir = '$NOWHERE/x'", "0", "runs[0]: job.output_dir: "),
        *(
            ("[[runs]]\n[[runs]]\njob.name = 'debug_model-0'", task, "runs[1] has the folder of")
            for task in ("0", "1")
        ),
        (
            "[[runs]]\njob = {name = 'a', output_dir = '~/b'}\n"
            "[[runs]]\njob = {name = 'a', output_dir = '$HOME/b/'}",
            "0",
            "runs[1] has the folder of runs[0]: ",
        ),
    ],
)
def test_bad_sweep_error_names_file_and_run(
    text: str, task: str | None, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    path = sweep(tmp_path, text)
    environment = {} if task is None else {"SLURM_ARRAY_TASK_ID": task}
    code, texts, error = begin(capsys, SWEEP=str(path), **environment)
    assert (code, texts) == (exit_codes.BAD_CONFIG, [])
    assert message in error
    assert str(path) in error


def test_bad_command_line_does_not_blame_the_sweep(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    path = sweep(tmp_path, "[[runs]]")
    task = {"SWEEP": str(path), "SLURM_ARRAY_TASK_ID": "0"}
    assert "sweep" not in begin(capsys, "--optimizer.lrr", "1", **task)[2]


@pytest.mark.parametrize(
    "value", [True, 3, 1e-3, "a\n'\"\\ \x7f é", [1, [2]], [{"a b": "c", "d": [True]}], {}]
)
def test_toml_text_round_trips(value: object):
    assert tomli.loads(f"value = {toml_text(value)}") == {"value": value}
    assert "\n" not in toml_text(value)


def test_missing_sweep_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="nowhere"):
        overrides_of(tmp_path / "nowhere", "0", Job())
