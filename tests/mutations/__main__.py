"""Mutation check: plant one small fault at a time, and run the tests that should notice it.

``python -m tests.mutations [NAME ...] [--tests all] [--out FILE] [--control]``

Each fault is planted in a copy of the tracked files. Exits with 1 if a mutation survives that has
no reason to. Linux only. Interrupted, it ends its processes; with ``--out`` it goes on later.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from runtime.log import duration
from tests.lib.repository import ROOT
from tests.mutations.mutations import MUTATIONS, Mutation

# Time limits of a test run. Broken collectives may wait for each other.
NAMED_SECONDS, SUITE_SECONDS = 15 * 60, 90 * 60
POLL_SECONDS = 0.1
# It holds that each mutation applies, so it fails wherever one does.
OWN_TEST = "tests/test_mutations.py"
SUITE = ("tests", "-n", "2", "--dist", "loadfile", f"--ignore={OWN_TEST}")
# All processes of a test run have it in their environment.
MARK = "MUTATION_FOLDER"
CAUGHT, HUNG, SURVIVED = "caught", "hung", "survived"


class RunError(Exception):
    """The tests could not be run."""


@dataclass(frozen=True)
class PytestRun:
    """Result of one run of pytest."""

    outcome: str
    by: str
    """Test that failed, or the exit code if none is named."""
    seconds: float


@dataclass(frozen=True)
class Record:
    """Result of one mutation, a line of ``--out``."""

    name: str
    outcome: str
    by: str
    seconds: float
    tests: str
    """``named`` or ``all``."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests.mutations", description=__doc__)
    parser.add_argument("names", metavar="NAME", nargs="*", help="default: all")
    parser.add_argument("--tests", choices=("named", "all"), default="named",
                        help="all: the whole fast suite for what the named tests miss")  # fmt: skip
    parser.add_argument("--out", type=Path, help="append results as JSON lines; skip those in it")
    parser.add_argument("--control", action="store_true",
                        help="first run the named tests without a fault")  # fmt: skip
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - {mutation.name for mutation in MUTATIONS}:
        parser.error(f"no such mutation: {', '.join(sorted(unknown))}")
    chosen = [m for m in MUTATIONS if not options.names or m.name in options.names]
    # Shells make background jobs ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    try:
        if options.control:
            run_control(chosen)
        records = run_all(chosen, tests=options.tests, out=options.out)
    except RunError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return report(chosen, records)


def _exit_on_sigterm(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def run_control(mutations: list[Mutation]) -> None:
    """Run the tests of ``mutations`` on the unchanged tree; raise ``RunError`` if one fails."""
    tests = list(dict.fromkeys(test for mutation in mutations for test in mutation.test_ids))
    with copied_tree() as copy:
        found = run_tests(copy, *tests, limit=SUITE_SECONDS)
    if found.outcome != SURVIVED:
        raise RunError(f"{found.by} fails without a fault ({found.outcome})")
    print(f"control   {duration(found.seconds)}  all named tests pass without a fault", flush=True)


def run_all(mutations: list[Mutation], *, tests: str, out: Path | None) -> list[Record]:
    """Run each mutation that ``out`` does not have; return the records of all."""
    known = {record.name: record for record in read_records(out)}
    records = []
    for mutation in mutations:
        record = known.get(mutation.name)
        is_settled = record is not None and (record.outcome != SURVIVED or record.tests == "all")
        if record is None or not (is_settled or tests == "named"):
            record = run_mutation(mutation, tests=tests)
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps(asdict(record)) + "\n")
        print(line_of(record, mutation), flush=True)
        records.append(record)
    return records


def read_records(out: Path | None) -> Iterator[Record]:
    if out is not None and out.exists():
        for line in out.read_text().splitlines():
            yield Record(**json.loads(line))


