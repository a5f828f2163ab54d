"""The launcher starts the world that was asked for, and ends with the trainer's own exit code."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runtime import exit_codes
from runtime.control import SIGNALS, lock_run
from runtime.failures import MOST_ATTEMPTS
from runtime.machine import usable_cpus
from tests.reliability.test_processes import are_gone, seconds_until
from tools import agent, launch
from tools.agent import End, Nodes
from tools.launch import (
    DEFAULT_CPU_RANKS,
    exit_code,
    find_nodes,
    ranks_per_node,
    shown_ranks,
)

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


@pytest.mark.parametrize("name", ["NGPU", "SLURM_GPUS_ON_NODE"])
def test_more_ranks_than_gpus_are_refused(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert ranks_per_node({name: "2"}) == 2
    with pytest.raises(ValueError, match=f"{name}=3: of GPUs 2 can be seen"):
        ranks_per_node({name: "3"})


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
    [
        ({"NNODES": "two"}, "NNODES"),
        ({"NGPU": "0"}, "NGPU"),
        ({"LOG_RANK": "all"}, "LOG_RANK"),
        ({"NGPU": "2", "LOG_RANK": "0,2"}, "LOG_RANK: 0,2: a node's ranks are 0 to 1"),
    ],
)
def test_a_bad_environment_is_a_bad_configuration(
    environment: dict[str, str], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = tmp_path / "run.toml"
    config.touch()
    assert launch.main([str(config)], environment) == exit_codes.BAD_CONFIG
    assert key in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["file", "/proc/none"])
def test_a_folder_that_cannot_be_made_is_named(
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


def test_every_rank_has_a_thread():
    assert launch.cpu_threads(1) == usable_cpus()
    assert launch.cpu_threads(usable_cpus() + 1) == 1


def test_ranks_whose_output_is_shown():
    assert shown_ranks("0", 1) == {0}
    assert shown_ranks("0,2", 3) == {0, 2}


@pytest.mark.parametrize(
    ("codes", "told", "outcome", "code"),
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
        ([1, 75], signal.SIGTERM, "", exit_codes.FAILED),
        ([93, 93], signal.SIGTERM, "", exit_codes.DO_NOT_REQUEUE),
        ([143, 143], signal.SIGTERM, "", exit_codes.FAILED),
    ],
)
def test_exit_code(codes: list[int], told: signal.Signals | None, outcome: str, code: int):
    end = End(dict(enumerate(codes)), message="", signal=told, verdict=None)
    assert exit_code(end, outcome, has_checkpoints=True) == code


def test_a_run_that_was_told_to_stop_and_does_not_save_has_failed():
    end = End({0: 0}, message="", signal=signal.SIGTERM, verdict=None)
    assert exit_code(end, "stopped SIGTERM", has_checkpoints=False) == exit_codes.FAILED


@pytest.mark.parametrize(
    ("node", "told", "n_failures"), [(0, None, 1), (1, None, 0), (0, signal.SIGTERM, 0)]
)
def test_the_first_node_shows_a_rank_and_tells_of_failures(
    node: int,
    told: signal.Signals | None,
    n_failures: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    shown = []

    def run_ranks(program: list[str], **keywords: Any) -> End:
        shown.append(keywords["shown"])
        return End({node: 1}, message="", signal=told, verdict=None)

    monkeypatch.setattr(launch, "run_ranks", run_ranks)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config, control = tmp_path / "run.toml", tmp_path / "default" / "control"
    config.touch()
    control.mkdir(parents=True)
    environment = {"NGPU": "1", "NNODES": "2", "NODE_RANK": str(node), "MASTER_ADDR": "here"}
    arguments = [str(config), "--job.output_dir", str(tmp_path)]
    assert launch.main(arguments, environment) == exit_codes.FAILED
    assert shown == [{0} if node == 0 else set()]
    assert len(failures(tmp_path)) == n_failures
    assert exit_codes.reported(control) == (exit_codes.FAILED if node == 0 else None)


def run_trainer(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The launcher's code for two ranks of a trainer that does as ``source`` says."""
    config, trainer = folder / "run.toml", folder / "trainer.py"
    config.touch()
    control = folder / "default" / "control"
    control.mkdir(parents=True, exist_ok=True)
    lines = [
        "import os, signal, sys, time",
        f"sys.path.insert(0, {str(launch.TRAINER.parent)!r})",
        f"control = {str(control)!r}",
        "rank = os.environ['RANK']",
    ]
    trainer.write_text("\n".join([*lines, source]))
    monkeypatch.setattr(launch, "TRAINER", trainer)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # The launcher leaves its handlers behind.
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        return launch.main([str(config), "--job.output_dir", str(folder)], {"NGPU": "2"})
    finally:
        monkeypatch.undo()
        for number, handler in handlers.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)


