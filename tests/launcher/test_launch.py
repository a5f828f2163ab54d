"""The launcher starts the requested ranks and exits with the trainer's exit code."""

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from config import ConfigError, JobConfig, load_config
from launcher import agent, launch
from launcher.agent import End
from launcher.console import Console, PlainScreen
from launcher.failures import MOST_ATTEMPTS
from launcher.launch import (
    DEFAULT_CPU_RANKS,
    exit_code,
    find_nodes,
    head_ports,
    ranks_per_node,
    shown_ranks,
)
from launcher.rendezvous import POLL_SECONDS, Nodes, exit_barrier, open_store, rendezvous
from runtime import exit_codes
from runtime.machine import available_cpus
from runtime.run_lock import lock_run
from runtime.signals import SIGNALS
from tests.lib.launch import without_slow_phases
from tests.lib.patience import PATIENCE_SECONDS, wait_until
from tests.lib.ports import free_port
from tests.lib.processes import are_gone, seconds_until
from tests.lib.repository import ROOT

SLURM = {"SLURM_JOB_ID": "123456", "SLURM_NNODES": "3", "SLURM_STEP_NODELIST": "node[07-09]"}


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake ``scontrol`` for one list of hosts, alone on the PATH."""
    script = tmp_path / "scontrol"
    script.write_text(
        """#!/bin/sh
        [ "$*" = "show hostnames node[07-09]" ] && printf "node07\\nnode08\\nnode09\\n"
        """
    )
    script.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.parametrize(
    ("environment", "gpus", "count"),
    [
        ({}, 0, DEFAULT_CPU_RANKS),
        ({}, 8, 8),
        ({"NGPU": ""}, 8, 8),
        ({"SLURM_GPUS_ON_NODE": "4"}, 8, 4),
        ({"NGPU": "3", "SLURM_GPUS_ON_NODE": "4"}, 8, 3),
    ],
)
def test_ranks_per_node(
    environment: dict[str, str], gpus: int, count: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert ranks_per_node(environment) == count


@pytest.mark.parametrize("name", ["NGPU", "SLURM_GPUS_ON_NODE"])
def test_more_ranks_than_gpus_are_rejected(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert ranks_per_node({name: "2"}) == 2
    with pytest.raises(ValueError, match=f"{name}=3: only 2 GPUs are visible, .* NGPU=2"):
        ranks_per_node({name: "3"})
    assert ranks_per_node({name: "3", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}) == 3


def test_gpus_of_slurm_that_the_driver_lost_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="SLURM_GPUS_ON_NODE=8: only 0 GPUs are visible"):
        ranks_per_node({"SLURM_GPUS_ON_NODE": "8", "NCCL_MULTI_RANK_GPU_ENABLE": "1"})
    assert ranks_per_node({"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": ""}) == 8
    with pytest.raises(ValueError, match="NGPU=3: only 0 GPUs are visible"):
        ranks_per_node({"SLURM_GPUS_ON_NODE": "8", "NGPU": "3"})


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", " "])
def test_invalid_rank_count_names_ngpu(text: str):
    with pytest.raises(ValueError, match="NGPU"):
        ranks_per_node({"NGPU": text})


def test_one_node_needs_no_environment():
    nodes = find_nodes({})
    assert (nodes.count, nodes.rank) == (1, 0)


def test_nodes_from_the_users_environment():
    environment = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
    assert find_nodes(environment) == Nodes(count=2, rank=1, address="head", port=29500)
    assert find_nodes(SLURM | environment) == find_nodes(environment)


@pytest.mark.usefixtures("scontrol")
def test_nodes_from_slurm():
    nodes = [find_nodes(SLURM | {"SLURM_NODEID": str(rank)}) for rank in range(3)]
    assert [node.rank for node in nodes] == [0, 1, 2]
    assert {(node.count, node.address) for node in nodes} == {(3, "node07")}
    (port,) = {node.port for node in nodes}
    assert 1024 < port < 65536


def test_jobs_on_one_head_node_have_different_ports():
    ports = {find_nodes({"SLURM_JOB_ID": str(job)}).port for job in range(1000, 1100)}
    assert len(ports) == 100


def test_default_ports_are_not_free_ports_of_the_kernel():
    ports = [port for job in range(100_000) for port in head_ports({"SLURM_JOB_ID": str(job)})]
    assert (min(ports), max(ports)) == (20000, 31999)
    assert find_nodes({"SLURM_JOB_ID": "17"}).port == head_ports({"SLURM_JOB_ID": "17"})[0]


def test_port_in_use_names_master_port():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"^MASTER_PORT={port}: .*address already in use"):
            open_store(Nodes(count=2, rank=0, address="localhost", port=port), seconds=10)


@pytest.mark.parametrize("is_another", [False, True])
def test_run_folder_says_that_the_port_was_taken(
    is_another: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (config := tmp_path / "run.toml").touch()
    (control := tmp_path / "default" / "control").mkdir(parents=True)
    with (
        lock_run(control) if is_another else nullcontext(),
        socket.create_server(("", 0)) as other,
    ):
        port = str(other.getsockname()[1])
        nodes = {"NNODES": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        arguments = [str(config), "--job.output_dir", str(tmp_path)]
        # A later start may find the port free.
        assert launch.main(arguments, {"NGPU": "1"} | nodes) == exit_codes.FAILED
    text = f"rendezvous of 2 nodes failed: MASTER_PORT={port}: cannot listen on this port"
    assert text in capsys.readouterr().err
    found = [each["reason"][: len(text)] for each in failures(tmp_path)]
    assert found == ([] if is_another else [text])
    assert exit_codes.read_exit_code(control) == (None if is_another else exit_codes.FAILED)


MANY_CONNECTIONS = """
import resource

