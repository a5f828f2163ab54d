"""Links in a run's folder are not followed: no file elsewhere is written or deleted."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest

from checkpoint.checkpoint_dir import delete, purge
from config import ConfigError
from launcher import launch
from metrics.tracker import TrackedRun
from metrics.trackers import Trackers, tracker_classes
from runtime import exit_codes
from runtime.filesystem import (
    RUN_FILES,
    RUN_FOLDERS,
    atomic_write_text,
    make_folder,
    open_file,
    read_file,
    replaced_file,
)
from runtime.log import logger
from runtime.run_folder import list_checkpoints
from runtime.run_lock import lock_run
from tests.lib.saved import write_checkpoint
from tests.lib.traces import run_steps
from tools import rollback

ROW = pytest.mark.row(34, "No link in a run's folder is followed")
# Files in folders that are checked at the start.
INNER = ("control/lock", "control/outcome", "control/failures", "ledger/rank-00000.jsonl")
PLACES = (*RUN_FILES, *RUN_FOLDERS, *INNER)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder elsewhere, with files of the names that a run writes."""
    folder = tmp_path / "victim"
    for name in (
        "file",
        "lock",
        "exit_code",
        "rejection",
        "outcome",
        "stop",
        "step-00000001/manifest.json",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("precious\n")
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def plant(run: Path, place: str, victim: Path) -> None:
    """Put a link at ``place`` of a run's folder, to a folder of ``victim`` or to a file in it."""
    (run / "control").mkdir(parents=True)
    with suppress(OSError):
        (run / place).rmdir()
    (run / place).parent.mkdir(exist_ok=True)
    (run / place).symlink_to(victim if place in RUN_FOLDERS else victim / "file")


@ROW
@pytest.mark.parametrize("place", PLACES)
def test_start_is_rejected_with_the_link_by_name(
    tmp_path: Path,
    victim: Path,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    record_result: Callable[[str], None],
) -> None:
    monkeypatch.setattr(launch, "run_ranks", lambda *_, **__: pytest.fail("the ranks were started"))
    before, run = contents(victim), tmp_path / "default"
    plant(run, place, victim)
    (tmp_path / "run.toml").touch()
    arguments = [str(tmp_path / "run.toml"), f"--job.output_dir={tmp_path}"]
    assert launch.main(arguments, {"NGPU": "1"}) == exit_codes.BAD_CONFIG
    error = capsys.readouterr().err
    assert error.startswith("job.output_dir: ")
    assert "a symbolic link, which is not followed" in error
    assert repr(str(run / place)) in error
    # Whoever else writes in a run's folder locks it first.
    with pytest.raises(ConfigError, match="a symbolic link, which is not followed"):
        lock_run(run / "control")
    assert contents(victim) == before
    if place == PLACES[0]:
        record_result(f"{len(PLACES)} of {len(PLACES)} links rejected by name, 0 followed")


@ROW
def test_run_folder_and_its_parents_may_be_links(tmp_path: Path) -> None:
    (tmp_path / "scratch" / "run").mkdir(parents=True)
    (tmp_path / "outputs").symlink_to("scratch")
    (tmp_path / "outputs" / "linked").symlink_to("run")
    lock_run_of = tmp_path / "outputs" / "linked" / "control"
    make_folder(lock_run_of)
    with lock_run(lock_run_of):
        assert (tmp_path / "scratch" / "run" / "control" / "lock").read_text() != ""


@ROW
@pytest.mark.parametrize("mode", ["wb", "ab+"])
def test_only_regular_files_without_other_names_are_written(
    tmp_path: Path, victim: Path, mode: str
) -> None:
    before = contents(victim)
    for name, make in {
        "link": lambda path: path.symlink_to(victim / "file"),
        "dangling": lambda path: path.symlink_to(victim / "new"),
        "hard link": lambda path: os.link(victim / "file", path),
        "pipe": os.mkfifo,
        "folder": Path.mkdir,
    }.items():
        make(tmp_path / name)
        with pytest.raises(OSError, match=name.replace("dangling", "link")):
            open_file(tmp_path / name, mode)
    assert contents(victim) == before
    for _ in range(2):
        with open_file(tmp_path / "plain", mode) as file:
            file.write(b"a line\n")
    assert read_file(tmp_path / "plain") == b"a line\n" * (1 if mode == "wb" else 2)


@ROW
def test_links_are_replaced_not_followed(tmp_path: Path, victim: Path) -> None:
    before = contents(victim)
    for name in ("outcome", ".outcome", "trace"):
        (tmp_path / name).symlink_to(victim / "file")
    atomic_write_text(tmp_path / "outcome", "done\n")
    with replaced_file(tmp_path / "trace") as scratch:
        scratch.write_text("a trace")
    found = {p.name: p.read_text() for p in tmp_path.iterdir() if p.is_file()}
    assert found == {"outcome": "done\n", "trace": "a trace"}
    assert not any(path.is_symlink() for path in tmp_path.iterdir())
    assert contents(victim) == before


@ROW
def test_traces_and_curves_follow_no_link(tmp_path: Path, victim: Path) -> None:
    before, traces = contents(victim), tmp_path / "run" / "traces"
    make_folder(traces)
    trace = traces / "trace-step-00000004-rank0.json.gz"
    trace.symlink_to(victim / "file")
    run_steps(traces, range(1, 5), rank=0, enable_trace=True, trace_freq=4)
    assert trace.stat().st_size > 0
    assert [path.name for path in traces.iterdir()] == [trace.name]
    (tmp_path / "run" / "tensorboard").symlink_to(victim)
    with patch.object(logger, "error") as alarm:
        run = TrackedRun("id", "run", "project", tmp_path / "run", {}, None)
        Trackers(tracker_classes(["tensorboard"]), run).finish()
    assert "a symbolic link" in str(alarm.call_args)
    assert contents(victim) == before


@ROW
def test_deleting_a_link_keeps_what_it_points_to(tmp_path: Path, victim: Path) -> None:
    """A checkpoint that is a link is read, as the file system shows it, and deleted as a link."""
    before, folder = contents(victim), tmp_path / "checkpoints"
    folder.mkdir()
    for name in (".tmp-step-00000003-0", ".trash-0", "step-00000001"):
        (folder / name).symlink_to(victim)
    (folder / "step-00000002").symlink_to(write_checkpoint(tmp_path / "elsewhere"))
    purge(folder, keep=1, keep_every=0, verified=set())
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000002"]
    delete(folder.iterdir())
    assert not list(folder.iterdir())
    assert contents(victim) == before
    assert (tmp_path / "elsewhere" / "manifest.json").exists()


@ROW
def test_rollback_follows_no_link(
    tmp_path: Path, victim: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(victim)
    plant(tmp_path / "run", "control/lock", victim)
    write_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000001")
    assert rollback.main([str(tmp_path / "run"), "1"]) == exit_codes.BAD_CONFIG
    assert "a symbolic link, which is not followed" in capsys.readouterr().err
    assert contents(victim) == before
