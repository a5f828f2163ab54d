"""MLflow: https://mlflow.org/docs/latest. The only module that imports ``mlflow``."""

import hashlib
import os
import re
import time
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from metrics.tracker import TrackedRun

RUN_ID_TAG = "shardloom.run_id"
# MLflow rejects batches with more, and longer names of metrics.
MAX_PARAMS, MAX_PARAM_LENGTH, MAX_NAME_LENGTH = 100, 6000, 250


class MlflowTracker:
    """A run of MLflow at ``MLFLOW_TRACKING_URI``, by default in ``mlflow.db`` beside the runs."""

    def start(self, run: TrackedRun) -> None:
        """Find the run that has this id as a tag, or create it."""
        runs_folder = run.folder.parent.absolute()
        given = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(given or f"sqlite:///{runs_folder / 'mlflow.db'}")
        # By default a local store would put artifacts into the current folder.
        artifacts = None if given else (runs_folder / "mlflow_artifacts").as_uri()
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = (
            self._client.create_experiment(run.project, artifact_location=artifacts)
            if experiment is None
            else experiment.experiment_id
        )
        tagged = f"tags.`{RUN_ID_TAG}` = '{run.id}'"
        if found := self._client.search_runs([experiment_id], tagged):
            self._id = found[0].info.run_id
            self._client.set_terminated(self._id, status="RUNNING")
            return
        tags = {RUN_ID_TAG: run.id}
        created = self._client.create_run(experiment_id, run_name=run.name, tags=tags)
        self._id = created.info.run_id
        # Parameters of a run cannot change later; config.toml has the newest.
        params = [Param(key, value[:MAX_PARAM_LENGTH]) for key, value in flat(run.config).items()]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + MAX_PARAMS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to the curve of each value of a step."""
        now = int(1000 * time.time())
        points = [Metric(valid_name(name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=points)

    def text(self, step: int, name: str, text: str) -> None:
        """Add a text as an artifact."""
        path = f"{name}/step-{step:08d}-{time.time_ns()}.txt"
        self._client.log_text(self._id, text, path)

    def finish(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)


def flat(config: Mapping[str, Any]) -> dict[str, str]:
    """Return texts of the values by ``section.key``."""
    return {f"{section}.{key}": str(v) for section, t in config.items() for key, v in t.items()}


def valid_name(name: str) -> str:
    """Replace what MLflow does not allow in a metric's name, such as in a source's label.

    A name that changes ends with its hash, so that no two metrics become one curve.
    """
    parts = re.sub(r"[^\w\-. /:]", "_", name).split("/")
    valid = "/".join(part for part in parts if part not in ("", ".", ".."))
    if valid == name and len(name) <= MAX_NAME_LENGTH:
        return name
    suffix = f"_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return valid[: MAX_NAME_LENGTH - len(suffix)] + suffix