import torch.distributed as dist

from launcher.rendezvous import Nodes, open_store

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
store = open_store(Nodes(count=1, rank=0, address="", port=0), seconds=10)
# Both ends of each are in this process.
clients = [dist.TCPStore(store.host, store.port, is_master=False) for _ in range(40)]
for i, client in enumerate(clients):
    client.set(str(i), "")
print(store.check([str(i) for i in range(40)]))
"""


def test_store_accepts_more_connections_than_the_soft_limit_of_open_files() -> None:
    command = [sys.executable, "-c", MANY_CONNECTIONS]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout == "True\n"


@pytest.mark.parametrize(("node", "reason"), [
    (0, "nodes 1, 2 did not join within 1 s"),
    (1, "Connection refused for 1 s"),
])  # fmt: skip
def test_node_that_never_joins_is_named(
    node: int,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(agent, "RENDEZVOUS_SECONDS", 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    (config := tmp_path / "run.toml").touch()
    environment = {
        "NGPU": "1", "NNODES": "3", "NODE_RANK": str(node), "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    arguments = [str(config), "--job.output_dir", str(tmp_path)]
    assert launch.main(arguments, environment) == exit_codes.FAILED
    text = f"rendezvous of 3 nodes failed: {reason}"
    output = capfd.readouterr()
    assert text in (output.out if node else output.err)
    found = [each["reason"].partition(reason)[0] + reason for each in failures(tmp_path)]
    assert found == [text] * (node == 0)
    control = tmp_path / "default" / "control"
    assert exit_codes.read_exit_code(control) == (exit_codes.FAILED if node == 0 else None)


@pytest.mark.parametrize("address", ["localhost", "head.invalid"])
def test_wait_for_the_head_can_be_interrupted(address: str):
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        open_store(Nodes(count=2, rank=1, address=address, port=port), seconds=PATIENCE_SECONDS)
    signal.signal(signal.SIGALRM, previous)
    assert time.monotonic() - begin < PATIENCE_SECONDS / 2


@pytest.mark.parametrize(
    ("environment", "key"),
    [
        ({"NNODES": "2"}, "MASTER_ADDR"),
        (
            {"SLURM_JOB_ID": "1", "SLURM_NNODES": "2"},
            "SLURM_NNODES=2: .* start srun .* or set NNODES=1",
        ),
        ({"NNODES": "two"}, "NNODES"),
        ({"NNODES": "0"}, "NNODES"),
        ({"NNODES": "2:4"}, "NNODES"),
        ({"NODE_RANK": "first"}, "NODE_RANK"),
        ({"NODE_RANK": "-1"}, "NODE_RANK"),
        ({"NODE_RANK": "1"}, "NODE_RANK"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "head"}, "NODE_RANK"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT"),
    ],
)
def test_invalid_nodes_are_rejected_by_name(environment: dict[str, str], key: str):
    with pytest.raises(ValueError, match=f"^{key}"):
        find_nodes(environment)


def test_missing_scontrol_names_master_addr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        find_nodes(SLURM)
    assert find_nodes(SLURM | {"MASTER_ADDR": "head"}).address == "head"


@pytest.mark.parametrize(
    ("environment", "key"),
    [
        ({"NNODES": "two"}, "NNODES"),
        ({"NGPU": "0"}, "NGPU"),
        ({"LOG_RANK": "all"}, "LOG_RANK"),
        ({"NGPU": "2", "LOG_RANK": "0,2"}, "LOG_RANK: 0,2: a node's ranks are 0 to 1"),
    ],
)
def test_bad_environment_exits_with_bad_config(
    environment: dict[str, str], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = tmp_path / "run.toml"
    config.touch()
    assert launch.main([str(config)], environment) == exit_codes.BAD_CONFIG
    assert key in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["file", "/proc/none"])
def test_unusable_output_dir_is_named(
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("run.toml", "file"):
        (tmp_path / name).touch()
    arguments = [str(tmp_path / "run.toml"), "--job.output_dir", str(tmp_path / folder)]
    assert launch.main(arguments, {"NGPU": "1"}) == exit_codes.BAD_CONFIG
    assert capsys.readouterr().err.startswith("job.output_dir: ")


@pytest.mark.parametrize(
    ("given", "n_ranks", "wants"),
    [
        ({}, 1, {"OMP_NUM_THREADS": str(available_cpus()), "GOMP_SPINCOUNT": "10000"}),
        ({}, available_cpus() + 1, {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "10000"}),
        ({"OMP_NUM_THREADS": "3"}, 1, {"OMP_NUM_THREADS": "3", "GOMP_SPINCOUNT": "10000"}),
        ({"GOMP_SPINCOUNT": "7"}, 1, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, 1, {"GOMP_SPINCOUNT": None}),
    ],
)
def test_threads_use_each_cpu_once_and_spin_briefly(
    given: dict[str, str],
    n_ranks: int,
    wants: dict[str, str | None],
    monkeypatch: pytest.MonkeyPatch,
):
    for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        # Set first, so that it is restored even if only the function sets it.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    launch.set_thread_defaults(n_ranks)
    assert {name: os.environ.get(name) for name in wants} == wants


def test_log_rank_selects_shown_ranks():
    assert shown_ranks("0", 1) == {0}
    assert shown_ranks("0,2", 3) == {0, 2}


@pytest.mark.parametrize(
    ("codes", "received", "outcome", "code"),
    [
        ([0, 0], None, "done", exit_codes.DONE),
        ([75, 75], None, "stopped SIGTERM", exit_codes.PREEMPTED),
        ([75, -15], None, "stopped SIGTERM", exit_codes.PREEMPTED),
        ([75, 1], None, "stopped SIGTERM", exit_codes.FAILED),
        ([93, -15], None, "", exit_codes.DO_NOT_REQUEUE),
        ([2, 1], None, "", exit_codes.BAD_CONFIG),
        ([-9, 1], None, "", exit_codes.FAILED),
        ([-15, -15], None, "", exit_codes.FAILED),
        ([75, 75], signal.SIGUSR1, "stopped SIGUSR1", exit_codes.PREEMPTED),
        ([0, 0], signal.SIGTERM, "done", exit_codes.DONE),
        ([0, 0], signal.SIGTERM, "stopped stop file", exit_codes.DONE),
        ([0, 0], signal.SIGTERM, "stopped the end of the data", exit_codes.DONE),
        ([0, 1], signal.SIGTERM, "done", exit_codes.FAILED),
        ([-10, -10], signal.SIGUSR1, "done", exit_codes.PREEMPTED),
        ([-9, -10], signal.SIGUSR1, "done", exit_codes.PREEMPTED),
        ([-9, -9], signal.SIGUSR1, "done", exit_codes.FAILED),
        ([1, 75], signal.SIGTERM, "", exit_codes.FAILED),
        ([93, 93], signal.SIGTERM, "", exit_codes.DO_NOT_REQUEUE),
        ([143, 143], signal.SIGTERM, "", exit_codes.FAILED),
    ],
)
def test_exit_code(codes: list[int], received: signal.Signals | None, outcome: str, code: int):
    end = End(dict(enumerate(codes)), message="", signal=received, verdict=None)
    assert exit_code(end, outcome, has_checkpoints=True) == code


def test_stopped_run_without_checkpoints_has_failed():
    end = End({0: 0}, message="", signal=signal.SIGTERM, verdict=None)
    assert exit_code(end, "stopped SIGTERM", has_checkpoints=False) == exit_codes.FAILED


@pytest.mark.parametrize(
    ("node", "received", "n_failures"), [(0, None, 1), (1, None, 0), (0, signal.SIGTERM, 0)]
)
def test_head_node_shows_rank_0_and_records_failures(
    node: int,
    received: signal.Signals | None,
    n_failures: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    shown = []

    def run_ranks(program: list[str], config: JobConfig, **keywords: Any) -> End:
        shown.append(keywords["shown"])
        return End({node: 1}, message="", signal=received, verdict=None)

    monkeypatch.setattr(launch, "run_ranks", run_ranks)
    monkeypatch.setattr(launch, "is_terminal", lambda descriptor: True)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config, control = tmp_path / "run.toml", tmp_path / "default" / "control"
    config.touch()
    control.mkdir(parents=True)
    environment = {"NGPU": "1", "NNODES": "2", "NODE_RANK": str(node), "MASTER_ADDR": "here"}
    arguments = [str(config), "--job.output_dir", str(tmp_path)]
    assert launch.main(arguments, environment) == exit_codes.FAILED
    assert shown == [{0} if node == 0 else set()]
    assert len(failures(tmp_path)) == n_failures
    assert exit_codes.read_exit_code(control) == (exit_codes.FAILED if node == 0 else None)
    assert ("node 1 of 2: ended with exit code 1" in capsys.readouterr().out) == (node == 1)


def trainer_of(source: str, folder: Path) -> Path:
    """Write a trainer that runs ``source`` in each rank."""
    trainer = folder / "trainer.py"
    control = folder / "default" / "control"
    control.mkdir(parents=True, exist_ok=True)
    lines = [
        "import os, signal, sys, time",
        f"sys.path.insert(0, {str(launch.TRAINER.parent)!r})",
        f"control = {str(control)!r}",
        "rank = os.environ['RANK']",
    ]
    trainer.write_text("\n".join([*lines, source]))
    return trainer


def run_trainer(
    source: str, folder: Path, monkeypatch: pytest.MonkeyPatch, config: Path | None = None
) -> int:
    """Launch two ranks of a trainer that runs ``source``; return the launcher's exit code."""
    if config is None:
        config = folder / "run.toml"
        config.touch()
    monkeypatch.setattr(launch, "TRAINER", trainer_of(source, folder))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # The launcher does not restore signal handlers.
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        return launch.main([str(config), "--job.output_dir", str(folder)], {"NGPU": "2"})
    finally:
        monkeypatch.undo()
        for number, handler in handlers.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)


