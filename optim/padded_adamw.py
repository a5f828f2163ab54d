"""AdamW whose result does not depend on where shards end."""

from itertools import chain

import torch
import torch.nn.functional as F

from runtime.distributed import local_part

# No vector register of a CPU we know is wider.
VECTOR_BYTES = 64


class PaddedAdamW(torch.optim.AdamW):
    """Fused AdamW that updates every element in whole vectors.

    On a CPU PyTorch's kernel rounds the last elements, which do not fill a vector, otherwise than
    the rest. Tensors that have such are updated in padded copies.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Mutates parameters and state; obeys ``found_inf`` as a fused optimizer does."""
        found_inf = getattr(self, "found_inf", None)
        for group in self.param_groups:
            # Parameters, gradients, first and second moments, what is not used, steps.
            lists: list[list[torch.Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *lists)
            *used, _, steps = lists
            local = [[local_part(tensor) for tensor in tensors] for tensors in used]
            padded = [[_pad(tensor) for tensor in tensors] for tensors in local]
            beta1, beta2 = group["betas"]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                padded[0],
                padded[1],
                padded[2],
                padded[3],
                [],
                steps,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                found_inf=found_inf,
            )
            if found_inf is not None:
                torch._foreach_sub_(steps, [found_inf] * len(steps))
            for tensor, copy in chain.from_iterable(map(zip, local, padded)):
                if copy is not tensor:
                    tensor.copy_(copy[: tensor.numel()].view_as(tensor))


def _pad(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself if it is whole vectors, else a flat copy that is."""
    missing = -tensor.numel() % (VECTOR_BYTES // tensor.element_size())
    return F.pad(tensor.flatten(), (0, missing)) if missing else tensor
