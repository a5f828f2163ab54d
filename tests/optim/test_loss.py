import pytest
import torch
import torch.nn.functional as F

from optim.loss import IGNORED, cross_entropy_sum


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, 11, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(11, (3, 7), generator=generator)
    labels[0, 2:] = IGNORED
    labels[2] = IGNORED
    return logits, labels


def test_loss_is_the_sum_over_valid_labels(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, labels = batch
    log_probabilities = logits.log_softmax(-1)
    want = -sum(
        log_probabilities[row, place, label]
        for row, place in (labels != IGNORED).nonzero().tolist()
        for label in [labels[row, place]]
    )
    loss = cross_entropy_sum(logits, labels)
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, want, rtol=1e-14, atol=0)
    loss.backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad.abs().sum(-1) > 0, labels != IGNORED)


def test_microbatches_add_up(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, labels = batch
    parts = [cross_entropy_sum(logits[row : row + 1], labels[row : row + 1]) for row in range(3)]
    torch.testing.assert_close(sum(parts), cross_entropy_sum(logits, labels), rtol=1e-14, atol=0)
    assert parts[2] == 0, "no valid label is no loss, not 0 / 0"


def test_bfloat16_logits_are_summed_in_float32(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, labels = batch[0].detach().bfloat16(), batch[1]
    loss = cross_entropy_sum(logits, labels)
    assert loss.dtype == torch.float32
    want = F.cross_entropy(logits.double().flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=0)
