"""TensorBoard events in ``tensorboard/``."""

import uuid
from collections.abc import Mapping

from metrics.history import ROLLED_BACK
from metrics.tracker import TrackedRun
from runtime.filesystem import make_folder

FLUSH_SECONDS = 10


class TensorBoardTracker:
    """Curves of the metrics; purges what a rollback undid, and what a restart repeats."""

    def start(self, run: TrackedRun) -> None:
        """Create an event file."""
        self._folder = run.folder / "tensorboard"
        make_folder(self._folder)
        # Without a checkpoint, a start repeats all steps of earlier ones.
        self._open(0 if run.resumed_step is None else run.resumed_step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to the curve of each value of a step."""
        if ROLLED_BACK in values:
            self._writer.close()
            self._open(step + 1)
        elif any(step <= self._newest.get(name, -1) for name in values):
            self._writer.close()
            self._open(step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._newest |= dict.fromkeys(values, step)

    def _open(self, purged: int) -> None:
        """Create an event file that purges the points of earlier ones from step ``purged`` on."""
        # The import is slow, and needs the package only here.
        from torch.utils.tensorboard import SummaryWriter

        # A random name, because the writer would follow a link of that name.
        suffix = f".{uuid.uuid4().hex}"
        # Of a rank that fails, what is not written yet is lost.
        self._writer = SummaryWriter(
            str(self._folder), purge_step=purged, filename_suffix=suffix, flush_secs=FLUSH_SECONDS
        )
        # Step of the last point of each curve in this file.
        self._newest: dict[str, int] = {}

    def text(self, step: int, name: str, text: str) -> None:
        """Add a text, which TensorBoard would show as Markdown."""
        indented = "".join(f"    {line}\n" for line in text.splitlines())
        self._writer.add_text(name, indented, step)

    def finish(self) -> None:
        """Write what is buffered."""
        self._writer.close()
