"""Trackers, planted ones and those of real packages, without a network."""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from metrics import trackers
from metrics.tensorboard_tracker import TensorBoardTracker
from metrics.tracker import TrackedRun
from metrics.trackers import Trackers, check_installed, run_id, tracker_classes
from runtime.log import logger
from tests.lib.processes import seconds_until

WANDB_HEADER_BYTES = 7
# Labels of sources, which may be anything. MLflow allows those before "a+b".
SHARES = {
    f"data_share/{label}": float(number)
    for number, label in enumerate(
        ["a:b", "a_b", "a/b", "维基", "代码", "a+b", "a=b", "a//b", "../a", "a/", "a" * 300]
    )
}
CONFIG = {"optimizer": {"lr": 3e-3}, "model": {"args": {"dim": 64}}}


def tracked(folder: Path, resumed_step: int | None = None) -> TrackedRun:
    folder.mkdir(parents=True, exist_ok=True)
    return TrackedRun(run_id(folder), "books", "novels", folder, CONFIG, resumed_step)


class Planted:
    """Keeps what it gets; raises or waits at the planted steps."""

    def __init__(self, fails: Callable[[int], bool] = lambda step: False) -> None:
        self.fails, self.release = fails, threading.Event()
        self.steps: list[int] = []
        self.texts: list[tuple[int, str, str]] = []
        self.is_finished = False

    def start(self, run: TrackedRun) -> None: ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self.fails(step):
            raise ConnectionError("no route\nto host")
        self.steps.append(step)

    def text(self, step: int, name: str, text: str) -> None:
        self.texts.append((step, name, text))

    def finish(self) -> None:
        self.is_finished = True


class Hanging(Planted):
    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.release.wait()
        super().log(step, values)


def test_failing_tracker_is_one_alarm_and_others_have_all(tmp_path: Path) -> None:
    good, bad = Planted(), Planted(fails=lambda step: 3 <= step <= 5)
    run = tracked(tmp_path)
    with patch.object(logger, "error") as alarm, patch.object(logger, "warning") as warning:
        all_of_them = Trackers({"good": lambda: good, "bad": lambda: bad}, run)
        for step in range(1, 9):
            all_of_them.log(step, {"loss": 1.0})
        all_of_them.finish()
    assert good.steps == list(range(1, 9))
    assert bad.steps == [1, 2, 6, 7, 8]
    assert good.is_finished
    assert bad.is_finished
    assert alarm.call_count == 1
    assert alarm.call_args.args[1:] == ("bad", "ConnectionError: no route")
    assert warning.call_args.args[1:] == ("bad", 3)


def test_tracker_that_does_not_start_is_an_alarm(tmp_path: Path) -> None:
    def build() -> Planted:
        raise ImportError("broken package")

    with patch.object(logger, "error") as alarm, patch.object(logger, "warning") as warning:
        all_of_them = Trackers({"bad": build}, tracked(tmp_path))
        for step in range(5):
            all_of_them.log(step, {"loss": 1.0})
        all_of_them.finish()
    assert "broken package" in str(alarm.call_args)
    assert warning.call_args.args[1:] == ("bad", 5)


def test_hanging_tracker_delays_no_step_and_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "MAX_QUEUED", 10)
    monkeypatch.setattr(trackers, "HANG_SECONDS", 0.05)
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 0.1)
    hanging = Hanging()
    with patch.object(logger, "error") as alarm, patch.object(logger, "warning") as warning:
        all_of_them = Trackers({"hung": lambda: hanging}, tracked(tmp_path))
        all_of_them.log(0, {"loss": 1.0})
        (thread,) = all_of_them._threads
        seconds_until(lambda: thread._queue.empty(), limit=5.0)
        begin = time.perf_counter()
        for step in range(1, 1001):
            all_of_them.log(step, {"loss": 1.0})
        assert time.perf_counter() - begin < 0.5
        seconds_until(lambda: time.perf_counter() - begin > 0.06, limit=5.0)
        all_of_them.log(1001, {"loss": 1.0})
        all_of_them.finish()
    texts = [call.args[0] % call.args[1:] for call in alarm.call_args_list]
    assert len(texts) == 2
    assert "does not answer" in texts[0]
    assert "did not finish" in texts[1]
    # 991 found no room, nor did the call to finish; ten wait.
    assert warning.call_args.args[1:] == ("hung", 991 + 1 + 10)
    hanging.release.set()


def test_warnings_and_alarms_are_texts_at_their_step(tmp_path: Path) -> None:
    planted = Planted()
    all_of_them = Trackers({"planted": lambda: planted}, tracked(tmp_path, resumed_step=20))
    with patch.object(logger, "handlers", [*logger.handlers]):
        logger.info("not this")
        logger.warning("rank %d is slow", 3)
        all_of_them.log(21, {"loss": 1.0})
        all_of_them.end_step(22)
        logger.error("ALARM: disk full")
        all_of_them.finish()
        logger.error("after the end")
    assert planted.texts == [
        (20, "warnings", "rank 3 is slow"),
        (22, "alarms", "ALARM: disk full"),
    ]


