"""What a Slurm job is to train, found and checked without Slurm."""

from pathlib import Path

import pytest
import tomli

from config import ConfigError, load_config
from runtime import exit_codes
from runtime.control import lock_run
from tests.test_train import ROOT
from tools import slurm_begin
from tools.slurm_begin import main, overrides_of, toml_text

CONFIG = ROOT / "train_configs" / "debug_model.toml"
JOB = {"SLURM_JOB_NUM_NODES": "2", "NGPU": "1"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where outputs/ may appear."""
    monkeypatch.chdir(tmp_path)


def begin(
    capsys: pytest.CaptureFixture[str], *overrides: str, **environment: str
) -> tuple[int, list[str], str]:
    code = main([str(CONFIG), *overrides], JOB | environment)
    told = capsys.readouterr()
    *texts, rest = told.out.split("\0")
    assert rest == ""
    return code, texts, told.err


def test_arguments_come_out_as_they_went_in(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    hostile = f"--job.output_dir={tmp_path}/a b\n'\"$(x)`y`;*\\"
    code, texts, _ = begin(capsys, "--job.name", "one", hostile)
    assert code == exit_codes.DONE
    folder = f"{hostile.partition('=')[2]}/one"
    assert texts == [folder, str(CONFIG), "--job.name", "one", hostile]


def test_a_relative_folder_stays_one(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert begin(capsys, "--job.name", "never")[1][0] == "outputs/never"
    modes = {
        path: (tmp_path / path).stat().st_mode & 0o777
        for path in ("outputs", "outputs/never", "outputs/never/control")
    }
    (tmp_path / "other").mkdir()
    # The runs' folder may be everybody's, a run is its owner's alone.
    ordinary = (tmp_path / "other").stat().st_mode & 0o777
    assert list(modes.values()) == [ordinary, 0o700, 0o700]
    assert ordinary != 0o700


@pytest.mark.parametrize(
    ("overrides", "environment", "told"),
    [
        (["--optimizer.lrr", "1"], {}, "optimizer.lrr: unknown key"),
        (["--parallelism.tensor_parallel_degree", "3"], {}, "do not make 2 ranks"),
        ([], {"NGPU": "none"}, "NGPU"),
        ([], {"LOG_RANK": "2"}, "LOG_RANK: 2: a node's ranks are 0 to"),
        ([], {"SWEEP": "no such file", "SLURM_ARRAY_TASK_ID": "0"}, "no such file"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    overrides: list[str],
    environment: dict[str, str],
    told: str,
    capsys: pytest.CaptureFixture[str],
):
    code, texts, error = begin(capsys, *overrides, **environment)
    assert (code, texts) == (exit_codes.BAD_CONFIG, [])
    assert told in error
    assert "Traceback" not in error


def test_the_past_is_forgotten_at_the_first_start_only(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    control = tmp_path / "debug_model" / "control"
    folder = f"--job.output_dir={tmp_path}"
    for environment, left in (({"SLURM_RESTART_COUNT": "1"}, ["requeues"]), ({}, [])):
        control.mkdir(parents=True, exist_ok=True)
        exit_codes.report(control, 75)
        (control / "requeues").touch()
        assert begin(capsys, folder, **environment)[0] == exit_codes.DONE
        assert sorted({p.name for p in control.iterdir()} - {"lock"}) == left


def test_a_stop_written_while_a_requeued_job_waits_is_heard(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    control = tmp_path / "debug_model" / "control"
    control.mkdir(parents=True)
    (control / "stop").touch()
    folder = f"--job.output_dir={tmp_path}"
    code, texts, error = begin(capsys, folder, SLURM_RESTART_COUNT="1")
    assert (code, texts) == (exit_codes.DONE, [])
    assert "stop" in error
    # Submitted anew, it is to go on.
    assert begin(capsys, folder)[1]


def test_a_run_that_another_job_writes_to_is_left_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(slurm_begin, "LOCK_SECONDS", 0.5)
    control = tmp_path / "debug_model" / "control"
    control.mkdir(parents=True)
    exit_codes.report(control, 75)
    with lock_run(control):
        for environment in ({}, {"SLURM_RESTART_COUNT": "1"}):
            code, _, error = begin(capsys, f"--job.output_dir={tmp_path}", **environment)
            assert code == exit_codes.BAD_CONFIG
            assert "is writing to" in error
    assert exit_codes.reported(control) == 75


def test_a_requeued_job_waits_for_the_last_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    control = tmp_path / "debug_model" / "control"
    control.mkdir(parents=True)
    lock = lock_run(control)
    monkeypatch.setattr(slurm_begin.time, "sleep", lambda seconds: lock.close())
    folder = f"--job.output_dir={tmp_path}"
    assert begin(capsys, folder)[0] == exit_codes.BAD_CONFIG
    assert not lock.closed
    assert begin(capsys, folder, SLURM_RESTART_COUNT="1")[0] == exit_codes.DONE


def sweep(folder: Path, text: str) -> Path:
    path = folder / "sweep.toml"
    path.write_text(text)
    return path


def test_a_run_of_a_sweep_comes_last_and_has_its_own_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    path = sweep(tmp_path, "[[runs]]\n[[runs]]\n[runs.optimizer]\nlr = 0.25\n")
    asked = ["--optimizer.lr", "0.5", "--job.name", "mine"]
    code, texts, _ = begin(capsys, *asked, SWEEP=str(path), SLURM_ARRAY_TASK_ID="1")
    assert code == exit_codes.DONE
    config = load_config(Path(texts[1]), texts[2:])
    assert (config.optimizer.lr, config.job.name) == (0.25, "mine-1")
    assert texts[0] == "outputs/mine-1"
    sweep(tmp_path, "[[runs]]\njob.name = 'its_own'\n")
    texts = begin(capsys, *asked, SWEEP=str(path), SLURM_ARRAY_TASK_ID="0")[1]
    assert load_config(Path(texts[1]), texts[2:]).job.name == "its_own"


@pytest.mark.parametrize(
    ("text", "task", "told"),
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
    ],
)
def test_a_sweep_that_is_wrong_is_refused_by_file_and_run(
    text: str, task: str | None, told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    path = sweep(tmp_path, text)
    environment = {} if task is None else {"SLURM_ARRAY_TASK_ID": task}
    code, texts, error = begin(capsys, SWEEP=str(path), **environment)
    assert (code, texts) == (exit_codes.BAD_CONFIG, [])
    assert told in error
    assert str(path) in error


def test_a_bad_command_line_is_not_the_sweeps_fault(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    path = sweep(tmp_path, "[[runs]]")
    task = {"SWEEP": str(path), "SLURM_ARRAY_TASK_ID": "0"}
    assert "sweep" not in begin(capsys, "--optimizer.lrr", "1", **task)[2]


@pytest.mark.parametrize(
    "value", [True, 3, 1e-3, "a\n'\"\\ \x7f é", [1, [2]], [{"a b": "c", "d": [True]}], {}]
)
def test_values_survive_being_overrides(value: object):
    assert tomli.loads(f"value = {toml_text(value)}") == {"value": value}
    assert "\n" not in toml_text(value)


def test_a_missing_sweep_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="nowhere"):
        overrides_of(tmp_path / "nowhere", "0", name="run")
