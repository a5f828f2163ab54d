"""Breakdown of the time of traced steps, for one rank and between ranks. Needs no PyTorch.

At each moment a step does one of these: it computes; it communicates while nothing is computed
(exposed communication); it waits for data; or the host has nothing running (Python between
operators on a CPU, an idle GPU).
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from metrics.intervals import Interval, intersect, merge, subtract, total
from metrics.trace_file import BETWEEN_STEPS, DATA_WAIT, STEP_SYNC, Collective, Trace

# Operators whose own time is Python's, autograd's or a queue's. Those that they call count.
HOST_NAMESPACES = {
    *("autograd", "torch", "c10d", "_c10d_functional", "c10d_functional", "profiler"),
    *("PythonSubclass", "PythonDispatchMode"),
}
POINT_TO_POINT = re.compile("send|recv", re.IGNORECASE)
BACKWARD = "autograd::engine::evaluate_function"
# Kernels of torch.compile on CPUs have no operator of their own.
COMPILED = ("Torch-Compiled Region", "CompiledFunction", "inductor")

Events = Sequence[tuple[float, float, str]]
"""Begin, end, name."""


@dataclass(frozen=True)
class OperatorTime:
    """Time in an operator (without those that it calls) or a kernel, over all traced steps."""

    name: str
    count: int
    microseconds: float


@dataclass(frozen=True)
class CollectiveTime:
    """Time in one kind of collective over all traced steps; two at once count twice."""

    name: str
    description: str
    """Mesh dim, such as mesh_tp; "" if unknown."""
    count: int
    microseconds: float
    exposed: float


@dataclass(frozen=True)
class RankSummary:
    """Time of one rank's traced steps, in microseconds."""

    path: Path
    rank: int
    world_size: int
    backend: str
    is_gpu: bool
    steps: tuple[int, ...]
    time: float
    compute: float
    communication: float
    """Collectives that run, hidden behind compute or not."""
    exposed: float
    """Communication, and waiting for ranks at the start of a step, while nothing is computed."""
    data_wait: float
    host: float
    """The rest: Python between operators on a CPU; a GPU without work."""
    by_collective: tuple[CollectiveTime, ...]
    top: tuple[OperatorTime, ...]
    collectives: tuple[Collective, ...]
    groups: tuple[tuple[int, ...], ...]
    """Process groups with more than one rank."""
    between: dict[str, float]
    """Named work between the traced steps, which is not counted."""


@dataclass(frozen=True)
class Skew:
    """Ranks that wait for each other in collectives."""

    waits: dict[int, float]
    """Microseconds by rank, over all traced steps."""
    caused: dict[int, float]
    """Microseconds that the others of a group waited on average, by the rank that came last."""
    n_last: dict[int, int]
    """Collectives in which the rank came last."""
    n_compared: int
    problem: str = ""
    """Reason why nothing could be compared."""


def summarize(trace: Trace, *, n_top: int) -> RankSummary:
    """Sum up one rank's steps. Raises ``ValueError`` if the trace has none."""
    if not trace.steps:
        raise ValueError(f"{trace.path}: no ProfilerStep: not a trace of training steps")
    is_gpu = bool(trace.kernels) or any(each.group != "gloo" for each in trace.collectives)
    if trace.has_gpu and not is_gpu:
        text = "the process had a GPU, but the trace has no kernels: CUPTI could not record them"
        raise ValueError(f"{trace.path}: {text} (another profiler, or missing permission)")
    window = device_window(trace) if is_gpu else merge(list(trace.steps.values()))
    ops = executed(trace.ops.get(trace.main_thread, []))
    busy = trace.kernels if is_gpu else compute_segments(ops)
    compute = intersect(merge([(begin, end) for begin, end, _ in busy]), window)
    own = [each for each in trace.collectives if intersect([(each.begin, each.end)], window)]
    running = intersect(merge([(each.begin, each.end) for each in own]), window)
    free = subtract(window, compute)
    # On a GPU, a collective may run while the host waits for data.
    waits = intersect(free, merge(trace.ranges.get(DATA_WAIT, [])))
    waits = subtract(waits, running) if is_gpu else waits
    syncs = merge(trace.ranges.get(STEP_SYNC, []))
    exposed = subtract(intersect(free, merge([*running, *syncs])), waits)
    calls = trace.kernels if is_gpu else outermost(ops)
    parts = {"compute": total(compute), "exposed": total(exposed), "data_wait": total(waits)}
    groups = {tuple(ranks) for ranks in trace.groups if len(ranks) > 1}
    return RankSummary(
        path=trace.path, rank=trace.rank, world_size=trace.world_size, backend=trace.backend,
        is_gpu=is_gpu, steps=tuple(sorted(trace.steps)), time=total(window),
        communication=total(running), host=total(window) - sum(parts.values()), **parts,
        by_collective=collective_times(own, exposed),
        top=top_operators(calls, busy, window)[:n_top],
        collectives=tuple(own), groups=tuple(sorted(groups)), between=between_steps(trace),
    )  # fmt: skip


