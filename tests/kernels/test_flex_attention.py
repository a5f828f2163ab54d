"""FlexAttention: block masks match PyTorch's, results match dense masks.

CPUs run the kernel's dense reference. PyTorch forbids its backward there, though it works.
"""

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
from torch.nn.attention import flex_attention as pytorchs
from torch.nn.attention.flex_attention import create_block_mask

from config import load_config
from config.job_config import ActivationCheckpoint
from kernels import flex_attention as module
from kernels.flex_attention import (
    FlexAttention,
    apply_flex_attention,
    attend_within,
    block_mask,
    check_flex_attention,
)
from kernels.kernel_check import MAX_ERROR
from models.transformer import Attention, InnerAttention, TransformerArgs
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from run_spec import resolve
from tests.lib.repository import ROOT

# The dense reference on CPUs is intended here.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
CONFIG = ROOT / "train_configs" / "debug_model.toml"
HEADS, HEAD_DIM = (4, 2), 16
SHAPE = {
    "dim": 64, "n_layers": 1, "n_heads": HEADS[0], "n_kv_heads": HEADS[1], "head_dim": HEAD_DIM,
    "hidden_dim": 64, "vocab_size": 64,
}  # fmt: skip
# Sequence length, queries at its end, block size; also sizes that do not divide.
SIZES = [(512, 512, 128), (300, 300, 128), (300, 100, 32), (77, 40, 16), (64, 16, 16), (9, 9, 16)]


@pytest.fixture
def backward_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytorchs, "_validate_device", lambda *tensors: None)


def documents(s: int, rate: float, seed: int = 0) -> torch.Tensor:
    """Return ids (3, s): random documents, documents of length 1, and one document."""
    generator = torch.Generator().manual_seed(seed)
    random = (torch.rand(s, generator=generator) < rate).cumsum(0)
    return torch.stack([random, torch.arange(s), torch.zeros(s, dtype=torch.int64)])


