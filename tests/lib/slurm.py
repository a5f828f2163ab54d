"""A temporary Slurm cluster on this machine for tests.

One controller and a few nodes, each with its own host name and loopback address. Requires root and
Debian's Slurm packages. All files are in one temporary folder, nothing in /etc is read, and only
processes started here are stopped.
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.lib.patience import wait_until

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "unshare", "setpriv")
CPUS = 4
UNSHARE = ("unshare", "--uts", "--mount", "--propagation", "private")
# Each node runs in its own namespaces with its own host name and the /etc/hosts of the cluster.
ENTER = """
hostname "$0" && mount --bind "$1/hosts" /etc/hosts &&
mount --bind "$1/nsswitch.conf" /etc/nsswitch.conf && shift && exec "$@"
"""


class Cluster:
    """Handle to submit jobs, query them and crash nodes. Created by ``cluster()``."""

    def __init__(self, folder: Path, n_nodes: int) -> None:
        self.folder, self.nodes = folder, [f"n{i}" for i in range(n_nodes)]
        # Variables of an enclosing Slurm job would confuse this cluster.
        self.environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("SLURM", "SBATCH", "SRUN"))
        } | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._namespaces: dict[str, str] = {}

    def sbatch(self, *arguments: str, cwd: Path, **environment: str) -> str:
        """Submit a job; return its id."""
        return self.call("sbatch", "--parsable", *arguments, cwd=cwd, **environment).strip()

    def call(self, *command: str, cwd: Path | None = None, **environment: str) -> str:
        done = subprocess.run(
            command,
            env=self.environment | environment,
            cwd=cwd,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def show(self, job: str, key: str) -> str:
        """Value of ``key`` in ``scontrol show job``: JobState, Restarts, ExitCode, NodeList, ..."""
        (value,) = re.findall(rf"(?<!\S){key}=(\S*)", self.call("scontrol", "show", "job", job))
        return str(value)

    def wait(self, job: str, state: str) -> None:
        """Wait until the job is in ``state``; fail if it reaches another final state."""
        final = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        wait_until(lambda: self.show(job, "JobState") in final | {state})
        assert self.show(job, "JobState") == state, self.call("scontrol", "show", "job", job)

    def crash(self, node: str) -> None:
        """Kill all processes of ``node`` at once, as a power loss would."""
        # Its number may be given to a namespace of another cluster on this machine.
        namespace = self._namespaces.pop(node)
        for path in Path("/proc").iterdir():
            if path.name.isdecimal() and _namespace(int(path.name)) == namespace:
                with suppress(ProcessLookupError):
                    os.kill(int(path.name), signal.SIGKILL)
        self._daemons[node].wait()

    def start(self) -> None:
        for name in ("run", "state", "log", *(f"spool/{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        _configure(self.folder, self.nodes)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        run = self.folder / "run"
        options = {"key-file": key, "socket": run / "munge", "pid-file": run / "munged.pid"}
        options |= {"log-file": self.folder / "log" / "munged", "seed-file": run / "munged.seed"}
        # Without --force, munged rejects the folder's permissions.
        flags = ["--force", "--foreground", "--num-threads=2"]
        self._daemon("munged", "munged", *flags, *(f"--{k}={v}" for k, v in options.items()))
        wait_until((run / "munge").exists)
        self._daemon("ctl", *self._in("ctl"), "slurmctld", "-D", "-c")
        for node in self.nodes:
            self._daemon(node, *self._in(node), "slurmd", "-D", "-N", node)
        wait_until(lambda: self._ready() == set(self.nodes))
        self._namespaces = {node: _namespace(self._daemons[node].pid) for node in self.nodes}
        assert len(set(self._namespaces.values()) - {"", _namespace(os.getpid())}) == len(
            self.nodes
        )

    def stop(self) -> None:
        for node in list(self._namespaces):
            self.crash(node)
        for daemon in self._daemons.values():
            daemon.terminate()
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(5)
            daemon.kill()
            daemon.wait()

    def _ready(self) -> set[str]:
        return set(self.call("sinfo", "--noheader", "-N", "-t", "idle", "-o", "%N").split())

    def _in(self, host: str) -> list[str]:
        return [*UNSHARE, "sh", "-c", ENTER, host, str(self.folder)]

    def _daemon(self, name: str, *command: str) -> None:
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                # The daemons must also die if this process is killed.
                ["setpriv", "--pdeathsig", "KILL", *command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


@contextmanager
def cluster(n_nodes: int) -> Iterator[Cluster]:
    """Start a cluster with nodes n0, n1, ...; skip the test if this machine cannot run one."""
    _require()
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    found = Cluster(folder, n_nodes)
    try:
        found.start()
        yield found
    finally:
        found.stop()
        shutil.rmtree(folder)


def _require() -> None:
    if os.geteuid() != 0:
        pytest.skip("host names per node need root")
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    attempt = [*UNSHARE, "sh", "-c", "hostname node && mount --bind /etc/hosts /etc/hosts"]
    if subprocess.run(attempt, capture_output=True).returncode:
        pytest.skip("root may not make namespaces here")
    if all(map(shutil.which, PROGRAMS)):
        return
    if shutil.which("apt-get") is None:
        pytest.skip(f"needs Debian's packages {', '.join(PACKAGES)}")
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    # The tests start their own daemons.
    install = ["apt-get", "install", "--yes", "--no-install-recommends", *PACKAGES]
    for command in (["apt-get", "update"], install):
        done = subprocess.run(command, env=quiet, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"could not install {', '.join(PACKAGES)}: {done.stderr.strip()}")


def _namespace(process: int) -> str:
    try:
        return os.readlink(f"/proc/{process}/ns/uts")
    except OSError:
        return ""


def _configure(folder: Path, nodes: list[str]) -> None:
    # Another cluster may be on this machine, started at the same moment by the next process id.
    base = 20000 + os.getpid() % 100 * 100
    addresses = {node: f"127.0.0.{10 + i}" for i, node in enumerate(nodes)}
    names = {"localhost": "127.0.0.1", "ctl": "127.0.0.1"} | addresses
    hosts = "".join(f"{address} {name}\n" for name, address in names.items())
    (folder / "hosts").write_text(hosts)
    (folder / "nsswitch.conf").write_text("hosts: files\npasswd: files\ngroup: files\n")
    values = {
        "ClusterName": "test",
        "SlurmctldHost": "ctl(127.0.0.1)",
        "SlurmUser": "root",
        "SlurmctldPort": str(base),
        # The ports of jobs follow from their numbers.
        "FirstJobId": str(base),
        "CommunicationParameters": "NoCtldInAddrAny",
        # A requeued job waits for the lifetime of a credential, two minutes by default.
        "AuthInfo": f"socket={folder}/run/munge,cred_expire=5",
        "StateSaveLocation": f"{folder}/state",
        "SlurmdSpoolDir": f"{folder}/spool/%n",
        "SlurmctldPidFile": f"{folder}/run/slurmctld.pid",
        "SlurmdPidFile": f"{folder}/run/slurmd.%n.pid",
        "SlurmctldLogFile": f"{folder}/log/slurmctld",
        "SlurmdLogFile": f"{folder}/log/slurmd.%n",
        # No cgroups, and more CPUs per node than the machine has.
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SlurmdParameters": "config_overrides",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "MailProg": "/bin/true",
        # Keep records of finished jobs.
        "MinJobAge": "3600",
        "ReturnToService": "2",
        # Timeouts of seconds instead of minutes.
        "SlurmdTimeout": "8",
        "KillWait": "20",
        "MessageTimeout": "5",
        "TCPTimeout": "2",
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,sched_min_interval=0",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
    }
    lines = [f"{key}={value}" for key, value in values.items()]
    for i, (node, address) in enumerate(addresses.items()):
        place = f"NodeName={node} NodeHostname={node} NodeAddr={address} Port={base + 1 + i}"
        lines.append(f"{place} CPUs={CPUS} SocketsPerBoard=1 CoresPerSocket={CPUS} RealMemory=4000")
    for name, tier, grace in (("low", 1, 60), ("high", 10, 0)):
        parts = f"Nodes={','.join(nodes)} PriorityTier={tier} GraceTime={grace}"
        default = "YES" if name == "low" else "NO"
        lines.append(f"PartitionName={name} {parts} Default={default} MaxTime=INFINITE State=UP")
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