def device_window(trace: Trace) -> list[Interval]:
    """Times of the steps on the device, which lags behind the host; without what is between.

    It begins with the first step on the host or, if later, when the device has finished what was
    launched before; it ends when both have finished the last step.
    """
    window: list[Interval] = []
    work = [(k[0], k[1]) for k in trace.kernels] + [(c.begin, c.end) for c in trace.collectives]
    for step, host in sorted(trace.steps.items()):
        first, last = trace.device_steps.get(step, host)
        begin = host[0]
        if window:
            # Validation and saving are between the end of one step and the host's next step.
            begin = max(window[-1][1], begin)
        else:
            begin = max([begin, *(end for start, end in work if start < first)])
        window.append((begin, max(last, host[1], begin)))
    return merge(window)


def executed(
    ops: Sequence[tuple[float, float, str, bool]],
) -> list[tuple[float, float, str]]:
    """Operators without those whose result selective recomputation had kept.

    Its dispatch mode sees each operator, which it calls again, or whose result it looks up. So in
    backward an operator that autograd records did not run if it calls none of its name, as others
    of that name do.
    """
    ops = sorted(ops, key=lambda op: (op[0], -op[1]))
    calls_own_name, innermost = set[int](), dict[str, int]()
    looked_up, backward_end = list[int](), 0.0
    for index, (begin, end, name, is_recorded) in enumerate(ops):
        outer = innermost.get(name)
        if outer is not None and begin < ops[outer][1]:
            calls_own_name.add(outer)
        innermost[name] = index
        if name.startswith(BACKWARD):
            backward_end = max(backward_end, end)
        elif is_recorded and begin < backward_end:
            looked_up.append(index)
    names = {ops[index][2] for index in calls_own_name}
    skipped = {i for i in looked_up if ops[i][2] in names} - calls_own_name
    return [op[:3] for index, op in enumerate(ops) if index not in skipped]


def compute_segments(ops: Events) -> list[tuple[float, float, str]]:
    """Times in which the innermost operator of a thread computes."""
    segments: list[tuple[float, float, str]] = []
    stack: list[tuple[float, str]] = []
    now = 0.0

    def advance(to: float) -> None:
        nonlocal now
        while stack and now < to:
            end, name = stack[-1]
            if computes(name) and min(end, to) > now:
                segments.append((now, min(end, to), name))
            now = min(end, to)
            if end <= to:
                stack.pop()
        now = to

    for begin, end, name in sorted(ops, key=lambda op: (op[0], -op[1])):
        advance(begin)
        stack.append((end, name))
    advance(float("inf"))
    return segments


def outermost(ops: Events) -> list[tuple[float, float, str]]:
    """Operators that are not inside one of the same name.

    Selective recomputation and DTensor see each operator, and then call it again.
    """
    found: list[tuple[float, float, str]] = []
    ends: dict[str, float] = {}
    for begin, end, name in sorted(ops, key=lambda op: (op[0], -op[1])):
        if begin >= ends.get(name, begin):
            ends[name] = end
            found.append((begin, end, name))
    return found


