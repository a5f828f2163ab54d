"""SDPA backend priority on GPUs, and FlashAttention 3 or 4."""

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

from kernels.kernel_check import assert_kernel_matches, problem_on_any_rank
from runtime.compat import is_installed
from runtime.log import logger

# PyTorch's default order depends on its release and on cuDNN's.
PRIORITY = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# Major compute capabilities where cuDNN comes first. It is nearly twice as fast as FlashAttention 2
# on Hopper and faster on B200. It is slower on A100 and workstation Blackwell (12), equal on L40S
# (huggingface/transformers#48163, pytorch/torchtitan#1196).
CUDNN_FIRST = (9, 10)
# Newer FlashAttentions: package, and the compute capability that it supports.
FLASH_PACKAGES = {"FA4": ("flash_attn.cute", (10, 0)), "FA3": ("flash_attn_interface", (9, 0))}

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""q (b, h, s, k), k and v (b, h_kv, s, k) to (b, h, s, k)."""


@contextmanager
def sdpa_backend_priority(*, heads: tuple[int, int], head_dim: int) -> Iterator[None]:
    """Context in which SDPA on GPUs uses the first backend of the priority order that supports it.

    FlashAttention 3 or 4 comes first if installed and correct. ``heads``: numbers of query and of
    key heads.
    """
    if not torch.cuda.is_available():
        yield
        return
    flash = activate_newest_flash(heads=heads, head_dim=head_dim)
    order = backend_priority(torch.cuda.get_device_capability()[0], has_newer_flash=bool(flash))
    names = " > ".join(backend.name.removesuffix("_ATTENTION").lower() for backend in order)
    logger.info("SDPA backend priority: %s%s", names, flash and f"; flash = {flash}")
    with sdpa_kernel(order, set_priority=True):
        yield


def backend_priority(major: int, *, has_newer_flash: bool) -> list[SDPBackend]:
    """Return ``PRIORITY`` in the fastest order for a GPU of major compute capability ``major``."""
    is_cudnn_first = major in CUDNN_FIRST and not has_newer_flash
    first = SDPBackend.CUDNN_ATTENTION if is_cudnn_first else SDPBackend.FLASH_ATTENTION
    return sorted(PRIORITY, key=lambda backend: backend != first)


def activate_newest_flash(*, heads: tuple[int, int], head_dim: int) -> str:
    """Activate the newest FlashAttention that is installed for this GPU and passes a check.

    Mutates PyTorch's flash backend. Returns the name of the implementation, or "". Collective.
    """
    for name, (package, capability) in FLASH_PACKAGES.items():
        if _activate(name, package, capability, heads=heads, head_dim=head_dim):
            return name
    return ""


def _activate(
    name: str, package: str, capability: tuple[int, int], *, heads: tuple[int, int], head_dim: int
) -> bool:
    """Activate the implementation on all ranks or on none. Collective."""
    is_installed_here = is_active = False

    # Other ranks may have other GPUs and packages, so all ask, whatever this one has.
    def activate_and_check() -> None:
        nonlocal is_installed_here, is_active
        if torch.cuda.get_device_capability() != capability or not is_installed(package):
            raise RuntimeError("not installed, or not for this GPU")
        is_installed_here = True
        activate_flash_attention_impl(name)
        is_active = True
        check_attention(_flash, plain_attention, heads=heads, head_dim=head_dim, device="cuda")

    problem = problem_on_any_rank(activate_and_check)
    if problem and is_active:
        restore_flash_attention_impl()
    if problem and is_installed_here:
        logger.warning("SDPA: %s disabled: %s", name, problem)
    return not problem


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return plain_attention(q, k, v)


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal SDPA of q (b, h, s, k), k and v (b, h_kv, s, k)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def check_attention(
    candidate: Attend, reference: Attend, *, heads: tuple[int, int], head_dim: int, device: str
) -> None:
    """Raise ``ArithmeticError`` unless ``candidate`` matches ``reference`` with these heads.

    See ``assert_kernel_matches``. ``heads``: numbers of query and of key heads.
    """
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(2, h, 384, head_dim) for h in (heads[0], heads[1], heads[1])]
    inputs = [torch.randn(shape, generator=generator, device=device) for shape in shapes]
    assert_kernel_matches(candidate, reference, inputs)
