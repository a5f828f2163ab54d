"""The record of a training step: memory by category, collectives, FLOPs, and bytes moved."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

FORWARD, BACKWARD, RECOMPUTE, UPDATE = "forward", "backward", "recompute", "update"
PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer state"
BUFFERS = "model buffers"
GATHERED, COMMUNICATION, LOGITS = "gathered weights", "communication buffers", "logits"
ACTIVATIONS, TEMPORARIES = "activations", "temporaries"
CATEGORIES = (
    PARAMETERS, BUFFERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS, GATHERED, COMMUNICATION,
    TEMPORARIES,
)  # fmt: skip
# Bytes that a rank sends, as a multiple of (n - 1) / n of the payload, with ring algorithms.
RING_PASSES = {"all_reduce": 2.0, "receive": 0.0}


class Collective(NamedTuple):
    """The key by which collectives are counted."""

    phase: str
    kind: str
    dim: str
    """Mesh dim."""
    payload: int
    """Bytes of the unsharded tensor; of one rank's, for all-to-all, send and receive."""


@dataclass(frozen=True)
class Group:
    """A process group of this rank, by the mesh dim that it is of."""

    dim: str
    ranks: tuple[int, ...]
    """In ascending order."""
    world_size: int
    """Ranks of the run."""

    def sent(self, collective: Collective) -> float:
        """Bytes that this rank sends in one such collective."""
        if collective.kind in ("send", "broadcast"):
            return collective.payload
        n = len(self.ranks)
        return RING_PASSES.get(collective.kind, 1.0) * collective.payload * (n - 1) / n


class MemoryTimeline(NamedTuple):
    """Memory after each change, and where layers begin and end."""

    held: torch.Tensor
    """(changes, categories) int64, in bytes."""
    marks: list[tuple[str, int]]
    """Names of marks, and the number of changes before each."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step of one rank."""

    memory: Mapping[str, int]
    """Bytes at the peak, by category."""
    collectives: Mapping[Collective, float]
    """Number of calls."""
    groups: Mapping[str, Group]
    """By mesh dim."""
    flops: Mapping[tuple[str, str], float]
    """By phase and kind: "matmul", "float8 matmul", "attention" or "delta rule"; attention's only
    for keys that the causal mask leaves."""
    traffic: Mapping[str, float]
    """Bytes read and written by all other operators, by phase."""
    timeline: MemoryTimeline = field(
        default=MemoryTimeline(torch.empty(0), []), compare=False, repr=False
    )

    def without_timeline(self) -> "StepRecord":
        """A copy that is small enough to send to another process."""
        return replace(self, timeline=MemoryTimeline(torch.empty(0), []))

    def without_recomputation(self) -> "StepRecord":
        """A copy with the work of activation checkpointing's mode "none", but not its memory."""
        calls, flops, traffic = self.collectives, self.flops, self.traffic
        return replace(
            self,
            collectives={call: n for call, n in calls.items() if call.phase != RECOMPUTE},
            flops={key: n for key, n in flops.items() if key[0] != RECOMPUTE},
            traffic={phase: n for phase, n in traffic.items() if phase != RECOMPUTE},
        )

    @property
    def peak(self) -> int:
        return sum(self.memory.values())

    def most(self, category: str) -> int:
        """The most bytes of ``category`` at any moment; needs the timeline."""
        return int(self.timeline.held[:, CATEGORIES.index(category)].max())
