"""Plans a rank of a long pipeline by those of short ones, because its microbatches are alike.

A rank holds the activations of a number of microbatches that is affine in that of ranks after it.
So is memory, at each moment. Once the pipeline is full, a microbatch adds only its inputs and the
buffers that receive it; counts are affine in the number of microbatches.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from parallelisms.pipeline_parallel import stages_per_rank
from planner.depth import affine, extrapolated, simulate_layers, stage_lengths
from planner.step_record import Group, StepRecord
from run_spec import RunSpec


@dataclass(frozen=True)
class Place:
    """A rank of a pipeline of ``pp`` ranks, through which ``n`` microbatches pass."""

    pp: int
    rank: int
    n: int


@dataclass(frozen=True)
class Short:
    """Places from which a place of a longer pipeline is extrapolated."""

    low: Place
    longer: Place
    """With one more rank."""
    n_longer: float
    """Times the difference between ``low`` and ``longer``."""
    more: Place
    """With more microbatches."""
    n_more: float
    is_interleaved: bool

    @property
    def places(self) -> list[Place]:
        places = [self.low] + [self.longer] * (self.n_longer > 0)
        return places + [self.more] * (self.n_more > 0)


def simulate_pipeline(run: RunSpec, world_size: int, rank: int, n: int) -> StepRecord:
    """Return the record of ``n`` microbatches on the pipeline's ``rank``."""
    pp = run.config.parallelism.pipeline_parallel_degree
    n_ranks = world_size // pp
    if run.config.parallelism.pipeline_parallel_schedule != "GPipe":
        short = short_of(Place(pp, rank, n), stages_per_rank(run.config.parallelism))
        records = _simulated(run, short, rank, n_ranks)
        record = None if records is None else _extrapolated(records, short)
        if records is not None and record is not None:
            groups = records[short.low].groups
            return replace(record, groups=_moved(groups, short.low, Place(pp, rank, n), n_ranks))
    return simulate_layers(run, world_size, rank * n_ranks, weights=[1.0] * n)


def short_of(place: Place, per_rank: int) -> Short:
    """Return the shortest places like ``place``, with so many stages on each rank."""
    is_last = place.rank == place.pp - 1
    if per_rank == 1:
        # Ranks between differ only in how many follow.
        rank = min(place.rank, 1)
        pp = 2 if is_last else rank + 2
        n_longer = (place.pp - place.rank) - (pp - rank)
        # With as many microbatches as follow it, a rank does all forwards first.
        n = pp - rank + min(place.n - (place.pp - place.rank), 1)
        low, longer = Place(pp, rank, n), Place(pp + 1, rank, n + 1)
        n_more = float(place.n - n - n_longer)
        return Short(low, longer, n_longer, replace(low, n=n + 1), n_more, False)
    rank = 1 if is_last else place.rank
    pp, rounds = rank + 1 if is_last else rank + 2, min(place.n // place.pp, 2)
    low = Place(pp, rank, rounds * pp)
    longer = Place(pp + 1, rank + is_last, rounds * (pp + 1))
    n_more = (place.n - rounds * place.pp) / pp
    return Short(low, longer, place.pp - pp, replace(low, n=low.n + pp), n_more, True)


def _simulated(
    run: RunSpec, short: Short, rank: int, n_ranks: int
) -> dict[Place, StepRecord] | None:
    """Simulate ``short``; None if its stages would not have the layers of those of ``rank``."""
    records = {}
    for place in short.places:
        shortened = _shortened(run, place, rank)
        if shortened is None:
            return None
        records[place] = simulate_layers(
            shortened, place.pp * n_ranks, place.rank * n_ranks, weights=[1.0] * place.n
        )
    return records


def _extrapolated(records: dict[Place, StepRecord], short: Short) -> StepRecord | None:
    low = records[short.low]
    record: StepRecord | None = low
    if short.n_longer > 0 and short.is_interleaved:
        # Other pipelines have other moments, but the peak is affine.
        record = _with_more(low, low, records[short.longer], short.n_longer)
    elif short.n_longer > 0:
        record = extrapolated(low, records[short.longer], short.n_longer)
    if short.n_more > 0 and record is not None:
        record = _with_more(record, low, records[short.more], short.n_more)
    return record


def _with_more(start: StepRecord, low: StepRecord, high: StepRecord, steps: float) -> StepRecord:
    """Return ``start`` and ``steps`` times what ``high`` counts more than ``low``."""
    counts: dict[str, Any] = {
        name: affine(getattr(low, name), getattr(high, name), steps, getattr(start, name))
        for name in ("memory", "collectives", "flops", "traffic")
    }
    memory = {category: round(size) for category, size in counts.pop("memory").items()}
    return replace(start, memory=memory, **counts)


def _shortened(run: RunSpec, place: Place, rank: int) -> RunSpec | None:
    """Return ``run`` with the pipeline of ``place``, whose rank has the layers of ``rank``."""
    parallelism = run.config.parallelism
    per_rank = stages_per_rank(parallelism)
    whole = stage_lengths(run, run.model_args.n_layers)
    lengths = whole[rank :: parallelism.pipeline_parallel_degree]
    longest = max(lengths)
    less_first = longest - lengths[0] if place.rank == 0 else 0
    less_last = longest - lengths[-1] if place.rank == place.pp - 1 else 0
    keys = {
        "pipeline_parallel_degree": place.pp,
        "pipeline_parallel_first_stage_less_layers": less_first,
        "pipeline_parallel_last_stage_less_layers": less_last,
    }
    n_layers = longest * place.pp * per_rank - less_first - less_last
    config = run.config.model_copy(update={"parallelism": parallelism.model_copy(update=keys)})
    args = replace(run.model_args, n_layers=n_layers)
    shortened = replace(run, config=config, model_args=args)
    found = stage_lengths(shortened, n_layers)[place.rank :: place.pp]
    return shortened if found == lengths else None


def _moved(
    groups: Mapping[str, Group], short: Place, place: Place, n_ranks: int
) -> dict[str, Group]:
    """Groups of ``place``; each rank of the pipeline stands for ``n_ranks`` consecutive ones."""
    by, world_size = (place.rank - short.rank) * n_ranks, place.pp * n_ranks
    moved = {
        dim: Group(group.dim, tuple(rank + by for rank in group.ranks), world_size)
        for dim, group in groups.items()
    }
    return moved | {"pp": Group("pp", tuple(range(0, world_size, n_ranks)), world_size)}
