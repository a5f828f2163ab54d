"""What each rank of ``tools.preflight`` does: tell what it is, measure, compare and report."""

import hashlib
import os
import platform
import shutil
import socket
import sys
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median_high
from typing import Any

import torch
import torch.distributed as dist

from config import JobConfig, dump_toml, load_config
from job import Job, resolve
from models.meta import build_on_meta
from parallelisms.parallel_dims import ParallelDims
from runtime import exit_codes
from runtime.compat import set_timeout
from runtime.distributed import init_distributed
from runtime.machine import usable_cpus
from runtime.post_mortem import ROOT, Witness
from runtime.together import everywhere
from tools.preflight_speed import KINDS, bus_bandwidth, groups_of, link_speed, multiply_speed

# Exit code of ranks when something is wrong, which the launcher does not take for a failure.
FOUND = exit_codes.DO_NOT_REQUEUE
CLOCK_SECONDS, CLOCK_TRIES = 1.0, 10
# How long a file may take to be seen from another node on a network file system.
SEEN_SECONDS = 5.0
# Speeds, and sizes of memory, below these shares of what the others have are findings.
SLOW, SMALL = 0.5, 0.95
GIB = 2**30


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

    rank: int
    node: int
    host: str
    is_leader: bool
    """Whether it speaks for its node."""

    def __str__(self) -> str:
        return f"rank {self.rank} (node {self.node}, {self.host})"

    @property
    def of_node(self) -> str:
        return f"node {self.node} ({self.host})"


@dataclass(frozen=True)
class Seen:
    """What all ranks told; equal on all of them."""

    places: list[Place]
    columns: dict[str, list[str]]
    """Columns of the table of nodes, by name: a text for each node."""
    findings: list[str]

    @property
    def leaders(self) -> list[Place]:
        return [place for place in self.places if place.is_leader]


def main(arguments: list[str]) -> int:
    with Witness(os.environ):
        config = load_config(Path(arguments[0]), arguments[1:])
        # As the trainer does, before any process group: it opens tokenizer and data.
        job, mistake = None, ""
        try:
            job = resolve(config, world_size=int(os.environ["WORLD_SIZE"]))
        except ValueError as error:
            mistake = str(error)
        device = init_distributed(config.comm)
        set_timeout(timedelta(seconds=config.comm.train_timeout_seconds))
        code = check(config, job, mistake, device)
        dist.barrier()
        dist.destroy_process_group()
        return code


def check(config: JobConfig, job: Job | None, mistake: str, device: torch.device) -> int:
    """Make all checks; rank 0 prints them. The exit code is equal on all ranks. A collective."""
    rank, mistakes = dist.get_rank(), everywhere(mistake)
    if all(mistakes):
        if rank == 0:
            print(mistake, file=sys.stderr)
        return exit_codes.BAD_CONFIG
    is_leader = os.environ["LOCAL_RANK"] == "0"
    node, host = int(os.environ["GROUP_RANK"]), socket.gethostname()
    places = everywhere(Place(rank, node, host, is_leader))
    findings = [f"{who}: {text}" for who, text in zip(places, mistakes, strict=True) if text]
    seen = Seen(places, {}, findings)
    compare_facts(seen, facts_of(config, job))
    compare_memory(seen, device)
    title = compare_folders(seen, config, max(everywhere(count_parameters(job))))
    compare_clocks(seen)
    compare_speeds(seen, device)
    dims = compare_dims(seen, config, device)
    if rank == 0:
        print(f"{len(seen.leaders)} nodes, {len(places)} ranks on {device.type}; {title}")
        rows = zip(*([name, *texts] for name, texts in seen.columns.items()), strict=True)
        print("\n".join(aligned([list(row) for row in rows]) + aligned(dims)))
        print("\n".join(findings) or "all is well")
    return FOUND if findings else exit_codes.DONE


def unequal(what: str, values: Sequence[Any], who: Sequence[str]) -> list[str]:
    """Those with another value than most have; in a tie, than the value that comes first."""
    usual = Counter(values).most_common(1)[0][0]
    return [
        f"{name}: {what} is {value}, and {usual} elsewhere"
        for name, value in zip(who, values, strict=True)
        if value != usual
    ]


