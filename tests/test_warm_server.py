"""Programs that a server forks for shells behave as those that Python starts."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from runtime import exit_codes
from runtime.imports import import_variables
from tests.lib.launch import LONG, records, small_keys
from tests.lib.patience import PATIENCE_SECONDS, wait_until
from tests.lib.warm import IS_POSSIBLE, server_address, write_forking_python

pytestmark = pytest.mark.skipif(not IS_POSSIBLE, reason="needs Linux")


def start(folder: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [write_forking_python(folder), *words],
        env=os.environ | import_variables(os.environ) | {"NGPU": "1"} | variables,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def started_run(folder: Path) -> subprocess.Popen[str]:
    keys = small_keys(folder, LONG)
    arguments = [part for key, value in keys.items() for part in (f"--{key}", value)]
    process = start(folder, "-m", "launcher.launch", "debug_model", *arguments)
    wait_until(lambda: (folder / "debug_model" / "metrics.jsonl").exists() and records(folder))
    return process


@pytest.mark.parametrize(
    ("program", "variables"),
    [("tools.slurm_begin", {}), ("tools.status", {"LC_TIME": "C"})],
    ids=["forked", "read at start"],
)
def test_output_and_exit_code_are_the_program_s(
    tmp_path: Path, program: str, variables: dict[str, str]
) -> None:
    process = start(tmp_path, "-m", program, "no\udcff.toml", **variables)
    output, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, output) == (exit_codes.BAD_CONFIG, "")
    assert "no" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("sent", [b"", (100).to_bytes(8) + b"{"], ids=["nothing", "a part"])
def test_client_that_is_killed_early_harms_no_other(tmp_path: Path, sent: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(server_address())
        client.sendall(sent)
    process = start(tmp_path, "-m", "tools.slurm_begin")
    assert "sbatch --nodes=N" in process.communicate(timeout=PATIENCE_SECONDS)[1]


def test_other_words_are_python_s(tmp_path: Path) -> None:
    process = start(tmp_path, "-c", "import sys; print(sys.executable)")
    assert process.communicate(timeout=PATIENCE_SECONDS)[0] == f"{sys.executable}\n"


def test_signals_reach_the_program(tmp_path: Path) -> None:
    process = started_run(tmp_path)
    process.send_signal(signal.SIGUSR1)
    output, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == exit_codes.PREEMPTED, errors
    assert "launcher: SIGUSR1, forwarded to the ranks" in output + errors


def test_program_dies_with_its_client(tmp_path: Path) -> None:
    process = started_run(tmp_path)
    # The launcher, and its rank.
    assert len(users_of(tmp_path)) >= 2
    process.kill()
    assert process.wait() == -signal.SIGKILL
    wait_until(lambda: not users_of(tmp_path))


def users_of(folder: Path) -> set[str]:
    """Process ids, as text, of those that have a file in ``folder`` open."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # It has just ended, or is another user's.
            if os.readlink(path).startswith(str(folder)):
                found.add(path.parts[2])
    return found
