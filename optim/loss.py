import torch
import torch.nn.functional as F

from runtime.distributed import local_part
from runtime.labels import IGNORED


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy in nats, summed over the labels that are not ``IGNORED``.

    logits (b, s, vocab_size), labels (b, s) int64. At least float32. The caller divides by the
    step's global count of valid labels, so that no degree of parallelism enters the scale. Logits
    that are sharded over the vocabulary stay so: call it, and backward, under ``loss_parallel``.
    """
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(
        precise.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return local_part(loss)
