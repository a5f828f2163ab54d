import pytest
import torch
import torch.nn.functional as F

from optim import loss
from optim.loss import IGNORED, cross_entropy_sum


@pytest.fixture(params=[1 << 24, 50, 1], ids=["whole", "chunks", "rows"])
def batch(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, torch.Tensor]:
    monkeypatch.setattr(loss, "CHUNK", request.param)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, 11, generator=generator, dtype=torch.float64)
    labels = torch.randint(11, (3, 7), generator=generator)
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


def test_loss_and_gradient_are_pytorchs(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, labels = batch
    want, gradient = reference(logits, labels)
    own = logits.clone().requires_grad_()
    found = cross_entropy_sum(own * 1, labels)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, want, rtol=1e-14, atol=0)
    (found * 3).backward()
    assert own.grad is not None
    torch.testing.assert_close(own.grad, 3 * gradient, rtol=1e-13, atol=1e-15)
    assert torch.equal(own.grad.abs().sum(-1) > 0, labels != IGNORED)


def test_logits_far_apart_do_not_overflow(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, labels = batch[0] * 1e3, batch[1]
    want, gradient = reference(logits, labels)
    own = logits.clone().requires_grad_()
    found = cross_entropy_sum(own * 1, labels)
    found.backward()
    torch.testing.assert_close(found, want, rtol=1e-14, atol=0)
    torch.testing.assert_close(own.grad, gradient, rtol=1e-13, atol=1e-15)


def test_microbatches_add_up(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, labels = batch
    parts = [cross_entropy_sum(logits[row : row + 1], labels[row : row + 1]) for row in range(3)]
    torch.testing.assert_close(sum(parts), cross_entropy_sum(logits, labels), rtol=1e-14, atol=0)
    assert parts[2] == 0, "no valid label is no loss, not 0 / 0"


def test_bfloat16_is_rounded_once(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, labels = batch[0].bfloat16(), batch[1]
    want, gradient = reference(logits, labels)
    own = logits.clone().requires_grad_()
    found = cross_entropy_sum(own * 1, labels, 4)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, want / 4, rtol=1e-6, atol=0)
    found.backward()
    assert own.grad is not None
    # A float32 apart, it may be rounded to the other side.
    close = own.grad.float(), gradient / 4
    torch.testing.assert_close(*close, rtol=2**-8, atol=1e-6)
    assert (own.grad == (gradient / 4).bfloat16()).float().mean() > 0.99


def test_gradients_are_where_logits_were(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """So that nothing of the size of logits is kept beside them."""
    logits, labels = batch
    own = logits.clone().requires_grad_()
    scores = own * 1
    cross_entropy_sum(scores, labels).backward()
    assert own.grad is not None
    assert torch.equal(scores.detach(), own.grad)
    with torch.no_grad():
        scores = logits.clone()
        cross_entropy_sum(scores, labels)
    assert torch.equal(scores, logits), "nobody asked for a gradient"
