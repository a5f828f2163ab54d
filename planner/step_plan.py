"""The plan of a step: a record of each kind of pipeline stage, or why there is none."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from config import ConfigError, JobConfig
from config.constraints import Constraint
from config.job_config import Metrics
from parallelisms.parallel_dims import Degrees, resolve_degrees
from planner.depth import simulate_layers, stage_lengths
from planner.pipeline import simulate_pipeline
from planner.step_record import StepRecord
from run_spec import RunSpec

# Microbatches on a rank that are all run; of more, those in the middle are alike.
MOST_MICROBATCHES = 3
# Share of a device's memory up to which fragments, NCCL's and cuBLAS's buffers have room.
TIGHT = 0.9


def _unless(key: str, reason: str, violated: Callable[[RunSpec], bool]) -> Constraint[RunSpec]:
    return Constraint(key, f"is not planned yet: {reason}", violated)


UNPLANNED: tuple[Constraint[RunSpec], ...] = (
    _unless("training.dtype", "experts and gated delta nets that compute in another dtype than"
            " bfloat16", lambda run: hasattr(run.model_args, "n_experts")
            and compute_dtype(run.config) != "bfloat16"),
    _unless("activation_checkpoint.mode", "memory_budget, by which the compiler chooses",
            lambda run: run.config.activation_checkpoint.mode == "memory_budget"),
    _unless("parallelism.fsdp_cpu_offload", "host memory",
            lambda run: run.config.parallelism.fsdp_cpu_offload),
    _unless("parallelism.pipeline_parallel_schedule", "InterleavedZeroBubble",
            lambda run: run.config.parallelism.pipeline_parallel_degree > 1
            and run.config.parallelism.pipeline_parallel_schedule == "InterleavedZeroBubble"),
    _unless("optimizer.name", "code outside of this repository",
            lambda run: run.config.optimizer.is_outside),
    _unless("debug.deterministic", '"elastic"', lambda run: run.config.debug.is_elastic),
)  # fmt: skip


@dataclass(frozen=True)
class StagePlan:
    """The plan of the ranks of one pipeline stage."""

    stage: int
    record: StepRecord


@dataclass(frozen=True)
class StepPlan:
    """The plan of one optimizer step."""

    run: RunSpec
    """As it was resolved, compiled or not."""
    degrees: Degrees
    world_size: int
    stages: list[StagePlan]
    """The first, the largest of those between, and the last."""

    @property
    def n_microbatches(self) -> int:
        """Microbatches of each rank."""
        return self.run.n_microbatches(self.degrees.batch)


def plan_step(run: RunSpec, world_size: int, *, has_gpu: bool = True) -> StepPlan:
    """Simulate a step of ``run``. Raises ``ConfigError`` for what is not planned yet."""
    degrees = resolve_degrees(run.config.parallelism, world_size)
    stages = [
        StagePlan(stage, plan_stage(run, world_size, stage, has_gpu=has_gpu))
        for stage in planned_stages(run, degrees)
    ]
    return StepPlan(run, degrees, world_size, stages)


def plan_stage(run: RunSpec, world_size: int, stage: int, *, has_gpu: bool = True) -> StepRecord:
    """Simulate a step of the pipeline's rank ``stage``; see ``plan_step``."""
    planned = replace(run, config=planned_config(run.config, has_gpu=has_gpu))
    if rejected := [row.message(planned) for row in UNPLANNED if row.violated(planned)]:
        raise ConfigError(rejected)
    degrees = resolve_degrees(run.config.parallelism, world_size)
    n = run.n_microbatches(degrees.batch)
    if degrees.pp > 1:
        try:
            return simulate_pipeline(planned, world_size, stage, n)
        except RuntimeError as error:
            # A schedule wraps what a stage raises.
            if isinstance(error.__cause__, ConfigError):
                raise error.__cause__ from None
            raise
    weights = [1.0] * n if n <= MOST_MICROBATCHES else [1.0, n - 2.0, 1.0]
    return simulate_layers(planned, world_size, 0, weights=weights)


def planned_config(config: JobConfig, *, has_gpu: bool = True) -> JobConfig:
    """Return the configuration of the step that is simulated: eager, in the dtype of a GPU."""
    training = config.training
    if has_gpu and training.mixed_precision_param == "auto" and training.dtype == "float32":
        training = training.model_copy(update={"mixed_precision_param": "bfloat16"})
    changed = {
        "compile": config.compile.model_copy(update={"enable": False, "backend": "inductor"}),
        "float8": config.float8.model_copy(update={"emulate": False}),
        "metrics": Metrics(),
        # It has the same collectives, in parts.
        "parallelism": config.parallelism.model_copy(update={"tensor_parallel_async": False}),
        "training": training,
    }
    return config.model_copy(update=changed)


def without_bfloat16(config: JobConfig) -> JobConfig:
    """Return ``config`` with the dtype of compute that "auto" means on devices without bfloat16."""
    training = config.training
    if training.mixed_precision_param == "auto" and training.dtype == "float32":
        training = training.model_copy(update={"mixed_precision_param": "float32"})
    return config.model_copy(update={"training": training})


def compute_dtype(config: JobConfig) -> str:
    """Dtype of compute of a ``planned_config``."""
    training = config.training
    is_mixed = training.dtype == "float32"
    return training.mixed_precision_param if is_mixed else training.dtype


def planned_stages(run: RunSpec, degrees: Degrees) -> Sequence[int]:
    """Return the ranks of the pipeline that are planned: with other stages than the others."""
    if degrees.pp <= 2:
        return range(degrees.pp)
    lengths = stage_lengths(run, run.model_args.n_layers)
    # The earlier of equal stages, because it holds more microbatches.
    middle = max(
        range(1, degrees.pp - 1),
        key=lambda rank: (sum(lengths[rank :: degrees.pp]), -rank),
    )
    return [0, middle, degrees.pp - 1]
