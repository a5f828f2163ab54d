"""An exhausted GPU is explained: who holds its memory, and which keys this run can still change."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn as nn

from config import ConfigError, JobConfig
from config.auto import with_values
from config.job_config import ActivationCheckpoint, Optimizer, Parallelism, Training
from metrics.memory_report import MemoryUse, explained_out_of_memory, measure, memory_text, remedies
from models import find_model
from parallelisms.constraints import check_constraints

GIB = 1 << 30
STATES = {"parameters": 8 * GIB, "gradients": 8 * GIB, "optimizer state": 16 * GIB}
USE = MemoryUse(STATES, allocated=70 * GIB, reserved=75 * GIB, total=80 * GIB)


def allowed_on(world_size: int) -> Callable[[JobConfig], bool]:
    """Return whether ``world_size`` GPUs could train a configuration of the default model."""
    _, args = find_model("llama3", "debugmodel")

    def is_allowed(config: JobConfig) -> bool:
        try:
            check_constraints(config, args, world_size, has_gpu=True)
        except ConfigError:
            return False
        return True

    return is_allowed


def remedies_of(config: JobConfig) -> str:
    """Remedies of a run on 8 GPUs, which can start."""
    assert allowed_on(8)(config)
    return "\n".join(remedies(config, allowed_on(8), states_are_larger=False))


def test_largest_part_is_first_and_its_remedies_too() -> None:
    lines = memory_text(USE, JobConfig(), allowed_on(8)).splitlines()
    assert lines[0] == "GPU memory: 80.00 GiB, of which tensors have 70.00 GiB:"
    assert lines[1] == "  activations, gathered weights and the rest: 38.00 GiB"
    assert lines[2] == "  optimizer state: 16.00 GiB"
    assert lines[5] == "to use less, the cheapest first:"
    assert "training.local_batch_size" in lines[6]
    states = replace(USE, allocated=40 * GIB)
    assert (
        "optimizer.state_dtype" in memory_text(states, JobConfig(), allowed_on(8)).splitlines()[7]
    )


def test_fragments_are_named() -> None:
    use = replace(USE, allocated=60 * GIB)
    assert "reserved, but in no tensor: 15.00 GiB" in memory_text(use, JobConfig(), allowed_on(8))
    assert "in no tensor" not in memory_text(USE, JobConfig(), allowed_on(8))


def test_no_remedy_that_the_run_has_already() -> None:
    config = JobConfig(
        training=Training(local_batch_size=1),
        activation_checkpoint=ActivationCheckpoint(mode="full"),
        parallelism=Parallelism(fsdp_reshard_after_forward="always", fsdp_cpu_offload=True),
        optimizer=Optimizer(state_dtype="bfloat16"),
    )
    text = remedies_of(config)
    for key in ("local_batch", "activation_ch", "reshard", "offload", "state_dtype", "replicate"):
        assert key not in text
    assert "context_parallel_degree" in text
    ddp = JobConfig(parallelism=Parallelism(data_parallel="ddp"))
    first = remedies(ddp, allowed_on(8), states_are_larger=True)[0]
    assert first.startswith('parallelism.data_parallel = "fsdp2')


@pytest.mark.parametrize(
    ("keys", "missing"),
    [
        ({"parallelism.data_parallel": "simple_fsdp"}, "reshard offload memory_budget"),
        ({"optimizer.name": "muon"}, "offload"),
        ({"optimizer.name": "own:Lion"}, "state_dtype"),
        ({"optimizer.beta2": 0.999}, "state_dtype"),
        ({"parallelism.tensor_parallel_degree": 2}, "memory_budget"),
        ({"parallelism.tensor_parallel_degree": 4}, "tensor_parallel context_parallel"),
        (
            {
                "parallelism.context_parallel_degree": 2,
                "parallelism.context_parallel_method": "allgather",
            },
            "memory_budget",
        ),
        ({"parallelism.pipeline_parallel_degree": 2}, "local_batch_size"),
        ({"debug.deterministic": "elastic"}, "context_parallel"),
    ],
)
def test_no_remedy_that_the_run_would_reject(keys: dict[str, Any], missing: str) -> None:
    compiled = {"compile.enable": True, "activation_checkpoint.mode": "none"}
    config = with_values(JobConfig(training=Training(global_batch_size=64)), compiled)
    every, left = remedies_of(config), remedies_of(with_values(config, keys))
    for part in missing.split():
        assert part in every
        assert part not in left


def test_a_pipeline_has_smaller_microbatches_of_its_own() -> None:
    keys = {
        "parallelism.pipeline_parallel_degree": 2,
        "parallelism.pipeline_parallel_microbatch_size": 2,
    }
    assert "pipeline_parallel_microbatch_size, lower" in remedies_of(with_values(JobConfig(), keys))


def test_error_of_a_full_gpu_says_who_holds_it() -> None:
    model = nn.Linear(256, 1024, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    with (
        pytest.raises(torch.OutOfMemoryError) as caught,
        explained_out_of_memory(model, optimizer, JobConfig(), allowed_on(1)),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    [note] = caught.value.__notes__
    n_bytes = 4 * 256 * 1024
    # Two moments, and a step count.
    held = {"parameters": n_bytes, "gradients": n_bytes, "optimizer state": 2 * n_bytes + 4}
    assert measure(model, optimizer).held == held
    assert "parameters: 0.00 GiB" in note
    assert "optimizer state: 0.00 GiB" in note
    with (
        pytest.raises(RuntimeError) as other,
        explained_out_of_memory(model, optimizer, JobConfig(), allowed_on(1)),
    ):
        raise RuntimeError("another error")
    assert not hasattr(other.value, "__notes__")
