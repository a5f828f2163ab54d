"""Warnings and alarms are kept with their step, also while they cannot be written."""

import errno
import json
import threading
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest

from metrics.alarms import AlarmHandler, AlarmsFile, is_alarm
from runtime.log import logger
from tests.lib.patience import PATIENCE_SECONDS


def test_warnings_and_alarms_are_kept_at_their_step(tmp_path: Path) -> None:
    path = tmp_path / "alarms.jsonl"
    for resumed_step in (0, 7):
        alarms = AlarmsFile(path)
        logger.info("not this")
        # Before the step is known, and after.
        logger.warning("file %d changed", resumed_step)
        alarms.end_step(resumed_step)
        logger.warning("rank %d is slow", resumed_step)
        alarms.end_step(resumed_step + 1)
        logger.error("ALARM: disk full")
        alarms.close()
        logger.error("after the end")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(map(is_alarm, lines))
    assert [(line["step"], line["kind"], line["text"]) for line in lines] == [
        (0, "warning", "file 0 changed"),
        (0, "warning", "rank 0 is slow"),
        (1, "alarm", "ALARM: disk full"),
        (7, "warning", "file 7 changed"),
        (7, "warning", "rank 7 is slow"),
        (8, "alarm", "ALARM: disk full"),
    ]


def test_a_run_without_any_has_no_file(tmp_path: Path) -> None:
    alarms = AlarmsFile(tmp_path / "alarms.jsonl")
    alarms.end_step(0)
    alarms.close()
    assert not list(tmp_path.iterdir())


def test_failing_write_is_one_alarm_and_is_done_once_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure to keep one is logged, and that does not begin again."""
    alarms = AlarmsFile(tmp_path / "alarms.jsonl")
    alarms.end_step(4)
    with patch("runtime.run_folder.open_file", side_effect=OSError(errno.ENOSPC, "No space left")):
        logger.error("ALARM: planted")
        logger.error("ALARM: another")
        alarms.end_step(5)
        assert not list(tmp_path.iterdir())
    alarms.end_step(6)
    lines = [json.loads(line) for line in (tmp_path / "alarms.jsonl").read_text().splitlines()]
    assert [(line["step"], line["text"]) for line in lines] == [
        (4, "ALARM: planted"),
        (4, "ALARM: another"),
    ]
    alarms.close()
    assert [text for text in caplog.messages if "was not written" in text] == [
        f"ALARM: {tmp_path / 'alarms.jsonl'} was not written: [Errno 28] No space left"
    ]


def test_handlers_of_two_threads_do_not_wait_for_each_other() -> None:
    """Each logs itself, as a file does whose disk is full, and a tracker that fails."""
    inside, found = threading.Barrier(2), list[str]()

    def take(kind: str, text: str) -> None:
        # With a lock each, both threads would be here at once.
        with suppress(threading.BrokenBarrierError):
            inside.wait(1)
        found.append(text)
        logger.warning("from a handler")

    handlers = [AlarmHandler(take), AlarmHandler(take)]
    threads = [
        threading.Thread(target=handler.call, args=[lambda: take("", "")], daemon=True)
        for handler in handlers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    for handler in handlers:
        handler.close()
    assert not any(thread.is_alive() for thread in threads)
    assert found.count("") == 2