def computes(name: str) -> bool:
    """False for an operator that only calls others, queues work or runs Python."""
    if name.startswith(COMPILED):
        return True
    namespace, is_qualified, _ = name.partition("::")
    return bool(is_qualified) and namespace not in HOST_NAMESPACES


def top_operators(
    calls: Events, segments: Events, window: list[Interval]
) -> tuple[OperatorTime, ...]:
    """Operators or kernels that ran in ``window``, those with the most time first."""
    begins = [begin for begin, _ in window]

    def is_inside(moment: float) -> bool:
        index = bisect_right(begins, moment) - 1
        return index >= 0 and moment < window[index][1]

    times: dict[str, float] = defaultdict(float)
    for begin, end, name in segments:
        if is_inside(begin):
            times[name] += end - begin
    counts = Counter(name for begin, _, name in calls if is_inside(begin))
    names = sorted(times, key=times.__getitem__, reverse=True)
    return tuple(OperatorTime(name, counts[name], times[name]) for name in names)


def collective_times(
    collectives: Sequence[Collective], exposed: list[Interval]
) -> tuple[CollectiveTime, ...]:
    """Time by kind of collective and mesh dim, the most exposed first."""
    begins = [begin for begin, _ in exposed]
    found: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for each in collectives:
        near = exposed[max(bisect_right(begins, each.begin) - 1, 0) : bisect_left(begins, each.end)]
        sums = found[each.name, each.description]
        sums[0] += 1
        sums[1] += each.end - each.begin
        sums[2] += total(intersect(near, [(each.begin, each.end)]))
    kinds = [
        CollectiveTime(*key, count=round(count), microseconds=time, exposed=bare)
        for key, (count, time, bare) in found.items()
    ]
    return tuple(sorted(kinds, key=lambda kind: kind.exposed, reverse=True))


def between_steps(trace: Trace) -> dict[str, float]:
    """Microseconds of named work between the first and the last traced step."""
    ordered = [trace.steps[step] for step in sorted(trace.steps)]
    gaps = [(a[1], b[0]) for a, b in pairwise(ordered) if a[1] < b[0]]
    found = {
        name: total(intersect(merge(trace.ranges.get(name, [])), gaps)) for name in BETWEEN_STEPS
    }
    return {name: time for name, time in found.items() if time > 0.0}


def compare_ranks(ranks: Sequence[RankSummary]) -> Skew:
    """Find who waits for whom.

    A collective ends on all ranks at about the same time, and the last rank to join is the one in
    which it is shortest. So no clocks are compared.
    """
    waits = {each.rank: 0.0 for each in ranks}
    caused, n_last, n_compared = dict(waits), dict.fromkeys(waits, 0), 0
    found: dict[str, dict[int, list[float]]] = defaultdict(dict)
    for each in ranks:
        joint = [c for c in each.collectives if not POINT_TO_POINT.search(c.name)]
        for collective in joint:
            key = collective.group if each.is_gpu else _gloo_group(ranks)
            times = found[key].setdefault(each.rank, [])
            times.append(collective.end - collective.begin)
    unnamed = found.pop("", {})
    for by_rank in found.values():
        # A window may begin within a collective of the step before; all end with the last step.
        newest_first = [reversed(times) for times in by_rank.values()]
        for times_of_one in zip(*newest_first, strict=False) if len(by_rank) > 1 else ():
            durations = dict(zip(by_rank, times_of_one, strict=True))
            last = min(durations, key=durations.__getitem__)
            others = {rank: time - durations[last] for rank, time in durations.items()}
            for rank, time in others.items():
                waits[rank] += time
            caused[last] += sum(others.values()) / (len(others) - 1)
            n_last[last] += 1
            n_compared += 1
    problem = ""
    if len(ranks) > 1 and n_compared == 0:
        problem = "no collective of the same group is in two of the traces"
        if unnamed:
            problem = "gloo's events do not name their group, and the mesh has several"
    return Skew(waits, caused, n_last, n_compared, problem)


def _gloo_group(ranks: Sequence[RankSummary]) -> str:
    """The only group that gloo's events can belong to; "" if there are several."""
    groups = {group for each in ranks for group in each.groups}
    return "gloo" if len(groups) <= 1 else ""