def run_mutation(mutation: Mutation, *, tests: str) -> Record:
    """Plant a mutation in a copy of the tree, and run its tests there."""
    with copied_tree() as copy:
        path = copy / mutation.file
        try:
            path.write_text(mutation.apply(path.read_text()))
        except ValueError as error:
            raise RunError(str(error)) from None
        found = run_tests(copy, *mutation.test_ids, limit=NAMED_SECONDS)
        seconds = found.seconds
        if found.outcome == SURVIVED and tests == "all":
            found = run_tests(copy, *SUITE, limit=SUITE_SECONDS)
            seconds += found.seconds
    return Record(mutation.name, found.outcome, found.by, round(seconds, 1), tests)


@contextmanager
def copied_tree() -> Iterator[Path]:
    """Yield a copy of the tracked files, as they are in the working tree; delete it on exit."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    with tempfile.TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder) / "tree"
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).exists():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
        yield copy


def run_tests(copy: Path, *arguments: str, limit: float) -> PytestRun:
    """Run pytest on the tree ``copy`` until the first failure. No process of it is left.

    Raises ``RunError`` if there is no such test.
    """
    folder, begin = copy.parent, time.monotonic()
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "not slow", f"--basetemp={folder}/tmp", *arguments]
    # Tests start run_train.sh, which tries PYTHON first. They must import the copy.
    added = {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable, MARK: str(folder)}
    added["PYTHONPATH"] = str(copy)
    log = folder / "log"
    # A file, because a process that outlives pytest would keep a pipe open.
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=copy,
            env=os.environ | added,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None and time.monotonic() - begin < limit:
                time.sleep(POLL_SECONDS)
            code = process.poll()
        finally:
            kill_processes(folder)
            process.wait()
    seconds, text = time.monotonic() - begin, log.read_text(errors="replace")
    if code is None:
        return PytestRun(HUNG, f"the time limit of {limit / 60:.0f} minutes", seconds)
    if code == 0:
        return PytestRun(SURVIVED, "", seconds)
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", text, re.MULTILINE)
    # 4 and 5: no such test. A fault may also end the process of pytest, with any code.
    if failed is None and code in (4, 5):
        raise RunError(f"{' '.join(arguments)}: pytest exits with {code}:\n{text[-2000:]}")
    return PytestRun(CAUGHT, failed[1] if failed else f"exit code {code} of pytest", seconds)


def kill_processes(folder: Path) -> None:
    """Kill all processes whose environment has ``folder``, or that work in it, until none is left.

    Tests start sessions of their own, so a process group does not have them all.
    """
    while found := [int(p.name) for p in Path("/proc").glob("[0-9]*") if _belongs_to(p, folder)]:
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def _belongs_to(process: Path, folder: Path) -> bool:
    # It may end meanwhile, or be another user's. A zombie has neither environment nor folder.
    with suppress(OSError):
        if f"{MARK}={folder}".encode() in (process / "environ").read_bytes().split(b"\0"):
            return True
        return (process / "cwd").readlink().is_relative_to(folder)
    return False


def line_of(record: Record, mutation: Mutation) -> str:
    by = f"  by {record.by}" if record.by else ""
    shown = record.outcome if record.outcome == CAUGHT else record.outcome.upper()
    reason = f"  ({mutation.reason})" if mutation.reason and record.outcome == SURVIVED else ""
    return f"{shown:<9} {duration(record.seconds)}  {record.name}{by}{reason}"


def report(mutations: list[Mutation], records: list[Record]) -> int:
    """Print counts; return 1 if a mutation survived without a reason."""
    reasons = {mutation.name: mutation.reason for mutation in mutations}
    survived = [record.name for record in records if record.outcome == SURVIVED]
    unexplained = [name for name in survived if not reasons[name]]
    counts = Counter(record.outcome for record in records)
    texts = [f"{counts[outcome]} {outcome}" for outcome in (CAUGHT, HUNG, SURVIVED)]
    print(f"{len(records)} mutations: {', '.join(texts)}, {len(unexplained)} without a reason")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
