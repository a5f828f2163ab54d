"""Muon's update is PyTorch's, orthogonal, and the same on every mesh."""

from dataclasses import replace
from functools import partial
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
from tests.layouts import CP, CPU, EP, METHOD, MODE, PP, REPLICATE, SCHEDULE, TP, Layout, spread
from tests.optim.test_nonfinite import no_waiting
from tests.parallelisms.test_parity import check_layout, slow
from tests.ranks import RankPool

MUON = Optimizer(name="muon", lr=1e-2)
SIMPLE, DDP = {MODE: "simple_fsdp"}, {MODE: "ddp"}
LAYOUTS = [
    Layout(1),
    Layout(2),
    # Divides no dim.
    Layout(3),
    Layout(4),
    Layout(2, SIMPLE),
    Layout(2, DDP),
    Layout(4, {REPLICATE: 2}),
    Layout(2, {TP: 2}),
    Layout(4, {TP: 2}),
    Layout(4, {TP: 2} | SIMPLE),
    Layout(4, {CP: 2, TP: 2}),
    Layout(2, {PP: 2}),
]
# Each is a larger one of a kind above, or two of them in one.
SLOW_LAYOUTS = [
    Layout(4, SIMPLE),
    Layout(4, DDP),
    Layout(2, {REPLICATE: 2}),
    Layout(4, SIMPLE | {REPLICATE: 2}),
    Layout(4, {TP: 2} | DDP),
    Layout(4, {PP: 2, SCHEDULE: "Interleaved1F1B"}),
    Layout(8, {TP: 2, REPLICATE: 2, PP: 2}),
]
WITH_EXPERTS = [
    Layout(2, DDP),
    Layout(4, {EP: 2}),
    Layout(4, {EP: 2, REPLICATE: 2}),
    Layout(4, {TP: 2, EP: 4}),
    Layout(4, {PP: 2, EP: 2}),
]
# Each is in one of those above.
SLOW_WITH_EXPERTS = [Layout(2), Layout(2, {EP: 2}), Layout(4, {TP: 2, EP: 2})]


@pytest.mark.parametrize("layout", [*LAYOUTS, *map(slow, SLOW_LAYOUTS)], ids=str)
def test_layout_matches_one_device(ranks: RankPool, layout: Layout) -> None:
    ranks.run(partial(check_layout, config=MUON), layout.world_size, "qwen3", True, layout)


@pytest.mark.parametrize("layout", [*WITH_EXPERTS, *map(slow, SLOW_WITH_EXPERTS)], ids=str)
def test_layout_with_experts_matches_one_device(ranks: RankPool, layout: Layout) -> None:
    check = partial(check_layout, config=MUON)
    ranks.run(check, layout.world_size, "qwen3_moe", False, layout)


@pytest.mark.parametrize("mode", ["fsdp2", "simple_fsdp"])
def test_fewer_rows_than_ranks(ranks: RankPool, mode: str) -> None:
    check = partial(check_layout, config=MUON, has_narrow_keys=True)
    assert ranks.run(check, 4, "llama3", False, Layout(4, {MODE: mode}))[0] != []


def test_delta_nets(ranks: RankPool) -> None:
    check = partial(check_layout, config=MUON)
    ranks.run(check, 4, "qwen3_next", False, Layout(4, {CP: 2, TP: 2} | {METHOD: "ulysses"}))


def test_singular_values_go_through_the_polynomial() -> None:
    """The closed form: U f(S) V', whatever the shape."""
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


def trained(optimizers: Any, parameters: list[nn.Parameter], steps: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in parameters:
            shape = parameter.shape
            parameter.grad = torch.randn(shape, generator=generator, dtype=parameter.dtype)
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach() for parameter in parameters]


def small(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 8), (8, 6), (8, 6), (3, 5, 4), (9,)]
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for s in shapes]


OPTIONS: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.95), "fused": True}


def built(parameters: list[nn.Parameter], **options: Any) -> Muon:
    """Muon for all but the last."""
    groups = [
        {"params": parameters[-1:], "weight_decay": 0.1},
        {"params": parameters[:-1], "weight_decay": 0.1, "muon_momentum": 0.9},
    ]
    return Muon(groups, weight_mesh=None, **OPTIONS, **options)


