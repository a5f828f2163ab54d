"""Estimates steps of many meshes from few simulations: those of a block and the ends of a model.

A simulation of one microbatch of one sequence, with two depths, stands for every number of layers,
data-parallel ranks, microbatches and sequences. Collectives and FLOPs of a step without a pipeline
are then those of its simulation. Memory is an estimate: the parts of the peak are scaled apart.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from parallelisms.parallel_dims import Degrees
from planner.depth import affine, affine_collectives
from planner.recorder import (
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
    depth: int
    """Layers of ``low``."""
    period: int
    """Layers that ``high`` has more."""
    dp_shard: int

    def steps(self, n_layers: int) -> float:
        return (n_layers - self.depth) / self.period


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
    is_resharded: bool
    """Weights are freed after forward."""


def estimated(sample: Sample, shape: Shape) -> StepRecord | None:
    """Return the record of a step of ``shape``; None if the two depths do not compare."""
    low, high, steps = sample.low, sample.high, sample.steps(shape.n_layers)
    collectives = affine_collectives(low.collectives, high.collectives, steps)
    if collectives is None:
        return None
    of_update = sample.dp_shard / shape.degrees.dp_shard
    tokens = shape.n_microbatches * shape.size
    traffic = affine(low.traffic, high.traffic, steps)
    return StepRecord(
        memory=_memory(sample, shape, collectives),
        collectives=_collectives(collectives, shape),
        groups={group.dim: group for group in groups(shape.degrees, shape.ep)},
        flops={key: tokens * n for key, n in affine(low.flops, high.flops, steps).items()},
        traffic={
            phase: size * (of_update if phase == UPDATE else tokens)
            for phase, size in traffic.items()
        },
    )


@cache
def groups(degrees: Degrees, ep: int) -> list[Group]:
    """Groups of the first rank."""
    shard = degrees.dp_shard * degrees.cp
    n_stage = degrees.dp_replicate * shard * degrees.tp
    strides = {
        "tp": (degrees.tp, 1),
        "cp": (degrees.cp, degrees.tp),
        "dp_shard_cp": (shard, degrees.tp),
        "batch": (degrees.batch, degrees.tp * degrees.cp),
        "dp_replicate": (degrees.dp_replicate, shard * degrees.tp),
        "pp": (degrees.pp, n_stage),
        "ep": (ep, 1),
        "efsdp": (shard * degrees.tp // ep, ep),
    }
    return [
        Group(dim, tuple(range(0, size * stride, stride)))
        for dim, (size, stride) in strides.items()
    ]


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
            # A pipeline reduces after its last microbatch.
            repeats = n if degrees.pp == 1 else 1
            result[call] += count * repeats
            shard = degrees.dp_shard * degrees.cp
            if degrees.dp_replicate > 1 and call.kind == "reduce_scatter":
                # FSDP2 sums over replicas once a step.
                key = Collective(BACKWARD, "all_reduce", "dp_replicate", call.payload // shard)
                result[key] += count
    return dict(result)


def _memory(sample: Sample, shape: Shape, collectives: dict[Collective, float]) -> dict[str, int]:
    """Bytes by category near the end of forward or the begin of backward."""
    steps = sample.steps(shape.n_layers)
    low, high = (dict(record.memory) for record in (sample.low, sample.high))
    memory = {key: max(size, 0.0) for key, size in affine(low, high, steps).items()}
    for key in (PARAMETERS, OPTIMIZER):
        memory[key] *= sample.dp_shard / shape.degrees.dp_shard
    per_layer = max(high[ACTIVATIONS] - low[ACTIVATIONS], 0) / sample.period
    kept = per_layer * shape.n_layers
    rest = max(memory[ACTIVATIONS] - kept, 0.0)
    memory[ACTIVATIONS] = shape.size * (kept * shape.in_flight + rest)
    for key in (LOGITS, TEMPORARIES):
        memory[key] *= shape.size
    memory[COMMUNICATION] = min(memory[COMMUNICATION], high[COMMUNICATION] * 1.25)
    payloads = {
        kind: sum(
            count * call.payload
            for call, count in collectives.items()
            if call.kind == kind and call.dim in WEIGHT_DIMS and call.phase in phases
        )
        for kind, phases in (("all_gather", (FORWARD,)), ("reduce_scatter", (BACKWARD,)))
    }
    if not shape.is_resharded:
        memory[GATHERED] = max(memory[GATHERED], payloads["all_gather"])
    if shape.degrees.pp > 1:
        memory[GRADIENTS] = payloads["reduce_scatter"]
    elif shape.n_microbatches > 1:
        memory[GRADIENTS] = memory[PARAMETERS]
    return {category: round(memory[category]) for category in CATEGORIES}
