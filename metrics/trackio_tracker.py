"""trackio: https://huggingface.co/docs/trackio. The only module that imports ``trackio``."""

import io
from collections.abc import Mapping
from contextlib import redirect_stdout

import trackio

from metrics.tracker import TrackedRun


class TrackioTracker:
    """A run of trackio, in its local database unless ``TRACKIO_SPACE_ID`` names a space."""

    def start(self, run: TrackedRun) -> None:
        """Start or resume the run, whose name has this id."""
        with redirect_stdout(io.StringIO()):  # It prints hints.
            self._run = trackio.init(
                run.project,
                f"{run.name}-{run.id}",
                config=dict(run.config),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to the curve of each value of a step."""
        self._run.log(dict(values), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        """Add a text, which trackio shows as Markdown."""
        indented = "".join(f"    {line}\n" for line in text.splitlines())
        self._run.log({name: trackio.Markdown(indented)}, step=step)

    def finish(self) -> None:
        """Write what is left."""
        with redirect_stdout(io.StringIO()):
            self._run.finish()
