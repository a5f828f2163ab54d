"""Two hosts in network namespaces: a run ends if the link is cut, and resumes after it is back."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtime.imports import import_variables
from shardloom import command_line
from tests.lib.forked import QUICK, checkpoints, log, run
from tests.lib.launch import LONG, curve, small_keys
from tests.lib.patience import PATIENCE_SECONDS, wait_until
from tests.lib.warm import write_forking_python

HOSTS = ("a", "b")
TIMEOUT_SECONDS = 8
# torch.distributed detects the cut within the timeout, the launcher a little later.
BOUND_SECONDS = 120


@contextmanager
def hosts() -> Iterator[str]:
    """Create network namespaces 10.213.0.1 and .2 on one switch; yield their name prefix."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    name = f"cut{os.getpid()}"
    if subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("root may not make namespaces here")
    try:
        ip("netns", "add", f"{name}-switch")
        ip("-n", f"{name}-switch", "link", "add", "switch", "type", "bridge")
        ip("-n", f"{name}-switch", "link", "set", "switch", "up")
        for i, host in enumerate(HOSTS, start=1):
            namespace = f"{name}-{host}"
            ip("netns", "add", namespace)
            pair = ["type", "veth", "peer", "name", "eth0", "netns", namespace]
            ip("-n", f"{name}-switch", "link", "add", f"port-{host}", *pair)
            options = ["master", "switch", "up"]
            ip("-n", f"{name}-switch", "link", "set", f"port-{host}", *options)
            ip("-n", namespace, "addr", "add", f"10.213.0.{i}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                ip("-n", namespace, "link", "set", interface, "up")
        yield name
    finally:
        for host in (*HOSTS, "switch"):
            subprocess.run(["ip", "netns", "del", f"{name}-{host}"], check=False)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextmanager
def started(name: str, folder: Path, **overrides: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a run with one rank per host; host i writes to ``folder/host-i.log``."""
    keys = small_keys(folder, QUICK | overrides)
    arguments = [part for key, value in keys.items() for part in (f"--{key}", value)]
    # What run_train.sh executes.
    _, *program = command_line("train", arguments)
    command = [write_forking_python(folder), *program]
    environment = os.environ | import_variables(os.environ)
    environment |= {"NGPU": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"NNODES": "2", "MASTER_ADDR": "10.213.0.1", "GLOO_SOCKET_IFNAME": "eth0"}
    environment |= {"LOG_RANK": "0"}
    launchers = []
    for i, host in enumerate(HOSTS):
        with (folder / f"host-{i}.log").open("ab") as output:
            launchers.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", f"{name}-{host}", *command],
                    env=environment | {"NODE_RANK": str(i)},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        yield launchers
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()


def test_cut_link_ends_both_hosts_and_run_resumes(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    cut.mkdir()
    # Each step takes a while, so that some are left when the link is cut.
    keys = LONG | {"training.steps": "16", "lr_scheduler.total_steps": "16"}
    keys |= {"checkpoint.interval": "2", "checkpoint.keep_latest_k": "2"}
    keys |= {"training.global_batch_size": "4"}
    keys |= {"comm.train_timeout_seconds": str(TIMEOUT_SECONDS)}
    with hosts() as name:
        with started(name, cut, **keys) as launchers:
            wait_until(lambda: len(checkpoints(cut)) == 2)
            ip("-n", f"{name}-switch", "link", "set", "port-b", "down")
            begin = time.monotonic()
            codes = [launcher.wait(BOUND_SECONDS) for launcher in launchers]
            print(f"exited with {codes} after {time.monotonic() - begin:.1f} seconds")
            assert 0 not in codes
            assert max(curve(cut)) < 16
        ip("-n", f"{name}-switch", "link", "set", "port-b", "up")
        with started(name, cut, **keys) as launchers:
            assert [launcher.wait(PATIENCE_SECONDS) for launcher in launchers] == [0, 0]
    assert "resumed from step" in (cut / "host-0.log").read_text()
    run(whole, 2, **keys)
    assert curve(cut) == curve(whole), log(whole)
