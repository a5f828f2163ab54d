"""Who holds a GPU's memory when it is full, and which keys lower it."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn as nn

from config.job_config import JobConfig
from runtime.dtensor import to_local

# Share of the GPU's memory that is reserved but in no tensor, from which on it is worth a line.
FRAGMENTED = 0.1


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
    module: nn.Module, optimizer: torch.optim.Optimizer, config: JobConfig
) -> Iterator[None]:
    """Context in which an error of exhausted GPU memory gets a note on who holds it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.add_note(memory_text(measure(module, optimizer), config))
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


def memory_text(use: MemoryUse, config: JobConfig) -> str:
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
    lines += [f"  {text}" for text in remedies(config, states_are_larger=states > rest)]
    return "\n".join(lines)


def remedies(config: JobConfig, *, states_are_larger: bool) -> list[str]:
    """Changes that this configuration still allows, first for the larger part of the memory."""
    training, parallelism = config.training, config.parallelism
    activations = {
        "training.local_batch_size, lower with the same global_batch_size: the same training": (
            training.decided_local_batch_size > 1
        ),
        'activation_checkpoint.mode = "memory_budget" and memory_budget = 0.9: recomputes what is'
        " cheap": config.compile.enable and config.activation_checkpoint.mode == "none",
        'activation_checkpoint.mode = "full": recomputes each block in backward': (
            config.activation_checkpoint.mode != "full"
        ),
        'parallelism.fsdp_reshard_after_forward = "always"': (
            parallelism.data_parallel != "ddp"
            and parallelism.fsdp_reshard_after_forward != "always"
        ),
        "parallelism.context_parallel_degree or tensor_parallel_degree, higher": True,
    }
    states = {
        'parallelism.data_parallel = "fsdp2": ddp keeps a whole replica on each rank': (
            parallelism.data_parallel == "ddp"
        ),
        "parallelism.data_parallel_replicate_degree, lower: more shards": (
            parallelism.data_parallel_replicate_degree > 1
        ),
        'optimizer.state_dtype = "bfloat16": 12 instead of 16 bytes per parameter': (
            training.dtype == "float32" and config.optimizer.state_dtype == "float32"
        ),
        "more GPUs: each holds fewer shards": parallelism.data_parallel != "ddp",
        "parallelism.fsdp_cpu_offload: the optimizer runs on the host, slowly": (
            not parallelism.fsdp_cpu_offload and parallelism.data_parallel == "fsdp2"
        ),
    }
    ordered = states | activations if states_are_larger else activations | states
    return [text for text, is_possible in ordered.items() if is_possible]


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    local = (to_local(tensor) for tensor in tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
