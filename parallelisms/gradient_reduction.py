"""How FSDP and DDP reduce gradients: always a sum, and when."""

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from config.job_config import Parallelism


def sum_gradients(model: nn.Module, *meshes: DeviceMesh) -> None:
    """Turn off the averaging in what ``fully_shard`` or ``replicate`` made of ``model``."""
    # A group of one averages nothing either, and a factor would cost a pass over the gradients.
    if all(mesh.size() == 1 for mesh in meshes):
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # A factor of 1 still asks for a scaled reduction, which gloo does not have.
            module.set_force_sum_reduction_for_comms(True)


def begin_microbatch(model: nn.Module, parallelism: Parallelism, *, is_last: bool) -> None:
    """Say, before a forward, what travels and what stays in the backward that follows it.

    The sum of a step's gradients is the same in any case. SimpleFSDP has no choice: autograd
    reduces in every backward.
    """
    if not isinstance(model, FSDPModule):
        return
    # Copies hold whole gradients anyway: waiting costs them nothing.
    waits = (
        parallelism.data_parallel == "ddp" or parallelism.fsdp_reduce_gradients == "last_microbatch"
    )
    model.set_requires_gradient_sync(is_last or not waits)
    # Replicas exchange only the step's sum of their shards.
    model.set_requires_all_reduce(is_last)
    if parallelism.fsdp_reshard_after_forward == "never":
        # Weights kept for a whole backward may as well be kept until they change.
        model.set_reshard_after_backward(is_last)
