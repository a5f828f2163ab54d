"""grouped_mm is used only where it passes its numerics check."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from kernels import grouped_mm as module
from kernels.grouped_mm import check_grouped_mm, disable_broken_grouped_mm
from kernels.kernel_check import MAX_ERROR
from models.moe import Experts, MoE

SHAPE = torch.Size((64, 32))
GPU = torch.device("cuda")


class Unwritten(torch.autograd.Function):
    """Identity whose gradient has unwritten elements, as on some GPUs."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, filler: float) -> torch.Tensor:
        ctx.filler = filler
        return weights.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradients[0].clone()
        gradient[1] = ctx.filler
        return gradient, None


def test_check_has_experts_without_tokens() -> None:
    """GPUs that leave their gradients unwritten would pass without them."""
    assert 0 in module.TOKENS_PER_EXPERT


def off_by_one(x: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    return F.grouped_mm(x, weights, offs=(offs - (offs == offs[0]).int()))


def layer() -> MoE:
    sizes = {"dim": 32, "hidden_dim": 64, "n_experts": 4, "top_k": 2}
    return MoE(**sizes, balance_weight=0.0)


def test_correct_kernel_passes() -> None:
    check_grouped_mm(SHAPE, device="cpu")


@pytest.mark.parametrize("filler", [torch.nan, 3e3])
def test_unwritten_gradients_fail_the_check(filler: float) -> None:
    def unwritten(x: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(x, Unwritten.apply(weights, filler), offs=offs)

    with pytest.raises(ArithmeticError, match="max error"):
        check_grouped_mm(SHAPE, device="cpu", grouped_mm=unwritten)


def test_wrong_offsets_fail_the_check() -> None:
    with pytest.raises(ArithmeticError, match="max error"):
        check_grouped_mm(SHAPE, device="cpu", grouped_mm=off_by_one)


@pytest.mark.parametrize("fault", [None, ArithmeticError("off by 3"), RuntimeError("no kernel")])
def test_failure_falls_back_to_a_loop(
    fault: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    moes = [layer(), layer()]
    with patch.object(module, "check_grouped_mm", side_effect=fault) as check:
        disable_broken_grouped_mm([*moes], device=GPU, dtype=torch.bfloat16)
    (shape,) = check.call_args.args
    assert shape == SHAPE
    assert {moe.experts.is_grouped for moe in moes} == {fault is None}
    is_logged = f"using a loop over experts: {fault}" in caplog.text
    assert is_logged == (fault is not None)


def test_other_dtypes_and_devices_skip_the_check() -> None:
    with patch.object(module, "check_grouped_mm", side_effect=AssertionError):
        disable_broken_grouped_mm([layer()], device=GPU, dtype=torch.float32)
        disable_broken_grouped_mm([layer()], device=torch.device("cpu"), dtype=torch.bfloat16)


def test_empty_input_has_zero_gradients() -> None:
    experts = Experts(4, 2, 32, 64)
    x = torch.empty(0, 32, requires_grad=True)
    experts(x, torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in experts.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("counts", [(300, 0, 17, 195), (0, 0, 0, 0), (0, 512, 0, 0)])
def test_grouped_mm_matches_float64_loop(counts: tuple[int, ...]) -> None:
    moe = layer().cuda().bfloat16()
    disable_broken_grouped_mm([moe], device=GPU, dtype=torch.bfloat16)
    x = torch.randn(sum(counts), 32, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in moe.experts.parameters():
            parameter.normal_()
    exact = layer().cuda().double()
    exact.load_state_dict({k: v.double() for k, v in moe.state_dict().items()})
    gradients = []
    for each_moe in (moe, exact):
        inputs = x.to(each_moe.experts.w1.dtype).requires_grad_()
        out = each_moe.experts(inputs, torch.tensor([counts], device="cuda"))
        gradients.append(
            torch.autograd.grad(out.square().sum(), [inputs, *each_moe.experts.parameters()])
        )
    for got, want in zip(*gradients, strict=True):
        if want.numel() > 0:
            assert (got - want).abs().max() <= MAX_ERROR * want.abs().max()
