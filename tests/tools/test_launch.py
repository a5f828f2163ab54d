"""The launcher starts the world that was asked for, and ends with the trainer's own exit code."""

import signal
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from runtime import exit_codes
from tools import launch
from tools.launch import DEFAULT_CPU_RANKS, Nodes, find_nodes, ranks_per_node, torchrun_arguments

SLURM = {"SLURM_JOB_ID": "123456", "SLURM_NNODES": "3", "SLURM_STEP_NODELIST": "node[07-09]"}


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Knows one list of hosts; a PATH with nothing else on it."""
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


@pytest.mark.parametrize("asked", ["0", "-1", "two", "1.5", " "])
def test_a_number_of_ranks_that_is_none_names_ngpu(asked: str):
    with pytest.raises(ValueError, match="NGPU"):
        ranks_per_node({"NGPU": asked})


def test_one_node_needs_nothing():
    nodes = find_nodes({})
    assert (nodes.count, nodes.rank) == (1, 0)


def test_nodes_as_the_user_says():
    said = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
    assert find_nodes(said) == Nodes(count=2, rank=1, address="head", port=29500)
    assert find_nodes(SLURM | said) == find_nodes(said)


@pytest.mark.usefixtures("scontrol")
def test_nodes_as_slurm_says():
    nodes = [find_nodes(SLURM | {"SLURM_NODEID": str(rank)}) for rank in range(3)]
    assert [node.rank for node in nodes] == [0, 1, 2]
    assert {(node.count, node.address) for node in nodes} == {(3, "node07")}
    (port,) = {node.port for node in nodes}
    assert 1024 < port < 65536


def test_jobs_that_share_a_head_node_do_not_share_a_port():
    ports = {find_nodes({"SLURM_JOB_ID": str(job)}).port for job in range(1000, 1100)}
    assert len(ports) == 100


@pytest.mark.parametrize(
    ("environment", "key"),
    [
        ({"NNODES": "2"}, "MASTER_ADDR"),
        ({"SLURM_JOB_ID": "1", "SLURM_NNODES": "2"}, "MASTER_ADDR"),
        ({"NNODES": "two"}, "NNODES"),
        ({"NNODES": "0"}, "NNODES"),
        ({"NNODES": "2:4"}, "NNODES"),
        ({"NODE_RANK": "first"}, "NODE_RANK"),
        ({"NODE_RANK": "-1"}, "NODE_RANK"),
        ({"NODE_RANK": "1"}, "NODE_RANK"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "head"}, "NODE_RANK"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT"),
    ],
)
def test_nodes_that_cannot_be_are_refused_by_name(environment: dict[str, str], key: str):
    with pytest.raises(ValueError, match=f"^{key}"):
        find_nodes(environment)


def test_without_scontrol_the_head_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        find_nodes(SLURM)
    assert find_nodes(SLURM | {"MASTER_ADDR": "head"}).address == "head"


@pytest.mark.parametrize(
    ("environment", "key"),
    [({"NNODES": "two"}, "NNODES"), ({"NGPU": "0"}, "NGPU"), ({"LOG_RANK": "all"}, "LOG_RANK")],
)
def test_a_bad_environment_is_a_bad_configuration(
    environment: dict[str, str], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = tmp_path / "run.toml"
    config.touch()
    assert launch.main([str(config)], environment) == exit_codes.BAD_CONFIG
    assert key in capsys.readouterr().err


def parsed(nodes: Nodes) -> Namespace:
    return torchrun.parse_args([*torchrun_arguments(4, nodes, "0,2"), "train.py", "--a.b", "c"])


def test_torchrun_on_one_node():
    arguments = parsed(Nodes(1, 0, "", 20000))
    assert arguments.standalone
    assert (arguments.nproc_per_node, arguments.local_ranks_filter) == ("4", "0,2")
    assert arguments.training_script_args == ["--a.b", "c"]


def test_torchrun_on_several_nodes():
    arguments = parsed(Nodes(3, 2, "node07", 21234))
    assert not arguments.standalone
    assert (arguments.nnodes, arguments.node_rank) == ("3", 2)
    assert (arguments.rdzv_backend, arguments.rdzv_endpoint) == ("static", "node07:21234")


def run_trainer(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The launcher's code for two ranks of a trainer that does as ``source`` says."""
    config, trainer = folder / "run.toml", folder / "trainer.py"
    config.touch()
    trainer.write_text(f"import os, signal, sys, time\nrank = os.environ['RANK']\n{source}")
    monkeypatch.setattr(launch, "TRAINER", trainer)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "10")
    # torchrun leaves its handlers behind.
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        return launch.main([str(config)], {"NGPU": "2"})
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)


@pytest.mark.parametrize(
    "code",
    [exit_codes.DONE, exit_codes.BAD_CONFIG, exit_codes.PREEMPTED, exit_codes.DO_NOT_REQUEUE],
)
def test_the_trainers_exit_code_comes_through(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # After a failure one rank is slow to end, so torchrun terminates it.
    source = f"time.sleep(60 * ({code} > 0) * int(rank))\nsys.exit({code})"
    assert run_trainer(source, tmp_path, monkeypatch) == code


CRASH = "sys.exit(1)"
CRASH_AFTER_A_KNOWN_CODE = """
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


@pytest.mark.parametrize("source", [CRASH, CRASH_AFTER_A_KNOWN_CODE])
def test_a_crash_is_a_crash(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ChildFailedError):
        run_trainer(source, tmp_path, monkeypatch)


TELLS_BUT_IS_NOT_SHOWN = """
if rank == '0':
    time.sleep(60)
with open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as file:
    file.write('{"message": "data.tokenizer: nope"}')
sys.exit(2)
"""


def test_what_any_rank_finds_wrong_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run_trainer(TELLS_BUT_IS_NOT_SHOWN, tmp_path, monkeypatch)
    assert "data.tokenizer: nope" in capsys.readouterr().err
