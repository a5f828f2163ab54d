from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from config.job_config import Compile
from optim import loss
from optim.loss import IGNORED, cross_entropy_sum

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
    labels[0, 2:] = IGNORED
    labels[2] = IGNORED
    return logits, labels


def reference(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By PyTorch: the sum of the loss and the gradient of logits, at least in float32."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    leaf = logits.to(dtype, copy=True).requires_grad_()
    want = F.cross_entropy(leaf.flatten(0, 1), labels.flatten(), reduction="sum")
    want.backward()
    assert leaf.grad is not None
    return want.detach(), leaf.grad


def test_loss_and_gradient_are_pytorchs(loss_fn: LossFn, batch: Batch) -> None:
    logits, labels = batch
    want, gradient = reference(logits, labels)
    own = logits.clone().requires_grad_()
    found = loss_fn(own * 1, labels, 7)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, want / 7, rtol=1e-14, atol=0)
    (found * 3).backward()
    assert own.grad is not None
    torch.testing.assert_close(own.grad, gradient * 3 / 7, rtol=1e-13, atol=1e-15)
    assert torch.equal(own.grad.abs().sum(-1) > 0, labels != IGNORED)


def test_logits_far_apart_do_not_overflow(loss_fn: LossFn, batch: Batch) -> None:
    logits, labels = batch[0] * 1e3, batch[1]
    want, gradient = reference(logits, labels)
    own = logits.clone().requires_grad_()
    found = loss_fn(own * 1, labels)
    found.backward()
    torch.testing.assert_close(found, want, rtol=1e-14, atol=0)
    torch.testing.assert_close(own.grad, gradient, rtol=1e-13, atol=1e-15)


def test_microbatches_add_up(loss_fn: LossFn, batch: Batch) -> None:
    logits, labels = batch
    parts = [loss_fn(logits[row : row + 1], labels[row : row + 1]) for row in range(3)]
    torch.testing.assert_close(sum(parts), loss_fn(logits, labels), rtol=1e-14, atol=0)
    assert parts[2] == 0, "no valid label is no loss, not 0 / 0"


def test_bfloat16_is_rounded_once(loss_fn: LossFn, batch: Batch) -> None:
    logits, labels = batch[0].bfloat16(), batch[1]
    want, gradient = reference(logits, labels)
    own = logits.clone().requires_grad_()
    found = loss_fn(own * 1, labels, 4)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, want / 4, rtol=1e-6, atol=0)
    (found * 3).backward()
    assert own.grad is not None
    # A float32 apart, it may be rounded to the other side.
    close = own.grad.float(), gradient * 3 / 4
    torch.testing.assert_close(*close, rtol=2**-8, atol=1e-6)
    assert (own.grad == (gradient * 3 / 4).bfloat16()).float().mean() > 0.99


def test_gradients_are_where_logits_were(loss_fn: LossFn, batch: Batch) -> None:
    """So that nothing of the size of logits is kept beside them."""
    logits, labels = batch
    own = logits.clone().requires_grad_()
    scores = own * 1
    loss_fn(scores, labels).backward()
    assert own.grad is not None
    assert torch.equal(scores.detach(), own.grad)
    with torch.no_grad():
        scores = logits.clone()
        loss_fn(scores, labels)
    assert torch.equal(scores, logits), "nobody asked for a gradient"


def test_it_is_compiled_if_asked_to(batch: Batch) -> None:
    logits, labels = batch
    with patch.object(loss, "_compiled", wraps=loss._compiled) as compiled:
        cross_entropy_sum(logits.clone().requires_grad_() * 1, labels).backward()
        for config in (Compile(), Compile(enable=True, backend="aot_eager")):
            cross_entropy_sum(logits * 1, labels, compile=config)
        assert compiled.call_count == 0
        cross_entropy_sum(logits.clone().requires_grad_() * 1, labels, compile=INDUCTOR).backward()
        assert compiled.call_count == 2


def test_a_second_backward_is_refused(batch: Batch) -> None:
    """It would take the gradient for logits."""
    logits, labels = batch
    found = cross_entropy_sum(logits.requires_grad_() * 1, labels)
    found.backward(retain_graph=True)
    with pytest.raises(AttributeError):
        found.backward()


def test_another_ranks_label_takes_no_logit() -> None:
    """Nor makes a loss of nothing of one that is -inf."""
    logits = torch.zeros(1, 1, 4, dtype=torch.float64)
    logits[..., 0] = -torch.inf
    found = loss._CrossEntropySum.apply(logits, torch.tensor([[1]]), 1, None, 4, False)
    assert found == torch.tensor(3.0, dtype=torch.float64).log()
