"""Step time of ``train.py``, compared with a bare loop and peers, or alone on a GPU.

Loops alternate step by step. A ratio is the median over turns of the bare loop's time divided by
the loop's time in the same turn: above 1 is faster than the bare loop.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarks.loops import Case, bare_loop, train_loop
from benchmarks.peers import PACKAGES, PEERS
from benchmarks.rows import Row
from benchmarks.turns import Loop, LoopError, Turn
from build_model import training_flops
from metrics.flops import peak_flops
from models import find_model
from models.meta import build_on_meta

LOOPS: dict[str, Callable[..., None]] = {"train": train_loop, "bare": bare_loop, **PEERS}
# Bound on the relative difference of float32 logits of the same weights.
PARITY = 1e-4


def run(case: Case) -> Iterator[Row]:
    """Yield a row per loop. Raises ``ValueError`` for an unknown loop."""
    if unknown := set(case.loops) - LOOPS.keys():
        raise ValueError(f"loops: {', '.join(sorted(unknown))} not one of {', '.join(LOOPS)}")
    deadline = time.monotonic() + case.limit_seconds
    precision = None
    problems: dict[str, str] = {}
    firsts: dict[str, Turn] = {}
    turns: dict[str, list[Turn]] = {name: [] for name in case.loops}
    probes: dict[str, list[float] | None] = {}
    for name in case.loops:
        if missing := [p for p in packages_of(case, name) if installed_version(p) is None]:
            problems[name] = f"skipped: {', '.join(missing)} not installed"
    for _ in range(case.restarts):
        with ExitStack() as stack:
            loops: dict[str, Loop] = {}
            for name in [name for name in case.loops if name not in problems]:
                try:
                    settings = (case, precision) if name == "bare" else (case,)
                    loop = Loop(LOOPS[name], *settings, ranks=case.ranks, deadline=deadline)
                    stack.enter_context(loop)
                    firsts[name] = loop.turn()
                except LoopError as error:
                    print(error)
                    problems[name] = error.problem
                    continue
                # The bare loop uses the matmul precision of train.py; peers choose their own.
                precision = loop.ready.matmul_precision if name == "train" else precision
                loops[name], probes[name] = loop, loop.ready.probe
            for name, turn in measured_turns(case, loops):
                turns[name].append(turn)
    has_bare = "bare" in case.loops and "bare" not in problems
    for name in case.loops:
        if name in problems:
            yield {"what": name, "problem": problems[name]}
            continue
        row = measured(case, firsts[name], turns[name])
        row["packages"] = {p: installed_version(p) for p in packages_of(case, name)}
        if name != "bare" and has_bare:
            row |= compared(turns["bare"], turns[name])
            row["problem"] = parity_problem(probes["bare"], probes[name])
        yield {"what": name} | row


def packages_of(case: Case, loop: str) -> list[str]:
    """Names of the distributions that ``loop`` needs besides the project's."""
    return [*PACKAGES.get(loop, ()), *case.packages]


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def measured_turns(case: Case, loops: dict[str, Loop]) -> Iterator[tuple[str, Turn]]:
    """Alternate the order of loops, so that none always follows the same other loop."""
    for number in range(case.warmup + case.turns):
        for name in list(loops)[:: 1 if number % 2 else -1]:
            turn = loops[name].turn(case.steps_per_turn)
            if number >= case.warmup:
                yield name, turn


def measured(case: Case, first: Turn, turns: list[Turn]) -> Row:
    """Medians, rates and MFU of one loop's turns."""
    seconds = statistics.median(turn.seconds for turn in turns) / case.steps_per_turn
    cpu_seconds = statistics.median(turn.cpu_seconds for turn in turns) / case.steps_per_turn
    rate = case.ranks * case.batch_size * case.seq_len / seconds
    spec = find_model(case.family, case.flavor)[0]
    model = build_on_meta(spec, case.args, torch.float32)
    flops = training_flops(spec, case.args, model, case.seq_len)
    peak = peak_flops(torch.device("cuda" if torch.cuda.is_available() else "cpu"), None)
    palm, causal = (peak and rate / case.ranks * count / peak for count in flops)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_per_second": rate,
        "step_seconds": seconds,
        "step_cpu_seconds": cpu_seconds,
        "tflops_per_device": rate / case.ranks * flops[1] / 1e12,
        "mfu_palm": palm,
        "mfu_causal": causal,
        "peak_memory_gib": turns[-1].peak_gib,
        "compile_seconds": turns[-1].compile_seconds,
        "first_step_seconds": first.seconds,
    }


def compared(bare: list[Turn], own: list[Turn]) -> Row:
    """Median ratios of wall and CPU time to the bare loop."""
    pairs = list(zip(bare, own, strict=True))
    by_wall = [b.seconds / o.seconds for b, o in pairs]
    by_cpu = [b.cpu_seconds / o.cpu_seconds for b, o in pairs]
    return {"ratio_wall": statistics.median(by_wall), "ratio_cpu": statistics.median(by_cpu)}


def parity_problem(bare: list[float] | None, own: list[float] | None) -> str | None:
    """Describe a difference of logits between two loops; None if equal or if one has no logits."""
    if bare is None or own is None:
        return None
    distance = max(abs(a - b) for a, b in zip(bare, own, strict=True)) / max(map(abs, bare))
    return f"another model: logits differ by {distance:.1e}" if distance > PARITY else None
