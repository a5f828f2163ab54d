"""Searches the meshes of a cluster for the most tokens per second that fit."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from multiprocessing import get_context
from typing import Any

from config import ConfigError, JobConfig
from config.auto import MODES
from planner.depth import names_layer
from planner.estimate import Sample, Shape, estimated
from planner.roofline import step_parts
from planner.search_simulations import (
    Map,
    Request,
    reported,
    simulate_sample,
    simulate_stage,
)
from planner.search_space import Choice, Kind, SearchSpace
from planner.step_plan import TIGHT, planned_stages
from planner.step_record import StepRecord
from run_spec import model_of, resolve
from runtime.devices import Hardware

GIB = 1 << 30
# Rows of the answer, and how many choices are planned in full for them, at most.
N_BEST, MOST_PLANS = 10, 12
# Choices of one mesh whose modelled speeds differ by less are one row.
ALIKE = 0.01
# An estimate of memory may be this much too large, before the choice is planned in full.
SLACK = 1.05
# Before the next check of whether the samples are enough.
SAMPLES_AT_ONCE = 8
# Data-parallel ranks of a sample.
SAMPLE_RANKS = 8


@dataclass(frozen=True)
class Found:
    """A choice, its memory and its time."""

    choice: Choice
    peak: int
    parts: dict[str, float]
    tokens_per_second: float
    alike: dict[str, list[Any]] = field(default_factory=dict)
    """See the function of this name."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """See ``SearchSpace.settings``."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Answer:
    """The best choices, fastest first, and one more if there is one."""

    best: list[Found]
    n_choices: int
    n_estimated: int
    """The others cannot be faster, or cannot fit."""
    n_fitting: int