def random_inputs(s: int, n_queries: int, device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(3, n_queries, HEADS[0], HEAD_DIM), *[(3, s, HEADS[1], HEAD_DIM)] * 2]
    return [torch.randn(shape, generator=generator, device=device) for shape in shapes]


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
@pytest.mark.parametrize(("s", "n_queries", "block"), SIZES)
def test_block_mask_matches_create_block_mask(
    s: int, n_queries: int, block: int, rate: float
) -> None:
    ids, offset = documents(s, rate), s - n_queries

    def mask_mod(
        b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        return (k <= q + offset) & (ids[b, q + offset] == ids[b, k])

    want = create_block_mask(mask_mod, 3, None, n_queries, s, device="cpu", BLOCK_SIZE=block)
    got = block_mask(ids, n_queries, block)
    assert torch.equal(got.to_dense(), want.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


def results(
    inner: nn.Module, inputs: list[torch.Tensor], ids: torch.Tensor | None
) -> list[torch.Tensor]:
    inputs = [t.detach().requires_grad_() for t in inputs]
    out = inner(*inputs, ids)
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


@pytest.mark.parametrize(("s", "n_queries"), [size[:2] for size in SIZES])
def test_outputs_and_gradients_match_dense_masks(
    s: int, n_queries: int, backward_on_cpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HALF", (torch.float64,))
    plain, ids = InnerAttention(), documents(s, 0.1)
    inputs = [t.double() for t in random_inputs(s, n_queries)]
    for document_ids in (ids, None):
        got = results(FlexAttention(plain, attend_within), inputs, document_ids)
        for a, b in zip(got, results(plain, inputs, document_ids), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def shift_boundary(ids: torch.Tensor) -> torch.Tensor:
    """Move the first position of a document to the one before."""
    ids = ids.clone()
    ids[:, 200] = ids[:, 199]
    return ids


@pytest.mark.parametrize(
    "fault", [shift_boundary, torch.zeros_like, lambda ids: torch.arange(384).expand(2, -1)]
)
def test_wrong_mask_fails_the_check(fault: Callable, backward_on_cpus: None) -> None:
    check = partial(check_flex_attention, heads=HEADS, head_dim=HEAD_DIM, device="cpu")
    check(FlexAttention(InnerAttention(), attend_within))

    def wrong(*args: torch.Tensor) -> torch.Tensor:
        return attend_within(*args[:3], fault(args[3]))

    with pytest.raises(ArithmeticError, match="max error"):
        check(FlexAttention(InnerAttention(), wrong))


def test_nan_fails_the_check(backward_on_cpus: None) -> None:
    def broken(*args: torch.Tensor) -> torch.Tensor:
        return attend_within(*args) * float("nan")

    with pytest.raises(ArithmeticError, match="max error is nan"):
        check_flex_attention(
            FlexAttention(InnerAttention(), broken),
            heads=HEADS,
            head_dim=HEAD_DIM,
            device="cpu",
        )


def test_failure_falls_back_to_dense_mask(caplog: pytest.LogCaptureFixture) -> None:
    attention = Attention(TransformerArgs(**SHAPE))
    before = attention.inner
    with patch.object(module, "check_flex_attention", side_effect=RuntimeError("no Triton")):
        apply_flex_attention([attention], dtype=torch.bfloat16, heads=HEADS, head_dim=HEAD_DIM)
    assert attention.inner is before
    assert "FlexAttention failed, using SDPA with a dense mask: no Triton" in caplog.text


@pytest.mark.parametrize(("dtype", "is_used"), [(torch.bfloat16, True), (torch.float32, False)])
def test_flex_attention_only_for_half_precision(dtype: torch.dtype, is_used: bool) -> None:
    attention = Attention(TransformerArgs(**SHAPE))
    with patch.object(module, "check_flex_attention"):
        apply_flex_attention([attention], dtype=dtype, heads=HEADS, head_dim=HEAD_DIM)
    assert isinstance(attention.inner, FlexAttention) == is_used


@torch.library.custom_op("shardloom_tests::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    CALLS.append(1)
    return x.sin()


counted.register_fake(torch.empty_like)
counted.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
CALLS: list[int] = []


class Block(nn.Module):
    def __init__(self, wraps: bool) -> None:
        super().__init__()
        self.attend = torch.compile(counted, options={"wrap_inductor_compiled_regions": wraps})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend(x.cos()).exp()


@pytest.mark.parametrize(("wraps", "calls"), [(True, 1), (False, 2)])
def test_wrapped_compile_region_can_be_saved(wraps: bool, calls: int) -> None:
    """With ``selective = "op"``, only the compile region is saved; the rest is recomputed."""
    blocks = nn.ModuleDict({"0": Block(wraps)})
    config = ActivationCheckpoint(mode="selective", selective="op")
    apply_activation_checkpoint(
        blocks, config=config, regions=(), frees_weights=False, is_random=False
    )
    x = torch.linspace(0, 1, 8, requires_grad=True)
    CALLS.clear()
    blocks["0"](x).sum().backward()
    assert len(CALLS) == calls
    (want,) = torch.autograd.grad(x.cos().sin().exp().sum(), x)
    torch.testing.assert_close(x.grad, want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("s", "n_queries"), [(512, 512), (300, 300), (300, 100), (4096, 4096)])
def test_kernel_matches_dense_masks(s: int, n_queries: int, is_compiled: bool) -> None:
    attention = Attention(TransformerArgs(**SHAPE)).cuda()
    plain = attention.inner
    apply_flex_attention([attention], dtype=torch.bfloat16, heads=HEADS, head_dim=HEAD_DIM)
    assert isinstance(attention.inner, FlexAttention)
    inner = torch.compile(attention.inner, dynamic=False) if is_compiled else attention.inner
    inputs, ids = (
        [t.bfloat16() for t in random_inputs(s, n_queries, "cuda")],
        documents(s, 0.01).cuda(),
    )
    exact = results(plain, [t.double() for t in inputs], ids)
    for a, b in zip(results(inner, inputs, ids), exact, strict=True):
        assert (a - b).abs().max() <= MAX_ERROR * b.abs().max()


@pytest.mark.parametrize(
    ("keys", "wants"),
    [
        ({}, False),
        ({"data.document_mask": "true"}, True),
        ({"parallelism.context_parallel_degree": "2"}, False),
        (
            {
                "parallelism.context_parallel_degree": "2",
                "parallelism.context_parallel_method": "allgather",
            },
            True,
        ),
        (
            {
                "data.document_mask": "true",
                "parallelism.pipeline_parallel_degree": "2",
                "parallelism.pipeline_parallel_schedule": "InterleavedZeroBubble",
                "parallelism.fsdp_reshard_after_forward": "never",
                "activation_checkpoint.mode": "none",
                "training.local_batch_size": "4",
            },
            False,
        ),
    ],
)
def test_wants_flex_attention_only_for_masks(keys: dict[str, str], wants: bool) -> None:
    overrides = [text for key, value in keys.items() for text in (f"--{key}", value)]
    job = resolve(load_config(CONFIG, overrides), world_size=2)
    assert job.wants_flex_attention == wants