def below(share: float, what: str, values: Sequence[float], who: Sequence[Any]) -> list[str]:
    """Those with less than a share of the median; in ``what``, {} is where the number goes."""
    # The higher of two middle values, so that a slow half is found too.
    usual = median_high(values)
    return [
        f"{name}: {what.format(f'{value:.3g}')}, and the median is {usual:.3g}"
        for name, value in zip(who, values, strict=True)
        if value < share * usual
    ]


def compare_facts(seen: Seen, facts: Mapping[str, Any]) -> None:
    """Compare what must be equal on all nodes. Like all that follow, a collective that adds to
    ``seen``."""
    told = {str(who): facts for who, facts in zip(seen.places, everywhere(facts), strict=True)}
    for key in dict.fromkeys(key for facts in told.values() for key in facts):
        having = [leader for leader in seen.leaders if key in told[str(leader)]]
        values = [told[str(leader)][key] for leader in having]
        seen.findings.extend(unequal(key, values, [leader.of_node for leader in having]))
    seen.columns["node"] = [str(leader.node) for leader in seen.leaders]
    seen.columns["host"] = [leader.host for leader in seen.leaders]
    seen.columns["devices"] = [str(told[str(leader)]["devices"]) for leader in seen.leaders]


def facts_of(config: JobConfig, job: Job | None) -> dict[str, Any]:
    has_gpu = torch.cuda.is_available()
    driver = Path("/proc/driver/nvidia/version")
    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "NCCL": torch.cuda.nccl.version() if has_gpu else None,
        "driver": driver.read_text().partition("\n")[0] if driver.exists() else None,
        "hash of the sources": source_hash(),
        "hash of the configuration": hashlib.sha256(dump_toml(config).encode()).hexdigest()[:12],
        "device": torch.cuda.get_device_name() if has_gpu else platform.machine(),
        "devices": torch.cuda.device_count() if has_gpu else usable_cpus(),
    }
    # A node without a job has already told why.
    if job is not None:
        facts["fingerprint of the tokenizer"] = job.tokenizer.fingerprint
        facts["fingerprint of the data"] = job.train.fingerprint
    return facts


def source_hash() -> str:
    """Hash of all our Python files; a model of the user's own is not among them."""
    packages = (path.parent for path in ROOT.glob("*/__init__.py"))
    files = [*ROOT.glob("*.py"), *(path for package in packages for path in package.rglob("*.py"))]
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return total.hexdigest()[:12]


def compare_memory(seen: Seen, device: torch.device) -> None:
    """Compare the memory of devices, some of which may be taken; without any, the machine's."""
    free = total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
    totals, taken = everywhere(total / GIB), everywhere(1 - free / total)
    seen.findings.extend(below(SMALL, "{} GiB of memory", totals, seen.places))
    seen.findings.extend(
        f"{who}: {share:.0%} of its device's memory is taken"
        for who, share in zip(seen.places, taken, strict=True)
        if share > 1 - SMALL
    )
    seen.columns["memory GiB"] = [f"{totals[leader.rank]:.1f}" for leader in seen.leaders]


def count_parameters(job: Job | None) -> int:
    if job is None:
        return 0
    model = build_on_meta(job.spec, job.args, getattr(torch, job.config.training.dtype))
    return sum(parameter.numel() for parameter in model.parameters())


def compare_folders(seen: Seen, config: JobConfig, n_parameters: int) -> str:
    """Compare whether all nodes can write to one folder with room; return what needs the room."""
    own = seen.places[dist.get_rank()]
    (token, *_) = everywhere(uuid.uuid4().hex)
    folder, mine, free, problem = Path(config.job.output_dir).absolute(), None, 0.0, ""
    try:
        folder = nearest(folder / config.job.name)
        free = shutil.disk_usage(folder).free / GIB
        if own.is_leader:
            mine = folder / f".preflight-{token}-{own.node}"
            mine.write_text(token)
    except OSError as error:
        problem = f"cannot write to {folder}: {error}"
    try:
        told = everywhere((str(folder), free, problem))
        writers = [leader for leader in seen.leaders if not told[leader.rank][2]]
        if own in writers:
            first = writers[0]
            if not is_read(folder / f".preflight-{token}-{first.node}", token):
                there = told[first.rank][0]
                problem = f"does not see in {folder} what {first.of_node} wrote in {there}"
        problems = everywhere(problem)
    finally:
        if mine is not None:
            with suppress(OSError):
                mine.unlink()
    seen.findings.extend(
        f"{leader.of_node}: {problems[leader.rank]}"
        for leader in seen.leaders
        if problems[leader.rank]
    )
    seen.columns["free GiB"] = [f"{told[leader.rank][1]:.1f}" for leader in seen.leaders]
    # A checkpoint has weights and two moments.
    need = 3 * n_parameters * getattr(torch, config.training.dtype).itemsize / GIB
    title = f"{n_parameters:,} parameters, {need:.2f} GiB a checkpoint"
    for leader in writers[:1]:
        folder_there, free_there, _ = told[leader.rank]
        if config.checkpoint.enable and free_there < need:
            seen.findings.append(
                f"{leader.of_node}: {free_there:.2f} GiB are free in {folder_there}; {title}"
            )
    return title


