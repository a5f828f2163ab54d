from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from config.job_config import Compile
from optim import loss
from optim.loss import IGNORE_INDEX, cross_entropy_sum
from tests.lib.parity import whole
from tests.lib.ranks import RankPool

INDUCTOR = Compile(enable=True)
Batch = tuple[torch.Tensor, torch.Tensor]
LossFn = Callable[..., torch.Tensor]


@pytest.fixture(params=[1 << 24, 50, 1, INDUCTOR], ids=["whole", "chunks", "rows", "compiled"])
def loss_fn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LossFn:
    if request.param is INDUCTOR:
        return partial(cross_entropy_sum, compile=INDUCTOR)
    monkeypatch.setattr(loss, "CPU_CHUNK", request.param)
    return cross_entropy_sum


@pytest.fixture
def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, 11, generator=generator, dtype=torch.float64)
    labels = torch.randint(11, (3, 7), generator=generator)
    labels[0, :2], labels[1, 0] = torch.tensor([0, 10]), 0
    labels[0, 2:] = IGNORE_INDEX
    labels[2] = IGNORE_INDEX
    return logits, labels


def reference(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's summed loss and gradient of the logits, at least float32."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    leaf = logits.to(dtype, copy=True).requires_grad_()
    want = F.cross_entropy(leaf.flatten(0, 1), labels.flatten(), reduction="sum")
    want.backward()
    assert leaf.grad is not None
    return want.detach(), leaf.grad


def test_loss_and_gradient_equal_pytorch(loss_fn: LossFn, batch: Batch) -> None:
    logits, labels = batch
    want, gradient = reference(logits, labels)
    leaf = logits.clone().requires_grad_()
    found = loss_fn(leaf * 1, labels, 7)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, want / 7, rtol=1e-14, atol=0)
    (found * 3).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, gradient * 3 / 7, rtol=1e-13, atol=1e-15)
    assert torch.equal(leaf.grad.abs().sum(-1) > 0, labels != IGNORE_INDEX)


def test_large_logits_do_not_overflow(loss_fn: LossFn, batch: Batch) -> None:
    logits, labels = batch[0] * 1e3, batch[1]
    want, gradient = reference(logits, labels)
    leaf = logits.clone().requires_grad_()
    found = loss_fn(leaf * 1, labels)
    found.backward()
    torch.testing.assert_close(found, want, rtol=1e-14, atol=0)
    torch.testing.assert_close(leaf.grad, gradient, rtol=1e-13, atol=1e-15)


def test_microbatch_losses_sum_to_batch_loss(loss_fn: LossFn, batch: Batch) -> None:
    logits, labels = batch
    parts = [loss_fn(logits[row : row + 1], labels[row : row + 1]) for row in range(3)]
    torch.testing.assert_close(sum(parts), loss_fn(logits, labels), rtol=1e-14, atol=0)
    assert parts[2] == 0, "without valid labels the loss is 0, not 0 / 0"


def test_bfloat16_gradient_is_rounded_once(loss_fn: LossFn, batch: Batch) -> None:
    logits, labels = batch[0].bfloat16(), batch[1]
    want, gradient = reference(logits, labels)
    leaf = logits.clone().requires_grad_()
    found = loss_fn(leaf * 1, labels, 4)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, want / 4, rtol=1e-6, atol=0)
    (found * 3).backward()
    assert leaf.grad is not None
    # float32 errors may change the direction of rounding.
    close = leaf.grad.float(), gradient * 3 / 4
    torch.testing.assert_close(*close, rtol=2**-8, atol=1e-6)
    assert (leaf.grad == (gradient * 3 / 4).bfloat16()).float().mean() > 0.99


def test_gradient_overwrites_logits(loss_fn: LossFn, batch: Batch) -> None:
    """No other tensor of the logits' size is kept."""
    logits, labels = batch
    leaf = logits.clone().requires_grad_()
    scores = leaf * 1
    loss_fn(scores, labels).backward()
    assert leaf.grad is not None
    assert torch.equal(scores.detach(), leaf.grad)
    with torch.no_grad():
        scores = logits.clone()
        loss_fn(scores, labels)
    assert torch.equal(scores, logits), "no gradient was requested"


def test_compiled_only_with_inductor(batch: Batch) -> None:
    logits, labels = batch
    with patch.object(loss, "_compiled", wraps=loss._compiled) as compiled:
        cross_entropy_sum(logits.clone().requires_grad_() * 1, labels).backward()
        for config in (Compile(), Compile(enable=True, backend="aot_eager")):
            cross_entropy_sum(logits * 1, labels, compile=config)
        assert compiled.call_count == 0
        cross_entropy_sum(logits.clone().requires_grad_() * 1, labels, compile=INDUCTOR).backward()
        assert compiled.call_count == 2


def test_second_backward_raises(batch: Batch) -> None:
    """It would read the gradient as logits."""
    logits, labels = batch
    found = cross_entropy_sum(logits.requires_grad_() * 1, labels)
    found.backward(retain_graph=True)
    with pytest.raises(AttributeError):
        found.backward()


def test_label_of_another_rank_reads_no_local_logit() -> None:
    """A local logit of -inf must not make the loss nonfinite."""
    logits = torch.zeros(1, 1, 4, dtype=torch.float64)
    logits[..., 0] = -torch.inf
    found = loss._CrossEntropySum.apply(logits, torch.tensor([[1]]), 1, None, 4, False, [logits])
    assert found == torch.tensor(3.0, dtype=torch.float64).log()


class SavesResult(torch.autograd.Function):
    """An operation that keeps what it returns, as exp and a loss on the logits do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        found = x * 1
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (found,) = ctx.saved_tensors
        return gradients[0] + found


def check_loss_of_dtensors() -> tuple[list[str], bool]:
    """Errors of saved logits, plain and sharded; whether replicated logits have the same loss."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(8, (2, 3), generator=generator)
    leaves = [logits, *(distribute_tensor(logits, mesh, [p]) for p in (Shard(2), Replicate()))]
    errors = []
    for leaf in leaves:
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as info:
            cross_entropy_sum(SavesResult.apply(leaf.detach().requires_grad_()), labels).backward()
        errors.append(type(info.value).__name__)
    found = []
    for leaf in (leaf.detach().requires_grad_() for leaf in leaves):
        value = cross_entropy_sum(leaf * 1, labels)
        value.backward()
        assert leaf.grad is not None
        found.append((value, whole(leaf.grad)))
    pairs = [pair for other in found[1:] for pair in zip(found[0], other, strict=True)]
    same = all(torch.allclose(*pair) for pair in pairs)
    return errors, same


def test_logits_that_others_saved_are_refused(ranks: RankPool) -> None:
    """Their backward would read the gradient; also of DTensors, which do not notice the change."""
    assert ranks.run(check_loss_of_dtensors, 2) == [(["RuntimeError"] * 3, True)] * 2
