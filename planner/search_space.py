"""The meshes of a cluster, and what goes with them, that a search compares."""

import math
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from config import ConfigError, JobConfig
from config.auto import MODES
from config.job_config import ActivationCheckpoint, Float8, Parallelism
from parallelisms.constraints import check_constraints
from parallelisms.parallel_dims import Degrees
from run_spec import model_of
from runtime.devices import Device

MOST_SIZE, MOST_CP, MOST_PP = 8, 16, 16
# Tables with keys that a choice replaces.
SECTIONS: dict[str, Any] = {
    "parallelism": Parallelism,
    "activation_checkpoint": ActivationCheckpoint,
    "float8": Float8,
}
SEARCHED = {
    "parallelism": {
        "data_parallel", "data_parallel_replicate_degree", "data_parallel_shard_degree",
        "tensor_parallel_degree", "tensor_parallel_async", "context_parallel_degree",
        "pipeline_parallel_degree", "pipeline_parallel_schedule",
        "pipeline_parallel_microbatch_size", "pipeline_parallel_stages_per_rank",
        "expert_parallel_degree", "fsdp_reshard_after_forward", "fsdp_reduce_gradients",
        "fsdp_forward_prefetch", "fsdp_backward_prefetch", "fsdp_cpu_offload",
    },
    "activation_checkpoint": {"mode", "memory_budget", "selective"},
    "float8": {"recipe"},
}  # fmt: skip


# Keys that a search may hold, and their field of a choice.
HELD = {
    "parallelism.data_parallel_replicate_degree": "dp_replicate",
    "parallelism.data_parallel_shard_degree": "dp_shard",
    "parallelism.tensor_parallel_degree": "tp",
    "parallelism.context_parallel_degree": "cp",
    "parallelism.pipeline_parallel_degree": "pp",
    "parallelism.pipeline_parallel_schedule": "schedule",
    "parallelism.expert_parallel_degree": "ep",
    "parallelism.fsdp_reshard_after_forward": "reshard",
    "activation_checkpoint.mode": "mode",
    "training.local_batch_size": "size",
    "float8.recipe": "recipe",
}
SCHEDULES, RESHARDS = ("1F1B", "Interleaved1F1B"), ("default", "always", "never")
COMPARED = {"schedule": SCHEDULES, "reshard": RESHARDS, "mode": MODES}
# Values that leave the choice to the search.
FREE = ("auto", -1)


class Choice(NamedTuple):
    """One mesh, and what goes with it."""

    dp_replicate: int
    dp_shard: int
    tp: int
    cp: int
    pp: int
    ep: int
    schedule: str
    mode: str
    reshard: str
    size: int
    """Sequences of a microbatch."""
    recipe: str
    """Of float8."""

    @property
    def kind(self) -> "Kind":
        # Scaled by tensor, weights are gathered in float8, but not with several stages per rank.
        schedule = self.schedule if self.recipe == "tensorwise" else "1F1B"
        return Kind(self.tp, self.cp, self.ep, self.mode, self.recipe, schedule)

    @property
    def mesh(self) -> tuple[int, int, int, int]:
        """Degrees but those of data parallel; replicas change the speed little."""
        return self.tp, self.cp, self.pp, self.ep

    @property
    def degrees(self) -> Degrees:
        return Degrees(
            pp=self.pp,
            dp_replicate=self.dp_replicate,
            dp_shard=self.dp_shard,
            cp=self.cp,
            tp=self.tp,
        )


class Kind(NamedTuple):
    """Choices that one sample stands for."""

    tp: int
    cp: int
    ep: int
    mode: str
    recipe: str
    schedule: str