class Search:
    """A search for one model, batch and cluster; ``held``: see ``SearchSpace``."""

    def __init__(
        self, config: JobConfig, world_size: int, hardware: Hardware, held: Collection[str] = ()
    ) -> None:
        if config.training.global_batch_size is None:
            raise ConfigError(["training.global_batch_size: --search needs it, to compare equals"])
        self._config, self._world_size, self._hardware = config, world_size, hardware
        self._batch = config.training.global_batch_size
        _, self._args = model_of(config)
        self.space = SearchSpace(config, world_size, hardware.device, held)
        self._limit = TIGHT * hardware.device.memory_gib * GIB

    def run(self, n_workers: int = 1, report: Callable[[str], None] | None = None) -> Answer:
        """Return the best choices, simulated by so many processes. Raises ``ConfigError``.

        Calls ``report`` with lines on the progress.
        """
        choices = list(self.space.choices())
        if not choices:
            n, batch = self._world_size, self._batch
            text = f"training.global_batch_size: no mesh of {n} ranks can train {batch} sequences"
            text += "".join(f", with {key} = {value}" for key, value in self.space.held.items())
            raise ConfigError([text])
        if n_workers == 1:
            return self._best(choices, reported(map, report))
        with ProcessPoolExecutor(n_workers, mp_context=get_context("spawn")) as pool:
            return self._best(choices, reported(pool.map, report))

    def _best(self, choices: list[Choice], run_all: Map) -> Answer:
        ranked = self._estimates(choices, run_all)
        if not ranked:
            # No sample can be planned. The plan of a choice raises the reason.
            simulate_stage(Request(self.space.config_of(choices[0]), self._world_size))
        fitting = self._fitting(ranked)
        best: list[Found] = []
        left, n_plans, most = fitting, 0, 1
        while len(best) <= N_BEST and n_plans < MOST_PLANS and left and most <= N_BEST + 1:
            some = self.different(left, best, most)[: MOST_PLANS - n_plans]
            # Few meshes have several rows.
            most += not some
            taken = {found.choice for found in some}
            left = [found for found in left if found.choice not in taken]
            n_plans += len(some)
            best += [each for each in self._planned(some, run_all) if each.peak <= self._limit]
        if not best:
            least = min((found.peak for found in ranked), default=0) / GIB
            raise ConfigError([f"--search: nothing fits; the least is {least:.1f} GiB of a rank"])
        settings = self.space.settings
        best = [
            replace(found, alike=alike(found.choice, fitting), settings=settings(found.choice))
            for found in best
        ]
        return Answer(_shown(best), len(choices), len(ranked), len(fitting))

    def _estimates(self, choices: list[Choice], run_all: Map) -> list[Found]:
        """Return estimates of all choices that may be among the best.

        What a sample with full recomputation holds, and computes besides it, are lower bounds of
        the other modes. So those are sampled from the fastest bound on, until the rest is slower.
        """
        by_kind: dict[Kind, list[Choice]] = defaultdict(list)
        for choice in choices:
            by_kind[choice.kind].append(choice)
        bounds = {kind: math.inf for kind in by_kind if kind.mode != "full"}
        estimates: list[Found] = []
        full = sorted(by_kind.keys() - bounds)
        for kind, sample in zip(full, self._samples(full, run_all), strict=True):
            found = self._all_estimated(by_kind[kind], sample)
            estimates += found
            if sample is not None:
                choices = [each.choice for each in self._fitting(found)]
                faster = self._all_estimated(choices, sample.without_recomputation())
                bound = max((each.tokens_per_second for each in faster), default=0.0)
                bounds |= {
                    other: bound for mode in MODES if (other := kind._replace(mode=mode)) in bounds
                }
        left = sorted((-bound, kind) for kind, bound in bounds.items() if bound > 0.0)
        while left and -left[0][0] > self._rate_of_last(estimates):
            some = [kind for _, kind in left[:SAMPLES_AT_ONCE]]
            left = left[SAMPLES_AT_ONCE:]
            for kind, sample in zip(some, self._samples(some, run_all), strict=True):
                estimates += self._all_estimated(by_kind[kind], sample)
        return estimates

    def _samples(self, kinds: list[Kind], run_all: Map) -> Iterable[Sample | None]:
        return run_all(simulate_sample, [self._sample_request(kind) for kind in kinds])

    def _rate_of_last(self, estimates: list[Found]) -> float:
        """Tokens/s of what could be alike to the last row; 0 with fewer rows."""
        rows = self.different(self._fitting(estimates), [], 1)
        return (1.0 - ALIKE) * rows[-1].tokens_per_second if len(rows) > N_BEST else 0.0

    def _fitting(self, estimates: list[Found]) -> list[Found]:
        """Those that may fit, fastest first."""
        fitting = [found for found in estimates if found.peak <= SLACK * self._limit]
        return sorted(fitting, key=_rank)

    def different(self, left: list[Found], best: list[Found], most: int) -> list[Found]:
        """Return the fastest of ``left``, with at most ``most`` of a mesh, ``best`` included.

        Those of a mesh that are about as fast are skipped, until so many are allowed that all are.
        """
        counts = Counter(found.choice.mesh for found in best)
        some: list[Found] = []
        for found in left:
            if len(best) + len(some) > N_BEST:
                break
            if most <= N_BEST and any(is_alike(each, found) for each in best + some):
                continue
            if counts[found.choice.mesh] < most and self.space.is_legal(found.choice):
                counts[found.choice.mesh] += 1
                some.append(found)
        return some

    def _sample_request(self, kind: Kind) -> "Request":
        n_dp = SAMPLE_RANKS * max(1, kind.ep // (kind.tp * kind.cp))
        choice = Choice(
            1, n_dp, kind.tp, kind.cp, 1, kind.ep, "1F1B", kind.mode, "default", 1, kind.recipe
        )
        config = self.space.config_of(choice)
        batch = {"global_batch_size": n_dp, "batch_size_ramp": []}
        training = config.training.model_copy(update=batch)
        # A sample has few layers.
        skip = [entry for entry in config.float8.skip if not names_layer(entry)]
        float8 = config.float8.model_copy(update={"skip": skip})
        config = config.model_copy(update={"training": training, "float8": float8})
        return Request(config, n_dp * kind.cp * kind.tp, schedule=kind.schedule)

    def _all_estimated(self, choices: list[Choice], sample: Sample | None) -> list[Found]:
        if sample is None:
            return []
        found = (self._estimate(choice, sample) for choice in choices)
        return [each for each in found if each is not None]

    def _estimate(self, choice: Choice, sample: Sample) -> Found | None:
        n = self._n_microbatches(choice)
        per_rank = 2 if choice.schedule != "1F1B" else 1
        deep = (per_rank + 1) * choice.pp - 1 if per_rank > 1 else choice.pp
        shape = Shape(
            degrees=choice.degrees,
            ep=choice.ep,
            n_layers=-(-self._args.n_layers // choice.pp),
            n_microbatches=n,
            size=choice.size,
            in_flight=min(n * per_rank, deep) / per_rank,
            # After few microbatches, a rank's first stage goes back when its others are done.
            accumulated=1.0 if n * per_rank > deep + choice.pp else 1.0 / per_rank,
            is_resharded=choice.reshard == ("always" if choice.pp > 1 else "default"),
            # Tied, they are one matrix, which the first and the last rank have.
            ends=0.5 if choice.pp > 1 and not self._args.tie_embeddings else 1.0,
        )
        record = estimated(sample, shape)
        if record is None:
            return None
        return self._found(choice, record.peak, [record])

    def _planned(self, some: list[Found], run_all: Map) -> list[Found]:
        """Return ``some`` with the memory and time of their plans."""
        n_ranks, requests = self._world_size, []
        for found in some:
            config = self.space.config_of(found.choice)
            run = resolve(config, n_ranks, has_gpu=True)
            stages = planned_stages(run, found.choice.degrees)
            requests.append([Request(config, n_ranks, stage) for stage in stages])
        # By stage, because few processes share few plans evenly only so.
        planned = iter(run_all(simulate_stage, [each for parts in requests for each in parts]))
        records = [list(islice(planned, len(parts))) for parts in requests]
        return [
            self._found(found.choice, max(record.peak for record in of_stages), of_stages)
            for found, of_stages in zip(some, records, strict=True)
        ]

    def _found(self, choice: Choice, peak: int, records: list[StepRecord]) -> Found:
        config = self.space.config_of(choice)
        parts = step_parts(records, config, self._n_microbatches(choice), self._hardware)
        rate = self._batch * config.training.seq_len / sum(parts.values())
        return Found(choice, peak, parts, rate)

    def _n_microbatches(self, choice: Choice) -> int:
        return self._batch // (choice.size * choice.degrees.batch)


def is_alike(one: Found, other: Found) -> bool:
    """True for two of one mesh that are about as fast."""
    is_near = abs(one.tokens_per_second / other.tokens_per_second - 1) < ALIKE
    return is_near and one.choice.mesh == other.choice.mesh


def alike(choice: Choice, fitting: list[Found]) -> dict[str, list[Any]]:
    """Values of single fields, instead of those of ``choice``, with which it is about as fast."""
    own = next(found for found in fitting if found.choice == choice)
    values: dict[str, list[Any]] = defaultdict(list)
    # Shards follow from replicas.
    names = [name for name in Choice._fields if name != "dp_shard"]
    for found in fitting:
        other = found.choice
        if not is_alike(own, found):
            continue
        changed = [name for name in names if getattr(other, name) != getattr(choice, name)]
        if len(changed) == 1:
            values[changed[0]].append(getattr(other, changed[0]))
    return {name: sorted(others) for name, others in sorted(values.items())}


def _shown(planned: list[Found]) -> list[Found]:
    """The ten, fastest first, of as many meshes as there are, and one more if it is slower."""
    ranked = sorted(planned, key=_rank)
    meshes = [found.choice.mesh for found in ranked]
    by_row = sorted(range(len(ranked)), key=lambda i: meshes.index(meshes[i]) < i)
    ten, others = sorted(by_row[:N_BEST]), by_row[N_BEST:]
    return [ranked[i] for i in ten + [i for i in others if i > ten[-1]][:1]]


def _rank(found: Found) -> tuple[float, Choice]:
    return -found.tokens_per_second, found.choice
