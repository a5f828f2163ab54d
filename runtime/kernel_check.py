"""Whether a kernel computes what it should: tried on the device where it is to run."""

from collections.abc import Callable

import torch

# The largest error of a kernel's results in bfloat16, over the largest element: a few of its last
# bits, each 2^-8. A kernel that takes one position too many or too few is off by far more.
MOST_ERROR = 2**-5

Kernel = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]


def check_kernel(fast: Kernel, exact: Kernel, drawn: list[torch.Tensor]) -> None:
    """Raise ``ArithmeticError`` unless ``fast`` in bfloat16 has the outputs and gradients of
    ``exact`` in float64, for the inputs ``drawn``, to ``MOST_ERROR``."""
    results = []
    for compute, dtype in ((fast, torch.bfloat16), (exact, torch.float64)):
        inputs = [t.bfloat16().to(dtype).requires_grad_() for t in drawn]
        out = compute(*inputs)
        outs = (out,) if isinstance(out, torch.Tensor) else out
        gradients = [each.detach().clone() for each in outs]
        # PyTorch's allocator may give this memory to the gradients: what a kernel leaves unwritten
        # then shows as NaN, where new memory would be 0.
        for given in inputs:
            torch.full_like(given, torch.nan)
        results.append([*outs, *torch.autograd.grad(outs, inputs, gradients)])
    pairs = zip(*results, strict=True)
    error = torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs]).max()
    if error.is_cuda:
        # The check took memory that the allocator does not give back by itself.
        torch.cuda.empty_cache()
    # Not ``>``, so that NaN fails too.
    if not error <= MOST_ERROR:
        raise ArithmeticError(f"its results are off by {error:.0e} of the largest")
