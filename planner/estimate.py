"""Estimates steps of many meshes from few simulations: those of a block and the ends of a model.

A simulation of one microbatch of one sequence, with two depths, stands for every number of layers,
data-parallel ranks, microbatches and sequences. Collectives and FLOPs of a step without a pipeline
are then those of its simulation. Memory is an estimate: the parts of the peak are scaled apart.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from parallelisms.parallel_dims import Degrees
from planner.depth import affine, affine_collectives
from planner.step_record import (
    ACTIVATIONS,
    BACKWARD,
    CATEGORIES,
    COMMUNICATION,
    FORWARD,
    GATHERED,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARIES,
    UPDATE,
    Collective,
    Group,
    StepRecord,
)

WEIGHT_DIMS = ("dp_shard_cp", "efsdp")


@dataclass(frozen=True)
class Sample:
    """Records of one microbatch of one sequence of two shallow models."""

    low: StepRecord
    high: StepRecord
    period: int
    """Layers of ``low``, and those that ``high`` has more."""
    dp_shard: int
    activations: tuple[int, int]
    """The most bytes of them in ``low`` and ``high``, which may not be at the peak."""
    of_weights: Mapping[str, float]
    """Of a period's traffic, by phase, what more sequences do not make larger, such as casts."""

    def without_recomputation(self) -> "Sample":
        low, high = (record.without_recomputation() for record in (self.low, self.high))
        return replace(self, low=low, high=high)

    def steps(self, n_layers: int) -> float:
        return n_layers / self.period - 1


class Shape(NamedTuple):
    """A step, which a sample is scaled to."""

    degrees: Degrees
    ep: int
    n_layers: int
    """Of a pipeline stage's rank."""
    n_microbatches: int
    size: int
    """Sequences of a microbatch."""
    in_flight: float
    """Microbatches whose activations the first stage holds."""
    accumulated: float
    """Share of a pipeline stage's unsharded gradients that it holds then."""
    is_resharded: bool
    """Weights are freed after forward."""
    ends: float = 1.0
    """Share of embeddings and output layer that a rank has: half of both in a pipeline."""


def estimated(sample: Sample, shape: Shape) -> StepRecord | None:
    """Return the record of a step of ``shape``; None if the two depths do not compare."""
    low, high, steps = sample.low, sample.high, sample.steps(shape.n_layers)
    collectives = affine_collectives(low.collectives, high.collectives, steps)
    if collectives is None:
        return None
    # Replicas update the same shards, but share Muon's matmuls.
    of_update = sample.dp_shard / shape.degrees.dp_shard
    tokens = shape.n_microbatches * shape.size
    traffic = affine(low.traffic, high.traffic, steps)
    n_periods = shape.n_layers / sample.period
    of_weights = {phase: n_periods * size for phase, size in sample.of_weights.items()}
    return StepRecord(
        memory=_memory(sample, shape),
        collectives=_collectives(collectives, shape),
        groups=groups(shape.degrees, shape.ep),
        flops={
            key: n * (of_update / shape.degrees.dp_replicate if key[0] == UPDATE else tokens)
            for key, n in affine(low.flops, high.flops, steps).items()
        },
        traffic={
            phase: size * of_update
            if phase == UPDATE
            else size * tokens - of_weights.get(phase, 0.0) * (tokens - shape.n_microbatches)
            for phase, size in traffic.items()
        },
    )


