"""AdamW that rounds each element alike, wherever a shard ends."""

import pytest
import torch
import torch.nn as nn

from optim.padded_adamw import PaddedAdamW

N, STEPS = 331, 5


def train(kind: type[torch.optim.AdamW], cuts: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Weights and moments after ``STEPS`` on shards that end at ``cuts``, whole again."""
    generator = torch.Generator().manual_seed(0)
    weight, *grads = torch.randn(STEPS + 1, N, generator=generator).to(dtype)
    parameters = [nn.Parameter(part.clone()) for part in weight.tensor_split(cuts)]
    optimizer = kind(parameters, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for grad in grads:
        for parameter, part in zip(parameters, grad.tensor_split(cuts), strict=True):
            parameter.grad = part.clone()
        optimizer.step()
    states = [optimizer.state[parameter] for parameter in parameters]
    moments = [torch.cat([s[name] for s in states]) for name in ("exp_avg", "exp_avg_sq")]
    return [torch.cat([p.detach() for p in parameters]), *moments]


def is_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_where_shards_end_changes_no_bit(dtype: torch.dtype) -> None:
    whole = train(PaddedAdamW, [], dtype)
    for cuts in ([1], [100, 100, 250], list(range(1, N))):
        assert is_equal(train(PaddedAdamW, cuts, dtype), whole)


def test_is_pytorchs_where_that_has_no_end() -> None:
    whole = train(torch.optim.AdamW, [], torch.float32)
    padded = train(PaddedAdamW, [], torch.float32)
    in_vectors = N - N % 16
    assert is_equal([t[:in_vectors] for t in padded], [t[:in_vectors] for t in whole])
    for got, want in zip(padded, whole, strict=True):
        torch.testing.assert_close(got, want)


def test_found_inf_masks_an_update() -> None:
    parameter = nn.Parameter(torch.randn(19))
    optimizer = PaddedAdamW([parameter], fused=True)
    parameter.grad = torch.randn(19)
    optimizer.step()
    state = optimizer.state[parameter]
    before = [parameter.detach().clone(), *(value.clone() for value in state.values())]
    optimizer.found_inf = torch.ones(())
    parameter.grad.fill_(torch.nan)
    optimizer.step()
    assert is_equal([parameter.detach(), *state.values()], before)