def failures(folder: Path) -> list[dict[str, Any]]:
    path = folder / "default" / "control" / "failures"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    "code",
    [exit_codes.DONE, exit_codes.BAD_CONFIG, exit_codes.PREEMPTED, exit_codes.DO_NOT_REQUEUE],
)
def test_trainer_exit_code_is_preserved(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # After a failure one rank is slow to exit, so the launcher terminates it.
    source = f"time.sleep(60 * ({code} > 0) * int(rank))\nsys.exit({code})"
    assert run_trainer(source, tmp_path, monkeypatch) == code
    assert not (tmp_path / "default" / "control" / "failures").exists()


WAITS_FOR_RANK_1 = """
if rank == '0':
    signal.signal(signal.SIGUSR1, lambda *_: None)
    while not os.path.exists(control + '/ready'):
        time.sleep(0.01)
    os.kill(int(os.environ['LAUNCHER_PID']), signal.SIGUSR1)
else:
    open(control + '/ready', 'w').close()
time.sleep(3600)
"""


def test_signal_before_all_ranks_have_handlers_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "SHUTDOWN_GRACE_SECONDS", 0.5)
    begin = time.monotonic()
    assert run_trainer(WAITS_FOR_RANK_1, tmp_path, monkeypatch) == exit_codes.PREEMPTED
    assert time.monotonic() - begin < agent.SHUTDOWN_SECONDS / 2
    assert failures(tmp_path) == []


