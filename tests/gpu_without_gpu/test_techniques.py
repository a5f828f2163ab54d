"""Each technique trains on GPUs: nothing is raised, and the host never waits in a step."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.gpu_without_gpu.stub_run import H200, QUIET, Device, train_on_stub
from tests.lib.repository import ROOT

LAYERS = 4
P = "parallelism."
SYNCING_MODEL = """
from dataclasses import replace

from models.llama3 import SPEC
from models.transformer import Transformer


class Syncs(Transformer):
    def forward(self, *inputs):
        out = super().forward(*inputs)
        out.sum().item()
        return out


SYNCS = replace(SPEC, model_cls=Syncs)
"""


@dataclass(frozen=True)
class Technique:
    name: str
    keys: dict[str, str]
    n_ranks: int = 1
    config: str = "debug_model"
    max_kernels: int = 650
    """Of a step. Eager, most are of rope, the loss and casts of weights."""
    expected: dict[str, str] = field(default_factory=dict)
    """Patterns of names by kind, each of which a step calls."""

    def __str__(self) -> str:
        return f"{self.name}-{self.n_ranks}"


COMPILED = {"compile.enable": "true"}
DOCUMENTS = {"data.document_mask": "true"}
FLOAT8 = {"float8.recipe": "tensorwise", "float8.skip_small": "false"}
IS_FLEX = {"kernel": "triton_tem_fused.*flex_attention"}
IS_SENT = {"nccl": "ncclSend"}
TECHNIQUES = [
    Technique("eager", {}),
    Technique("compiled", COMPILED, max_kernels=300),
    Technique("resharded", {P + "fsdp_reshard_after_forward": "always"}),
    Technique("bfloat16_weights", {"training.dtype": "bfloat16"}),
    Technique("no_recomputation", {"activation_checkpoint.mode": "none"}),
    Technique("full_recomputation", {"activation_checkpoint.mode": "full"}, max_kernels=750),
    Technique("bfloat16_moments", {"optimizer.state_dtype": "bfloat16"}, max_kernels=1000),
    Technique("muon", {"optimizer.name": "muon"}, max_kernels=1000),
    Technique("two_microbatches", {"training.global_batch_size": "16"}, max_kernels=1200),
    Technique("float8", FLOAT8, max_kernels=2500, expected={"gemm": "float8"}),
    Technique("documents", DOCUMENTS, max_kernels=900, expected=IS_FLEX),
    Technique("documents_compiled", DOCUMENTS | COMPILED, max_kernels=450, expected=IS_FLEX),
    Technique(
        "experts",
        {P + "expert_parallel_degree": "1"},
        config="qwen3_moe_debug",
        max_kernels=1300,
        expected={"kernel": "cutlass.*[Gg]roup"},
    ),
    Technique(
        "hybrid",
        {P + "expert_parallel_degree": "1", P + "context_parallel_degree": "1"},
        config="qwen3_next_debug",
        max_kernels=2500,
    ),
    Technique("fsdp2", {}, 2, expected={"nccl": "ReduceScatter"}),
    Technique("fsdp2_compiled", COMPILED, 2, max_kernels=300),
    Technique("ddp", {P + "data_parallel": "ddp"}, 2, expected={"nccl": "AllReduce"}),
    Technique(
        "simple_fsdp", {P + "data_parallel": "simple_fsdp"}, 2, expected={"nccl": "ReduceScatter"}
    ),
    Technique("hsdp", {P + "data_parallel_replicate_degree": "2"}, 2),
    Technique("tensor_parallel", {P + "tensor_parallel_degree": "2"}, 2, max_kernels=700),
    Technique("ulysses", {P + "context_parallel_degree": "2"}, 2, max_kernels=700),
    Technique(
        "gathered_keys",
        {P + "context_parallel_degree": "2", P + "context_parallel_method": "allgather"},
        2,
        max_kernels=850,
        expected=IS_FLEX,
    ),
    Technique(
        "pipeline", {P + "pipeline_parallel_degree": "2"}, 2, max_kernels=2300, expected=IS_SENT
    ),
    Technique(
        "interleaved_pipeline",
        {
            P + "pipeline_parallel_degree": "2",
            P + "pipeline_parallel_schedule": "Interleaved1F1B",
        },
        2,
        max_kernels=2300,
        expected=IS_SENT,
    ),
    Technique("float8_all_gather", FLOAT8, 2, max_kernels=2000, expected={"gemm": "float8"}),
    Technique(
        "float8_tensor_parallel",
        FLOAT8 | {P + "tensor_parallel_degree": "2"},
        2,
        max_kernels=2500,
        expected={"gemm": "float8"},
    ),
    Technique("muon_sharded", {"optimizer.name": "muon"}, 2, max_kernels=900),
    Technique("stragglers", {"metrics.straggler_window": "50"}, 2),
]


@pytest.mark.parametrize("technique", TECHNIQUES, ids=str)
def test_technique_trains_without_host_sync(technique: Technique, tmp_path: Path) -> None:
    keys, config = technique.keys, technique.config
    for steps in train_on_stub(tmp_path, n_ranks=technique.n_ranks, config=config, **keys):
        for step in steps[QUIET]:
            assert step.syncs == {}
            assert 0 < step.count("kernel") <= technique.max_kernels
        assert steps[4].device_allocations == {}
        for kind, pattern in technique.expected.items():
            assert steps[4].count(kind, pattern) > 0, steps[4].calls(kind)


def test_expert_parallel_waits_once_per_dispatch(tmp_path: Path) -> None:
    """The host must know how many tokens it receives; selective recomputation saves the answer."""
    ranks = train_on_stub(tmp_path, n_ranks=2, config="qwen3_moe_debug")
    for steps in ranks:
        assert steps[4].count("nccl", "ncclSend") > 0
        assert steps[4].count("sync") == LAYERS, steps[4].syncs
        assert steps[4].device_allocations == {}


def test_expert_and_context_parallel_train_a_hybrid_model(tmp_path: Path) -> None:
    for steps in train_on_stub(tmp_path, n_ranks=2, config="qwen3_next_debug"):
        assert steps[4].count("sync") == LAYERS, steps[4].syncs


def test_cpu_offload_updates_on_the_host(tmp_path: Path) -> None:
    for steps in train_on_stub(tmp_path, n_ranks=2, **{P + "fsdp_cpu_offload": "true"}):
        assert steps[4].count("kernel", "FusedAdam") == 0
        assert steps[4].count("copy", "device to pinned") > 0


def test_async_save_waits_only_in_its_own_step(tmp_path: Path) -> None:
    keys = {"checkpoint.enable": "true", "checkpoint.interval": "2"}
    runs = train_on_stub(tmp_path, n_ranks=2, **keys, **{"checkpoint.async_mode": "async"})
    for steps in runs:
        assert steps[2].syncs != {}
        assert steps[3].syncs == {}
    assert (tmp_path / "outputs/debug_model/checkpoints/step-00000005").is_dir()


def test_validation_and_sample_run(tmp_path: Path) -> None:
    keys = {"validation.enable": "true", "validation.steps": "1", "validation.sample_tokens": "4"}
    (steps,) = train_on_stub(tmp_path, **keys)
    assert len(steps) == 6


def test_planted_sync_is_counted(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(SYNCING_MODEL)
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    (steps,) = train_on_stub(tmp_path, environment=environment, **{"model.name": "planted:SYNCS"})
    assert steps[4].syncs == {"cudaStreamSynchronize": 1}


def test_small_device_is_out_of_memory(tmp_path: Path) -> None:
    device = Device(H200.name, 600 * 2**20)
    with pytest.raises(AssertionError, match="OutOfMemoryError"):
        train_on_stub(tmp_path, device=device)
