"""MoE matches a loop over tokens; no token is dropped, and each is counted once."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from models.moe import MoE

B, S, DIM, HIDDEN, EXPERTS, TOP_K = 3, 7, 10, 6, 5, 2


def build(balance_weight: float = 0.0) -> MoE:
    moe = MoE(
        dim=DIM, hidden_dim=HIDDEN, n_experts=EXPERTS, top_k=TOP_K,
        balance_weight=balance_weight,
    ).double()  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        moe.bias.zero_()
        moe.tokens_per_expert.zero_()
    return moe


def inputs() -> torch.Tensor:
    x = torch.randn(B, S, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x.requires_grad_()


def token_by_token(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for b in range(B):
        for s in range(S):
            scores = (moe.router.weight @ x[b, s]).softmax(dim=0)
            best = sorted(range(EXPERTS), key=lambda e: -(scores[e] + moe.bias[e]).item())[:TOP_K]
            for e in best:
                w1, w2, w3 = (w[e] for w in (moe.experts.w1, moe.experts.w2, moe.experts.w3))
                out[b, s] += (
                    scores[e] / scores[best].sum() * (w2 @ (F.silu(w1 @ x[b, s]) * (w3 @ x[b, s])))
                )
    return out


@pytest.mark.parametrize("is_biased", [True, False])
def test_moe_matches_a_loop_over_tokens(is_biased: bool) -> None:
    moe = build()
    if is_biased:
        moe.bias.copy_(torch.linspace(-0.5, 0.5, EXPERTS))
    results = []
    for forward in (moe, lambda x: token_by_token(moe, x)):
        x = inputs()
        out = forward(x)
        out.square().sum().backward()
        results.append([out, x.grad, *(p.grad for p in moe.parameters())])
        moe.zero_grad()
    for got, want in zip(*results, strict=True):
        assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)


def test_expert_without_tokens_has_zero_gradient() -> None:
    moe = build()
    moe.bias[3] = -2.0
    moe(inputs()).sum().backward()
    assert moe.tokens_per_expert[3] == 0
    assert moe.experts.w1.grad is not None
    assert moe.experts.w1.grad[3].eq(0).all()
    assert moe.experts.w1.grad[[0, 1, 2, 4]].ne(0).any()


def test_no_token_is_dropped_under_extreme_imbalance() -> None:
    moe = build()
    moe.bias.copy_(torch.tensor([9.0, 8.0, 0.0, 0.0, 0.0]))
    x = inputs()
    assert torch.allclose(moe(x), token_by_token(moe, x), rtol=1e-12, atol=1e-12)
    moe(x).sum().backward()
    assert moe.tokens_per_expert.tolist() == [B * S, B * S, 0, 0, 0]


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_tokens_per_expert_counts_each_token_once(is_recomputed: bool) -> None:
    moe = build()
    for _ in range(2):
        x = inputs()
        out = checkpoint(moe, x, use_reentrant=False) if is_recomputed else moe(x)
        out.sum().backward()
    assert moe.tokens_per_expert.sum() == 2 * B * S * TOP_K
    with torch.no_grad():
        moe(inputs())
    assert moe.tokens_per_expert.sum() == 2 * B * S * TOP_K, "forward alone counts nothing"


def balance_loss(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    """Equations 17 to 20 of arXiv 2412.19437, sequence by sequence."""
    total = torch.zeros((), dtype=torch.float64)
    for row in x:
        scores = F.linear(row, moe.router.weight).softmax(dim=-1)
        top_experts = F.one_hot((scores + moe.bias).topk(TOP_K).indices, EXPERTS).sum(dim=1)
        fractions = EXPERTS / (TOP_K * S) * top_experts.sum(dim=0).double()
        total = total + (fractions * scores.mean(dim=0)).sum()
    return total


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_balance_loss_adds_only_its_gradient(is_recomputed: bool) -> None:
    plain, balanced = build(), build(0.3)
    x, other = inputs(), inputs()
    want = plain(x).square().sum() + 0.3 * balance_loss(plain, x)
    want.backward()
    out = checkpoint(balanced, other, use_reentrant=False) if is_recomputed else balanced(other)
    assert torch.equal(out, plain(x))
    out.square().sum().backward()
    assert torch.allclose(other.grad, x.grad, rtol=1e-10, atol=1e-10)
    for got, want in zip(balanced.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(got.grad, want.grad, rtol=1e-10, atol=1e-10)