class SearchSpace:
    """The choices for one model, batch and cluster.

    ``held``: keys that all choices have with the value of ``config``. Raises ``ConfigError`` if a
    search does not compare it.
    """

    def __init__(
        self, config: JobConfig, world_size: int, device: Device, held: Collection[str] = ()
    ) -> None:
        assert config.training.global_batch_size is not None
        self._config, self._world_size, self._device = config, world_size, device
        self.held = _held_values(config, held)
        self._batch = config.training.global_batch_size
        _, self._args = model_of(config)

    def choices(self) -> Iterator[Choice]:
        """Yield them, in a fixed order."""
        n, device = self._world_size, self._device
        n_experts: int = getattr(self._args, "n_experts", 1)
        for tp, cp, pp in product(
            self._values("tp", divisors(n)),
            self._values("cp", divisors(n, MOST_CP)),
            self._values("pp", divisors(n, MOST_PP)),
        ):
            if n % (tp * cp * pp) or device.gpus_per_node % tp:
                continue
            rest = n // (tp * cp * pp)
            for replicate, ep in product(
                self._values("dp_replicate", divisors(rest)),
                self._values("ep", divisors(n_experts)),
            ):
                shard = rest // replicate
                if rest % replicate or shard not in self._values("dp_shard", [shard]):
                    continue
                base = Choice(
                    replicate, shard, tp, cp, pp, ep, "1F1B", "full", "default", 1, "none"
                )
                if self._batch % base.degrees.batch or not self.is_legal(base):
                    continue
                yield from self._variants(base)

    def _variants(self, base: Choice) -> Iterator[Choice]:
        own, is_pipeline = self._config.float8.recipe, base.pp > 1
        of_rank = self._batch // base.degrees.batch
        has_float8 = own == "none" and "float8" in self._device.tflops
        # In a pipeline, the default keeps weights.
        same, other = ("never", "always") if is_pipeline else ("always", "never")
        reshards = self._values("reshard", ["default", other])
        sizes = self._values("size", divisors(of_rank, MOST_SIZE))
        # Other fields make no difference to a legal mesh, and each check takes a millisecond.
        is_legal = cache(lambda **fields: self.is_legal(base._replace(**fields)))
        for schedule, mode, reshard, size, recipe in product(
            self._values("schedule", SCHEDULES) if is_pipeline else ["1F1B"],
            self._values("mode", MODES),
            ["default" if reshard == same else reshard for reshard in reshards],
            [size for size in sizes if of_rank % size == 0],
            self._values("recipe", ["none", "tensorwise"] if has_float8 else [own]),
        ):
            if is_legal(schedule=schedule, size=size) and is_legal(recipe=recipe):
                yield base._replace(
                    schedule=schedule, mode=mode, reshard=reshard, size=size, recipe=recipe
                )

    def _values(self, field: str, compared: Sequence[Any]) -> Sequence[Any]:
        held = [value for key, value in self.held.items() if HELD[key] == field]
        return held or compared

    def is_legal(self, choice: Choice) -> bool:
        """True if a run could start with it."""
        try:
            config = self.config_of(choice)
            check_constraints(config, self._args, self._world_size, has_gpu=True)
        except ValueError:
            return False
        return True

    def config_of(self, choice: Choice) -> JobConfig:
        """The configuration with ``choice``."""
        config = self._config
        updates = {name: keys for name, keys in _keys(choice).items() if name != "training"}
        sections: dict[str, Any] = {}
        for name, cls in SECTIONS.items():
            kept = getattr(config, name).model_dump(exclude_unset=True)
            kept = {key: value for key, value in kept.items() if key not in SEARCHED[name]}
            if choice.cp == 1:
                kept.pop("context_parallel_method", None)
            if choice.pp == 1:
                kept = {k: v for k, v in kept.items() if not k.startswith("pipeline_parallel")}
            if choice.recipe == "none" and name == "float8":
                kept = {}
            sections[name] = cls.model_validate(kept | updates.get(name, {}))
        size = {"local_batch_size": choice.size}
        sections["training"] = config.training.model_copy(update=size)
        return config.model_copy(update=sections)

    def settings(self, choice: Choice) -> dict[str, dict[str, Any]]:
        """Keys by table that change the configuration of this search to that of ``choice``.

        Also those of ``choice`` that are no defaults, for a reader who sees only them.
        """
        tables, chosen = _keys(choice), self.config_of(choice)
        for name in SECTIONS:
            before = getattr(self._config, name).model_dump()
            after = getattr(chosen, name).model_dump()
            changed = {key: value for key, value in after.items() if value != before[key]}
            if changed:
                tables[name] = tables.get(name, {}) | changed
        return tables


def _held_values(config: JobConfig, keys: Collection[str]) -> dict[str, Any]:
    """The ``keys`` of ``config`` that choices hold, and their values."""
    held: dict[str, Any] = {}
    for key in keys:
        section, _, name = key.partition(".")
        if key not in HELD:
            if name in SEARCHED.get(section, ()):
                raise ConfigError([f"{key}: has no effect with --search, which compares others"])
            continue
        field, value = HELD[key], getattr(getattr(config, section), name)
        compared = COMPARED.get(field, (value,))
        if value not in compared and value not in FREE:
            raise ConfigError([f"{key}: --search compares {', '.join(compared)}, not {value}"])
        if value not in FREE:
            held[key] = value
    return held


def _keys(choice: Choice) -> dict[str, dict[str, Any]]:
    """The keys of ``choice`` that differ from their defaults, by table."""
    defaults = Parallelism()
    keys = {
        "data_parallel_replicate_degree": choice.dp_replicate,
        "tensor_parallel_degree": choice.tp,
        "context_parallel_degree": choice.cp,
        "pipeline_parallel_degree": choice.pp,
        "pipeline_parallel_schedule": choice.schedule,
        "pipeline_parallel_microbatch_size": choice.size if choice.pp > 1 else 1,
        "expert_parallel_degree": choice.ep,
        "fsdp_reshard_after_forward": choice.reshard,
    }
    changed = {key: value for key, value in keys.items() if value != getattr(defaults, key)}
    tables: dict[str, dict[str, Any]] = {
        "training": {"local_batch_size": choice.size},
        "parallelism": changed,
        "activation_checkpoint": {"mode": choice.mode},
        "float8": {"recipe": choice.recipe} if choice.recipe != "none" else {},
    }
    return {name: table for name, table in tables.items() if table}


def divisors(n: int, most: float = math.inf) -> list[int]:
    """Divisors of ``n``, up to ``most``."""
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    found = sorted({*small, *(n // i for i in small)})
    return [each for each in found if each <= most]