def error_of_join(port: int, rank: int, logs: Path) -> str:
    nodes = Nodes(2, rank, "127.0.0.1", port)
    with Console(PlainScreen()) as console, pytest.raises(ConfigError) as raised:
        agent.run_ranks(
            ["none"], JobConfig(), n_ranks=1, nodes=nodes, shown=set(), console=console, logs=logs
        )
    return str(raised.value)


def test_folder_that_one_node_cannot_use_ends_all(tmp_path: Path) -> None:
    """The others would wait for its ranks, which are never started."""
    (tmp_path / "file").touch()
    logs, port = [tmp_path / "run" / "logs", tmp_path / "file" / "logs"], free_port()
    with ThreadPoolExecutor() as threads:
        errors = [*threads.map(partial(error_of_join, port), range(2), logs)]
    assert errors[0] == errors[1]
    assert re.match(r"node 1 \(.*\): job\.output_dir: .*file", errors[0])
    assert not (tmp_path / "run").exists()


DUMPS_ENVIRONMENT = """
import json
print('rank', rank)
with open(f'{control}/{rank}.json', 'w') as file:
    json.dump(dict(os.environ), file)
"""


def test_ranks_get_torchruns_and_the_users_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.delenv("TORCH_FR_DUMP_TEMP_FILE", raising=False)
    assert run_trainer(DUMPS_ENVIRONMENT, tmp_path, monkeypatch) == exit_codes.DONE
    (logs,) = (tmp_path / "default" / "logs").iterdir()
    for rank in "01":
        found = json.loads((tmp_path / "default" / "control" / f"{rank}.json").read_text())
        assert found["RANK"] == found["LOCAL_RANK"] == rank
        assert found["WORLD_SIZE"] == found["LOCAL_WORLD_SIZE"] == "2"
        assert (found["GROUP_RANK"], found["MASTER_ADDR"]) == ("0", "127.0.0.1")
        assert found["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        assert found["LAUNCHER_PID"] == str(os.getpid())
        assert (found["OMP_NUM_THREADS"], found["TORCH_NCCL_ASYNC_ERROR_HANDLING"]) == ("1", "1")
        assert found["NCCL_DEBUG"] == "INFO"
        assert found["TORCH_FR_DUMP_TEMP_FILE"] == f"{logs}/flight-record-"
    # Rank 0 is shown, and the output of both is kept.
    assert without_slow_phases(capfd.readouterr().out) == "rank 0\n"
    kept = {path.name: path.read_text() for path in logs.iterdir()}
    assert kept == {"rank-0.out": "rank 0\n", "rank-1.out": "rank 1\n"}


LOADS_CONFIG = """
from pathlib import Path
from config import dump_toml, load_config
config = load_config(Path(sys.argv[1]), sys.argv[2:])
Path(control, rank).write_text(dump_toml(config))
"""


@pytest.mark.row(30, "Every rank trains the configuration that its launcher read")
def test_ranks_get_what_the_launcher_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_result: Callable[[str], None]
):
    # A pipe can be read once, and ranks do not inherit it.
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", encoding="utf-8") as file:
        file.write("[optimizer]\nlr = 0.1\n[validation]\nsample_prompt = 'ü\"\\'\n")
    try:
        pipe = Path(f"/dev/fd/{reader}")
        assert run_trainer(LOADS_CONFIG, tmp_path, monkeypatch, pipe) == exit_codes.DONE
    finally:
        os.close(reader)
    want = {
        "job": {"output_dir": str(tmp_path)},
        "optimizer": {"lr": 0.1},
        "validation": {"sample_prompt": 'ü"\\'},
    }
    for rank in "01":
        found = load_config(tmp_path / "default" / "control" / rank, [])
        assert found == JobConfig.model_validate(want)
    record_result("a pipe, which can be read once: 2 of 2 ranks got all of its keys")


