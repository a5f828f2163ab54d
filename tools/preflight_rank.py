"""Checks of ``tools.preflight`` on each rank: gather facts and speeds, compare, report."""

import os
import platform
import shutil
import socket
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median_high
from typing import Any

import torch
import torch.distributed as dist

from config import JobConfig, load_config
from launcher.post_mortem import RankHeartbeat
from models.meta import build_on_meta
from parallelisms.parallel_dims import ParallelDims
from run_spec import RunSpec, resolve
from runtime import exit_codes
from runtime.compat import set_timeout
from runtime.distributed import init_distributed
from runtime.log import error_text, escape_on_stdout, say
from runtime.machine import available_cpus
from runtime.object_collectives import ABSENT, all_gather_object
from runtime.program import program_facts
from tools.preflight_speed import KINDS, bus_bandwidth, link_speed, matmul_speed, mesh_groups

# Exit code of ranks if there are findings; the launcher does not report it as a failure.
HAS_FINDINGS = exit_codes.DO_NOT_REQUEUE
CLOCK_SECONDS, CLOCK_TRIES = 1.0, 10
# Bound on the time until a network file system shows a file to another node.
VISIBLE_SECONDS = 5.0
# Speeds and memory sizes below these fractions of the median are findings.
SLOW, SMALL = 0.5, 0.95
GIB = 2**30


@dataclass(frozen=True)
class RankLocation:
    """Node and host of a rank."""

    rank: int
    node: int
    host: str
    is_leader: bool
    """True if this is the first rank of its node."""

    def __str__(self) -> str:
        return f"rank {self.rank} (node {self.node}, {self.host})"

    @property
    def of_node(self) -> str:
        return f"node {self.node} ({self.host})"


@dataclass(frozen=True)
class Report:
    """Facts and findings gathered from all ranks; equal on all of them."""

    places: list[RankLocation]
    columns: dict[str, list[str]]
    """Columns of the table of nodes by name, with one text per node."""
    findings: list[str]

    @property
    def leaders(self) -> list[RankLocation]:
        return [place for place in self.places if place.is_leader]


def main(arguments: list[str]) -> int:
    """Run all checks on this rank; return its exit code. Collective."""
    escape_on_stdout()
    with RankHeartbeat(os.environ):
        config = load_config(Path(arguments[0]), arguments[1:])
        # Like train.py, resolve before any process group exists; it opens tokenizer and data.
        run, config_error = None, ""
        try:
            run = resolve(config, world_size=int(os.environ["WORLD_SIZE"]))
        except ValueError as error:
            config_error = error_text(error)
        device = init_distributed(config.comm)
        set_timeout(timedelta(seconds=config.comm.train_timeout_seconds))
        code = check(config, run, config_error, device)
        dist.barrier()
        dist.destroy_process_group()
        return code


def check(config: JobConfig, run: RunSpec | None, config_error: str, device: torch.device) -> int:
    """Make all checks, print them on rank 0, return the same exit code on all ranks. Collective."""
    rank, config_errors = dist.get_rank(), all_gather_object(config_error)
    if all(config_errors):
        if rank == 0:
            print(config_error, file=sys.stderr)
        return exit_codes.BAD_CONFIG
    is_leader = os.environ["LOCAL_RANK"] == "0"
    node, host = int(os.environ["GROUP_RANK"]), socket.gethostname()
    places = all_gather_object(RankLocation(rank, node, host, is_leader))
    findings = [f"{who}: {text}" for who, text in zip(places, config_errors, strict=True) if text]
    report = Report(places, {}, findings)
    list_nodes(report, count_devices())
    compare_facts(report, node_environment())
    compare_facts(report, run.facts(device) if run is not None else {})
    compare_memory(report, device)
    title = compare_folders(report, config, max(all_gather_object(count_parameters(run))))
    compare_clocks(report)
    compare_speeds(report, device)
    dims = compare_dims(report, config, device)
    if rank == 0:
        n_nodes, n_ranks = len(report.leaders), len(places)
        size = f"{n_nodes} node{'s' * (n_nodes > 1)}, {n_ranks} rank{'s' * (n_ranks > 1)}"
        say(f"{size} on {device.type}; {title}")
        rows = zip(*([name, *texts] for name, texts in report.columns.items()), strict=True)
        say(*aligned([list(row) for row in rows]), *aligned(dims))
        say(*(findings or ["preflight: passed"]))
    return HAS_FINDINGS if findings else exit_codes.DONE


def unequal(what: str, values: Sequence[Any], who: Sequence[str]) -> list[str]:
    """List those whose value is not the most common one; in a tie, not the first one."""
    usual = Counter(values).most_common(1)[0][0]
    return [
        f"{name}: {what} is {value}, but {usual} elsewhere"
        for name, value in zip(who, values, strict=True)
        if value != usual
    ]


