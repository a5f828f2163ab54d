"""Jobs on a real Slurm cluster: they train, are requeued and resumed, and end when they should."""

import json
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.failures import MOST_ATTEMPTS
from runtime.exit_codes import BAD_CONFIG, DO_NOT_REQUEUE
from runtime.run_folder import list_checkpoints, step_of
from tests.lib import forked
from tests.lib.launch import LONG, curve, plant_crashing_model
from tests.lib.patience import wait_until
from tests.lib.repository import ROOT
from tests.lib.slurm import Cluster, cluster
from tests.lib.warm import write_forking_python

# Time within which a requeued job would have started again.
SETTLED_SECONDS = 8.0


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with cluster(4) as found:
        yield found


@pytest.fixture(scope="module")
def finished_jobs() -> list[tuple["Job", str, int]]:
    """Finished jobs with their expected final state and number of restarts."""
    return []


@pytest.fixture(scope="module", autouse=True)
def crashing(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> "Job":
    """Job that crashes and is requeued while other tests run."""
    folder = tmp_path_factory.mktemp("crashing")
    environment, keys = plant_crashing_model(folder)
    return submit(slurm, folder, "--nodelist=n3", environment=environment, **LONG | keys)


@dataclass(frozen=True)
class Job:
    slurm: Cluster
    id: str
    folder: Path
    """Folder of its log and output_dir of its run."""
    name: str = "debug_model"

    @property
    def control(self) -> Path:
        return self.folder / self.name / "control"

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def checkpoints(self) -> list[int]:
        return [step_of(path) for path in list_checkpoints(self.folder / self.name / "checkpoints")]

    def wait_for_steps(self, restarts: int) -> None:
        """Wait until that restart has trained a few steps that are in no checkpoint yet."""
        wait_until(lambda: self.slurm.show(self.id, "Restarts") == str(restarts))
        saved = max(self.checkpoints(), default=0)
        wait_until(lambda: max([0, *self.steps()]) >= saved + 3)

    def steps(self) -> list[int]:
        path = self.folder / self.name / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)["step"] for line in lines if line.endswith("}")]

    def wait(self, state: str) -> None:
        try:
            self.slurm.wait(self.id, state)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None


def submit(
    slurm: Cluster,
    folder: Path,
    *sbatch: str,
    config: Path = forked.CONFIG,
    environment: dict[str, str] | None = None,
    **overrides: str,
) -> Job:
    folder.mkdir(exist_ok=True)
    site = folder / "site.sh"
    if not site.exists():
        site.write_text("export NGPU=1 OMP_NUM_THREADS=1\n")
    arguments = [str(config), *forked.options(folder, **overrides)]
    script = [str(ROOT / "slurm" / "train.sbatch"), *arguments]
    output = ["--output", str(folder / "%x-%j.log")]
    variables = {"SITE": str(site), "PYTHON": write_forking_python(folder)} | (environment or {})
    return Job(slurm, slurm.sbatch(*output, *sbatch, *script, cwd=ROOT, **variables), folder)


