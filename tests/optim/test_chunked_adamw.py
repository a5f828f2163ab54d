"""ChunkedAdamW: bitwise independent of where shards end, and bfloat16 moments."""

from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode

from config.constraints import MAX_BFLOAT16_DECAY
from config.job_config import Optimizer
from models import find_model
from models.meta import build_on_meta
from optim import chunked_adamw, one_pass_adamw
from optim.chunked_adamw import ChunkedAdamW
from optim.loss import cross_entropy_sum
from optim.optimizer import build_optimizer
from parallelisms.materialize import materialize
from tests.lib.layouts import (
    CPU,
    MODE,
    PP,
    REPLICATE,
    TP,
    Layout,
    digest,
    on_shards,
    shard_debugmodel,
    small_args,
)
from tests.lib.ranks import RankPool

N, STEPS = 331, 5
MOMENTS = ("exp_avg", "exp_avg_sq")
BF16 = partial(ChunkedAdamW, moment_dtype=torch.bfloat16)
REMAINDERS = partial(ChunkedAdamW, has_remainders=True)
# Maximum relative error of rounding to bfloat16.
ROUNDING = 2**-8


def train(kind: Any, ends: list[int], dtype: torch.dtype, steps: int = STEPS) -> list[torch.Tensor]:
    """Concatenated weights and moments after ``steps`` on shards that end at ``ends``."""
    generator = torch.Generator().manual_seed(0)
    weight, *grads = torch.randn(steps + 1, N, generator=generator).to(dtype)
    parameters = [nn.Parameter(part.clone()) for part in weight.tensor_split(ends)]
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.1}
    optimizer = kind(parameters, **options, fused=True)
    for grad in grads:
        for parameter, part in zip(parameters, grad.tensor_split(ends), strict=True):
            parameter.grad = part.clone()
        optimizer.step()
    states = [optimizer.state[parameter] for parameter in parameters]
    names = [name for name in states[0] if name != "step"]
    own = [torch.cat([s[name] for s in states]) for name in names]
    return [torch.cat([p.detach() for p in parameters]), *own]