def below(share: float, what: str, values: Sequence[float], who: Sequence[Any]) -> list[str]:
    """List those below a share of the median; ``what`` is a format string for the value."""
    # The higher of two middle values, so that a slow half is reported too.
    usual = median_high(values)
    return [
        f"{name}: {what.format(f'{value:.3g}')}, median {usual:.3g}"
        for name, value in zip(who, values, strict=True)
        if value < share * usual
    ]


def compare_facts(report: Report, facts: Mapping[str, str]) -> None:
    """Compare facts that must be equal on all nodes. Collective. Mutates ``report``."""
    gathered = all_gather_object(dict(facts))
    # A node without a run has no facts of it, and has already reported its error.
    leaders = [leader for leader in report.leaders if gathered[leader.rank]]
    for key in dict.fromkeys(key for leader in leaders for key in gathered[leader.rank]):
        values = [gathered[leader.rank].get(key, ABSENT) for leader in leaders]
        report.findings.extend(unequal(key, values, [leader.of_node for leader in leaders]))


def list_nodes(report: Report, n_devices: int) -> None:
    """Add the first columns of the table of nodes. Collective. Mutates ``report``."""
    counts = all_gather_object(n_devices)
    report.columns["node"] = [str(leader.node) for leader in report.leaders]
    report.columns["host"] = [leader.host for leader in report.leaders]
    report.columns["devices"] = [str(counts[leader.rank]) for leader in report.leaders]


def node_environment() -> dict[str, str]:
    """Program, driver and devices of this node."""
    has_gpu = torch.cuda.is_available()
    driver = Path("/proc/driver/nvidia/version")
    return program_facts() | {
        "driver": driver.read_text().partition("\n")[0] if driver.exists() else ABSENT,
        "device": torch.cuda.get_device_name() if has_gpu else platform.machine(),
        "number of devices": str(count_devices()),
    }


def count_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else available_cpus()


def compare_memory(report: Report, device: torch.device) -> None:
    """Compare total and used device memory; on CPU, the total. Collective. Mutates ``report``."""
    free = total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
    totals, used = all_gather_object(total / GIB), all_gather_object(1 - free / total)
    report.findings.extend(below(SMALL, "{} GiB of memory", totals, report.places))
    report.findings.extend(
        f"{who}: {share:.0%} of its device's memory is in use"
        for who, share in zip(report.places, used, strict=True)
        if share > 1 - SMALL
    )
    report.columns["memory GiB"] = [f"{totals[leader.rank]:.1f}" for leader in report.leaders]


def count_parameters(run: RunSpec | None) -> int:
    if run is None:
        return 0
    model = build_on_meta(run.model_spec, run.model_args, getattr(torch, run.config.training.dtype))
    return sum(parameter.numel() for parameter in model.parameters())


def compare_folders(report: Report, config: JobConfig, n_parameters: int) -> str:
    """Check that all nodes share one writable folder with room for a checkpoint.

    Returns the model's size and that of a checkpoint. Collective. Mutates ``report``.
    """
    own = report.places[dist.get_rank()]
    (token, *_) = all_gather_object(uuid.uuid4().hex)
    folder, own_file, free, problem = Path(config.job.output_dir).absolute(), None, 0.0, ""
    try:
        folder = nearest(folder / config.job.name)
        free = shutil.disk_usage(folder).free / GIB
        if own.is_leader:
            own_file = folder / f".preflight-{token}-{own.node}"
            with own_file.open("x") as file:
                file.write(token)
    except OSError as error:
        problem = f"cannot write to {folder}: {error}"
    try:
        gathered = all_gather_object((str(folder), free, problem))
        writers = [leader for leader in report.leaders if not gathered[leader.rank][2]]
        if own in writers:
            first = writers[0]
            if not is_visible(folder / f".preflight-{token}-{first.node}", token):
                there = gathered[first.rank][0]
                problem = f"cannot read in {folder} what {first.of_node} wrote to {there}"
        problems = all_gather_object(problem)
    finally:
        if own_file is not None:
            with suppress(OSError):
                own_file.unlink()
    report.findings.extend(
        f"{leader.of_node}: {problems[leader.rank]}"
        for leader in report.leaders
        if problems[leader.rank]
    )
    report.columns["free GiB"] = [f"{gathered[leader.rank][1]:.1f}" for leader in report.leaders]
    need = n_parameters * _checkpoint_bytes(config) / GIB
    title = f"{n_parameters:,} parameters, {need:.2f} GiB per checkpoint"
    for leader in writers[:1]:
        folder_there, free_there, _ = gathered[leader.rank]
        if config.checkpoint.enable and free_there < need:
            report.findings.append(
                f"{leader.of_node}: {free_there:.2f} GiB free in {folder_there}; {title}"
            )
    return title


def _checkpoint_bytes(config: JobConfig) -> int:
    """Bytes per parameter of a checkpoint: the weight, Adam's two moments, and the remainder."""
    weight = getattr(torch, config.training.dtype)
    moment = torch.bfloat16 if config.optimizer.state_dtype == "bfloat16" else weight
    has_remainders = config.optimizer.param_remainders and weight == torch.bfloat16
    return weight.itemsize + 2 * moment.itemsize + has_remainders * torch.int16.itemsize


