"""Which kernel computes attention on a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)

from runtime.compat import is_installed
from runtime.kernel_check import check_kernel
from runtime.log import logger

# PyTorch's own order depends on its release and on cuDNN's.
ORDER = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# Compute capabilities, major, where cuDNN's comes first: nearly twice as fast as FlashAttention 2
# on Hopper and faster on B200, but slower on A100 and on Blackwells of workstations (12), level on
# L40S (huggingface/transformers#48163, pytorch/torchtitan#1196).
CUDNN_FIRST = (9, 10)
# Newer FlashAttentions: the package of each, and the GPUs (compute capability) that it is for.
FLASHES = {"FA4": ("flash_attn.cute", (10, 0)), "FA3": ("flash_attn_interface", (9, 0))}

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""q (b, h, s, k), k and v (b, h_kv, s, k) to (b, h, s, k)."""


@contextmanager
def attention_order(*, heads: tuple[int, int], head_dim: int) -> Iterator[None]:
    """Inside, each attention on a GPU takes the first kernel of ``ORDER`` that can compute it.
    FlashAttention 3 or 4 comes before all of them where it is installed and computes right with
    ``heads`` of queries and of keys."""
    if not torch.cuda.is_available():
        yield
        return
    flash = activate_newest_flash(heads=heads, head_dim=head_dim)
    order = kernel_order(torch.cuda.get_device_capability()[0], has_newer_flash=bool(flash))
    names = ", ".join(backend.name.removesuffix("_ATTENTION").lower() for backend in order)
    logger.info("attention: the first that can of %s%s", names, flash and f"; flash is {flash}")
    with sdpa_kernel(order, set_priority=True):
        yield


def kernel_order(major: int, *, has_newer_flash: bool) -> list[SDPBackend]:
    """``ORDER``, as it is best on a GPU of this compute capability."""
    is_cudnn_first = major in CUDNN_FIRST and not has_newer_flash
    first = SDPBackend.CUDNN_ATTENTION if is_cudnn_first else SDPBackend.FLASH_ATTENTION
    return sorted(ORDER, key=lambda backend: backend != first)


def activate_newest_flash(*, heads: tuple[int, int], head_dim: int) -> str:
    """Have PyTorch's flash attention be the newest that is installed for this GPU, if it computes
    what plain attention does. Return its name, "" if there is none."""
    for name, (package, capability) in FLASHES.items():
        if torch.cuda.get_device_capability() != capability or not is_installed(package):
            continue
        is_active = False
        try:
            activate_flash_attention_impl(name)
            is_active = True
            check_attention(_flash, plain_attention, heads=heads, head_dim=head_dim, device="cuda")
        # Others built it, for some release of PyTorch: whatever it raises, train without it.
        except Exception as error:
            if is_active:
                restore_flash_attention_impl()
            logger.warning("attention: not with %s: %s", name, error)
        else:
            return name
    return ""


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return plain_attention(q, k, v)


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def check_attention(
    fast: Attend, exact: Attend, *, heads: tuple[int, int], head_dim: int, device: str
) -> None:
    """Raise ``ArithmeticError`` unless ``fast`` in bfloat16 is ``exact`` in float64, gradients too,
    as ``check_kernel`` says, for ``heads`` of queries and of keys."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(2, h, 384, head_dim) for h in (heads[0], heads[1], heads[1])]
    drawn = [torch.randn(shape, generator=generator, device=device) for shape in shapes]
    check_kernel(fast, exact, drawn)
