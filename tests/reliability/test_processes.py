"""Real runs whose processes die, hang, crash in a loop and listen on ports."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from launcher.failures import MOST_ATTEMPTS
from runtime.exit_codes import BAD_CONFIG, DO_NOT_REQUEUE, DONE, FAILED, PREEMPTED
from runtime.run_folder import list_checkpoints, step_of
from tests.lib.launch import LONG, plant_crashing_model, start, wait_for_steps
from tests.lib.patience import PATIENCE_SECONDS
from tests.lib.ports import free_port
from tests.lib.processes import are_gone, is_running, seconds_until
from tests.lib.repository import ROOT
from tests.lib.warm import ZYGOTE

TIMEOUT_SECONDS = 5
KEYS = LONG | {
    "training.global_batch_size": "12",
    "checkpoint.interval": "2",
    "comm.train_timeout_seconds": str(TIMEOUT_SECONDS),
}
LISTENS = "0A"
# A model, and a disk on which no checkpoint and, until its step 3, no alarm has room.
FULL_DISK = """
import errno

from checkpoint.checkpointer import Checkpointer
from models.llama3 import SPEC
from runtime.run_folder import LineFile

MODEL, n_left, open_file = SPEC, 2, LineFile._open


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def open_alarms(self):
    global n_left
    if self._path.name == "alarms.jsonl" and n_left:
        n_left -= 1
        full()
    return open_file(self)


Checkpointer._open_scratch, LineFile._open = full, open_alarms
"""


@contextmanager
def long_run(folder: Path, n_ranks: int) -> Iterator[tuple[subprocess.Popen[str], dict[int, int]]]:
    """Start a run, wait for steps and a save; yield its launcher and the pids of its ranks."""
    (folder / "debug_model" / "metrics.jsonl").unlink(missing_ok=True)
    process = start(folder, n_ranks, **KEYS)
    try:
        wait_for_steps(folder, process)
        ranks = ranks_of(process.pid)
        assert sorted(ranks) == list(range(n_ranks))
        yield process, ranks
    finally:
        process.kill()
        process.wait()


def ranks_of(launcher: int) -> dict[int, int]:
    """Process ids by rank, in the order in which the launcher started them."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    names = {int(child): Path(f"/proc/{child}/comm").read_text().strip() for child in children}
    return dict(enumerate(child for child, name in names.items() if name != ZYGOTE))


def has_failures(folder: Path, count: int) -> bool:
    return len(failures(folder)) == count


def failures(folder: Path) -> list[dict[str, Any]]:
    path = folder / "debug_model" / "control" / "failures"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def listeners(process: int) -> list[str]:
    """Addresses on which ``process`` listens."""
    sockets = set()
    for file in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # Closed since.
            sockets.add(os.readlink(file))
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return [
        readable(fields[1].partition(":")[0])
        for fields in lines
        if fields[3] == LISTENS and f"socket:[{fields[9]}]" in sockets
    ]


def readable(address: str) -> str:
    """Format an address of /proc/net, which has 32-bit words in this machine's byte order."""
    words = (address[i : i + 8] for i in range(0, len(address), 8))
    parsed = ip_address(b"".join(bytes.fromhex(word)[::-1] for word in words))
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, dict[int, int]]]:
    """Process ids of a launcher and of its ranks."""
    with long_run(tmp_path_factory.mktemp("running"), 2) as (launcher, ranks):
        yield launcher.pid, ranks


@pytest.mark.row(27, "One node opens no port to the outside")
def test_one_node_listens_only_on_loopback(
    running: tuple[int, dict[int, int]], record_result: Callable[[str], None]
) -> None:
    launcher, ranks = running
    addresses = [
        address for process in (launcher, *ranks.values()) for address in listeners(process)
    ]
    # The store listens, and gloo has a few sockets per rank.
    assert len(addresses) > len(ranks)
    assert all(ip_address(address).is_loopback for address in addresses), addresses
    record_result(f"{len(addresses)} sockets that listen, all of them on loopback")


