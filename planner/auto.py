"""Decides keys that are "auto", by the memory that a step needs on each rank.

The launcher runs ``python -m planner.auto``, with a configuration on stdin and JSON on stdout: in a
process of its own, because CUDA keeps a context on a GPU that it has asked for its memory.
"""

import json
import math
import sys
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import torch

from config import ConfigError, JobConfig
from config.auto import MODE, SIZE, auto_keys, candidates, with_values
from config.job_config import Data, Validation
from parallelisms.parallel_dims import resolve_degrees
from planner.step_plan import TIGHT, StepPlan, plan_step, without_bfloat16
from run_spec import resolve
from runtime.log import error_text
from runtime.machine import host_memory
from runtime.outside import prints_to_stderr
from runtime.torch_device import gpu_has_bfloat16

GIB = 1 << 30
# Tokens of a microbatch from which matmuls are about as fast as they get. With fewer, a larger
# microbatch is worth more than less recomputation.
ENOUGH_TOKENS = 4096
# Measured peaks over planned ones with selective recomputation, at most (docs/planning.md).
SELECTIVE_PEAK = 1.09
# Share of a host's memory that ranks on CPUs may fill.
HOST_SHARE = 0.5


@dataclass(frozen=True)
class Decision:
    """Values of the keys that are "auto", and the memory of a step with them."""

    values: dict[str, Any]
    """Values by key."""
    plan: StepPlan
    """Of a step with them."""
    memory: float
    """Bytes of a rank."""

    @property
    def peak(self) -> int:
        """Bytes of a rank's tensors at the peak."""
        return peak_of(self.plan)

    @property
    def text(self) -> str:
        values = ", ".join(f"{key} = {json.dumps(value)}" for key, value in self.values.items())
        sizes = f"{self.peak / GIB:.4g} of {self.memory / GIB:.4g} GiB"
        return f'"auto": {values}, which takes {sizes} of a rank'


def decide(config: JobConfig, world_size: int, memory: float, *, has_gpu: bool) -> Decision:
    """Return values with which a step fits into ``memory``, in bytes of a rank.

    The first mode with which a microbatch of ``ENOUGH_TOKENS`` fits, and the largest microbatch
    with it; else, of all modes, the largest microbatch. Raises ``ConfigError``.
    """
    config, keys = without_data(config), auto_keys(config)
    found: list[tuple[int, Decision]] = []
    rejected: list[ConfigError] = []
    needed = math.inf
    enough = ENOUGH_TOKENS * config.parallelism.context_parallel_degree
    for smallest in candidates(config):
        try:
            configs = legal_sizes(smallest, world_size, has_gpu=has_gpu) if SIZE in keys else []
            peaks = Peaks(configs or [smallest], world_size, has_gpu=has_gpu)
            is_selective = smallest.activation_checkpoint.mode == "selective"
            factor = SELECTIVE_PEAK if is_selective else 1.0
            room = TIGHT * memory / factor
            # The smallest first: if it does not fit, none does.
            index = bisect_right(peaks, room, lo=1) - 1 if peaks[0] <= room else -1
        except ConfigError as error:
            rejected.append(error)
            continue
        needed = min(needed, *(factor * peak_of(plan) for plan in peaks.plans.values()))
        if index < 0:
            continue
        chosen = peaks.configs[index]
        size = chosen.training.decided_local_batch_size
        values = {SIZE: size, MODE: chosen.activation_checkpoint.mode}
        decision = Decision({key: values[key] for key in keys}, peaks.plans[index], memory)
        found.append((size, decision))
        if size * config.training.seq_len >= enough or index == len(peaks) - 1:
            return decision
    if found:
        return max(found, key=lambda pair: pair[0])[1]
    if math.isinf(needed):
        raise rejected[-1]
    raise ConfigError(
        [
            f'{keys[0]}: "auto" finds nothing that fits: a step takes at least'
            f" {needed / GIB:.3g} GiB of a rank, and {TIGHT:.0%} of its memory is"
            f" {TIGHT * memory / GIB:.3g} GiB; training.seq_len, training.dtype,"
            " optimizer.state_dtype and more ranks that shard (ddp does not) lower it"
        ]
    )


class Peaks:
    """Sequence of the peaks of ``configs``, in bytes, each counted when it is asked for."""

    def __init__(self, configs: list[JobConfig], world_size: int, *, has_gpu: bool) -> None:
        self.configs, self._world_size, self._has_gpu = configs, world_size, has_gpu
        self.plans: dict[int, StepPlan] = {}

    def __len__(self) -> int:
        return len(self.configs)

    def __getitem__(self, index: int) -> int:
        if index not in self.plans:
            run = resolve(self.configs[index], self._world_size, has_gpu=self._has_gpu)
            self.plans[index] = plan_step(run, self._world_size, has_gpu=self._has_gpu)
        return peak_of(self.plans[index])


def peak_of(plan: StepPlan) -> int:
    """Bytes of a rank's tensors at the peak, of the stage that needs the most."""
    return max(stage.record.peak for stage in plan.stages)


def legal_sizes(smallest: JobConfig, world_size: int, *, has_gpu: bool) -> list[JobConfig]:
    """Return ``smallest`` with each microbatch that the constraints allow, in ascending order.

    Raises ``ConfigError`` if there is none.
    """
    training = smallest.training
    batch_sizes = [training.global_batch_size or 1]
    batch_sizes += [phase.global_batch_size for phase in training.batch_size_ramp]
    most = math.gcd(*batch_sizes) // resolve_degrees(smallest.parallelism, world_size).batch
    found, rejected = [], None
    for size in [n for n in range(1, most + 1) if most % n == 0] or [1]:
        config = with_values(smallest, {SIZE: size})
        try:
            resolve(config, world_size, has_gpu=has_gpu)
            found.append(config)
        except ConfigError as error:
            rejected = rejected or error
    if rejected and not found:
        raise rejected
    return found


def without_data(config: JobConfig) -> JobConfig:
    """Return ``config`` with the tokenizer, but not the documents, which a plan does not need."""
    of_tokenizer = {key: getattr(config.data, key) for key in ("tokenizer", "bos", "eos")}
    data = Data(document_mask=config.data.document_mask)
    if config.model.vocab_size is None:
        data = data.model_copy(update=of_tokenizer)
    return config.model_copy(update={"data": data, "validation": Validation()})


def rank_memory(n_ranks: int, *, has_gpu: bool) -> float:
    """Bytes for each of ``n_ranks`` on this machine: of its GPU, or of half of the host's."""
    if not has_gpu:
        return HOST_SHARE * host_memory() / n_ranks
    # More ranks than GPUs share them evenly (NCCL_MULTI_RANK_GPU_ENABLE).
    n_gpus = min(n_ranks, torch.cuda.device_count())
    smallest = min(torch.cuda.get_device_properties(i).total_memory for i in range(n_gpus))
    return smallest / math.ceil(n_ranks / n_gpus)


def main() -> None:
    """Answer one request: {"values": ..., "text": ...}, or {"error": ...}."""
    request, has_gpu = json.load(sys.stdin), torch.cuda.is_available()
    config = JobConfig.model_validate(request["config"])
    if has_gpu and not gpu_has_bfloat16():
        config = without_bfloat16(config)
    memory = rank_memory(request["n_ranks"], has_gpu=has_gpu)
    try:
        with prints_to_stderr():
            decision = decide(config, request["world_size"], memory, has_gpu=has_gpu)
        answer = {"values": decision.values, "text": decision.text}
    except ValueError as error:
        answer = {"error": error_text(error)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
