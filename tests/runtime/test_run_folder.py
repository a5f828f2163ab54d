"""Files of a run: no damage blocks or ends their readers and writers, and none is destroyed."""

import json
import os
from pathlib import Path

import pytest

from launcher.failures import newest_saved_step, record_end, record_failure
from metrics.metrics_file import read_metrics
from runtime.exit_codes import clear_exit_code, read_exit_code, write_exit_code
from runtime.filesystem import atomic_write_text
from runtime.run_folder import LineFile, read_number, read_records, read_text, remove_file
from tests.lib.damage import DAMAGES, damage
from tests.lib.durability import file_size_limit
from tools.slurm_end import count_requeue, decide

EVERY_DAMAGE = pytest.mark.parametrize("name", DAMAGES)


@EVERY_DAMAGE
def test_readers_return_at_once(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file"
    damage(path, name)
    assert len(read_text(path)) < 1_000_000
    assert read_number(path) in (None, 1)
    for read in (read_records, read_metrics):
        records, problems = read(path)
        assert all(isinstance(record, dict) and record for record in records)
        assert len(problems) <= 1
        assert problems or records or name == "empty" or not path.exists() or name == "unreadable"


@EVERY_DAMAGE
def test_lines_are_appended_and_nothing_is_destroyed(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file"
    damage(path, name)
    was_file = path.is_file() and not path.is_symlink() and name != "sparse"
    before = path.read_bytes() if was_file else b""
    file = LineFile(path)
    if name == "sparse":
        # A file of any size can grow.
        assert not list(tmp_path.glob("corrupt-*"))
        return
    file.write('{"step": 1}')
    file.close()
    content = path.read_bytes()
    assert content.startswith(before)
    assert content.endswith(b'{"step": 1}\n')
    assert content[len(before) : -12] in (b"", b"\n")
    assert len(list(tmp_path.glob("corrupt-file-*"))) == (not was_file)


@EVERY_DAMAGE
@pytest.mark.parametrize(
    "damaged", ["failures", "progress", "outcome", "exit_code", "requeues", "rejection"]
)
def test_launchers_decide_despite_damage(tmp_path: Path, damaged: str, name: str) -> None:
    control = tmp_path / "control"
    damage(control / damaged, name)
    (tmp_path / "checkpoints" / "step-00000020").mkdir(parents=True)
    assert newest_saved_step(control) == 20
    assert [record_failure(control, lines=["it"], codes={}) for _ in range(3)] == [1, 2, 3]
    record_end(control, "done")
    assert read_exit_code(control) in (None, 1)
    assert decide(control, is_warned=False)[0] in (75, 93)
    clear_exit_code(control)
    assert read_exit_code(control) is None
    write_exit_code(control, 75)
    assert read_exit_code(control) == 75
    (control / "requeues").unlink()
    assert [count_requeue(control) for _ in range(2)] == [1, 2]


def test_progress_is_found_in_the_checkpoints(tmp_path: Path) -> None:
    control = tmp_path / "control"
    control.mkdir()
    assert newest_saved_step(control) == 0
    (control / "progress").write_text("10\n")
    assert newest_saved_step(control) == 10
    for name in ("step-00000020", "corrupt-step-00000030-ab", ".tmp-step-00000040-ab"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_saved_step(control) == 20


def test_full_disk_of_a_launcher_is_an_alarm(tmp_path: Path) -> None:
    control = tmp_path / "control"
    control.mkdir()
    with file_size_limit(0):
        assert record_failure(control, lines=["it"], codes={}) == 1
        write_exit_code(control, 1)
        code, reason = decide(control, is_warned=False)
    assert code == 93
    assert "cannot count the requeues" in reason
    assert record_failure(control, lines=["it"], codes={}) == 1
    assert json.loads((control / "failures").read_text())["attempt"] == 1


def test_folder_in_the_place_of_a_file_is_kept(tmp_path: Path) -> None:
    damage(tmp_path / "config.toml", "folder")
    os.mkfifo(tmp_path / ".config.toml")
    atomic_write_text(tmp_path / "config.toml", "new")
    assert (tmp_path / "config.toml").read_text() == "new"
    (kept,) = tmp_path.glob("corrupt-config.toml-*")
    assert (kept / "file").exists()


def test_failed_deletion_is_an_alarm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (file := tmp_path / "file").touch()
    remove_file(file / "exit_code")
    (text,) = caplog.messages
    assert text.startswith(f"ALARM: {file / 'exit_code'} was not deleted: ")