def test_open_port_is_detected() -> None:
    with socket.create_server(("", 0)), socket.create_server(("::", 0), family=socket.AF_INET6):
        assert {"0.0.0.0", "::"} <= set(listeners(os.getpid()))
    with socket.create_server(("127.0.0.1", 0)):
        assert "127.0.0.1" in listeners(os.getpid())


# Must run after the test above, because it kills the shared run.
@pytest.mark.row(29, "No worker outlives its launcher")
def test_ranks_die_with_their_launcher(
    running: tuple[int, dict[int, int]], record_result: Callable[[str], None]
) -> None:
    launcher, ranks = running
    os.kill(launcher, signal.SIGKILL)
    seconds = seconds_until(lambda: are_gone(ranks.values()), limit=5)
    record_result(
        f"kill -9 of the launcher: {len(ranks)} of {len(ranks)} ranks gone after {seconds:.1f} s"
    )


ORPHANS = """
import os, sys
from runtime.signals import die_with_parent
if os.fork() == 0:
    if sys.argv[1] == "bound":
        die_with_parent(int(sys.argv[2]) or os.getppid())
    print(os.getpid(), flush=True)
os.read(0, 1)
"""


@pytest.mark.parametrize(("kind", "outlives"), [("bound", False), ("free", True)])
def test_die_with_parent(kind: str, outlives: bool) -> None:
    command = [sys.executable, "-c", ORPHANS, kind, "0"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    parent = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    if outlives:
        assert is_running(child)
        os.kill(child, signal.SIGKILL)
    seconds_until(lambda: not is_running(child), limit=5)


def test_die_with_parent_that_is_already_dead() -> None:
    # This process is not its parent, as if the launcher died while its ranks started. Process 1
    # would be, if the parent ended before the child asks.
    command = [sys.executable, "-c", ORPHANS, "bound", str(os.getpid())]
    child = subprocess.run(command, cwd=ROOT, input="x", capture_output=True, text=True)
    assert child.stdout == ""


@pytest.mark.row(10, "A dead peer is noticed")
def test_killed_rank_ends_all_and_run_resumes(
    tmp_path: Path, trials: Callable[[int], int], record_result: Callable[[str], None]
) -> None:
    seconds, saved = [], 0
    for trial in range(trials(20)):
        victim = trial % 2
        with long_run(tmp_path, 2) as (launcher, ranks):
            os.kill(ranks[victim], signal.SIGKILL)
            seconds.append(seconds_until(partial(are_gone, ranks.values()), limit=2))
            output, _ = launcher.communicate()
        assert launcher.returncode == FAILED
        reason = failures(tmp_path)[-1]["reason"]
        assert re.match(rf"rank {victim} \(.*\) was killed by SIGKILL", reason)
        assert reason in output
        assert (f"resumed from step {saved} " in output) == (trial > 0)
        # Not control/progress, which is written after the checkpoint is committed.
        saved = step_of(list_checkpoints(tmp_path / "debug_model" / "checkpoints")[0])
    noticed = f"{len(seconds)} of {len(seconds)} noticed"
    record_result(f"{noticed}; the slowest survivor left after {max(seconds):.1f} s")


@pytest.mark.row(11, "A hung rank is noticed and named")
def test_hung_rank_is_reported(
    tmp_path: Path, trials: Callable[[int], int], record_result: Callable[[str], None]
) -> None:
    seconds = []
    for trial in range(trials(12)):
        victim = (trial + 1) % 3
        with long_run(tmp_path, 3) as (launcher, ranks):
            os.kill(ranks[victim], signal.SIGSTOP)
            is_reported = partial(has_failures, tmp_path, trial + 1)
            seconds.append(seconds_until(is_reported, after=TIMEOUT_SECONDS, limit=20))
            output, _ = launcher.communicate()
        assert launcher.returncode in (FAILED, DO_NOT_REQUEUE)
        reason = failures(tmp_path)[-1]["reason"]
        assert re.match(rf"rank {victim} \(.*\) did not answer; last heartbeat at", reason)
        assert output.count("did not answer") == 1
        assert not is_running(ranks[victim])
    named = f"{len(seconds)} of {len(seconds)} named"
    record_result(f"{named}, the slowest {max(seconds):.1f} s after the timeout")


def test_node_with_only_hung_ranks_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank of its launcher fails, so other nodes must report the failure to it."""
    keys = {"NNODES": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in keys.items():
        monkeypatch.setenv(name, str(value))
    nodes = []
    try:
        for number in ("0", "1"):
            monkeypatch.setenv("NODE_RANK", number)
            nodes.append(start(tmp_path, 1, **KEYS))
        wait_for_steps(tmp_path, nodes[0])
        (hung,) = ranks_of(nodes[1].pid).values()
        os.kill(hung, signal.SIGSTOP)
        for node in nodes:
            node.wait(TIMEOUT_SECONDS + 60)
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert {node.returncode for node in nodes} == {FAILED}
    assert re.match(r"rank 1 \(.*\) did not answer", failures(tmp_path)[-1]["reason"])
    assert not is_running(hung)


def test_run_without_saves_says_so_in_its_records(tmp_path: Path) -> None:
    (tmp_path / "full_disk.py").write_text(FULL_DISK)
    process = start(
        tmp_path,
        2,
        environment={"PYTHONPATH": str(tmp_path)},
        **{
            "model.name": "full_disk:MODEL",
            "training.steps": "8",
            "checkpoint.interval": "1",
            "checkpoint.max_unsaved_steps": "4",
        },
    )
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == FAILED, output
    reason = failures(tmp_path)[-1]["reason"]
    assert reason.endswith(": stopped by checkpoints that could not be saved"), reason
    alarms = (tmp_path / "debug_model" / "alarms.jsonl").read_text().splitlines()
    failed = [a for a in map(json.loads, alarms) if "checkpoint save failed" in a["text"]]
    assert [alarm["step"] for alarm in failed] == [1, 2, 3, 4, 5]


def test_exit_of_a_users_code_is_a_failure_of_its_rank(tmp_path: Path) -> None:
    """Also with code 0, and without a code of 1 from the ranks that wait for it."""
    environment, keys = plant_crashing_model(tmp_path)
    model = (tmp_path / "planted.py").read_text()
    leaving = 'import os, sys; int(os.environ["RANK"]) == 1 and sys.exit(0)'
    lines = f"{leaving}\n        return super().forward(*inputs)"
    (tmp_path / "planted.py").write_text(model.replace('raise RuntimeError("planted")', lines))
    keys |= {"training.steps": "2", "validation.enable": "false"}
    process = start(tmp_path, 2, environment=environment, **keys)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == FAILED, output
    (failure,) = failures(tmp_path)
    assert re.match(r"rank 1 .*failed in step 1.*sys\.exit\(0\) was called", failure["reason"])
    assert not (tmp_path / "debug_model" / "control" / "outcome").exists()


@pytest.mark.row(13, "A crash loop is bounded")
def test_crash_loop_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_result: Callable[[str], None]
) -> None:
    environment, keys = plant_crashing_model(tmp_path)
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    codes: list[int] = []
    while not codes or codes[-1] not in (DONE, BAD_CONFIG, PREEMPTED, DO_NOT_REQUEUE):
        assert len(codes) < MOST_ATTEMPTS, codes
        process = start(tmp_path, 1, **{"training.steps": "6"}, **keys)
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
        codes.append(process.returncode)
    assert codes == [FAILED] * (MOST_ATTEMPTS - 1) + [DO_NOT_REQUEUE], output
    assert [record["attempt"] for record in failures(tmp_path)] == [1, 2, 3]
    assert "RuntimeError: planted" in failures(tmp_path)[-1]["reason"]
    assert output.count("Traceback") == 1
    record_result(f"{len(codes)} attempts, then 93")