@cache
def groups(degrees: Degrees, ep: int) -> dict[str, Group]:
    """Groups of the first rank, by mesh dim."""
    shard = degrees.dp_shard * degrees.cp
    n_stage = degrees.dp_replicate * shard * degrees.tp
    strides = {
        "tp": (degrees.tp, 1),
        "cp": (degrees.cp, degrees.tp),
        "dp_shard_cp": (shard, degrees.tp),
        "batch": (degrees.batch, degrees.tp * degrees.cp),
        "dp_replicate": (degrees.dp_replicate, shard * degrees.tp),
        "pp": (degrees.pp, n_stage),
        "stage": (n_stage, 1),
        "ep": (ep, 1),
        "efsdp": (shard * degrees.tp // ep, ep),
    }
    return {
        dim: Group(dim, tuple(range(0, size * stride, stride)), degrees.pp * n_stage)
        for dim, (size, stride) in strides.items()
    }


def _collectives(of_one: dict[Collective, float], shape: Shape) -> dict[Collective, float]:
    """Collectives of all microbatches of a step."""
    result: dict[Collective, float] = defaultdict(float)
    degrees, n = shape.degrees, shape.n_microbatches
    for call, count in of_one.items():
        if call.phase == UPDATE:
            result[call] += count
        elif call.dim not in WEIGHT_DIMS:
            # Tensor parallel sums gradients of norms, which tokens do not make larger.
            is_of_weights = (call.phase, call.kind, call.dim) == (BACKWARD, "all_reduce", "tp")
            size = 1 if is_of_weights else shape.size
            result[call._replace(payload=call.payload * size)] += count * n
        elif call.kind == "all_gather":
            is_again = call.phase != FORWARD
            repeats = n if shape.is_resharded else 0 if is_again else 1
            result[call] += count * repeats
        else:
            # A pipeline reduces after its last microbatch, and hides it behind nothing.
            phase, repeats = (UPDATE, 1) if degrees.pp > 1 else (call.phase, n)
            result[call._replace(phase=phase)] += count * repeats
            if degrees.dp_replicate > 1 and call.kind == "reduce_scatter":
                # FSDP2 sums over replicas once a step.
                size = call.payload // len(groups(degrees, shape.ep)[call.dim].ranks)
                result[Collective(phase, "all_reduce", "dp_replicate", size)] += count
    return {call: count for call, count in result.items() if count}


def _memory(sample: Sample, shape: Shape) -> dict[str, int]:
    """Bytes by category near the end of forward or the begin of backward."""
    steps = sample.steps(shape.n_layers)
    low, high = (dict(record.memory) for record in (sample.low, sample.high))
    memory = {key: max(size, 0.0) for key, size in affine(low, high, steps).items()}
    of_ends = affine(low, high, sample.steps(0))
    for key in (PARAMETERS, OPTIMIZER):
        memory[key] -= (1.0 - shape.ends) * of_ends[key]
        memory[key] *= sample.dp_shard / shape.degrees.dp_shard
    # Of few layers at a time. The samples' peaks may be at different moments.
    for key in (GATHERED, LOGITS, COMMUNICATION, TEMPORARIES, GRADIENTS):
        memory[key] = min(memory[key], high[key] * 1.25)
    of_low, of_high = sample.activations
    per_layer = (of_high - of_low) / sample.period
    kept = per_layer * shape.n_layers
    rest = 2 * of_low - of_high
    memory[ACTIVATIONS] = shape.size * (kept * shape.in_flight + rest)
    for key in (LOGITS, TEMPORARIES):
        memory[key] *= shape.size
    if not shape.is_resharded:
        gathered = _of_weights(sample, shape, "all_gather", FORWARD)
        memory[GATHERED] = max(memory[GATHERED], gathered)
    if shape.degrees.pp > 1:
        gradients = _of_weights(sample, shape, "reduce_scatter", BACKWARD)
        memory[GRADIENTS] = shape.accumulated * gradients
    elif shape.n_microbatches > 1:
        memory[GRADIENTS] = memory[PARAMETERS]
    elif memory[PARAMETERS] > memory[GRADIENTS] + shape.size * (kept - per_layer):
        # The peak is at the end of the only backward.
        memory[GRADIENTS] = memory[PARAMETERS]
        memory[ACTIVATIONS] = shape.size * (per_layer + rest)
    return {category: round(memory[category]) for category in CATEGORIES}


def _of_weights(sample: Sample, shape: Shape, kind: str, phase: str) -> float:
    """Bytes of a stage's unsharded weights or gradients in the collectives of this kind."""

    def payload(n_layers: int) -> float:
        low, high = sample.low.collectives, sample.high.collectives
        calls = affine_collectives(low, high, sample.steps(n_layers)) or {}
        return sum(
            count * call.payload
            for call, count in calls.items()
            if (call.phase, call.kind) == (phase, kind) and call.dim in WEIGHT_DIMS
        )

    return payload(shape.n_layers) - (1.0 - shape.ends) * payload(0)
