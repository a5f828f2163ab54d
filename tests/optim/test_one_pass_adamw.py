"""AdamW in one pass: bfloat16 weights with remainders learn as float32 weights do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

from optim import one_pass_adamw
from optim.chunked_adamw import ChunkedAdamW
from optim.muon import Muon
from optim.one_pass_adamw import ParameterState, read_weight, write_weight

N = 1000
BFLOAT16 = torch.bfloat16


def stored(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight, remainder = value.to(BFLOAT16), torch.empty_like(value, dtype=torch.int16)
    write_weight(value, weight=weight, remainder=remainder)
    return weight, remainder


def test_weight_and_remainder_are_the_float32_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1_000_000,), generator=generator)
    value = bits.to(torch.int32).view(torch.float32)
    # What bfloat16 rounds to infinity has no neighbour.
    value = value[value.to(BFLOAT16).isfinite()]
    # Halves, both zeros, and the smallest denormal number.
    value = torch.cat([value, torch.tensor([1 + 2**-8, -1 - 2**-8, 1 + 3 * 2**-8, 0, -0.0, 1e-45])])
    weight, remainder = stored(value)
    assert torch.equal(read_weight(weight, remainder).view(torch.int32), value.view(torch.int32))
    # The nearest, or the other neighbour of a half.
    assert torch.equal((weight - value).abs(), (value.to(BFLOAT16) - value).abs())


def train(
    build: Callable[..., torch.optim.Optimizer], dtype: torch.dtype, *, lr: float, **options: Any
) -> tuple[nn.Parameter, dict[str, torch.Tensor]]:
    """A parameter and its state after 200 updates with the same gradients, exact in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    weight, *grads = torch.randn(201, N // 10, 10, generator=generator).to(BFLOAT16)
    parameter = nn.Parameter((0.02 * weight).to(dtype))
    optimizer = build([parameter], lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, **options)
    for grad in grads:
        parameter.grad = grad.to(dtype)
        optimizer.step()
    return parameter, optimizer.state[parameter]


def build_muon(parameters: list[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return Muon([{"params": parameters, "muon_momentum": 0.95}], weight_mesh=None, **options)


@pytest.mark.parametrize("build", [ChunkedAdamW, build_muon])
def test_small_updates_add_up_as_in_float32(build: Any) -> None:
    """With updates of less than half of a weight's last bit, those of bfloat16 are lost."""
    options: dict[str, Any] = {"lr": 1e-6, "fused": True}
    start, _ = train(build, torch.float32, **options | {"lr": 0.0})
    want, _ = train(build, torch.float32, moment_dtype=BFLOAT16, **options)
    lost, _ = train(build, BFLOAT16, **options)
    weight, state = train(build, BFLOAT16, has_remainders=True, **options)
    moved = (want - start).norm()
    assert (lost.float() - want).norm() > 0.8 * moved
    # Moments are rounded from sums that differ in their last bits. Muon's products are in bfloat16.
    error = 0.01 if build is ChunkedAdamW else 0.05
    assert (read_weight(weight, state["remainder"]) - want).norm() < error * moved
    assert (weight - want).abs().max() <= 2**-9 * 0.1


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("build", [ChunkedAdamW, build_muon])
def test_found_inf_masks_an_update(build: Any, is_first: bool) -> None:
    parameter = nn.Parameter(torch.randn(8, 8).to(BFLOAT16))
    optimizer = build([parameter], lr=1e-3, has_remainders=True, fused=True)
    optimizer.found_inf = torch.zeros(())
    if not is_first:
        parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    before = {"weight": parameter, **optimizer.state[parameter]}
    before = {name: tensor.detach().clone() for name, tensor in before.items()}
    optimizer.found_inf.fill_(1.0)
    parameter.grad = torch.full_like(parameter, torch.nan)
    optimizer.step()
    after = {"weight": parameter, **optimizer.state[parameter]}
    for name, tensor in after.items():
        want = before.get(name, torch.zeros_like(tensor))
        assert torch.equal(tensor, want), name


def random_state(weight_dtype: torch.dtype, moment_dtype: torch.dtype) -> ParameterState:
    generator = torch.Generator().manual_seed(1)
    weight, gradient, mean, square = torch.randn(4, N, generator=generator)
    tensors = [weight.to(weight_dtype), gradient.to(weight_dtype)]
    tensors += [mean.to(moment_dtype), square.square().to(moment_dtype)]
    if weight_dtype == BFLOAT16:
        tensors.append(torch.randint(-(2**15), 2**15, (N,), generator=generator).to(torch.int16))
    return ParameterState(torch.tensor(3.0), tensors)


GROUP = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
DTYPES = [(torch.float32, torch.float32), (torch.float32, BFLOAT16), (torch.float64, torch.float64)]


@pytest.mark.parametrize(("weight_dtype", "moment_dtype"), DTYPES)
def test_equals_pytorch(weight_dtype: torch.dtype, moment_dtype: torch.dtype) -> None:
    state, twin = (random_state(weight_dtype, moment_dtype) for _ in range(2))
    one_pass_adamw.one_pass_adamw([state], GROUP, None)
    weight, gradient, *moments = twin.tensors
    parameter = nn.Parameter(weight)
    optimizer = ChunkedAdamW([parameter], **GROUP, moment_dtype=moment_dtype, fused=True)
    parameter.grad = gradient
    names = ("exp_avg", "exp_avg_sq")
    optimizer.state[parameter] = {"step": twin.step, **dict(zip(names, moments, strict=True))}
    optimizer.step()
    assert torch.equal(state.step, twin.step)
    tolerance = {"rtol": 2**-8, "atol": 0.0} if moment_dtype == BFLOAT16 else {}
    torch.testing.assert_close(state.tensors[0], parameter.detach())
    torch.testing.assert_close(state.tensors[2:], moments, **tolerance)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("weight_dtype", "moment_dtype"), [*DTYPES, (BFLOAT16, BFLOAT16)])
def test_gpu_equals_cpu(weight_dtype: torch.dtype, moment_dtype: torch.dtype) -> None:
    here, there = (random_state(weight_dtype, moment_dtype) for _ in range(2))
    there = ParameterState(there.step.cuda(), [tensor.cuda() for tensor in there.tensors])
    for state in (here, there):
        one_pass_adamw.one_pass_adamw([state], GROUP, None)
    results = [
        [read_weight(weight, others[0] if others else None), mean, square]
        for weight, _, mean, square, *others in (here.tensors, [t.cpu() for t in there.tensors])
    ]
    tolerance = {"rtol": 2**-7, "atol": 1e-6} if moment_dtype == BFLOAT16 else {}
    torch.testing.assert_close(*results, **tolerance)  # type: ignore[arg-type]
