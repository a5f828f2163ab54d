"""The meshes of a cluster, and what goes with them, that a search compares."""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

from config import JobConfig
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
    """The choices for one model, batch and cluster."""

    def __init__(self, config: JobConfig, world_size: int, device: Device) -> None:
        assert config.training.global_batch_size is not None
        self._config, self._world_size, self._device = config, world_size, device
        self._batch = config.training.global_batch_size
        _, self._args = model_of(config)

    def choices(self) -> Iterator[Choice]:
        """Yield them, in a fixed order."""
        n, device = self._world_size, self._device
        n_experts: int = getattr(self._args, "n_experts", 1)
        own = self._config.float8.recipe
        recipes = (
            [own] if own != "none" or "float8" not in device.tflops else ["none", "tensorwise"]
        )
        for tp, cp, pp in product(divisors(n), divisors(n, MOST_CP), divisors(n, MOST_PP)):
            if n % (tp * cp * pp) or device.gpus_per_node % tp:
                continue
            rest = n // (tp * cp * pp)
            for replicate, ep in product(divisors(rest), divisors(n_experts)):
                base = Choice(
                    replicate, rest // replicate, tp, cp, pp, ep, "1F1B", "full", "default", 1,
                    "none",
                )  # fmt: skip
                if self._batch % base.degrees.batch or not self.is_legal(base):
                    continue
                yield from self._variants(base, recipes)

    def _variants(self, base: Choice, recipes: Sequence[str]) -> Iterator[Choice]:
        schedules = ["1F1B", "Interleaved1F1B"] if base.pp > 1 else ["1F1B"]
        # In a pipeline, the default keeps weights.
        reshards = ["default", "always"] if base.pp > 1 else ["default", "never"]
        of_rank = self._batch // base.degrees.batch
        sizes = divisors(of_rank, MOST_SIZE)
        for schedule, mode, reshard, size, recipe in product(
            schedules, MODES, reshards, sizes, recipes
        ):
            yield base._replace(
                schedule=schedule, mode=mode, reshard=reshard, size=size, recipe=recipe
            )

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
        updates = {name: keys for name, keys in settings(choice).items() if name != "training"}
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


def settings(choice: Choice) -> dict[str, dict[str, Any]]:
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
