"""Muon's update equals PyTorch's, is orthogonal, and is divided evenly over ranks."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode

from config.job_config import Optimizer
from models import find_model
from models.meta import build_on_meta
from optim import muon
from optim.muon import COEFFICIENTS, ITERATIONS, Muon, hidden_matrices, orthogonalize
from optim.optimizer import build_optimizer
from parallelisms.materialize import materialize
from tests.lib.host_sync import forbid_host_sync
from tests.lib.layouts import (
    CPU,
    EP,
    MODE,
    Layout,
    shard_debugmodel,
)
from tests.lib.ranks import RankPool

MUON = Optimizer(name="muon", lr=1e-2)
DDP = {MODE: "ddp"}


def test_orthogonalize_maps_singular_values_by_polynomial() -> None:
    """Closed form: U f(S) V' for every shape."""
    a, b, c = COEFFICIENTS
    generator = torch.Generator().manual_seed(0)
    for shape in ((5, 12, 7), (2, 6, 6), (3, 4, 20)):
        matrices = torch.randn(shape, generator=generator, dtype=torch.float64)
        u, s, vt = torch.linalg.svd(matrices, full_matrices=False)
        s = s / s.norm(dim=-1, keepdim=True)
        for _ in range(ITERATIONS):
            s = a * s + b * s**3 + c * s**5
        torch.testing.assert_close(orthogonalize(matrices), u * s[:, None] @ vt)
        assert s.max() < 1.3
    assert torch.equal(orthogonalize(torch.zeros(1, 3, 4)), torch.zeros(1, 3, 4))


def train(optimizers: Any, parameters: list[nn.Parameter], steps: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in parameters:
            shape = parameter.shape
            parameter.grad = torch.randn(shape, generator=generator, dtype=parameter.dtype)
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach() for parameter in parameters]


def build_parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 8), (8, 6), (8, 6), (3, 5, 4), (9,)]
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for s in shapes]


OPTIONS: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.95), "fused": True}


def build_muon(parameters: list[nn.Parameter], **options: Any) -> Muon:
    """Muon for all parameters but the last."""
    groups = [
        {"params": parameters[-1:], "weight_decay": 0.1},
        {"params": parameters[:-1], "weight_decay": 0.1, "muon_momentum": 0.9},
    ]
    return Muon(groups, weight_mesh=None, **OPTIONS, **options)


