"""What makes losses of different tokenizers comparable."""

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from runtime.distributed import sum_over
from runtime.labels import IGNORED


def bits_per_nat(
    labels: Iterable[torch.Tensor], byte_lengths: np.ndarray, batch_mesh: DeviceMesh
) -> float:
    """The factor from nats per token to bits per byte of text, for all ranks' ``labels`` (b, s).

    ``byte_lengths`` (n_vocab,): of each token's text; markers have none. A collective.
    """
    counts = np.zeros(2, np.int64)
    for part in labels:
        ids = part.numpy()
        ids = ids[ids != IGNORED]
        # Token files that were made elsewhere may have ids that stand for no token.
        counts += len(ids), byte_lengths[ids[ids < len(byte_lengths)]].sum()
    n_tokens, n_bytes = sum_over(torch.from_numpy(counts), batch_mesh).tolist()
    return n_tokens / max(n_bytes, 1) / math.log(2.0)