def test_run_keeps_its_id(tmp_path: Path) -> None:
    first = run_id(tmp_path)
    assert run_id(tmp_path) == first
    for damaged in ("", "../../x", "a b", "x" * 1000):
        (tmp_path / "run_id").write_text(damaged)
        new = run_id(tmp_path)
        assert new.isalnum()
        assert new != damaged
        assert run_id(tmp_path) == new


def test_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "is_installed", lambda name: name != "mlflow")
    with pytest.raises(ValueError, match=r"metrics\.trackers: mlflow .* -m pip install mlflow"):
        check_installed(["tensorboard", "mlflow"])


def track(name: str, folder: Path) -> TrackedRun:
    """Two attempts of one run; the second resumes from step 2."""
    for resumed, steps in ((None, (1, 2, 3)), (2, (3, 4))):
        run = tracked(folder, resumed)
        with patch.object(logger, "error") as alarm:
            all_of_them = Trackers(tracker_classes([name]), run)
            for step in steps:
                all_of_them.log(step, {"loss": 1.0 / step, "mfu": None} | SHARES)
            all_of_them.text("sample", "def <f>\n\t#*x*")
            all_of_them.finish()
        assert not alarm.called, alarm.call_args
        # wandb names a start's folder by the second.
        second = int(time.time())
        seconds_until(lambda second=second: name != "wandb" or time.time() >= second + 1, limit=5.0)
    return run


def test_tensorboard_has_texts(tmp_path: Path) -> None:
    track("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]
    assert {*events.Tags()["scalars"]} == {"loss", *SHARES}
    (last,) = events.Tensors("sample/text_summary")[-1:]
    assert last.tensor_proto.string_val == [b"    def <f>\n    \t#*x*\n"]


def test_tensorboard_purges_what_is_repeated(tmp_path: Path) -> None:
    """Killed before its first checkpoint, then rolled back to step 1 and to step 3."""
    for steps in ((0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 2, 3, 4, 4)):
        tracker = TensorBoardTracker()
        tracker.start(tracked(tmp_path))
        for number, step in enumerate(steps):
            # Another line of the same step.
            tracker.log(step, {"validation_loss": float(number)})
            tracker.log(step, {"loss": float(number)})
        tracker.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for name in ("loss", "validation_loss"):
        points = [(event.step, event.value) for event in events.Scalars(name)]
        assert points == [(0, 0.0), (1, 1.0), (2, 4.0), (3, 5.0), (4, 7.0)]


def test_mlflow_goes_on_in_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = track("mlflow", tmp_path / "outputs" / "books")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/outputs/mlflow.db")
    experiment = client.get_experiment_by_name("novels")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.data.tags["shardloom.run_id"] == run.id
    assert (found.info.run_name, found.info.status) == ("books", "FINISHED")
    assert found.data.params["optimizer.lr"] == "0.003"
    shares = {name: v for name, v in found.data.metrics.items() if name.startswith("data_share/")}
    assert sorted(shares.values()) == [*SHARES.values()]
    allowed = [*SHARES][:5]
    assert [shares[name] for name in allowed] == [SHARES[name] for name in allowed]
    points = client.get_metric_history(found.info.run_id, "loss")
    assert sorted((p.step, p.value) for p in points) == [
        (1, 1.0), (2, 0.5), (3, 1 / 3), (3, 1 / 3), (4, 0.25)
    ]  # fmt: skip
    assert [f.path for f in client.list_artifacts(found.info.run_id)] == ["sample"]


def leveldb_records(data: bytes, offset: int) -> Iterator[bytes]:
    """Records of a LevelDB log, in which blocks of 32 KiB hold parts: crc, length, kind, bytes."""
    whole, position = b"", 0
    while position + 7 <= len(data):
        in_block = (position + offset) % 32768
        if in_block > 32768 - 7:
            position += 32768 - in_block
            continue
        length, kind = (
            int.from_bytes(data[position + 4 : position + 6], "little"),
            data[position + 6],
        )
        part = data[position + 7 : position + 7 + length]
        whole = part if kind in (1, 2) else whole + part
        if kind in (1, 4):
            yield whole
        position += 7 + length


def test_wandb_offline_goes_on_in_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = track("wandb", tmp_path)
    from wandb.proto.wandb_internal_pb2 import Record

    points: list[tuple[int, float]] = []
    ids, names = set(), set()
    for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        for data in leveldb_records(path.read_bytes()[WANDB_HEADER_BYTES:], WANDB_HEADER_BYTES):
            record = Record.FromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
                names.add((record.run.display_name, record.run.project))
            items = {
                item.key or "/".join(item.nested_key): item.value_json
                for item in record.history.item
            }
            if "loss" in items:
                points.append((int(items["step"]), float(items["loss"])))
    assert ids == {run.id}
    assert names == {("books", "novels")}
    assert points == [(1, 1.0), (2, 0.5), (3, 1 / 3), (3, 1 / 3), (4, 0.25)]


def test_trackio_goes_on_in_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    import trackio.sqlite_storage
    import trackio.utils

    for module in (trackio.utils, trackio.sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio", raising=False)
    track("trackio", tmp_path)
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows: list[Any] = connection.execute("select run_name, step from metrics").fetchall()
    assert len({name for name, _ in rows}) == 1
    assert {step for _, step in rows} == {1, 2, 3, 4}
