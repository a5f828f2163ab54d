"""Host memory to which asynchronous saves copy tensors."""

from collections.abc import Sequence

import torch

# Bytes, unless one tensor needs more.
MAX_SLAB = 2**30
# Of offsets in a slab: a multiple of each dtype's size.
ALIGNMENT = 512


def allocate_like(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return uninitialized host tensors of the same shapes and dtypes; pinned for those of GPUs.

    PyTorch rounds every pinned allocation up to a power of two, at worst to twice its size, so
    tensors are parts of slabs that have such sizes: at most half of ``MAX_SLAB`` remains unused, or
    what no smaller tensor fills of a larger one's slab.
    """
    found: dict[int, torch.Tensor] = {}
    for is_cuda in (False, True):
        chosen = [i for i, tensor in enumerate(tensors) if tensor.is_cuda == is_cuda]
        sizes = {i: -(-tensors[i].nbytes // ALIGNMENT) * ALIGNMENT for i in chosen}
        left = sum(sizes.values())
        unused: list[torch.Tensor] = []
        for i in sorted(chosen, key=lambda i: -sizes[i]):
            fits = (n for n, part in enumerate(unused) if len(part) >= sizes[i])
            at = next(fits, len(unused))
            if at == len(unused):
                unused.append(_slab(max(sizes[i], min(left, MAX_SLAB)), is_pinned=is_cuda))
            own, unused[at] = unused[at][: tensors[i].nbytes], unused[at][sizes[i] :]
            found[i] = own.view(tensors[i].dtype).view(tensors[i].shape)
            left -= sizes[i]
    return [found[i] for i in range(len(tensors))]


def _slab(n_bytes: int, *, is_pinned: bool) -> torch.Tensor:
    """Allocate the next power of two of ``n_bytes``."""
    n_bytes = 1 << max(0, n_bytes - 1).bit_length()
    return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=is_pinned)
