"""Whether a kernel computes what it should: tried on the device where it is to run."""

from collections.abc import Callable

import torch

# Of a kernel's results in bfloat16 the largest error over the largest element: a few of its last
# bits, each 2^-8. One position too many or too few is worth far more.
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
        # Gradients get this memory, if PyTorch's allocator has it: what a kernel leaves unwritten
        # there is seen, where new memory is 0.
        for given in inputs:
            torch.full_like(given, torch.nan)
        results.append([*outs, *torch.autograd.grad(outs, inputs, gradients)])
    pairs = zip(*results, strict=True)
    error = torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs]).max()
    if error.is_cuda:
        # It took more than it gives back by itself.
        torch.cuda.empty_cache()
    # What is not a number is no small error.
    if not error <= MOST_ERROR:
        raise ArithmeticError(f"its results are off by {error:.0e} of the largest")
