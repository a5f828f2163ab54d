"""Bits per byte: a loss that is comparable across tokenizers."""

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from runtime.distributed import sum_over
from runtime.labels import IGNORE_INDEX


def bits_per_nat(
    labels: Iterable[torch.Tensor], byte_lengths: np.ndarray, batch_mesh: DeviceMesh
) -> float:
    """Return the factor from nats per token to bits per byte, over all ranks' labels. Collective.

    ``labels``: (b, s) int64 per microbatch. ``byte_lengths`` (n_vocab,): UTF-8 bytes of each
    token's text; 0 for special tokens.
    """
    counts = np.zeros(2, np.int64)
    for microbatch_labels in labels:
        ids = microbatch_labels.numpy()
        ids = ids[ids != IGNORE_INDEX]
        # Token files made by other tools may have ids outside the vocabulary.
        counts += len(ids), byte_lengths[ids[ids < len(byte_lengths)]].sum()
    n_tokens, n_bytes = sum_over(torch.from_numpy(counts), batch_mesh).tolist()
    return n_tokens / max(n_bytes, 1) / math.log(2.0)
