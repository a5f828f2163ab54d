"""Simulates a deep model by two shallow ones, because its layers are alike.

Collectives, FLOPs and traffic are affine in the number of layers. The peak of memory is not: it is
the largest of many moments. But what is held at any one moment is affine: as long as a layer,
counted from the nearer end of its stage, does there what it does in a model of any depth.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from parallelisms.pipeline_parallel import stage_layers, stages_per_rank
from planner.simulate import simulate_step
from planner.step_record import CATEGORIES, FORWARD, UPDATE, Collective, MemoryTimeline, StepRecord
from run_spec import RunSpec

# Layers of a stage of the shallower model, at least.
FEWEST = 3
BEGIN = "begin"


def simulate_layers(
    run: RunSpec, world_size: int, rank: int, *, weights: Sequence[float]
) -> StepRecord:
    """Return the record of ``simulate_step``, from shallower models where that is possible."""
    n_layers, n_stages, period = run.model_args.n_layers, _n_stages(run), period_of(run)
    fewest = max(FEWEST, 2 * period) + 2 * _prefetched(run)
    lengths = stage_lengths(run, n_layers)
    # Periods of layers that every stage has to spare, beside the one of the deeper model.
    spare = (min(lengths) - fewest) // period
    if spare < 2 or not _is_periodic(run):
        return simulate_step(run, world_size, rank, weights=weights)
    shallow = n_layers - spare * period * n_stages
    depths = [shallow, shallow + period * n_stages]
    for depth, n_skipped in zip(depths, (spare, spare - 1), strict=True):
        expected = [length - n_skipped * period for length in lengths]
        assert stage_lengths(run, depth) == expected, "stages lose equal numbers of layers"
    low, high = (
        simulate_step(_with_layers(run, depth), world_size, rank, weights=weights, n_more=n_more)
        for depth, n_more in zip(depths, (0, period), strict=True)
    )
    return extrapolated(low, high, spare) or simulate_step(run, world_size, rank, weights=weights)


def extrapolated(low: StepRecord, high: StepRecord, steps: float) -> StepRecord | None:
    """Return the record that is ``steps`` times as far from ``low`` as ``high`` is.

    None if they are not records of the same step.
    """
    collectives = affine_collectives(low.collectives, high.collectives, steps)
    if collectives is None or low.flops.keys() != high.flops.keys():
        return None
    timeline = _affine_timeline(low, high, steps)
    at_peak = timeline.held[timeline.held.sum(1).argmax()].tolist()
    return replace(
        high,
        memory=dict(zip(CATEGORIES, at_peak, strict=True)),
        collectives=collectives,
        flops=affine(low.flops, high.flops, steps),
        traffic=affine(low.traffic, high.traffic, steps),
        timeline=timeline,
    )


def affine(low: Any, high: Any, steps: float, start: Any = None) -> dict[Any, float]:
    """Counts of ``start``, else ``low``, and ``steps`` times what ``high`` has more."""
    start = low if start is None else start
    return {
        key: start.get(key, 0.0) + steps * (count - low.get(key, 0.0))
        for key, count in high.items()
    }


def affine_collectives(low: Any, high: Any, steps: float) -> dict[Collective, float] | None:
    """Of a call whose size depends on the number of layers, the size is affine, not the number."""
    result: dict[Collective, float] = defaultdict(float)
    shared = low.keys() & high.keys()
    result |= affine({key: low[key] for key in shared}, {key: high[key] for key in shared}, steps)
    others = [[key for key in sorted(counts) if key not in shared] for counts in (low, high)]
    if len(others[0]) != len(others[1]):
        return None
    for first, second in zip(*others, strict=True):
        if first[:3] != second[:3] or low[first] != high[second]:
            return None
        payload = round(first.payload + steps * (second.payload - first.payload))
        result[second._replace(payload=payload)] += low[first]
    return dict(sorted(result.items()))


def _affine_timeline(low: StepRecord, high: StepRecord, steps: float) -> MemoryTimeline:
    """Memory at all moments that both records have."""
    segments = [_segments(record.timeline) for record in (low, high)]
    held: list[torch.Tensor] = []
    marks: list[tuple[str, int]] = []
    for label in (label for label in segments[0] if label in segments[1]):
        first, second = (segment[label] for segment in segments)
        if len(first) != len(second):
            # Such as the update, which goes over all parameters.
            first, second = (rows[rows.sum(1).argmax()][None] for rows in (first, second))
        marks.append((label[0], sum(map(len, held))))
        held.append(first + round(steps) * (second - first))
    return MemoryTimeline(torch.cat(held), marks)


def _segments(timeline: MemoryTimeline) -> dict[tuple[str, int], torch.Tensor]:
    """Rows of ``held`` from each mark to the next, by its name and occurrence.

    Occurrences of forward, and of the update, are counted from the end: the last forward of a full
    pipeline is that with the most in flight. Skips rows after a mark without a name.
    """
    found: dict[tuple[str, int], torch.Tensor] = {}
    counts: Counter[str] = Counter()
    marks = list(timeline.marks)
    if not marks or marks[0][1] > 0:
        marks.insert(0, (BEGIN, 0))
    totals = Counter(name for name, _ in marks)
    ends = [*(index for _, index in marks[1:]), len(timeline.held)]
    for (name, start), end in zip(marks, ends, strict=True):
        counts[name] += 1
        is_from_end = name.endswith((FORWARD, UPDATE))
        number = counts[name] - is_from_end * (totals[name] + 1)
        if name and end > start:
            found[name, number] = timeline.held[start:end]
    return found


def _with_layers(run: RunSpec, n_layers: int) -> RunSpec:
    return replace(run, model_args=replace(run.model_args, n_layers=n_layers))


def _n_stages(run: RunSpec) -> int:
    parallelism = run.config.parallelism
    return parallelism.pipeline_parallel_degree * stages_per_rank(parallelism)


def stage_lengths(run: RunSpec, n_layers: int) -> list[int]:
    """Layers of each stage."""
    parallelism, n_stages = run.config.parallelism, _n_stages(run)
    if n_stages == 1:
        return [n_layers]
    stages = stage_layers(
        n_layers,
        n_stages,
        less_first=parallelism.pipeline_parallel_first_stage_less_layers,
        less_last=parallelism.pipeline_parallel_last_stage_less_layers,
    )
    return [len(stage) for stage in stages]


def period_of(run: RunSpec) -> int:
    """Number of layers after which their kinds repeat."""
    checkpointing = run.config.activation_checkpoint
    every = checkpointing.selective if checkpointing.mode == "selective" else 1
    kinds: int = getattr(run.model_args, "attention_every", 1)
    return math.lcm(kinds, every if isinstance(every, int) else 1)


def _prefetched(run: RunSpec) -> int:
    parallelism = run.config.parallelism
    return max(parallelism.fsdp_forward_prefetch, parallelism.fsdp_backward_prefetch)


def _is_periodic(run: RunSpec) -> bool:
    """False if layers are put together: buckets of gradients, Muon's batches of matrices.

    False too if the configuration names a layer. In a pipeline, a layer's place in its stage must
    decide its kind.
    """
    is_bucketed = run.config.parallelism.data_parallel == "ddp"
    is_staged = _n_stages(run) > 1 and period_of(run) > 1
    is_named = any(map(names_layer, run.config.float8.skip))
    return not (is_bucketed or is_staged or is_named or run.config.optimizer.name != "adamw")


def names_layer(entry: str) -> bool:
    """True if an entry of ``float8.skip`` is one of a single layer, such as ``layers.0``."""
    return any(part.isdecimal() for part in entry.split("."))