class Float64ForBfloat16(TorchDispatchMode):
    """Turns casts to bfloat16 into casts to float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") == torch.bfloat16:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@pytest.mark.parametrize("chunk", [muon.CHUNK, 100, 1])
def test_update_equals_pytorch(chunk: int) -> None:
    """In float64, with one parameter per expert. PyTorch's Muon computes in bfloat16 only."""
    parameters, references = build_parameters(torch.float64), build_parameters(torch.float64)
    with patch.object(muon, "CHUNK", chunk):
        got = train([build_muon(parameters)], parameters)
    # Views of the stack's memory.
    experts = [nn.Parameter(matrix) for matrix in references[3].detach()]

    def set_expert_gradients() -> None:
        assert references[3].grad is not None
        for expert, gradient in zip(experts, references[3].grad, strict=True):
            expert.grad = gradient

    pytorch_muon = torch.optim.Muon(
        references[:3] + experts,
        lr=0.02,
        momentum=0.9,
        weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(references[-1:], weight_decay=0.1, **OPTIONS)
    with Float64ForBfloat16():
        want = train([SimpleNamespace(step=set_expert_gradients), pytorch_muon, adamw], references)
    for actual, expected in zip(got, want, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_update_rms_is_similar_to_adamw() -> None:
    """Update RMS is 0.2 lr; AdamW's is 0.2 to 0.4 lr (arXiv 2502.16982)."""
    for shape in ((64, 64), (32, 128), (128, 32)):
        parameter = nn.Parameter(torch.zeros(shape))
        parameter.grad = torch.randn(shape)
        group = {"params": [parameter], "weight_decay": 0.0, "muon_momentum": 0.95}
        Muon([group], weight_mesh=None, **OPTIONS).step()
        assert 0.15 < parameter.detach().square().mean().sqrt() / OPTIONS["lr"] < 0.25


@pytest.mark.parametrize("moment_dtype", [None, torch.bfloat16])
def test_found_inf_masks_update_without_host_sync(
    moment_dtype: torch.dtype | None,
) -> None:
    parameters = build_parameters(torch.float32)
    optimizer = build_muon(parameters, moment_dtype=moment_dtype)
    train([optimizer], parameters)
    state = [value for own in optimizer.state.values() for value in own.values()]
    before = [tensor.detach().clone() for tensor in [*parameters, *state]]
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.fill_(torch.nan)
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    with forbid_host_sync():
        optimizer.step()
    assert all(map(torch.equal, before, [*parameters, *state]))
    optimizer.found_inf.zero_()  # type: ignore[attr-defined]
    train([optimizer], parameters)
    assert not any(map(torch.equal, before[: len(parameters)], parameters))


def test_bfloat16_momentum_is_close_to_float32() -> None:
    parameters, others = build_parameters(torch.float32), build_parameters(torch.float32)
    rounded = build_muon(parameters, moment_dtype=torch.bfloat16)
    got, want = train([rounded], parameters), train([build_muon(others)], others)
    buffers = [rounded.state[p]["momentum_buffer"] for p in parameters[:-1]]
    assert {buffer.dtype for buffer in buffers} == {torch.bfloat16}
    for actual, expected in zip(got, want, strict=True):
        assert 0 < (actual - expected).norm() < 0.02 * expected.norm()


def muon_fqns(name: str) -> set[str]:
    spec, args = find_model(name, "debugmodel")
    model = build_on_meta(spec, replace(args, n_layers=1), torch.float32)
    names = {id(p): fqn for fqn, p in model.named_parameters()}
    return {names[id(p)] for p in hidden_matrices(spec.blocks(model), spec.moes(model))}


def test_muon_updates_matrices_of_blocks() -> None:
    attention = {f"layers.0.attention.w{x}.weight" for x in "qkvo"}
    dense = attention | {f"layers.0.feed_forward.w{x}.weight" for x in "123"}
    assert muon_fqns("llama3") == muon_fqns("qwen3") == dense
    experts = {f"layers.0.feed_forward.experts.w{x}" for x in "123"}
    assert muon_fqns("qwen3_moe") == attention | experts | {"layers.0.feed_forward.router.weight"}
    # Excludes the convolution (heads, channels, taps) and the shared expert's gate, a vector.
    linear = {f"layers.0.attention.{x}.weight" for x in ("wqkvz", "wba", "wo")}
    shared = {f"layers.0.feed_forward.shared.w{x}.weight" for x in "123"}
    assert muon_fqns("qwen3_next") == linear | shared | experts | {
        "layers.0.feed_forward.router.weight"
    }


def test_model_without_matrices_raises() -> None:
    with pytest.raises(ValueError, match="no hidden matrices"):
        build_optimizer(nn.Linear(2, 2), MUON)


def assignments(layout: Layout) -> list[tuple[tuple[int, ...], int, bool]]:
    """Shape, owner rank and whether it needs communication, of each stack."""
    spec, args = find_model("qwen3_moe", "debugmodel")
    found = shard_debugmodel("qwen3_moe", replace(args, n_layers=4), layout)
    materialize(found.module, CPU, seed=1)
    matrices = hidden_matrices(spec.blocks(found.module), spec.moes(found.module))
    optimizer = build_optimizer(
        found.module, MUON, matrices=matrices, weight_mesh=found.dims.weight_mesh
    )
    assert isinstance(optimizer, Muon)
    return [(t.stack.shape, t.owner, t.needs_communication) for ts in optimizer._rounds for t in ts]


@pytest.mark.parametrize("layout", [Layout(4), Layout(4, DDP), Layout(4, {EP: 2})], ids=str)
def test_owners_balance_the_cost(ranks: RankPool, layout: Layout) -> None:
    assigned, *others = ranks.run(assignments, 4, layout)
    assert all(expected == assigned for expected in others)
    loads = [0, 0, 0, 0]
    for (count, m, n), owner, _ in assigned:
        loads[owner] += count * m * n * min(m, n)
    assert max(loads) < 1.25 * sum(loads) / 4
    local_shapes = {shape for shape, _, needs_communication in assigned if not needs_communication}
    # Experts that are whole on a rank are not communicated.
    assert all(len(shape) == 3 and shape[0] > 1 for shape in local_shapes)
    assert (local_shapes == set()) == (layout.parallelism == DDP)