def test_requeued_job_equals_uninterrupted_run(slurm: Cluster, tmp_path: Path) -> None:
    # Each step takes a while, so that some are left whenever the job is stopped.
    steps = LONG | {"training.steps": "30", "lr_scheduler.total_steps": "30"}
    steps["training.global_batch_size"] = "4"
    # As from a task of an array that was requeued, whose environment sbatch passes on.
    others = {"SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "0", "SLURM_RESTART_COUNT": "1"}
    others["SLURM_CPUS_PER_TASK"] = "3"
    job = submit(slurm, tmp_path / "stopped", "--nodes=2", environment=others, **steps)
    job.wait_for_steps(0)
    # The same signal as --signal=B:USR1@300 before the time limit.
    slurm.call("scancel", "--batch", "--signal=USR1", job.id)
    job.wait_for_steps(1)
    slurm.call("scontrol", "requeue", job.id)
    job.wait("COMPLETED")
    log = job.log()
    assert slurm.show(job.id, "Restarts") == "2"
    assert "requeue: stopped by a signal; newest checkpoint: step " in log
    assert log.count("resumed from step") == 2
    assert "hardware: 2 ranks on cpu" in log
    assert "mesh: dp_shard 2\n" in log
    forked.run(tmp_path / "whole", 2, **steps)
    assert curve(job.folder) == curve(tmp_path / "whole")
    assert len(curve(job.folder)) == 30


def test_dead_node_is_replaced_and_stop_file_ends_job(slurm: Cluster, tmp_path: Path) -> None:
    replicate = {"parallelism.data_parallel_replicate_degree": "2"}
    saved = {"checkpoint.interval": "5"}
    nodes = ["--nodes=2", "--exclude=n3"]
    job = submit(slurm, tmp_path, *nodes, **LONG, **replicate, **saved)
    wait_until(lambda: len(job.checkpoints()) > 1)
    slurm.crash("n1")
    job.wait_for_steps(1)
    assert slurm.show(job.id, "NodeList") == "n[0,2]"
    assert "mesh: dp_replicate 2\n" in job.log()
    assert "resumed from step" in job.log()
    (job.control / "stop").touch()
    job.wait("COMPLETED")
    assert "stop: stopped by the stop file" in job.log()
    assert slurm.show(job.id, "Restarts") == "1"


def test_preempted_job_resumes_and_cancelled_job_saves(
    slurm: Cluster, finished_jobs: list[tuple[Job, str, int]], tmp_path: Path
) -> None:
    # Slurm signals all processes of a job, of which a forked launcher and its ranks are none.
    python = tmp_path / "python_of_launchers"
    forking = f'exec {write_forking_python(tmp_path)} "$@"'
    python.write_text(
        f'#!/bin/sh\n[ "$2" != launcher.launch ] || exec {sys.executable} "$@"\n{forking}\n'
    )
    python.chmod(0o755)
    job = submit(slurm, tmp_path, "--nodelist=n0", environment={"PYTHON": str(python)}, **LONG)
    job.wait_for_steps(0)
    urgent = ["--partition=high", "--nodelist=n0", "--exclusive", "--output=/dev/null"]
    slurm.sbatch(*urgent, "--wrap", "sleep 1", cwd=ROOT)
    job.wait_for_steps(1)
    preempted = job.checkpoints()
    slurm.call("scancel", job.id)
    job.wait("CANCELLED")
    assert "resumed from step" in job.log()
    wait_until(lambda: "received SIGTERM; Slurm decides whether to requeue" in job.log())
    assert job.checkpoints()[0] > preempted[0]
    finished_jobs.append((job, "CANCELLED", 1))


def test_signals_before_training_requeue_the_job(slurm: Cluster, tmp_path: Path) -> None:
    # The container of its first command hangs; Slurm ends it in a preemption.
    entered, container = tmp_path / "entered", tmp_path / "container"
    container.write_text(
        f'#!/bin/sh\n[ -e {entered} ] || {{ touch {entered}; exec sleep 600; }}\nexec "$@"\n'
    )
    container.chmod(0o755)
    site = f"export NGPU=1 OMP_NUM_THREADS=1\nCONTAINER=({container})\n"
    (tmp_path / "site.sh").write_text(site)
    job = submit(slurm, tmp_path, "--nodelist=n0", environment={"PREFLIGHT": "1"}, **LONG)
    wait_until(entered.exists)
    urgent = ["--partition=high", "--nodelist=n0", "--exclusive", "--output=/dev/null"]
    slurm.sbatch(*urgent, "--wrap", "sleep 1", cwd=ROOT)
    wait_until(lambda: "restart 1" in job.log())
    slurm.call("scancel", "--batch", "--signal=USR1", job.id)
    # In its preflight: Slurm ends that, and the batch script after the grace time.
    wait_until(lambda: "restart 2" in job.log() and "preflight" in job.log().split("restart 2")[1])
    slurm.sbatch(*urgent, "--wrap", "sleep 1", cwd=ROOT)
    job.wait_for_steps(3)
    assert not (job.control / "failures").exists()
    (job.control / "stop").touch()
    job.wait("COMPLETED")


def test_sweep_trains_one_run_per_task_with_exact_text(slurm: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s "a" $(touch hit) folder'
    sweep = tmp_path / "sweep.toml"
    sweep.write_text(
        "[[runs]]\njob.name = 'own'\n[[runs]]\noptimizer.lr = 2e-3\n"
        "data.sources = [{type = 'builtin', weight = 2.0}]\n"
    )
    prompt = "`touch hit`; $(touch hit) 'a' \"b\"\n--job.name c\\n *"
    job = submit(
        slurm,
        folder,
        "--array=0-2",
        environment={"SWEEP": str(sweep), "PREFLIGHT": "1"},
        **{"training.steps": "2", "validation.sample_prompt": prompt},
    )
    wait_until(lambda: not slurm.call("squeue", "--noheader", "--jobs", job.id))
    configs = {
        path.parent.name: tomllib.loads(path.read_text()) for path in folder.glob("*/config.toml")
    }
    assert configs.keys() == {"own", "debug_model-1"}, job.log()
    assert configs["debug_model-1"]["optimizer"]["lr"] == 2e-3
    assert configs["debug_model-1"]["data"]["sources"][0]["weight"] == 2.0
    assert {config["validation"]["sample_prompt"] for config in configs.values()} == {prompt}
    assert len([*folder.glob("*/checkpoints/step-00000002")]) == 2
    assert job.log().count("preflight: passed") == 2
    assert not [*tmp_path.rglob("hit"), *ROOT.glob("hit")]
    assert f"{sweep}: there is no runs[2], only 0 to 1" in job.log()
    assert slurm.show(f"{job.id}_2", "ExitCode") == f"{BAD_CONFIG}:0"


def test_bad_configuration_ends_the_job(
    slurm: Cluster, finished_jobs: list[tuple[Job, str, int]], tmp_path: Path
) -> None:
    job = submit(slurm, tmp_path, "--nodes=2", **{"parallelism.tensor_parallel_degree": "3"})
    job.wait("FAILED")
    assert slurm.show(job.id, "ExitCode") == f"{BAD_CONFIG}:0"
    assert "parallelism.tensor_parallel_degree = 3 does not divide 2 ranks" in job.log()
    assert "srun exited" not in job.log()
    finished_jobs.append((job, "FAILED", 0))


def test_of_jobs_that_start_one_run_at_once_one_trains_it(
    slurm: Cluster, finished_jobs: list[tuple[Job, str, int]], tmp_path: Path
) -> None:
    jobs = [submit(slurm, tmp_path, "--nodelist=n0", **LONG) for _ in range(3)]
    states = [lambda job=job: slurm.show(job.id, "JobState") for job in jobs]
    wait_until(lambda: sum(state() == "FAILED" for state in states) == 2)
    (owner,) = (job for job, state in zip(jobs, states, strict=True) if state() != "FAILED")
    owner.wait_for_steps(0)
    # Of the losers nothing is left in the run.
    assert not {"failures", "requeues"} & {path.name for path in owner.control.iterdir()}
    (owner.control / "stop").touch()
    owner.wait("COMPLETED")
    assert owner.log().count("is writing to") >= 2
    for job in jobs:
        if job is not owner:
            assert slurm.show(job.id, "ExitCode") == f"{BAD_CONFIG}:0"
            finished_jobs.append((job, "FAILED", 0))


def test_crash_loop_ends(
    slurm: Cluster, finished_jobs: list[tuple[Job, str, int]], crashing: Job
) -> None:
    crashing.wait("FAILED")
    assert slurm.show(crashing.id, "ExitCode") == f"{DO_NOT_REQUEUE}:0"
    lines = (crashing.control / "failures").read_text().splitlines()
    assert [json.loads(line)["attempt"] for line in lines] == list(range(1, MOST_ATTEMPTS + 1))
    assert "RuntimeError: planted" in crashing.log()
    finished_jobs.append((crashing, "FAILED", MOST_ATTEMPTS - 1))


def test_finished_jobs_do_not_restart(finished_jobs: list[tuple[Job, str, int]]) -> None:
    assert finished_jobs
    time.sleep(SETTLED_SECONDS)
    for job, state, restarts in finished_jobs:
        assert job.slurm.show(job.id, "JobState") == state
        assert job.slurm.show(job.id, "Restarts") == str(restarts)
