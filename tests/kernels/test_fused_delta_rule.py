"""flash-linear-attention is used where it is installed and passes the check.

Its kernels need a GPU; on CPUs a fake kernel replaces them.
"""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.library import opcheck

from config.job_config import ActivationCheckpoint
from kernels import fused_delta_rule as module
from kernels.delta_rule import CHUNK, delta_rule
from kernels.fused_delta_rule import (
    FusedDeltaRule,
    _rule,
    apply_fused_delta_rule,
    check_fused_delta_rule,
)
from models.gated_delta_net import GatedDeltaNet
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from runtime.compat import is_installed

DIMS = {"n_key_heads": 2, "n_value_heads": 4, "key_dim": 16, "value_dim": 24, "conv_size": 4}
CALLS: list[bool] = []


class Chunks(torch.autograd.Function):
    """Autograd function around the whole kernel, as in the package."""

    @staticmethod
    def forward(ctx: Any, rule: Callable, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        CALLS.append(True)
        ctx.rule = rule
        ctx.save_for_backward(*inputs)
        return rule(*inputs)

    @staticmethod
    def backward(ctx: Any, *grad_results: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        def compute() -> tuple[torch.Tensor, ...]:
            inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            with torch.enable_grad():
                results = ctx.rule(*inputs)
            return torch.autograd.grad(results, inputs, grad_results)

        # Inside a custom op, autograd is disabled on this thread.
        with ThreadPoolExecutor(1) as pool:
            return None, *pool.submit(compute).result()


def kernel_of(rule: Callable) -> Callable:
    def chunk_gated_delta_rule(
        *inputs: torch.Tensor, output_final_state: bool, use_qk_l2norm_in_kernel: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert output_final_state
        assert use_qk_l2norm_in_kernel
        return cast(Any, Chunks.apply(rule, *inputs))

    return chunk_gated_delta_rule


CORRECT_KERNEL = kernel_of(partial(delta_rule, document_ids=None))


@contextmanager
def fake_fla(kernel: Callable = CORRECT_KERNEL) -> Iterator[None]:
    names = ["fla", "fla.ops", "fla.ops.gated_delta_rule"]
    modules = {name: ModuleType(name) for name in names}
    cast(Any, modules[names[-1]]).chunk_gated_delta_rule = kernel
    on_cpu = lambda *args, **kwargs: check_fused_delta_rule(*args, **kwargs | {"device": "cpu"})  # noqa: E731
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, fake in modules.items():
            monkeypatch.setitem(sys.modules, name, fake)
        monkeypatch.setattr(module, "is_installed", lambda package: package == "fla")
        monkeypatch.setattr(module, "check_fused_delta_rule", on_cpu)
        yield


def delta_net() -> GatedDeltaNet:
    torch.manual_seed(0)
    net = GatedDeltaNet(dim=32, norm_eps=1e-6, **DIMS)
    with torch.no_grad():
        net.init_weights(nn.init.trunc_normal_, residual_std=0.02)
    return net.bfloat16()


def random_inputs(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 100, 3, *last) for last in ((8,), (8,), (12,), (), ())]
    q, k, v, decay, beta = (torch.randn(shape, generator=generator) for shape in shapes)
    inputs = [q.to(dtype), k.to(dtype), v.to(dtype), -F.softplus(decay), beta.sigmoid().to(dtype)]
    return [t.requires_grad_() for t in inputs]


def test_installed_package_is_used(caplog: pytest.LogCaptureFixture) -> None:
    nets, sizes = [delta_net(), delta_net()], set()

    def rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *gates: torch.Tensor) -> Any:
        sizes.add((*q.shape[2:], *k.shape[2:], *v.shape[2:]))
        return delta_rule(q, k, v, *gates, None)

    with fake_fla(kernel_of(rule)), caplog.at_level("INFO", "shardloom"):
        apply_fused_delta_rule([*nets], dtype=torch.bfloat16, n_ranks=2)
    assert sizes == {(2, 16, 2, 16, 2, 24)}, "the check uses other heads"
    assert all(isinstance(net.inner.rule, FusedDeltaRule) for net in nets)
    assert "flash-linear-attention: delta rule of 2 layers" in caplog.text


def is_unchanged(rule: Callable, **settings: Any) -> bool:
    net = delta_net()
    apply_fused_delta_rule([net], **{"dtype": torch.bfloat16, "n_ranks": 1} | settings)
    return net.inner.rule is rule


def test_fla_kernel_only_for_bf16_nondeterministic(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert is_unchanged(delta_rule, dtype=torch.float32)
    assert not caplog.text
    assert is_unchanged(delta_rule)
    assert "disabled, 1 layers are slower: it is not installed (fla-core)" in caplog.text
    with fake_fla():
        assert not is_unchanged(delta_rule)
        assert is_unchanged(delta_rule, dtype=torch.float32)
        assert is_unchanged(delta_rule, dtype=None)
        with patch.object(torch, "are_deterministic_algorithms_enabled", return_value=True):
            assert is_unchanged(delta_rule)
        # Delta nets of other families need not have a rule.
        other = nn.Module()
        other.inner = nn.Identity()
        apply_fused_delta_rule([other], dtype=torch.bfloat16, n_ranks=1)


def kernel_with(index: int, change: Callable) -> Callable:
    def rule(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return delta_rule(*[change(t) if i == index else t for i, t in enumerate(inputs)], None)

    return kernel_of(rule)


Results = tuple[torch.Tensor, torch.Tensor]


def two_chunk_memory(*inputs: torch.Tensor) -> Results:
    """Forget all before the previous chunk."""
    outs = []
    for start in range(0, inputs[0].shape[1], CHUNK):
        part = [t[:, max(0, start - CHUNK) : start + CHUNK] for t in inputs]
        own = min(start, CHUNK)
        outs.append(delta_rule(*part, None)[0][:, own:])
    return torch.cat(outs, dim=1), delta_rule(*inputs, None)[1]


def full_chunks_only(*inputs: torch.Tensor) -> Results:
    out, state = delta_rule(*inputs, None)
    size = out.shape[1] // CHUNK * CHUNK
    return F.pad(out[:, :size], (0, 0, 0, 0, 0, out.shape[1] - size)), state


def no_last_state(*inputs: torch.Tensor) -> Results:
    out, state = delta_rule(*inputs, None)
    return out, state * 0


def no_gradients(*inputs: torch.Tensor, **options: bool) -> Any:
    return delta_rule(*inputs, None)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (kernel_with(0, lambda q: q.roll(1, dims=1)), "max error"),
        (kernel_with(3, lambda decay: decay * 1.2), "max error"),
        (kernel_with(3, lambda decay: decay.where(decay > -20, -2)), "max error"),
        (kernel_with(4, lambda beta: beta * torch.nan), "max error is nan"),
        (kernel_of(two_chunk_memory), "max error"),
        (kernel_of(full_chunks_only), "max error"),
        (kernel_of(no_last_state), "max error"),
        (no_gradients, "does not require grad"),
        (lambda *inputs: None, "unexpected keyword"),
    ],
    ids=[
        "positions",
        "decay",
        "documents",
        "nan",
        "long memory",
        "last chunk",
        "last state",
        "no gradients",
        "another release",
    ],
)
def test_failing_kernel_is_logged_and_not_used(
    kernel: Callable, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with fake_fla(kernel):
        assert is_unchanged(delta_rule)
    assert "flash-linear-attention disabled, " in caplog.text
    assert message in caplog.text


def test_states_and_other_dtypes_use_the_plain_rule() -> None:
    rule, ids = FusedDeltaRule(delta_rule), torch.arange(100).expand(2, -1) // 40
    CALLS.clear()
    with fake_fla():
        for inputs, state in (
            (random_inputs(torch.float32), None),
            (random_inputs(), torch.randn(2, 3, 8, 12)),
        ):
            for got, want in zip(
                rule(*inputs, ids, state), delta_rule(*inputs, ids, state), strict=True
            ):
                assert torch.equal(got, want)
        assert not CALLS


def results(rule: Callable, ids: torch.Tensor | None) -> list[torch.Tensor]:
    out, state = rule(*(inputs := random_inputs()), ids)
    total = out.float().square().sum() + state.square().sum()
    return [out, state, *torch.autograd.grad(total, inputs)]


def test_results_match_the_plain_rule() -> None:
    ids = torch.arange(100).expand(2, -1) // 40
    CALLS.clear()
    for document_ids in (ids, None):
        with fake_fla():
            found = results(FusedDeltaRule(delta_rule), document_ids)
        assert CALLS.pop()
        for got, want in zip(found, results(delta_rule, document_ids), strict=True):
            assert got.dtype == want.dtype
            assert (got - want).abs().max() <= 2**-8 * want.abs().max()


def test_documents_are_independent() -> None:
    """Documents do not leak into the next; many in one chunk cost no precision."""
    q, k, v, decay, beta = (t.detach() for t in random_inputs())
    v[:, :50] *= 1e4
    document_ids = torch.tensor([0] * 50 + [1 + i // 2 for i in range(50)]).expand(2, -1)
    with fake_fla():
        got, _ = FusedDeltaRule(delta_rule)(q, k, v, decay, beta, document_ids)
    want, _ = delta_rule(q, k, v, decay, beta, document_ids)
    quiet = slice(50, None)
    assert (got - want)[:, quiet].abs().max() <= 2**-7 * want[:, quiet].abs().max()


def test_document_ids_may_include_earlier_positions() -> None:
    ids = torch.tensor([0] * 70 + [1] * 70).expand(2, -1)
    with fake_fla():
        got = FusedDeltaRule(delta_rule)(*random_inputs(), ids)[0]
    assert torch.allclose(got, delta_rule(*random_inputs(), ids)[0], atol=2**-8)


def test_custom_op_passes_opcheck() -> None:
    with fake_fla():
        opcheck(_rule, random_inputs())


def gradients(net: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 70, 32, generator=generator).bfloat16().requires_grad_()
    ids = torch.arange(70).expand(2, -1) // 30
    out = net(x, torch.empty(0), ids)
    return [out, *torch.autograd.grad(out.float().square().sum(), x)]


def test_compiled_block_uses_the_kernel() -> None:
    net = delta_net()
    with fake_fla():
        apply_fused_delta_rule([net], dtype=torch.bfloat16, n_ranks=1)
        eager = gradients(net)
        CALLS.clear()
        compiled = gradients(torch.compile(net, fullgraph=True, backend="aot_eager"))
    assert CALLS
    for got, want in zip(compiled, eager, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(("mode", "n_calls"), [("full", 3), ("selective", 2)])
def test_selective_checkpointing_saves_the_kernel(mode: str, n_calls: int) -> None:
    blocks = nn.ModuleDict({"0": delta_net()})
    config = ActivationCheckpoint(mode=mode, selective="op")
    apply_activation_checkpoint(
        blocks, config=config, regions=(), frees_weights=False, is_random=False
    )
    with fake_fla():
        cast(Any, blocks["0"]).inner.rule = FusedDeltaRule(delta_rule)
        CALLS.clear()
        gradients(blocks["0"])
    assert len(CALLS) == n_calls


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(not is_installed("fla"), reason="needs flash-linear-attention")
@pytest.mark.parametrize("heads", [(4, 64, 64), (32, 128, 128), (2, 64, 128)])
def test_package_kernels_pass_the_check(heads: tuple[int, int, int]) -> None:
    check_fused_delta_rule(FusedDeltaRule(delta_rule), *heads, device="cuda")