class NoBfloat16(TorchDispatchMode):
    """Casts to bfloat16 become casts to float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") == torch.bfloat16:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@pytest.mark.parametrize("chunk", [muon.CHUNK, 100, 1])
def test_is_pytorchs(chunk: int) -> None:
    """In float64, and with each expert as a matrix of its own; PyTorch's knows bfloat16 only."""
    parameters, copies = small(torch.float64), small(torch.float64)
    with patch.object(muon, "CHUNK", chunk):
        got = trained([built(parameters)], parameters)
    # They share the memory of the stack.
    experts = [nn.Parameter(matrix) for matrix in copies[3].detach()]

    def deal() -> None:
        assert copies[3].grad is not None
        for expert, gradient in zip(experts, copies[3].grad, strict=True):
            expert.grad = gradient

    theirs = torch.optim.Muon(
        copies[:3] + experts,
        lr=0.02,
        momentum=0.9,
        weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(copies[-1:], weight_decay=0.1, **OPTIONS)
    with NoBfloat16():
        want = trained([SimpleNamespace(step=deal), theirs, adamw], copies)
    for ours, other in zip(got, want, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-12, atol=1e-12)


def test_an_update_is_as_large_as_adamws() -> None:
    """Root mean square 0.2 lr, where AdamW's is between 0.2 and 0.4 (arXiv 2502.16982)."""
    for shape in ((64, 64), (32, 128), (128, 32)):
        parameter = nn.Parameter(torch.zeros(shape))
        parameter.grad = torch.randn(shape)
        group = {"params": [parameter], "weight_decay": 0.0, "muon_momentum": 0.95}
        Muon([group], weight_mesh=None, **OPTIONS).step()
        assert 0.15 < parameter.detach().square().mean().sqrt() / OPTIONS["lr"] < 0.25


@pytest.mark.parametrize("moment_dtype", [None, torch.bfloat16])
def test_found_inf_masks_an_update_and_the_host_does_not_wait(
    moment_dtype: torch.dtype | None,
) -> None:
    parameters = small(torch.float32)
    optimizer = built(parameters, moment_dtype=moment_dtype)
    trained([optimizer], parameters)
    state = [value for own in optimizer.state.values() for value in own.values()]
    before = [tensor.detach().clone() for tensor in [*parameters, *state]]
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.fill_(torch.nan)
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    with no_waiting():
        optimizer.step()
    assert all(map(torch.equal, before, [*parameters, *state]))
    optimizer.found_inf.zero_()  # type: ignore[attr-defined]
    trained([optimizer], parameters)
    assert not any(map(torch.equal, before[: len(parameters)], parameters))


def test_momentum_in_bfloat16() -> None:
    parameters, others = small(torch.float32), small(torch.float32)
    short = built(parameters, moment_dtype=torch.bfloat16)
    got, want = trained([short], parameters), trained([built(others)], others)
    buffers = [short.state[p]["momentum_buffer"] for p in parameters[:-1]]
    assert {buffer.dtype for buffer in buffers} == {torch.bfloat16}
    for ours, other in zip(got, want, strict=True):
        assert 0 < (ours - other).norm() < 0.02 * other.norm()


def fqns_of_muon(name: str) -> set[str]:
    spec, args = find_model(name, "debugmodel")
    model = build_on_meta(spec, replace(args, n_layers=1), torch.float32)
    names = {id(p): fqn for fqn, p in model.named_parameters()}
    return {names[id(p)] for p in hidden_matrices(spec.blocks(model), spec.moes(model))}


def test_matrices_of_blocks_are_muons() -> None:
    attention = {f"layers.0.attention.w{x}.weight" for x in "qkvo"}
    dense = attention | {f"layers.0.feed_forward.w{x}.weight" for x in "123"}
    assert fqns_of_muon("llama3") == fqns_of_muon("qwen3") == dense
    experts = {f"layers.0.feed_forward.experts.w{x}" for x in "123"}
    assert fqns_of_muon("qwen3_moe") == attention | experts | {
        "layers.0.feed_forward.router.weight"
    }
    # Neither the convolution (heads, channels, taps) nor the shared expert's gate, a vector.
    linear = {f"layers.0.attention.{x}.weight" for x in ("wqkvz", "wba", "wo")}
    shared = {f"layers.0.feed_forward.shared.w{x}.weight" for x in "123"}
    assert fqns_of_muon("qwen3_next") == linear | shared | experts | {
        "layers.0.feed_forward.router.weight"
    }


def test_a_model_without_matrices_is_refused() -> None:
    with pytest.raises(ValueError, match="no hidden matrices"):
        build_optimizer(nn.Linear(2, 2), MUON)


def plan_of(layout: Layout) -> list[tuple[tuple[int, ...], int, bool]]:
    """Of each stack its shape, the rank that orthogonalizes it, and whether it travels."""
    spec, args = find_model("qwen3_moe", "debugmodel")
    found = spread("qwen3_moe", replace(args, n_layers=4), layout)
    materialize(found.model, CPU, seed=1)
    matrices = hidden_matrices(spec.blocks(found.model), spec.moes(found.model))
    optimizer = build_optimizer(
        found.model, MUON, matrices=matrices, weight_mesh=found.dims.weight_mesh
    )
    assert isinstance(optimizer, Muon)
    return [(t.stack.shape, t.owner, t.travels) for ts in optimizer._rounds for t in ts]


@pytest.mark.parametrize("layout", [Layout(4), Layout(4, DDP), Layout(4, {EP: 2})], ids=str)
def test_the_work_is_dealt_out(ranks: RankPool, layout: Layout) -> None:
    plan, *others = ranks.run(plan_of, 4, layout)
    assert all(other == plan for other in others)
    loads = [0, 0, 0, 0]
    for (count, m, n), owner, _ in plan:
        loads[owner] += count * m * n * min(m, n)
    assert max(loads) < 1.25 * sum(loads) / 4
    stays = {shape for shape, _, travels in plan if not travels}
    # Experts that are whole on a rank stay there.
    assert all(len(shape) == 3 and shape[0] > 1 for shape in stays)
    assert (stays == set()) == (layout.parallelism == DDP)
