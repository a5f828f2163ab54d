"""Cells: model, parallelisms and other options that a test trains with, and the arrays of them.

``python -m tests.lib.cells [--full]`` prints the array.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import Any

from config import ConfigError, JobConfig
from config.job_config import (
    ActivationCheckpoint,
    Compile,
    Model,
    Optimizer,
    Parallelism,
    Training,
)
from models import TransformerArgs
from models.qwen3_next import Qwen3NextArgs
from parallelisms.constraints import check_constraints
from tests.lib.covering import CoveringArray, Row, covering_array
from tests.lib.layouts import SEQ_LEN, args_of

# Divided by every number of data-parallel ranks, and of microbatches.
ROWS = 48


@dataclass(frozen=True)
class Cell:
    """A value of each dimension. The defaults are neutral."""

    model: str = "llama3"
    data_parallel: str = "fsdp2"
    replicate: int = 1
    shard: int = 1
    """Data-parallel ranks of a replica; with ddp they replicate."""
    tensor: int = 1
    context: str = ""
    """Method and degree."""
    pipeline: str = ""
    """Schedule and degree."""
    expert: int = 1
    reshard: str | int = "default"
    reduce: str = ""
    prefetch: int = 0
    offload: bool = False
    recompute: str = ""
    compile: bool = False
    tied: bool = False
    narrow: bool = False
    """Two KV rows: fewer than most numbers of ranks."""
    optimizer: str = "adamw"
    documents: bool = False
    frozen: str = ""
    """Words in the FQNs of parameters that are not trained."""
    compute_dtype: str = "float64"

    def __str__(self) -> str:
        words = [self.model]
        for name, value in asdict(self).items():
            if name != "model" and value != getattr(Cell, name):
                text = str(value).replace(" ", "") if isinstance(value, str) else f"{name}{value}"
                words.append(name if value is True else text)
        return "-".join(words)

    @property
    def world_size(self) -> int:
        degrees = [_degree(self.context), _degree(self.pipeline)]
        return math.prod([self.replicate, self.shard, self.tensor, *degrees])

    @property
    def microbatches(self) -> tuple[int, ...]:
        """Number of microbatches of each step. Compiled steps have one shape."""
        first, fewest = (4, _degree(self.pipeline)) if self.pipeline else (2, 1)
        return (first, first if self.compile else fewest)

    @property
    def args(self) -> TransformerArgs:
        """A model so small that computing it takes no time."""
        degree, schedule = _degree(self.pipeline), _kind(self.pipeline)
        args = args_of(self.model, max(2, degree * (2 if "Interleaved" in schedule else 1)))
        args = replace(args, dim=32, head_dim=8, hidden_dim=48, vocab_size=64)
        args = replace(args, tie_embeddings=self.tied)
        if self.narrow:
            args = replace(args, n_kv_heads=1, head_dim=2)
        if isinstance(args, Qwen3NextArgs):
            args = replace(args, key_dim=8, value_dim=12, shared_hidden_dim=24)
        return args

    @property
    def job_config(self) -> JobConfig:
        """Only keys that differ from their defaults are set, as the constraints ask for."""
        keys = {
            "data_parallel": self.data_parallel,
            "data_parallel_replicate_degree": self.replicate,
            "tensor_parallel_degree": self.tensor,
            "context_parallel_degree": _degree(self.context),
            "context_parallel_method": _kind(self.context) or "ulysses",
            "pipeline_parallel_degree": _degree(self.pipeline),
            "pipeline_parallel_schedule": _kind(self.pipeline) or "1F1B",
            "expert_parallel_degree": self.expert,
            "fsdp_reshard_after_forward": self.reshard,
            "fsdp_reduce_gradients": self.reduce or "every_microbatch",
            "fsdp_forward_prefetch": self.prefetch,
            "fsdp_backward_prefetch": self.prefetch,
            "fsdp_cpu_offload": self.offload,
        }
        defaults = DEFAULTS.parallelism.model_dump()
        # Inductor compiles for minutes what these backends trace and run eagerly.
        is_cut = self.recompute == "memory_budget"
        backend = "aot_eager_decomp_partition" if is_cut else "aot_eager"
        sections = {
            "model": Model(name=self.model, flavor="debugmodel"),
            "optimizer": Optimizer(name=self.optimizer, lr=1e-2),
            "training": Training(
                seq_len=SEQ_LEN,
                local_batch_size=1,
                global_batch_size=self.replicate * self.shard * max(self.microbatches),
                **TRAINING[self.compute_dtype],
            ),
            "parallelism": Parallelism(**{k: v for k, v in keys.items() if v != defaults[k]}),
            "activation_checkpoint": RECOMPUTE[self.recompute],
            "compile": Compile(enable=True, backend=backend) if self.compile else Compile(),
        }
        # ``JobConfig(...)`` copies all defaults, half of the time that an array takes.
        return DEFAULTS.model_copy(update=sections)


def is_valid(cell: Cell) -> bool:
    """True if ``train.py`` accepts the options of ``cell``, and its results can be compared."""
    # Its rotated dims are more than these heads have.
    if cell.narrow and cell.model == "qwen3_next":
        return False
    try:
        check_constraints(cell.job_config, cell.args, cell.world_size, has_gpu=False)
    except ConfigError as error:
        # Without a GPU, FSDP2 offloads from host memory to host memory.
        allowed = "parallelism.fsdp_cpu_offload: requires a GPU"
        return all(message.startswith(allowed) for message in error.messages)
    return True


DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "model": ("llama3", "qwen3", "qwen3_moe", "qwen3_next"),
    "data_parallel": ("fsdp2", "simple_fsdp", "ddp"),
    "replicate": (1, 2),
    # 3 divides no dim.
    "shard": (1, 2, 3, 4),
    "tensor": (1, 2, 4),
    "context": ("", "ulysses 2", "allgather 2", "ulysses 4", "allgather 4"),
    "pipeline": (
        "", "1F1B 2", "GPipe 2", "Interleaved1F1B 2", "InterleavedZeroBubble 2", "1F1B 4",
    ),
    "expert": (1, 2, 4),
    "reshard": ("default", "always", "never", 2),
    "reduce": ("", "last_microbatch"),
    "prefetch": (0, 2),
    "offload": (False, True),
    "recompute": ("", "full", "selective", "every second", "memory_budget"),
    "compile": (False, True),
    "tied": (False, True),
    "narrow": (False, True),
    "optimizer": ("adamw", "muon"),
    "documents": (False, True),
}  # fmt: skip
DEFAULTS = JobConfig()
RECOMPUTE = {
    "": ActivationCheckpoint(mode="none"),
    "full": ActivationCheckpoint(mode="full"),
    "selective": ActivationCheckpoint(mode="selective"),
    "every second": ActivationCheckpoint(mode="selective", selective=2),
    "memory_budget": ActivationCheckpoint(mode="memory_budget", memory_budget=0.3),
}
TRAINING: dict[str, dict[str, Any]] = {
    "float64": {"dtype": "float64"},
    "bfloat16": {"mixed_precision_param": "bfloat16"},
}


def _kind(text: str) -> str:
    return text.partition(" ")[0]


def _degree(text: str) -> int:
    return int(text.partition(" ")[2] or 1)


def cost(cell: Cell) -> float:
    """Seconds on two cores, roughly."""
    # Each rank traces each kind of region; tensor parallel ones have more operations.
    traced = (1.0 + cell.tensor) * (4.0 if cell.model == "qwen3_next" else 1.0)
    return 1.0 + 0.5 * cell.world_size + 3.0 * cell.compile * cell.world_size * traced


@dataclass(frozen=True)
class Suite:
    """Dimensions and ranks of an array besides ``NAMED``, and how many values it combines."""

    dimensions: Mapping[str, tuple[Any, ...]]
    max_ranks: int
    strength: int
    seed: int

    @cached_property
    def array(self) -> CoveringArray:
        names = ("reshard", "compile", "model", "tensor", "context", "shard")
        values = product(*(self.dimensions[name] for name in names))
        is_allowed = cache(is_valid)

        def is_valid_row(row: Row) -> bool:
            cell = Cell(**row)
            return cell.world_size <= self.max_ranks and is_allowed(cell)

        return covering_array(
            self.dimensions,
            is_valid_row,
            strength=self.strength,
            supports=[dict(zip(names, support, strict=True)) for support in values],
            cost=lambda row: cost(Cell(**row)),
            given=[asdict(cell) for cell in NAMED if cell.compute_dtype == "float64"],
            seed=self.seed,
        )

    @property
    def cells(self) -> list[Cell]:
        return [Cell(**row) for row in self.array.rows]


FULL = Suite(DIMENSIONS, max_ranks=8, strength=3, seed=0)
# Degrees of 4 leave no ranks for other degrees: see NAMED.
FAST = Suite(
    DIMENSIONS
    | {
        "shard": (1, 2, 3),
        "tensor": (1, 2),
        "context": ("", "ulysses 2", "allgather 2"),
        "pipeline": DIMENSIONS["pipeline"][:-1],
        "expert": (1, 2),
        "reshard": ("default", "always", "never"),
        # It needs compilation, which takes many seconds: see NAMED.
        "recompute": ("", "full", "selective", "every second"),
    },
    max_ranks=4,
    strength=2,
    # Of sixty seeds, that of the array that takes the least time.
    seed=31,
)
NAMED = [
    # Only a group that is smaller than the ranks frees weights in part.
    Cell(model="qwen3", shard=4, reshard=2, recompute="full", tied=True),
    Cell(model="qwen3_next", shard=4, reshard=2, documents=True),
    # Tensor parallel and data parallel shards of different numbers.
    Cell(model="llama3", data_parallel="simple_fsdp", shard=3, tensor=2),
    # Fewer KV heads than ranks.
    Cell(model="qwen3", tensor=4, tied=True),
    Cell(model="qwen3", context="ulysses 4", documents=True, tied=True),
    # More ranks than key heads.
    Cell(model="qwen3_next", context="ulysses 4", recompute="selective"),
    # Chunks of the sequence come in another order than on two ranks.
    Cell(model="qwen3", context="allgather 4", documents=True),
    Cell(model="qwen3", context="allgather 4", tied=True),
    Cell(model="qwen3", pipeline="1F1B 4", tied=True),
    # Every rank of a mesh of several parallelisms has experts of its own.
    Cell(model="qwen3_moe", shard=4, expert=4, optimizer="muon"),
    Cell(model="qwen3_moe", shard=4, expert=2, prefetch=2),
    Cell(model="qwen3_moe", shard=2, tensor=2, expert=4),
    Cell(model="qwen3_moe", tensor=2, context="ulysses 2", expert=4),
    Cell(model="qwen3_next", tensor=2, context="allgather 2", expert=4, documents=True),
    Cell(model="qwen3_moe", pipeline="1F1B 2", context="allgather 2", tensor=2, expert=4),
    # Selective recomputation finds experts gathered if forward did.
    Cell(
        model="qwen3_moe",
        pipeline="Interleaved1F1B 2",
        shard=2,
        expert=2,
        reshard="always",
        recompute="selective",
    ),
    Cell(model="qwen3", pipeline="Interleaved1F1B 2", context="allgather 2", tensor=2, tied=True),
    Cell(model="qwen3", shard=2, recompute="memory_budget", compile=True, tied=True),
    # In mixed precision only gross errors show. It is no dimension, for pairs that met only there.
    Cell(model="qwen3", replicate=2, shard=2, tied=True, compute_dtype="bfloat16"),
    Cell(model="llama3", data_parallel="simple_fsdp", shard=2, compute_dtype="bfloat16"),
    Cell(model="qwen3", data_parallel="ddp", pipeline="1F1B 2", shard=2, compute_dtype="bfloat16"),
    # What most large runs are.
    Cell(model="qwen3", replicate=2, shard=2, recompute="selective", compile=True),
]


if __name__ == "__main__":
    for each in FULL.cells if "--full" in sys.argv else [*NAMED, *FAST.cells]:
        print(each)
