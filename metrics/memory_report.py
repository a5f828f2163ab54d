"""Who holds a GPU's memory when it is full, and which keys lower it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from config.auto import MODE, SIZE, with_values
from config.job_config import ActivationCheckpoint, JobConfig
from runtime.dtensor import to_local

# Share of the GPU's memory that is reserved but in no tensor, from which on it is worth a line.
FRAGMENTED = 0.1
# FSDP shards over the ranks that changed degrees leave.
SHARD_REST = {"parallelism.data_parallel_shard_degree": -1}
IsAllowed = Callable[[JobConfig], bool]
Remedies = dict[str, list[dict[str, Any]]]
"""Values by key, of which one must be allowed, by the line that names the change."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one device."""

    held: Mapping[str, int]
    """Parameters, gradients, optimizer state: by their known tensors."""
    allocated: int
    """In tensors."""
    reserved: int
    """Taken from the device by PyTorch."""
    total: int


@contextmanager
def explained_out_of_memory(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: JobConfig,
    is_allowed: IsAllowed,
) -> Iterator[None]:
    """Context in which an error of exhausted GPU memory gets a note on who holds it.

    ``is_allowed``: true for a configuration that this run's model and ranks could train.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.add_note(memory_text(measure(module, optimizer), config, is_allowed))
        raise


def measure(module: nn.Module, optimizer: torch.optim.Optimizer) -> MemoryUse:
    """Memory of this rank's GPU; all 0 besides ``held`` on a CPU."""
    parameters = list(module.parameters())
    states = (value for state in optimizer.state.values() for value in state.values())
    held = {
        "parameters": _bytes(parameters),
        "gradients": _bytes(p.grad for p in parameters if p.grad is not None),
        "optimizer state": _bytes(value for value in states if isinstance(value, torch.Tensor)),
    }
    if not torch.cuda.is_available():
        return MemoryUse(held, 0, 0, 0)
    total = torch.cuda.mem_get_info()[1]
    return MemoryUse(held, torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total)


def memory_text(use: MemoryUse, config: JobConfig, is_allowed: IsAllowed) -> str:
    """Lines: who holds how much, the largest first, and what lowers it, the cheapest first."""
    states = sum(use.held.values())
    rest = max(use.allocated - states, 0)
    parts = {**use.held, "activations, gathered weights and the rest": rest}
    lines = [f"GPU memory: {_gib(use.total)}, of which tensors have {_gib(use.allocated)}:"]
    for name in sorted(parts, key=parts.__getitem__, reverse=True):
        lines.append(f"  {name}: {_gib(parts[name])}")
    free = use.reserved - use.allocated
    if use.total and free > FRAGMENTED * use.total:
        lines.append(
            f"  reserved, but in no tensor: {_gib(free)}: fragments; unset PYTORCH_ALLOC_CONF, or"
            " include expandable_segments:True"
        )
    lines.append("to use less, the cheapest first:")
    found = remedies(config, is_allowed, states_are_larger=states > rest)
    lines += [f"  {text}" for text in found]
    return "\n".join(lines)


def remedies(config: JobConfig, is_allowed: IsAllowed, *, states_are_larger: bool) -> list[str]:
    """Changes that this run still allows, first for the larger part of the memory."""
    activations, states = _for_activations(config), _for_states(config)
    ordered = states | activations if states_are_larger else activations | states
    found = []
    for text, choices in ordered.items():
        changed = [with_values(config, values) for values in choices]
        if any(each != config and is_allowed(each) for each in changed):
            found.append(text)
    if config.parallelism.data_parallel != "ddp":
        found.append("more GPUs: each holds a smaller shard")
    return found


def _for_activations(config: JobConfig) -> Remedies:
    parallelism, is_kept = config.parallelism, config.activation_checkpoint.mode == "none"
    size, microbatch = SIZE, config.training.decided_local_batch_size
    if parallelism.pipeline_parallel_degree > 1:
        size = "parallelism.pipeline_parallel_microbatch_size"
        microbatch = parallelism.pipeline_parallel_microbatch_size
    budget = {MODE: "memory_budget", "activation_checkpoint.memory_budget": 0.9}
    # Keys of other modes must have their defaults.
    defaults = {f"activation_checkpoint.{k}": v for k, v in ActivationCheckpoint()}
    full = defaults | {MODE: "full"}
    cp, tp = (f"parallelism.{each}_parallel_degree" for each in ("context", "tensor"))
    return {
        f"{size}, lower with the same global_batch_size: the same training": [
            {size: n} for n in range(1, microbatch)
        ],
        'activation_checkpoint.mode = "memory_budget" and memory_budget = 0.9: recomputes what is'
        " cheap": [budget] if is_kept else [],
        'activation_checkpoint.mode = "full": recomputes each block in backward': [full],
        'parallelism.fsdp_reshard_after_forward = "always"': [
            {"parallelism.fsdp_reshard_after_forward": "always"}
        ],
        f"{cp}, higher": [SHARD_REST | {cp: 2 * parallelism.context_parallel_degree}],
        f"{tp}, higher": [SHARD_REST | {tp: 2 * parallelism.tensor_parallel_degree}],
    }


def _for_states(config: JobConfig) -> Remedies:
    is_ddp = config.parallelism.data_parallel == "ddp"
    replicas = "parallelism.data_parallel_replicate_degree"
    fewer = range(1, config.parallelism.data_parallel_replicate_degree)
    fsdp2 = SHARD_REST | {"parallelism.data_parallel": "fsdp2", replicas: 1}
    return {
        'parallelism.data_parallel = "fsdp2": ddp keeps a whole replica on each rank': (
            [fsdp2] if is_ddp else []
        ),
        f"{replicas}, lower: more shards": (
            [] if is_ddp else [SHARD_REST | {replicas: n} for n in fewer]
        ),
        'optimizer.state_dtype = "bfloat16", in a new run: half the optimizer state': [
            {"optimizer.state_dtype": "bfloat16"}
        ],
        "parallelism.fsdp_cpu_offload: the optimizer runs on the host, slowly": [
            {"parallelism.fsdp_cpu_offload": True}
        ],
    }


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    local = (to_local(tensor) for tensor in tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