def is_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (ChunkedAdamW, torch.float32),
        (ChunkedAdamW, torch.float64),
        (ChunkedAdamW, torch.bfloat16),
        (BF16, torch.float32),
        (REMAINDERS, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("chunk", [chunked_adamw.CHUNK, 64])
def test_result_independent_of_shard_ends(kind: Any, dtype: torch.dtype, chunk: int) -> None:
    whole = train(kind, [], dtype)
    with (
        patch.object(chunked_adamw, "CHUNK", chunk),
        patch.object(one_pass_adamw, "CHUNK", chunk),
    ):
        for ends in ([], [1], [100, 100, 250], list(range(1, N))):
            assert is_equal(train(kind, ends, dtype), whole)


def test_equals_pytorch_on_full_vectors() -> None:
    whole = train(torch.optim.AdamW, [], torch.float32)
    padded = train(ChunkedAdamW, [], torch.float32)
    in_vectors = N - N % 16
    assert is_equal([t[:in_vectors] for t in padded], [t[:in_vectors] for t in whole])
    for got, want in zip(padded, whole, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", [ChunkedAdamW, BF16])
def test_found_inf_masks_an_update(kind: Any) -> None:
    parameter = nn.Parameter(torch.randn(19))
    optimizer = kind([parameter], fused=True)
    parameter.grad = torch.randn(19)
    optimizer.step()
    state = optimizer.state[parameter]
    before = [parameter.detach().clone(), *(value.clone() for value in state.values())]
    optimizer.found_inf = torch.ones(())
    parameter.grad.fill_(torch.nan)
    optimizer.step()
    assert is_equal([parameter.detach(), *state.values()], before)


def test_step_rounds_moments_once_and_never_the_update() -> None:
    want, got = train(torch.optim.AdamW, [], torch.float32, 1), train(BF16, [], torch.float32, 1)
    torch.testing.assert_close(got[0], want[0])
    for rounded, full in zip(got[1:], want[1:], strict=True):
        assert rounded.dtype == torch.bfloat16
        assert ((rounded - full).abs() <= ROUNDING * full.abs()).all()


def test_moment_errors_are_bounded() -> None:
    """Rounding errors decay with the moment, so at most 1 / (1 - beta) of them add up."""
    want, got = (train(kind, [], torch.float32, 100) for kind in (torch.optim.AdamW, BF16))
    for rounded, full, beta in zip(got[1:], want[1:], (0.9, 0.95), strict=True):
        size = full.abs().max() if beta == 0.9 else full.abs()
        assert ((rounded - full).abs() <= ROUNDING / (1 - beta) * size).all()
        # Most are much closer.
        assert (rounded - full).norm() < 2 * ROUNDING * full.norm()
    assert (got[0] - want[0]).norm() < 0.01 * want[0].norm()


def decay_moments(beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Every bfloat16 significand, and the same after a step with zero gradient."""
    values = (1 + torch.arange(128) / 128).to(torch.bfloat16)
    parameter = nn.Parameter(torch.zeros(128))
    optimizer = BF16([parameter], betas=(beta, beta), fused=True)
    parameter.grad = torch.zeros(128)
    optimizer.step()
    optimizer.state[parameter]["exp_avg_sq"].copy_(values)
    optimizer.step()
    return values, optimizer.state[parameter]["exp_avg_sq"]


def test_moments_decay_with_every_allowed_beta() -> None:
    before, after = decay_moments(MAX_BFLOAT16_DECAY)
    assert (after < before).all()
    before, after = decay_moments(1 - 0.98 * 2**-8)
    assert (after == before).any()


class LargestAllocation(TorchDispatchMode):
    """Records the size of the largest tensor allocated (not views or in-place results)."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)]
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in given:
            self.elements = max(self.elements, result.numel())
        return result


def test_memory_of_moments_and_chunks() -> None:
    """8 bytes per parameter, plus copies of one chunk."""
    parameters = [nn.Parameter(torch.randn(size)) for size in (4096, 31, 7, 1024)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = BF16(parameters, fused=True)
    optimizer.step()
    moments = [optimizer.state[p][name] for p in parameters for name in MOMENTS]
    n_bytes = sum(t.numel() * t.element_size() for t in [*parameters, *moments])
    assert n_bytes == 8 * sum(p.numel() for p in parameters)
    with patch.object(chunked_adamw, "CHUNK", 256), LargestAllocation() as mode:
        optimizer.step()
    assert mode.elements == 256


def losses_of(state_dtype: str) -> torch.Tensor:
    """Losses of a model that memorizes one batch."""
    spec, args = find_model("llama3", "debugmodel")
    args = replace(args, n_layers=2, max_seq_len=32)
    model = build_on_meta(spec, args, torch.float32)
    materialize(model, CPU, seed=7)
    optimizer = build_optimizer(model, Optimizer(lr=3e-3, state_dtype=state_dtype))
    tokens = torch.randint(256, (8, 33), generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(40):
        loss = cross_entropy_sum(model(tokens[:, :-1]), tokens[:, 1:], divisor=8 * 32)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return torch.stack(found)


def test_bfloat16_moments_train_equally_well() -> None:
    want, got = losses_of("float32"), losses_of("bfloat16")
    assert want[-1] < 0.5 * want[0]
    assert ((got - want).abs() < 0.01 * want).all()
    assert not torch.equal(got, want)


LAYOUTS = [
    Layout(1),
    Layout(2),
    # Divides no dim.
    Layout(3),
    Layout(2, {MODE: "simple_fsdp"}),
    Layout(2, {MODE: "ddp"}),
    Layout(2, {TP: 2}),
    Layout(2, {PP: 2}),
    Layout(4, {TP: 2, REPLICATE: 2}),
    # Fewer rows of keys than ranks: sharded by columns.
    Layout(4),
    Layout(4, {MODE: "simple_fsdp"}),
]


def updated_digests(layout: Layout | None, weight_dtype: str, state_dtype: str) -> dict[str, str]:
    """Digests of weights and states after updates whose gradients do not depend on the mesh."""
    args = replace(small_args("qwen3", "debugmodel"), n_kv_heads=1, head_dim=2)
    if layout is None:
        model = build_on_meta(
            find_model("qwen3", "debugmodel")[0], args, getattr(torch, weight_dtype)
        )
    else:
        model = shard_debugmodel("qwen3", args, layout, dtype=weight_dtype).module
    materialize(model, CPU, seed=3)
    config = Optimizer(lr=1e-2, state_dtype=state_dtype)
    optimizer = build_optimizer(model, config, is_elastic=True)
    for step in range(3):
        for weight in model.parameters():
            weight.grad = on_shards(lambda x, step=step: x * (step - 0.5) + x.square(), weight)
        optimizer.step()
    found = {}
    for fqn, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        tensors = {"weight": parameter, **state}
        found |= {f"{fqn}.{name}": digest(t) for name, t in tensors.items() if name != "step"}
    return found


@cache
def unsharded_digests(weight_dtype: str, state_dtype: str) -> dict[str, str]:
    return updated_digests(None, weight_dtype, state_dtype)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "dtypes",
    [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32")],
    ids=["float32", "bfloat16_moments", "remainders"],
)
def test_result_bitwise_equal_on_every_mesh(
    ranks: RankPool, layout: Layout, dtypes: tuple[str, str]
) -> None:
    want = unsharded_digests(*dtypes)
    assert any("remainder" in name for name in want) == (dtypes[0] == "bfloat16")
    found = ranks.run(updated_digests, layout.world_size, layout, *dtypes)
    assert dict(chain.from_iterable(part.items() for part in found)) == want


def test_loaded_state_has_dtype_of_optimizer() -> None:
    weight = torch.randn(N)
    optimizers = []
    for kind, lr in ((ChunkedAdamW, 0.25), (BF16, 0.5)):
        parameter = nn.Parameter(weight.clone())
        optimizers.append(kind([parameter], lr=lr, fused=True))
        parameter.grad = torch.randn(N)
        optimizers[-1].step()
    full, rounded = optimizers
    for source, target in ((rounded, full), (full, rounded), (rounded, rounded)):
        target.load_state_dict(source.state_dict())
        assert target.param_groups[0]["lr"] == source.param_groups[0]["lr"]
        [given], [loaded] = source.state.values(), target.state.values()
        assert loaded["step"].dtype == torch.float32
        for name in MOMENTS:
            assert loaded[name].dtype == (target.moment_dtype or torch.float32)
            assert torch.equal(loaded[name], given[name].to(loaded[name].dtype))