def nearest(folder: Path) -> Path:
    """Return ``folder`` or its first parent that exists; the check creates no folders."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def is_visible(path: Path, text: str) -> bool:
    """True if ``path`` shows ``text`` within ``VISIBLE_SECONDS``."""
    deadline = time.monotonic() + VISIBLE_SECONDS
    while True:
        # A caching file system may also raise before it shows the file of another node.
        with suppress(OSError):
            if path.read_text() == text:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def compare_clocks(report: Report) -> None:
    """Compare the clocks with node 0's. Collective. Mutates ``report``.

    A clock is taken to be read at the middle of a round trip; the error bound is half of it.
    """
    rank, stamp = dist.get_rank(), torch.zeros(1, dtype=torch.float64)
    offsets = [(0.0, 0.0)]
    for leader in report.leaders[1:]:
        tries = []
        for _ in range(CLOCK_TRIES):
            if rank == 0:
                sent = wall_clock()
                dist.send(stamp, leader.rank)
                dist.recv(stamp, leader.rank)
                bound = (wall_clock() - sent) / 2
                tries.append((bound, stamp.item() - sent - bound))
            elif rank == leader.rank:
                dist.recv(stamp, 0)
                dist.send(stamp.fill_(wall_clock()), 0)
        offsets += [min(tries)[::-1]] if tries else []
    offsets = all_gather_object(offsets)[0]
    report.findings.extend(
        f"{leader.of_node}: its clock is {offset:+.3f} s from node 0's, error bound {bound:.4f} s"
        for leader, (offset, bound) in zip(report.leaders, offsets, strict=True)
        if abs(offset) - bound > CLOCK_SECONDS
    )
    report.columns["clock s"] = [f"{offset:+.3f}" for offset, _ in offsets]


def wall_clock() -> float:
    return time.time()


def compare_speeds(report: Report, device: torch.device) -> None:
    """Compare matmul and link speeds of all ranks. Collective. Mutates ``report``."""
    own, alone = report.places[dist.get_rank()], [[place.rank] for place in report.places]
    link = partial(link_speed, device, node=own.node, n_nodes=len(report.leaders))
    speeds, links = gather_speeds(partial(matmul_speed, device), alone), gather_speeds(link, alone)
    texts = {"matmul at {} TFLOP/s": speeds, "best link at {} GB/s": links}
    for what, values in texts.items():
        report.findings.extend(below(SLOW, what, values, report.places))
    for name, values in (("TFLOP/s", speeds), ("link GB/s", links)):
        nodes: dict[int, list[float]] = {}
        for place, value in zip(report.places, values, strict=True):
            nodes.setdefault(place.node, []).append(value)
        report.columns[name] = [f"{min(nodes[leader.node]):.3g}" for leader in report.leaders]


def gather_speeds(measure: Callable[[], float], groups: Sequence[Sequence[int]]) -> list[float]:
    """Gather the speed of each group's slowest rank. Collective.

    If a group is slow, all measure again: other work may have slowed a node for a moment.
    """
    best = [0.0] * dist.get_world_size()
    for _ in range(2):
        best = [max(pair) for pair in zip(best, all_gather_object(measure()), strict=True)]
        slowest = [min(best[rank] for rank in ranks) for ranks in groups]
        if not below(SLOW, "{}", slowest, groups):
            break
    return slowest


def compare_dims(report: Report, config: JobConfig, device: torch.device) -> list[list[str]]:
    """Compare the groups of each mesh dim; return table rows, none if all dims have size 1.

    Collective. Mutates ``report``.
    """
    dims = ParallelDims.build(config.parallelism, len(report.places), device.type)
    meshes, ep = [dims.weight_mesh, dims.data_mesh], config.parallelism.expert_parallel_degree
    if ep > 1:
        meshes.append(dims.build_expert_mesh(ep))
    rows = [["dim", "ranks", "groups", *(f"{kind} GB/s" for kind in KINDS)]]
    for label, groups, group in mesh_groups(meshes):
        rows.append([label, str(len(groups[0])), str(len(groups))])
        who = [f"{label} of {named(report, ranks)}" for ranks in groups]
        for kind in KINDS:
            slowest = gather_speeds(partial(bus_bandwidth, kind, group, device), groups)
            report.findings.extend(below(SLOW, kind + " at {} GB/s", slowest, who))
            rows[-1].append(f"{min(slowest):.3g}")
    return rows if len(rows) > 1 else []


def named(report: Report, ranks: Sequence[int]) -> str:
    """Ranks of a group, and their hosts, which a scheduler can exclude."""
    hosts = dict.fromkeys(report.places[rank].host for rank in ranks)
    return f"ranks {', '.join(map(str, ranks))} ({', '.join(hosts)})"


def aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