@pytest.mark.parametrize("is_another", [False, True])
def test_rejected_start_writes_no_exit_code_of_another_run(
    is_another: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    control = tmp_path / "default" / "control"
    control.mkdir(parents=True)
    with lock_run(control) if is_another else nullcontext():
        assert run_trainer("sys.exit(2)", tmp_path, monkeypatch) == exit_codes.BAD_CONFIG
    assert exit_codes.read_exit_code(control) == (None if is_another else exit_codes.BAD_CONFIG)
    assert exit_codes.read_rejection(control).startswith("exit codes by rank") != is_another


CRASH = "sys.exit(1)"


@pytest.mark.parametrize("source", [CRASH, "os.kill(os.getpid(), signal.SIGINT)"])
def test_failed_start_writes_no_end_of_another_run(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its ranks ended before they found that another run has the lock."""
    control = tmp_path / "default" / "control"
    control.mkdir(parents=True)
    with lock_run(control):
        assert run_trainer(source, tmp_path, monkeypatch) == exit_codes.FAILED
    assert exit_codes.read_exit_code(control) is None
    assert failures(tmp_path) == []


CRASH_AFTER_PREEMPTION = """
ready = os.path.join(os.path.dirname(__file__), 'ready')
if rank == '1':
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(ready, 'w').close()
    time.sleep(0.5)
    sys.exit(1)
while not os.path.exists(ready):
    time.sleep(0.01)
sys.exit(75)
"""


@pytest.mark.parametrize("source", [CRASH, CRASH_AFTER_PREEMPTION])
def test_crash_exits_with_failed(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert run_trainer(source, tmp_path, monkeypatch) == exit_codes.FAILED
    assert [record["attempt"] for record in failures(tmp_path)] == [1]


def test_crash_loop_ends_and_preemption_resets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    codes = [run_trainer(CRASH, tmp_path, monkeypatch) for _ in range(MOST_ATTEMPTS - 1)]
    codes.append(run_trainer("sys.exit(75)", tmp_path, monkeypatch))
    codes += [run_trainer(CRASH, tmp_path, monkeypatch) for _ in range(MOST_ATTEMPTS)]
    assert codes == [1, 1, 75, 1, 1, 93]
    assert "not retrying" in capsys.readouterr().err


CONFIG_ERROR_ON_HIDDEN_RANK = """
if rank == '0':
    time.sleep(60)
with open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as file:
    file.write('{"message": "data.tokenizer: nope"}')
sys.exit(2)
"""


def test_config_error_of_any_rank_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run_trainer(CONFIG_ERROR_ON_HIDDEN_RANK, tmp_path, monkeypatch)
    assert "data.tokenizer: nope" in capsys.readouterr().err


SAVES = """
received = []
for number in SIGNALS:
    signal.signal(number, lambda number, frame: received.append(number))
open(control + '/ready' + rank, 'w').close()
while not all(os.path.exists(control + '/ready' + other) for other in '01'):
    time.sleep(0.01)
if rank == '0':
    os.kill(os.getppid(), NUMBER)
while not received:
    time.sleep(0.01)
if rank == '0':
    os.kill(os.getppid(), signal.SIGTERM)
time.sleep(0.5)
with open(control + '/outcome', 'w') as file:
    file.write(f'stopped {signal.Signals(received[0]).name}')
sys.exit(75)
""".replace("SIGNALS", str([int(number) for number in SIGNALS]))


@pytest.mark.parametrize("number", SIGNALS)
def test_signals_reach_ranks_that_have_time_to_save(
    number: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    source = SAVES.replace("NUMBER", str(int(number)))
    # What started the tests may ignore it, like nohup.
    handler = signal.signal(number, signal.SIG_DFL)
    try:
        assert run_trainer(source, tmp_path, monkeypatch) == exit_codes.PREEMPTED
    finally:
        signal.signal(number, handler)
    outcome = (tmp_path / "default" / "control" / "outcome").read_text()
    assert outcome == f"stopped {number.name}"
    assert "before it trained" not in capsys.readouterr().out


def test_last_exit_code_is_deleted_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    control = tmp_path / "default" / "control"
    control.mkdir(parents=True)
    (control / "exit_code").write_text("1\n")
    source = "assert not os.path.exists(control + '/exit_code')"
    assert run_trainer(source, tmp_path, monkeypatch) == exit_codes.DONE
    assert (control / "exit_code").read_text() == "0\n"


class Clock:
    """Clock that sleeping moves forward, for an ``Agent`` whose rank saves until ``ends``."""

    pid = 0

    def __init__(self, signals: dict[float, signal.Signals], ends: float) -> None:
        self.now, self.requests, self._signals, self._ends = 0.0, [], signals, ends
        self.sent: list[signal.Signals] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for begin in [begin for begin in self._signals if begin <= self.now]:
            self.requests.append(self._signals.pop(begin))

    def killpg(self, process: int, number: signal.Signals) -> None:
        self.sent.append(number)

    def poll(self) -> int | None:
        return exit_codes.PREEMPTED if self.now >= self._ends else None

    def wait(self, seconds: float) -> None:
        pass


def test_second_signal_restarts_the_time_limit(monkeypatch: pytest.MonkeyPatch):
    limit = agent.SHUTDOWN_SECONDS
    clock = Clock({0.0: signal.SIGUSR1, 0.8 * limit: signal.SIGINT}, ends=1.6 * limit)
    monkeypatch.setattr(agent, "time", clock)
    monkeypatch.setattr(agent, "os", clock)
    processes: Any = {0: clock}
    watcher = agent.Agent(processes, None, 1, None, is_head=True)
    watcher.wait(clock.requests, has_others=False)
    assert clock.sent == [signal.SIGUSR1, signal.SIGTERM]


@pytest.mark.parametrize("n_polls", range(5))
def test_hung_rank_is_named_whenever_another_fails(n_polls: int, monkeypatch: pytest.MonkeyPatch):
    polls, killed = iter([None] * n_polls), list[int]()
    failed = SimpleNamespace(pid=1, poll=lambda: next(polls, exit_codes.FAILED), wait=id)
    hung = SimpleNamespace(pid=2, poll=lambda: -9 if 2 in killed else None, wait=id)
    killpg = SimpleNamespace(killpg=lambda pid, number: killed.append(pid))
    monkeypatch.setattr(agent, "os", killpg)
    monkeypatch.setattr(agent, "SHUTDOWN_GRACE_SECONDS", 0)
    processes: Any = {0: failed, 1: hung}
    watcher = agent.Agent(processes, cast(Any, dist.HashStore()), 2, cast(Any, None), is_head=True)
    watcher.wait([], has_others=False)
    assert watcher.failure is not None
    assert watcher.failure.lines[-1] == "rank 1 did not answer; no heartbeat received"


def test_ranks_too_slow_to_save_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(agent, "SHUTDOWN_SECONDS", 0)
    source = SAVES.replace("NUMBER", "signal.SIGTERM").replace("sleep(0.5)", "sleep(3600)")
    assert run_trainer(source, tmp_path, monkeypatch) == exit_codes.FAILED
    assert not (tmp_path / "default" / "control" / "outcome").exists()
    text = r"ranks \[.+\] did not end within 0 s of SIGTERM: killed without a save"
    assert re.search(text, capfd.readouterr().out)


IGNORES_SIGNALS = """
import subprocess
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
with open(control + '/child' + rank, 'w') as file:
    file.write(str(subprocess.Popen(['sleep', '60']).pid))
open(control + '/ready' + rank, 'w').close()
while not all(os.path.exists(control + '/ready' + other) for other in '01'):
    time.sleep(0.01)
while True:
    os.kill(os.getppid(), signal.SIGINT if rank == '0' else 0)
    time.sleep(0.2)
"""


def test_third_signal_kills_ranks_and_their_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    begin = time.monotonic()
    assert run_trainer(IGNORES_SIGNALS, tmp_path, monkeypatch) == exit_codes.FAILED
    assert time.monotonic() - begin < 30
    assert failures(tmp_path) == []
    children = [(tmp_path / "default" / "control" / f"child{rank}").read_text() for rank in "01"]
    seconds_until(lambda: are_gone(map(int, children)), limit=5)


def test_launchers_exit_together_unless_one_gets_a_signal():
    nodes = [Nodes(count=2, rank=rank, address="", port=0) for rank in range(2)]
    with ThreadPoolExecutor() as pool:
        store = dist.HashStore()
        head = pool.submit(exit_barrier, store, nodes[0], [], 60.0)
        with pytest.raises(TimeoutError):
            head.result(3 * POLL_SECONDS)
        exit_barrier(store, nodes[1], [], 60.0)
        head.result(10)
    begin = time.monotonic()
    exit_barrier(dist.HashStore(), nodes[0], [signal.SIGTERM], PATIENCE_SECONDS)
    assert time.monotonic() - begin < PATIENCE_SECONDS


def test_node_of_another_job_does_not_join() -> None:
    store = dist.HashStore()
    nodes = [Nodes(count=2, rank=rank, address="head", port=29500) for rank in range(2)]
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda node: rendezvous(store, node, 60, 4, ""), nodes))
    assert [counts for counts, _ in found] == [[4, 4], [4, 4]]
    with pytest.raises(dist.DistError, match=r"head:29500 .* another job has MASTER_PORT"):
        rendezvous(store, nodes[1], 60, 8, "")
    assert json.loads(store.get("launcher/1"))[0] == 4


def test_signal_before_handlers_exits_as_preempted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    source = "os.kill(os.getppid(), signal.SIGUSR1) if rank == '0' else None\ntime.sleep(60)"
    assert run_trainer(source, tmp_path, monkeypatch) == exit_codes.PREEMPTED
    assert "stopped by SIGUSR1 before it trained: the run is as it was" in capsys.readouterr().out


ONE_HANGS = """
from launcher.post_mortem import RankHeartbeat
with RankHeartbeat(os.environ) as heartbeat:
    heartbeat.step = 10 + int(rank)
    open(control + '/ready' + rank, 'w').close()
    while not all(os.path.exists(control + '/ready' + other) for other in '01'):
        time.sleep(0.01)
    if rank == '1':
        HANG
    raise ArithmeticError('a real error')
"""
HANGS = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
"""


@pytest.mark.parametrize(
    ("hang", "text"),
    [
        ("os.kill(os.getpid(), signal.SIGSTOP)", "did not answer; last heartbeat at"),
        (HANGS, "in step 11 at"),
    ],
    ids=["process", "main-thread"],
)
def test_hung_rank_is_named_and_killed(
    hang: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    source = ONE_HANGS.replace("HANG", hang)
    assert run_trainer(source, tmp_path, monkeypatch) == exit_codes.FAILED
    (record,) = failures(tmp_path)
    (line,) = [line for line in record["ranks"] if line.startswith("rank 1 ")]
    assert text in line
    started = (tmp_path / "default" / "control" / "ready1").stat().st_mtime
    # It ignores SIGTERM, after which the launcher would wait 30 seconds for it.
    assert time.time() - started < 20
    error = capsys.readouterr().err
    assert error.count("ArithmeticError: a real error\n") == 2
    assert error.count("Traceback") == 1


TALKS = """
from runtime.log import init_logging, logger, show_progress
init_logging()
logger.info('model: planted')
show_progress(3, 10)
if rank == '0':
    while not os.path.exists(control + '/end'):
        time.sleep(0.01)
    logger.error('ALARM: planted')
"""


# Not a fork of this process: what earlier tests left could join threads that a fork lacks.
ON_A_TERMINAL = """
import os, sys
os.login_tty(0)
from pathlib import Path
from launcher import launch
launch.TRAINER = Path(sys.argv.pop(1))
sys.exit(launch.main(sys.argv[1:], {"NGPU": "2"}))
"""


def test_terminal_after_ctrl_z_and_at_the_end(tmp_path: Path):
    """The whole launcher on a terminal of its own, stopped and continued."""
    pyte = pytest.importorskip("pyte")
    config, trainer = tmp_path / "run.toml", trainer_of(TALKS, tmp_path)
    config.touch()
    arguments = [trainer, config, "--job.output_dir", tmp_path]
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL, *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm-256color"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    screen = pyte.Screen(80, 24)
    stream = pyte.ByteStream(screen)

    def shows(text: str) -> bool:
        with suppress(OSError):  # The other end is closed.
            if select.select([master], [], [], 0.1)[0]:
                stream.feed(os.read(master, 1 << 16))
        return any(line.startswith(text) for line in screen.display)

    def is_live() -> bool:
        assert process.poll() is None, "\n".join(screen.display)
        return shows("step 3/10")

    def has_continued() -> bool:
        return is_live() and any("launcher: continued" in line for line in screen.display)

    wait_until(is_live)
    assert shows("model                 planted")
    os.write(master, b"\x1a")
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
    wait_until(lambda: not shows("step 3/10"))
    process.send_signal(signal.SIGCONT)
    wait_until(has_continued)
    (tmp_path / "default" / "control" / "end").touch()
    with suppress(OSError):  # The other end is closed.
        while True:
            stream.feed(os.read(master, 1 << 16))
    os.close(master)
    assert process.wait(PATIENCE_SECONDS) == exit_codes.DONE
    lines = [line.rstrip() for line in screen.display if line.strip()]
    assert lines[-1].endswith("ALARM: planted")
    assert "launcher: continued" in lines[-2]
    assert screen.cursor.x == 0


@pytest.mark.parametrize(
    ("outcome", "is_alone", "first"),
    [
        ("done", True, "next: train on: NGPU=2 "),
        ("stopped SIGTERM", True, "next: resume: NGPU=2 "),
        (exit_codes.DATA_ENDED.outcome, True, "next: generate text: "),
        ("done", False, "next: generate text: "),
    ],
)
def test_next_commands_fit_the_end_of_the_run(
    outcome: str, is_alone: bool, first: str, tmp_path: Path
) -> None:
    config = run_with_checkpoint(tmp_path)
    lines = launch.next_commands(config, outcome, {"NGPU": "2"}, is_alone=is_alone)
    assert lines[0].startswith(first)
    assert ("config.toml --training.steps" in lines[0]) == lines[0].startswith("next: train on")
    own = [line for line in lines if "your own text" in line]
    assert len(own) == is_alone
    # The same model and schedule, not those of the default configuration.
    named = f"shardloom train {config.job.folder}/config.toml --data.source files "
    assert all(named in line for line in own)


@pytest.mark.parametrize("is_started", [True, False])
@pytest.mark.parametrize("outcome", ["", "stopped SIGTERM", "done"])
def test_next_commands_without_a_checkpoint_need_none(
    outcome: str, is_started: bool, tmp_path: Path
) -> None:
    config = JobConfig.model_validate({"job": {"output_dir": str(tmp_path)}})
    if is_started:
        config.job.folder.mkdir()
        (config.job.folder / "config.toml").touch()
        (config.job.folder / "metrics.jsonl").touch()
    lines = launch.next_commands(config, outcome, {}, is_alone=True)
    purposes = [line.split(": ")[1] for line in lines]
    again = ["start again"] if is_started and outcome != "done" else []
    assert purposes[: len(again)] == again
    assert {*purposes} <= {*again, "report", "curves", "your own text"}
    # There is nothing to show before the first step.
    assert ("report" in purposes) == ("curves" in purposes) == is_started


def test_longer_run_has_a_longer_schedule(tmp_path: Path) -> None:
    for total, is_raised in ((None, True), (5000, False)):
        config = run_with_checkpoint(tmp_path, total_steps=total)
        line = launch.next_commands(config, "done", {}, is_alone=True)[0]
        assert ("--lr_scheduler.total_steps 2000" in line) == is_raised


def test_longer_run_is_longer_than_what_was_trained(tmp_path: Path) -> None:
    config = run_with_checkpoint(tmp_path)
    config = config.model_copy(
        update={"training": config.training.model_copy(update={"steps": 30})}
    )
    line = launch.next_commands(config, "done", {}, is_alone=True)[0]
    assert "--training.steps 200 --lr_scheduler.total_steps 200" in line


def run_with_checkpoint(folder: Path, **lr_scheduler: int | None) -> JobConfig:
    given = {"job": {"output_dir": str(folder)}, "lr_scheduler": lr_scheduler}
    config = JobConfig.model_validate(given)
    (config.job.folder / "checkpoints" / "step-00000100").mkdir(parents=True, exist_ok=True)
    return config
