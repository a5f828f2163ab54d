"""TensorBoard events in ``tensorboard/``."""

import uuid
from collections.abc import Mapping

from metrics.tracker import TrackedRun
from runtime.filesystem import make_folder

FLUSH_SECONDS = 10


class TensorBoardTracker:
    """Curves of the metrics; points after the step that a run resumed from are purged."""

    def start(self, run: TrackedRun) -> None:
        """Create an event file."""
        # The import is slow, and needs the package only here.
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        make_folder(folder)
        purged = None if run.resumed_step is None else run.resumed_step + 1
        # A random name, because the writer would follow a link of that name.
        suffix = f".{uuid.uuid4().hex}"
        # Of a rank that fails, what is not written yet is lost.
        self._writer = SummaryWriter(
            str(folder), purge_step=purged, filename_suffix=suffix, flush_secs=FLUSH_SECONDS
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to the curve of each value of a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        """Add a text, which TensorBoard would show as Markdown."""
        indented = "".join(f"    {line}\n" for line in text.splitlines())
        self._writer.add_text(name, indented, step)

    def finish(self) -> None:
        """Write what is buffered."""
        self._writer.close()
