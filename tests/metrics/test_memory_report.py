"""An exhausted GPU is explained: who holds its memory, and which keys this run can still change."""

from dataclasses import replace

import pytest
import torch
import torch.nn as nn

from config import JobConfig
from config.job_config import ActivationCheckpoint, Optimizer, Parallelism, Training
from metrics.memory_report import MemoryUse, explained_out_of_memory, memory_text, remedies

GIB = 1 << 30
STATES = {"parameters": 8 * GIB, "gradients": 8 * GIB, "optimizer state": 16 * GIB}
USE = MemoryUse(STATES, allocated=70 * GIB, reserved=75 * GIB, total=80 * GIB)


def test_largest_part_is_first_and_its_remedies_too() -> None:
    lines = memory_text(USE, JobConfig()).splitlines()
    assert lines[0] == "GPU memory: 80.00 GiB, of which tensors have 70.00 GiB:"
    assert lines[1] == "  activations, gathered weights and the rest: 38.00 GiB"
    assert lines[2] == "  optimizer state: 16.00 GiB"
    assert lines[5] == "to use less, the cheapest first:"
    assert "training.local_batch_size" in lines[6]
    states = replace(USE, allocated=40 * GIB)
    assert "optimizer.state_dtype" in memory_text(states, JobConfig()).splitlines()[-7]


def test_fragments_are_named() -> None:
    use = replace(USE, allocated=60 * GIB)
    assert "reserved, but in no tensor: 15.00 GiB" in memory_text(use, JobConfig())
    assert "in no tensor" not in memory_text(USE, JobConfig())


def test_no_remedy_that_the_run_has_already() -> None:
    config = JobConfig(
        training=Training(local_batch_size=1),
        activation_checkpoint=ActivationCheckpoint(mode="full"),
        parallelism=Parallelism(fsdp_reshard_after_forward="always", fsdp_cpu_offload=True),
        optimizer=Optimizer(state_dtype="bfloat16"),
    )
    text = "\n".join(remedies(config, states_are_larger=False))
    for key in ("local_batch", "activation_ch", "reshard", "offload", "state_dtype", "replicate"):
        assert key not in text
    assert "context_parallel_degree" in text
    ddp = JobConfig(parallelism=Parallelism(data_parallel="ddp"))
    assert remedies(ddp, states_are_larger=True)[0].startswith('parallelism.data_parallel = "fsdp2')


def test_error_of_a_full_gpu_says_who_holds_it() -> None:
    model = nn.Linear(256, 1024, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    with (
        pytest.raises(torch.OutOfMemoryError) as caught,
        explained_out_of_memory(model, optimizer, JobConfig()),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    [note] = caught.value.__notes__
    assert "parameters: 0.00 GiB" in note
    assert "optimizer state: 0.00 GiB" in note
    with (
        pytest.raises(RuntimeError) as other,
        explained_out_of_memory(model, optimizer, JobConfig()),
    ):
        raise RuntimeError("another error")
    assert not hasattr(other.value, "__notes__")
