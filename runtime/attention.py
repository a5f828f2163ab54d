"""Which kernel computes attention on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from runtime.log import logger

# On Hopper cuDNN's is nearly twice as fast as FlashAttention 2; PyTorch's own order depends on its
# release and on cuDNN's.
ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@contextmanager
def attention_order() -> Iterator[None]:
    """Inside, each attention on a GPU takes the first kernel of ``ORDER`` that can compute it."""
    if not torch.cuda.is_available():
        yield
        return
    names = ", ".join(backend.name.removesuffix("_ATTENTION").lower() for backend in ORDER)
    logger.info("attention: the first that can of %s", names)
    with sdpa_kernel(ORDER, set_priority=True):
        yield
