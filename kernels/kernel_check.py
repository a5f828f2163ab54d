"""Numerics check of a kernel against a float64 reference, on the devices where it runs."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from runtime.object_collectives import all_gather_object

# Max error of bfloat16 results over the largest element: a few units of 2^-8. A kernel that masks
# one position wrongly has a far larger error.
MAX_ERROR = 2**-5

Kernel = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]


def problem_on_any_rank(check: Callable[[], None]) -> str:
    """Return the error of ``check``; if only some ranks have one, the first of them and its rank.

    "" if it raises on none. A rank with another kernel would round differently, and all would wait
    for it. Collective if there is a process group, so every rank must call it, whatever it has.
    """
    problem = ""
    try:
        check()
    # Compilers and builds for other GPUs or another PyTorch raise many types of errors.
    except Exception as error:
        problem = str(error) or type(error).__name__
    if not dist.is_initialized():
        return problem
    problems = all_gather_object(problem)
    if all(problems) or not any(problems):
        return problem
    return next(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text)


def assert_kernel_matches(candidate: Kernel, reference: Kernel, inputs: list[torch.Tensor]) -> None:
    """Raise ``ArithmeticError`` unless ``candidate`` matches ``reference`` to ``MAX_ERROR``.

    Compares outputs and gradients for ``inputs``: bfloat16 against float64.
    """
    results = []
    for compute, dtype in ((candidate, torch.bfloat16), (reference, torch.float64)):
        leaves = [t.bfloat16().to(dtype).requires_grad_() for t in inputs]
        out = compute(*leaves)
        outs = (out,) if isinstance(out, torch.Tensor) else out
        gradients = [each.detach().clone() for each in outs]
        # The allocator may reuse this memory for gradients. Elements that a kernel does not write
        # are then NaN; in new memory they would be 0.
        for leaf in leaves:
            torch.full_like(leaf, torch.nan)
        results.append([*outs, *torch.autograd.grad(outs, leaves, gradients)])
    pairs = zip(*results, strict=True)
    error = torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs]).max()
    if error.is_cuda:
        # The caching allocator keeps the memory of the check otherwise.
        torch.cuda.empty_cache()
    # ``not <=`` instead of ``>``, so that NaN fails too.
    if not error <= MAX_ERROR:
        raise ArithmeticError(f"max error is {error:.0e} of the largest element")
