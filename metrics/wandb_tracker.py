"""Weights & Biases: https://docs.wandb.ai. The only module that imports ``wandb``."""

from collections.abc import Mapping
from html import escape

import wandb

from metrics.tracker import FINISH_SECONDS, TrackedRun
from runtime.filesystem import make_folder
from runtime.log import logger


class WandbTracker:
    """A run of Weights & Biases, offline where there is neither a key nor a network."""

    def start(self, run: TrackedRun) -> None:
        """Start or resume the run of this id. Obeys ``WANDB_MODE``, ``WANDB_ENTITY`` and others."""
        make_folder(run.folder / "wandb")
        settings = wandb.Settings(
            console="off", silent=True, save_code=False, finish_timeout=FINISH_SECONDS / 2
        )
        keywords = {
            "project": run.project,
            "name": run.name,
            "id": run.id,
            "resume": "allow",
            "dir": str(run.folder),
            "config": dict(run.config),
            "allow_val_change": True,
            "settings": settings,
        }
        mode = wandb.setup().settings.mode
        try:
            # Without a key it would ask the terminal for one.
            if mode in ("online", "shared") and not wandb.login(prompt=False):
                raise wandb.errors.UsageError("no API key: set WANDB_API_KEY or run wandb login")
            self._run = wandb.init(**keywords)
        except wandb.errors.Error as error:
            text = "wandb: offline, because %s; upload with: wandb sync %s/wandb/offline-run-*"
            logger.warning(text, error, run.folder)
            self._run = wandb.init(**keywords, mode="offline")
        # Not wandb's own step, which may not go back after a rollback.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to the curve of each value of a step."""
        self._run.log({"step": step, **values})

    def text(self, step: int, name: str, text: str) -> None:
        """Add a text to the panel ``name``; alarms are alerts too."""
        self._run.log({"step": step, name: wandb.Html(f"<pre>{escape(text)}</pre>", inject=False)})
        if name == "alarms":
            self._run.alert(title=f"alarm at step {step}", text=text, level=wandb.AlertLevel.ERROR)

    def finish(self) -> None:
        """Upload what is left, for half of the time that trackers have."""
        self._run.finish()
