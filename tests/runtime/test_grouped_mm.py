"""Experts multiply together where that is what each does alone, and one by one elsewhere."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from models.moe import Experts, MoE
from runtime import grouped_mm as module
from runtime.grouped_mm import avoid_wrong_grouped_mm, check_grouped_mm
from runtime.kernel_check import MOST_ERROR

SHAPE = torch.Size((64, 32))


class Unwritten(torch.autograd.Function):
    """Weights as they are, and their gradient as it is on some GPUs."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, filler: float) -> torch.Tensor:
        ctx.filler = filler
        return weights.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradients[0].clone()
        gradient[1] = ctx.filler
        return gradient, None


def off_by_one(x: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    return F.grouped_mm(x, weights, offs=(offs - (offs == offs[0]).int()))


def layer() -> MoE:
    sizes = {"dim": 32, "hidden_dim": 64, "n_experts": 4, "n_chosen": 2}
    return MoE(**sizes, balance_weight=0.0)


def test_a_kernel_that_is_right_passes() -> None:
    check_grouped_mm(SHAPE, device="cpu")


@pytest.mark.parametrize("filler", [torch.nan, 3e3])
def test_gradients_of_experts_without_tokens_must_be_0(filler: float) -> None:
    def unwritten(x: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(x, Unwritten.apply(weights, filler), offs=offs)

    with pytest.raises(ArithmeticError, match="off by"):
        check_grouped_mm(SHAPE, device="cpu", grouped_mm=unwritten)


def test_a_token_of_another_expert_is_seen() -> None:
    with pytest.raises(ArithmeticError, match="off by"):
        check_grouped_mm(SHAPE, device="cpu", grouped_mm=off_by_one)


@pytest.mark.parametrize("fault", [None, ArithmeticError("off by 3"), RuntimeError("no kernel")])
def test_where_it_fails_experts_multiply_one_by_one(
    fault: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    moes = [layer(), layer()]
    with patch.object(module, "check_grouped_mm", side_effect=fault) as check:
        avoid_wrong_grouped_mm([*moes], dtype=torch.bfloat16)
    (shape,) = check.call_args.args
    assert shape == SHAPE
    assert {moe.experts.is_grouped for moe in moes} == {fault is None}
    told = f"one by one, for grouped_mm failed here: {fault}" in caplog.text
    assert told == (fault is not None)


def test_other_dtypes_need_no_kernel() -> None:
    with patch.object(module, "check_grouped_mm", side_effect=AssertionError):
        avoid_wrong_grouped_mm([layer()], dtype=torch.float32)


def test_no_token_at_all_makes_gradients_of_0() -> None:
    experts = Experts(4, 2, 32, 64)
    x = torch.empty(0, 32, requires_grad=True)
    experts(x, torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in experts.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("counts", [(300, 0, 17, 195), (0, 0, 0, 0), (0, 512, 0, 0)])
def test_together_is_one_by_one(counts: tuple[int, ...]) -> None:
    moe = layer().cuda().bfloat16()
    avoid_wrong_grouped_mm([moe], dtype=torch.bfloat16)
    x = torch.randn(sum(counts), 32, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in moe.experts.parameters():
            parameter.normal_()
    exact = layer().cuda().double()
    exact.load_state_dict({k: v.double() for k, v in moe.state_dict().items()})
    found = []
    for each in (moe, exact):
        given = x.to(each.experts.w1.dtype).requires_grad_()
        out = each.experts(given, torch.tensor([counts], device="cuda"))
        found.append(torch.autograd.grad(out.square().sum(), [given, *each.experts.parameters()]))
    for got, want in zip(*found, strict=True):
        if want.numel() > 0:
            assert (got - want).abs().max() <= MOST_ERROR * want.abs().max()
