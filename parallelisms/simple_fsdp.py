"""SimpleFSDP (arXiv 2411.00284): FSDP by DTensor redistributions that autograd differentiates.

The redistribution is an all-gather in forward and a reduce-scatter in backward. There are no hooks
or streams, so a compiler sees the collectives in a block's graph and can bucket them. Inductor's
defaults do not reorder them to overlap with matmuls.
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
from parallelisms.parametrization import apply_parametrization
from runtime.compat import find
from runtime.dtensor import to_local
from runtime.log import logger


def apply_simple_fsdp(
    model: nn.Module,
    fsdp_mesh: DeviceMesh,
    *,
    weight_mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
) -> None:
    """Shard over the last dim of ``fsdp_mesh`` and replicate over the one before it, if any.

    Mutates ``model``: parameters become DTensors on dims of ``weight_mesh``, with the placements of
    FSDP2 and unchanged names. A module reads them unsharded during its forward only.
    """
    transforms: dict[nn.Parameter, _ReplicateParametrization] = {}
    sharded: dict[nn.Parameter, nn.Parameter] = {}
    for fqn, parameter in list(model.named_parameters(remove_duplicate=False)):
        if parameter not in sharded:
            shard = shard_placement(parameter, fsdp_mesh.size(-1))
            sharded[parameter] = _shard_parameter(parameter, shard, fsdp_mesh, weight_mesh)
            transforms[sharded[parameter]] = _ReplicateParametrization(
                _one_dim_meshes(fsdp_mesh), shard, parameter, mp_policy
            )
        path, _, name = fqn.rpartition(".")
        model.get_submodule(path).register_parameter(name, sharded[parameter])
    apply_parametrization(model, transforms)
    sizes = " x ".join(str(size) for size in fsdp_mesh.shape)
    logger.info(
        "simple_fsdp: %d parameters on a mesh of %s, param_dtype %s, reduce_dtype %s",
        len(transforms), sizes, mp_policy.param_dtype, mp_policy.reduce_dtype,
    )  # fmt: skip


@dataclass(frozen=True)
class _ReplicateParametrization:
    """Transform from a sharded parameter to the unsharded weight."""

    meshes: list[DeviceMesh]
    """1-D: that of the replicas, if any, then that of the shards."""
    shard: Shard
    template: nn.Parameter
    """The unsharded parameter on the meta device; with tensor parallel a DTensor."""
    mp_policy: MixedPrecisionPolicy

    def __call__(self, parameter: torch.Tensor) -> torch.Tensor:
        """All-gather the weight in ``param_dtype``; backward reduces its gradient. Collective."""
        assert isinstance(parameter, DTensor)
        full = to_local(self.template)
        *replicate_meshes, shard_mesh = self.meshes
        local = parameter.to_local()
        # Replicas first: their forward communicates nothing, and backward all-reduces only shards.
        for mesh in replicate_meshes:
            replica = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
            local = self._all_gather(replica, forward_dtype=None)
        shard = DTensor.from_local(
            local, shard_mesh, [self.shard], run_check=False, shape=full.shape, stride=full.stride()
        )
        local = self._all_gather(shard, forward_dtype=self.mp_policy.param_dtype)
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

    def _all_gather(self, tensor: DTensor, forward_dtype: torch.dtype | None) -> torch.Tensor:
        """All-gather ``tensor`` over its 1-D mesh; backward reduces the gradient over it."""
        unsharded = tensor.redistribute(
            placements=[Replicate()],
            forward_dtype=forward_dtype,
            backward_dtype=self.mp_policy.reduce_dtype,
        )
        return unsharded.to_local(grad_placements=[Partial()])


def _shard_parameter(
    parameter: nn.Parameter, shard: Shard, fsdp_mesh: DeviceMesh, weight_mesh: DeviceMesh
) -> nn.Parameter:
    """Return this rank's shard of a parameter that every data-parallel rank has unsharded."""
    unsharded = parameter.detach()
    tp_local = to_local(unsharded)
    *replicate_meshes, shard_mesh = _one_dim_meshes(fsdp_mesh)
    local = distribute_tensor(tp_local, shard_mesh, [shard], src_data_rank=None).to_local()
    mesh, placement, tp_placements = fsdp_mesh, cast(Placement, shard), list[Placement]()
    if isinstance(unsharded, DTensor):
        mesh = weight_mesh[(*_names(fsdp_mesh), *_names(unsharded.device_mesh))]
        tp_placements = list(unsharded.placements)
        if shard in tp_placements:
            # Tensor parallel shards this dim first, although its mesh dim comes last.
            strided = find("torch.distributed.tensor.placement_types:_StridedShard")
            placement = strided(shard.dim, split_factor=unsharded.device_mesh.size())
    placements = [*(Replicate() for _ in replicate_meshes), placement, *tp_placements]
    sharded = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=unsharded.shape, stride=unsharded.stride()
    )
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    assert mesh.mesh_dim_names is not None
    return mesh.mesh_dim_names


def _one_dim_meshes(mesh: DeviceMesh) -> list[DeviceMesh]:
    return [mesh[name] for name in _names(mesh)]
