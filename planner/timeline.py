"""Timeline of a simulated step: what computes and communicates when, and the memory over it.

Events, their order, sizes and data dependencies are those of ``train.py``'s own step. Their seconds
are the roofline's.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from planner.operators import Call
from planner.recorder import Block, StepRecorder, category_of
from planner.roofline import MEMORY, OVERLAPPED, collective_seconds, rates_of
from planner.step_record import BACKWARD, UPDATE, Collective, Group, StepRecord
from runtime.devices import Hardware

COMPUTE = "compute"


@dataclass(frozen=True, eq=False)
class Event:
    """An operator or a collective, in the order in which the program issues them."""

    phase: str
    flops: Mapping[str, float]
    """By kind; of the other operators none."""
    traffic: float
    """Bytes that another operator reads and writes."""
    collective: Collective | None
    is_async: bool
    """The program does not wait for it: what it returns is waited for where it is used."""
    reads: Sequence[Block]
    writes: Sequence[Block]
    n_changes: int
    """Number of changes of memory until it has run."""


@dataclass(frozen=True)
class TimedRecord(StepRecord):
    """A step's record with its events."""

    events: Sequence[Event] = ()
    changes: Sequence[tuple[str, int]] = ()
    """Category and bytes of each allocation, and of each release, which is negative."""


@dataclass(frozen=True)
class Span:
    """Occupation of a lane from ``begin`` to ``end``, in seconds."""

    lane: str
    """``COMPUTE`` or a mesh dim."""
    kind: str
    """Phase of compute, or kind of collective."""
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Spans of a step in order, and bytes held by category from each time on."""

    spans: list[Span]
    memory: list[tuple[float, Counter[str]]]

    @property
    def seconds(self) -> float:
        return max(span.end for span in self.spans)


class EventRecorder(StepRecorder):
    """Recorder that keeps the order of what it records."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._events: list[Event] = []

    def restart(self) -> None:
        super().restart()
        self._events = []

    def record(self) -> TimedRecord:
        changes = [(category_of(block), change) for block, change in self._changes]
        return TimedRecord(**vars(super().record()), events=self._events, changes=changes)

    def count_kernel(self, tensors: Any, *args: object) -> None:
        before = self._totals()
        super().count_kernel(tensors, *args)
        self._append(UPDATE, before, self._known(tensors), [])

    def count_work(self, call: Call) -> None:
        before = self._totals()
        super().count_work(call)
        self._append(call.phase, before, self._known(call.inputs), self._known(call.outputs))

    def count_collective(self, call: Call) -> None:
        before = dict(self._collectives)
        super().count_collective(call)
        counts = self._collectives.items()
        found = [key for key, count in counts if count != before.get(key, 0.0)]
        if found:
            blocks = self._known([*call.inputs, *call.outputs])
            # The functional collectives of autograd are waited for at once.
            is_async = call.func.namespace == "c10d" and found[0].dim.startswith(OVERLAPPED)
            event = Event(
                call.phase, {}, 0.0, found[0], is_async, blocks, blocks, len(self._changes)
            )
            self._events.append(event)

    def _known(self, tensors: Sequence[torch.Tensor]) -> list[Block]:
        found = (self._live.get(id(tensor.untyped_storage())) for tensor in tensors)
        return [block for block in found if block is not None]

    def _totals(self) -> tuple[dict[str, float], float]:
        flops: dict[str, float] = defaultdict(float)
        for (_, kind), value in self._flops.items():
            flops[kind] += value
        return flops, sum(self._traffic.values())

    def _append(
        self,
        phase: str,
        before: tuple[dict[str, float], float],
        reads: list[Block],
        writes: list[Block],
    ) -> None:
        """Append an event of what was counted since ``before``, unless that is nothing."""
        flops, traffic = self._totals()
        done = {kind: n - before[0][kind] for kind, n in flops.items() if n > before[0][kind]}
        if done or traffic > before[1]:
            moved = traffic - before[1]
            count = len(self._changes)
            self._events.append(Event(phase, done, moved, None, False, reads, writes, count))


@dataclass
class _Clock:
    """Times of the lanes and of data, while events are placed."""

    hardware: Hardware
    peak: float
    groups: Mapping[str, Group]
    compute: float = 0.0
    lanes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    ready: dict[Block, float] = field(default_factory=dict)
    """When a collective's result arrives."""

    def place(self, event: Event) -> Span:
        known = [self.ready[block] for block in event.reads if block in self.ready]
        arrived = max(known, default=0.0)
        if event.collective is not None:
            return self._communicate(event, event.collective, arrived)
        if event.phase == BACKWARD and arrived > self.compute and not event.flops:
            # FSDP2 and DDP convert and add reduced gradients in a stream of their own.
            self.ready |= dict.fromkeys(event.writes, arrived)
            return Span(COMPUTE, event.phase, self.compute, self.compute)
        begin = max(self.compute, arrived)
        self.compute = begin + self._seconds(event)
        return Span(COMPUTE, event.phase, begin, self.compute)

    def _communicate(self, event: Event, collective: Collective, arrived: float) -> Span:
        dim = collective.dim
        begin = max(self.lanes[dim], self.compute, arrived)
        end = begin + collective_seconds(collective, self.groups[dim], self.hardware)
        self.lanes[dim] = end
        self.ready |= dict.fromkeys(event.writes, end)
        if not event.is_async:
            self.compute = end
        return Span(dim, collective.kind, begin, end)

    def _seconds(self, event: Event) -> float:
        bandwidth = self.hardware.device.memory_gb_per_second * 1e9 * MEMORY
        rates = rates_of(self.hardware, self.peak)
        return event.traffic / bandwidth + sum(n / rates[kind] for kind, n in event.flops.items())


def timeline_of(record: TimedRecord, hardware: Hardware, peak: float) -> Timeline:
    """Place the events of ``record`` in time. ``peak``: FLOP/s of a device.

    One lane computes, and each mesh dim communicates in one more. An event begins when the program
    has issued it, its lane is free, and what it reads has arrived.
    """
    clock = _Clock(hardware, peak, record.groups)
    spans: list[Span] = []
    memory: list[tuple[float, Counter[str]]] = []
    held: Counter[str] = Counter()
    done = 0
    for event in record.events:
        # What it allocates is held from its issue on.
        begin = clock.compute
        spans.append(clock.place(event))
        for category, change in record.changes[done : event.n_changes]:
            held[category] += change
            memory.append((begin, held.copy()))
        done = event.n_changes
    return Timeline([span for span in spans if span.end > span.begin], memory)