def failures(folder: Path) -> list[dict[str, object]]:
    path = folder / "default" / "control" / "failures"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    "code",
    [exit_codes.DONE, exit_codes.BAD_CONFIG, exit_codes.PREEMPTED, exit_codes.DO_NOT_REQUEUE],
)
def test_the_trainers_exit_code_comes_through(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # After a failure one rank is slow to end, so the launcher terminates it.
    source = f"time.sleep(60 * ({code} > 0) * int(rank))\nsys.exit({code})"
    assert run_trainer(source, tmp_path, monkeypatch) == code
    assert not (tmp_path / "default" / "control" / "failures").exists()


TELLS_ITS_ENVIRONMENT = """
import json
print('rank', rank)
with open(f'{control}/{rank}.json', 'w') as file:
    json.dump(dict(os.environ), file)
"""


def test_ranks_are_told_what_torchrun_tells_and_the_rest_is_the_users_to_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.delenv("TORCH_FR_DUMP_TEMP_FILE", raising=False)
    assert run_trainer(TELLS_ITS_ENVIRONMENT, tmp_path, monkeypatch) == exit_codes.DONE
    (logs,) = (tmp_path / "default" / "logs").iterdir()
    for rank in "01":
        told = json.loads((tmp_path / "default" / "control" / f"{rank}.json").read_text())
        assert told["RANK"] == told["LOCAL_RANK"] == rank
        assert told["WORLD_SIZE"] == told["LOCAL_WORLD_SIZE"] == "2"
        assert (told["GROUP_RANK"], told["MASTER_ADDR"]) == ("0", "127.0.0.1")
        assert told["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        assert told["LAUNCHER_PID"] == str(os.getpid())
        assert (told["OMP_NUM_THREADS"], told["TORCH_NCCL_ASYNC_ERROR_HANDLING"]) == ("1", "1")
        assert told["NCCL_DEBUG"] == "INFO"
        assert told["TORCH_FR_DUMP_TEMP_FILE"] == f"{logs}/flight-record-"
    # Of two ranks one is shown, and only what the other says is logged.
    assert capfd.readouterr().out == "rank 0\n"
    assert {path.name: path.read_text() for path in logs.iterdir()} == {"rank-1.out": "rank 1\n"}


@pytest.mark.parametrize("is_another", [False, True])
def test_a_refused_start_reports_nothing_to_the_run_it_was_refused_for(
    is_another: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    control = tmp_path / "default" / "control"
    control.mkdir(parents=True)
    with lock_run(control) if is_another else nullcontext():
        assert run_trainer("sys.exit(2)", tmp_path, monkeypatch) == exit_codes.BAD_CONFIG
    assert exit_codes.reported(control) == (None if is_another else exit_codes.BAD_CONFIG)


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
    assert run_trainer(source, tmp_path, monkeypatch) == exit_codes.FAILED
    assert [record["attempt"] for record in failures(tmp_path)] == [1]


def test_a_crash_loop_ends_and_an_end_as_asked_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    codes = [run_trainer(CRASH, tmp_path, monkeypatch) for _ in range(MOST_ATTEMPTS - 1)]
    codes.append(run_trainer("sys.exit(75)", tmp_path, monkeypatch))
    codes += [run_trainer(CRASH, tmp_path, monkeypatch) for _ in range(MOST_ATTEMPTS)]
    assert codes == [1, 1, 75, 1, 1, 93]
    assert "not trying again" in capsys.readouterr().err


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


SAVES = """
received = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
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
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_every_signal_reaches_the_ranks_and_they_have_time_to_save(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = SAVES.replace("NUMBER", str(int(number)))
    assert run_trainer(source, tmp_path, monkeypatch) == exit_codes.PREEMPTED
    outcome = (tmp_path / "default" / "control" / "outcome").read_text()
    assert outcome == f"stopped {number.name}"


def test_ranks_that_take_too_long_to_save_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(agent, "SHUTDOWN_SECONDS", 0)
    source = SAVES.replace("NUMBER", "signal.SIGTERM")
    assert run_trainer(source, tmp_path, monkeypatch) == exit_codes.FAILED
    assert not (tmp_path / "default" / "control" / "outcome").exists()


DOES_NOT_LISTEN = """
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


def test_a_third_signal_kills_ranks_and_all_that_they_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    begin = time.monotonic()
    assert run_trainer(DOES_NOT_LISTEN, tmp_path, monkeypatch) == exit_codes.FAILED
    assert time.monotonic() - begin < 30
    assert failures(tmp_path) == []
    children = [(tmp_path / "default" / "control" / f"child{rank}").read_text() for rank in "01"]
    seconds_until(lambda: are_gone(map(int, children)), limit=5)


def test_launchers_part_together_unless_one_is_told_to_stop():
    nodes = [Nodes(count=2, rank=rank, address="", port=0) for rank in range(2)]
    with ThreadPoolExecutor() as pool:
        store = dist.HashStore()
        head = pool.submit(agent._part, store, nodes[0], [])
        with pytest.raises(TimeoutError):
            head.result(3 * agent.POLL_SECONDS)
        agent._part(store, nodes[1], [])
        head.result(10)
    agent._part(dist.HashStore(), nodes[0], [signal.SIGTERM])


def test_a_signal_before_ranks_can_handle_it_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = "os.kill(os.getppid(), signal.SIGUSR1) if rank == '0' else None\ntime.sleep(60)"
    assert run_trainer(source, tmp_path, monkeypatch) == exit_codes.PREEMPTED


ONE_HANGS = """
from runtime.post_mortem import Witness
with Witness(os.environ) as witness:
    witness.step = 10 + int(rank)
    open(control + '/ready' + rank, 'w').close()
    while not all(os.path.exists(control + '/ready' + other) for other in '01'):
        time.sleep(0.01)
    if rank == '1':
        HANG
    raise ArithmeticError('a real error')
"""
DEAF = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
"""


@pytest.mark.parametrize(
    ("hang", "told"),
    [
        ("os.kill(os.getpid(), signal.SIGSTOP)", "did not answer; last heard at"),
        (DEAF, "in step 11 at"),
    ],
    ids=["process", "main-thread"],
)
def test_a_rank_that_hangs_is_named_and_ended(
    hang: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    source = ONE_HANGS.replace("HANG", hang)
    assert run_trainer(source, tmp_path, monkeypatch) == exit_codes.FAILED
    (record,) = failures(tmp_path)
    (line,) = [line for line in record["ranks"] if line.startswith("rank 1 ")]
    assert told in line
    heard = (tmp_path / "default" / "control" / "ready1").stat().st_mtime
    # It does not hear SIGTERM, after which the launcher would wait 30 seconds for it.
    assert time.time() - heard < 20
    error = capsys.readouterr().err
    assert error.count("ArithmeticError: a real error\n") == 2
    assert error.count("Traceback") == 1
