"""Lines of ``samples.jsonl``: texts that the model wrote during the run."""

import json
import time
from pathlib import Path
from typing import Any

from metrics.metrics_file import drop_repeated
from runtime.run_folder import LineFile, WriteAlarm


class SamplesFile:
    """Appends samples. Drops those of steps that a run resumed from ``resumed_step`` repeats.

    Without one, the run repeats all.
    """

    def __init__(self, path: Path, resumed_step: int | None) -> None:
        self._resumed_step, self._has_resumed = resumed_step, False
        with WriteAlarm().of(path):
            last = -1 if resumed_step is None else resumed_step
            records = drop_repeated(path, last, is_sample)
            self._has_resumed = any(record["step"] == resumed_step for record in records)
        self._file = LineFile(path)

    def write(self, sample: dict[str, Any]) -> None:
        """Append a sample: step, prompt, text and seed. A finished run that starts again has it."""
        if not (self._has_resumed and sample["step"] == self._resumed_step):
            self._file.write(json.dumps(sample | {"time": time.time()}))

    def close(self) -> None:
        self._file.close()


def is_sample(record: dict[str, Any]) -> bool:
    """True if the object may be a line."""
    step, texts = record.get("step"), (record.get("prompt"), record.get("text"))
    return type(step) is int and step >= 0 and all(isinstance(text, str) for text in texts)