def nearest(folder: Path) -> Path:
    """``folder``, or the first above it that exists: a check creates no folders."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def is_read(path: Path, text: str) -> bool:
    deadline = time.monotonic() + SEEN_SECONDS
    while True:
        # File systems that cache may fail, too, before they show what another node wrote.
        with suppress(OSError):
            if path.read_text() == text:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def compare_clocks(seen: Seen) -> None:
    """Compare with node 0's: a clock is read halfway from question to answer, give or take half."""
    rank, stamp = dist.get_rank(), torch.zeros(1, dtype=torch.float64)
    offsets = [(0.0, 0.0)]
    for leader in seen.leaders[1:]:
        tries = []
        for _ in range(CLOCK_TRIES):
            if rank == 0:
                asked = wall_clock()
                dist.send(stamp, leader.rank)
                dist.recv(stamp, leader.rank)
                bound = (wall_clock() - asked) / 2
                tries.append((bound, stamp.item() - asked - bound))
            elif rank == leader.rank:
                dist.recv(stamp, 0)
                dist.send(stamp.fill_(wall_clock()), 0)
        offsets += [min(tries)[::-1]] if tries else []
    offsets = everywhere(offsets)[0]
    seen.findings.extend(
        f"{leader.of_node}: its clock is {offset:+.3f} s from node 0's, known to {bound:.4f} s"
        for leader, (offset, bound) in zip(seen.leaders, offsets, strict=True)
        if abs(offset) - bound > CLOCK_SECONDS
    )
    seen.columns["clock s"] = [f"{offset:+.3f}" for offset, _ in offsets]


def wall_clock() -> float:
    return time.time()


def compare_speeds(seen: Seen, device: torch.device) -> None:
    """Compare speeds: of each rank alone, and of its links to a few others."""
    speeds = everywhere(multiply_speed(device))
    own = seen.places[dist.get_rank()]
    links = everywhere(link_speed(device, node=own.node, n_nodes=len(seen.leaders)))
    texts = {"matrix products at {} TFLOP/s": speeds, "its best link has {} GB/s": links}
    for what, values in texts.items():
        seen.findings.extend(below(SLOW, what, values, seen.places))
    for name, values in (("TFLOP/s", speeds), ("link GB/s", links)):
        nodes: dict[int, list[float]] = {}
        for place, value in zip(seen.places, values, strict=True):
            nodes.setdefault(place.node, []).append(value)
        seen.columns[name] = [f"{min(nodes[leader.node]):.3g}" for leader in seen.leaders]


def compare_dims(seen: Seen, config: JobConfig, device: torch.device) -> list[list[str]]:
    """Compare groups of each mesh dim; return rows of a table, none if no dim is larger than 1."""
    dims = ParallelDims.build(config.parallelism, len(seen.places), device.type)
    meshes, ep = [dims.weight_mesh, dims.data_mesh], config.parallelism.expert_parallel_degree
    if ep > 1:
        meshes.append(dims.build_expert_mesh(ep))
    rows = [["dim", "ranks", "groups", *(f"{kind} GB/s" for kind in KINDS)]]
    for label, groups, group in groups_of(meshes):
        rows.append([label, str(len(groups[0])), str(len(groups))])
        for kind in KINDS:
            told = everywhere(bus_bandwidth(kind, group, device))
            slowest = [min(told[rank] for rank in ranks) for ranks in groups]
            who = [f"{label} of ranks {', '.join(map(str, ranks))}" for ranks in groups]
            seen.findings.extend(below(SLOW, kind + " at {} GB/s", slowest, who))
            rows[-1].append(f"{min(slowest):.3g}")
    return rows if len(rows) > 1 else []


def aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
