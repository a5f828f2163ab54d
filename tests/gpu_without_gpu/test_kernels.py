"""Expected kernels: those that a step launches, by name, and the source of generated ones."""

import re
from pathlib import Path

import pytest

from tests.gpu_without_gpu.stub_run import GRAPHS, Step, train_on_stub

LAYERS = 4
BFLOAT16 = {
    "compile.enable": "true",
    "training.dtype": "bfloat16",
    "optimizer.param_remainders": "false",
    "activation_checkpoint.mode": "none",
}
# Seven matrices and two norms of each layer, the embedding, the last norm and the output.
PARAMETERS = 9 * LAYERS + 3
# A kernel of its own for each tensor, not one for many.
ONE_TENSOR_MULTIPLICATION = r"elementwise_kernel.*MulFunctor<(float|c10::BFloat16)>"


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Step:
    """A compiled step of bfloat16 weights, which nothing but clipping and AdamW touch eagerly."""
    ((*_, step, _),) = train_on_stub(tmp_path_factory.mktemp("compiled"), **BFLOAT16)
    return step


def test_adamw_is_fused(step: Step) -> None:
    assert step.count("kernel", "FusedAdamMathFunctor") in (1, 2)
    # One kernel for many step counts.
    assert step.count("kernel", "multi_tensor_apply.*BinaryOpScalarFunctor") in (1, 2)


@pytest.mark.parametrize(
    "keys",
    [{"training.dtype": "bfloat16"}, {"optimizer.state_dtype": "bfloat16"}],
    ids=["remainders", "bfloat16_moments"],
)
def test_adamw_is_one_pass(keys: dict[str, str], tmp_path: Path) -> None:
    """One kernel per parameter, also if nothing else is compiled."""
    ((*_, step, _),) = train_on_stub(tmp_path, **keys)
    assert step.count("kernel", "triton.*sqrt") == PARAMETERS
    assert step.count("kernel", "FusedAdamMathFunctor") == 0
    assert step.syncs == {}


def test_clipping_scales_many_gradients_in_one_kernel(step: Step) -> None:
    assert step.count("kernel", "multi_tensor_apply.*LpNormFunctor") in (1, 2)
    assert step.count("kernel", "multi_tensor_apply.*BinaryOpScalarTensorFunctor") in (1, 2)
    # Of scalars and of the rotary embedding's table.
    assert step.count("kernel", ONE_TENSOR_MULTIPLICATION) < 3 * LAYERS


def test_attention_is_cudnn(step: Step) -> None:
    assert step.count("kernel", "cudnn_attention_forward") == LAYERS
    assert step.count("kernel", "cudnn_attention_backward") == LAYERS
    assert step.count("kernel", "flash|fmha|softmax") == 0


def test_compiled_loss_is_one_kernel_each_way(step: Step) -> None:
    assert step.count("kernel", "triton.*exp.*sum") == 1
    assert step.count("kernel", "triton.*exp.*mul_sub") == 1


def test_compiled_block_is_as_many_kernels_as_expected(step: Step) -> None:
    """Seven linear layers: seven GEMMs forward, fourteen backward, and the output's three."""
    assert step.count("gemm") == 21 * LAYERS + 3
    assert step.count("kernel", "triton") <= 15 * LAYERS + 2


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"compile.enable": "true", "training.global_batch_size": "32"},
        {"data.document_mask": "true", "activation_checkpoint.mode": "full"},
        {"float8.recipe": "tensorwise", "float8.skip_small": "false"},
        {"training.dtype": "bfloat16"},
    ],
    ids=["eager", "compiled", "documents", "float8", "bfloat16"],
)
def test_a_graph_takes_little_of_the_host(keys: dict[str, str], tmp_path: Path) -> None:
    """A launch per microbatch and one of the update; besides them the host launches batches."""
    ((_, _, captured, *steps, _),) = train_on_stub(tmp_path, **GRAPHS, **keys)
    # The random generator's own, of which the models use nothing.
    n_graphs = int(keys.get("training.global_batch_size", "8")) // 8
    assert captured.count("captured sync") <= min(n_graphs, 3) + 1
    assert captured.count("captured kernel") > 100
    for step in steps:
        assert step.count("graph", "launch") == n_graphs + 1
        assert step.count("kernel") < 30
        assert step.count("gemm") == 0
        assert step.syncs == step.device_allocations == {}


def test_flex_attention_finds_the_blocks_of_each_sequence(tmp_path: Path) -> None:
    """Compiled kernels find the blocks of a sequence by the stride of heads: it is not 0."""
    keys = {"data.document_mask": "true", "training.local_batch_size": "2"}
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    train_on_stub(tmp_path, environment=environment, **keys, **{"training.steps": "1"})
    sources = [path.read_text() for path in (tmp_path / "inductor").rglob("*.py")]
    found = re.findall(r"(stride_(?:kv|q)_idx_h) = (\d+)", "\n".join(sources))
    assert {name for name, _ in found} == {"stride_kv_idx_h", "stride_q_idx_h"}
    assert "0" not in {stride for _, stride in found}, found
