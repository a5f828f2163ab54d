"""SimpleFSDP (arXiv 2411.00284): weights made whole by DTensor operations that autograd reverses.

The redistribution in forward is an all-gather, its derivative a reduce-scatter. There is nothing
else, so a compiler sees all of it in a block's graph and may bucket and overlap it.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from parallelisms.fsdp import shard_placement
from parallelisms.weights_in_forward import apply_weights_in_forward
from runtime.compat import find
from runtime.distributed import local_part
from runtime.log import logger


def apply_simple_fsdp(
    model: nn.Module,
    fsdp_mesh: DeviceMesh,
    *,
    weight_mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
) -> None:
    """Shard over the last dim of ``fsdp_mesh``, replicate over the one before it if there is one.

    Mutates ``model``: parameters become DTensors with FSDP2's placements and unchanged names, on
    dims of ``weight_mesh``. In a module's forward, and only there, they read as whole weights.
    """
    makers: dict[nn.Parameter, _Gather] = {}
    shared: dict[nn.Parameter, nn.Parameter] = {}
    for fqn, parameter in list(model.named_parameters(remove_duplicate=False)):
        if parameter not in shared:
            shard = shard_placement(parameter, fsdp_mesh.size(-1))
            shared[parameter] = _shard_of(parameter, shard, fsdp_mesh, weight_mesh)
            makers[shared[parameter]] = _Gather(_dims(fsdp_mesh), shard, parameter, mp_policy)
        path, _, name = fqn.rpartition(".")
        model.get_submodule(path).register_parameter(name, shared[parameter])
    apply_weights_in_forward(model, makers)
    sizes = " x ".join(str(size) for size in fsdp_mesh.shape)
    logger.info(
        "simple_fsdp: %d parameters on a mesh of %s, compute in %s, reduction in %s",
        len(makers), sizes, mp_policy.param_dtype, mp_policy.reduce_dtype,
    )  # fmt: skip


@dataclass(frozen=True)
class _Gather:
    """What makes a sharded parameter whole."""

    meshes: list[DeviceMesh]
    """1-D: replicas if there are any, then shards."""
    shard: Shard
    template: nn.Parameter
    """What it is when whole, on the meta device: under tensor parallel a DTensor."""
    mp_policy: MixedPrecisionPolicy

    def __call__(self, parameter: torch.Tensor) -> torch.Tensor:
        """The whole weight in the compute dtype; its gradient is summed in the reduction dtype."""
        assert isinstance(parameter, DTensor)
        part = local_part(self.template)
        *replicate_meshes, shard_mesh = self.meshes
        local = parameter.to_local()
        # Replicas first: in forward nothing travels, and in backward, last, they exchange shards.
        for mesh in replicate_meshes:
            copy = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
            local = self._gathered_over(copy, forward_dtype=None)
        shard = DTensor.from_local(
            local, shard_mesh, [self.shard], run_check=False, shape=part.shape, stride=part.stride()
        )
        local = self._gathered_over(shard, forward_dtype=self.mp_policy.param_dtype)
        if not isinstance(self.template, DTensor):
            return local
        return DTensor.from_local(
            local,
            self.template.device_mesh,
            self.template.placements,
            run_check=False,
            shape=self.template.shape,
            stride=self.template.stride(),
        )

    def _gathered_over(self, tensor: DTensor, forward_dtype: torch.dtype | None) -> torch.Tensor:
        """Gathered over a 1-D mesh in forward, its gradient reduced over it in backward."""
        whole = tensor.redistribute(
            placements=[Replicate()],
            forward_dtype=forward_dtype,
            backward_dtype=self.mp_policy.reduce_dtype,
        )
        return whole.to_local(grad_placements=[Partial()])


def _shard_of(
    parameter: nn.Parameter, shard: Shard, fsdp_mesh: DeviceMesh, weight_mesh: DeviceMesh
) -> nn.Parameter:
    """What this rank keeps of a parameter that every data-parallel rank holds whole."""
    whole = parameter.detach()
    part = local_part(whole)
    *replicate_meshes, shard_mesh = _dims(fsdp_mesh)
    local = distribute_tensor(part, shard_mesh, [shard], src_data_rank=None).to_local()
    mesh, own, others = fsdp_mesh, cast(Placement, shard), list[Placement]()
    if isinstance(whole, DTensor):
        mesh = weight_mesh[(*_names(fsdp_mesh), *_names(whole.device_mesh))]
        others = list(whole.placements)
        if shard in others:
            # Tensor parallel cut this dim first, though its mesh dim comes last.
            strided = find("torch.distributed.tensor.placement_types:_StridedShard")
            own = strided(shard.dim, split_factor=whole.device_mesh.size())
    placements = [*(Replicate() for _ in replicate_meshes), own, *others]
    sharded = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    assert mesh.mesh_dim_names is not None
    return mesh.mesh_dim_names


def _dims(mesh: DeviceMesh) -> list[DeviceMesh]:
    return [mesh[name] for name in _names(mesh)]
