"""SimpleFSDP (arXiv 2411.00284): weights made whole by DTensor operations that autograd reverses.

The redistribution in forward is an all-gather, its derivative a reduce-scatter. There is nothing
else, so a compiler sees all of it in a block's graph and may bucket and overlap it.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

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
from torch.distributed.tensor.placement_types import _StridedShard

from parallelisms.fsdp import shard_placement
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
    places: dict[nn.Parameter, list[tuple[str, str]]] = defaultdict(list)
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        path, _, name = fqn.rpartition(".")
        places[parameter].append((path, name))
    weights: dict[nn.Module, list[_Weight]] = defaultdict(list)
    for parameter, shared in places.items():
        shard = shard_placement(parameter, fsdp_mesh.size(-1))
        sharded = _shard_of(parameter, shard, fsdp_mesh, weight_mesh)
        for path, name in shared:
            model.get_submodule(path).register_parameter(name, sharded)
        owner = model
        if len(shared) == 1:
            ((path, name),) = shared
            owner, shared = model.get_submodule(path), [("", name)]
        # What several modules share is gathered once, while the whole model runs.
        weights[owner].append(
            _Weight(tuple(shared), _dims(fsdp_mesh), shard, template=parameter, mp_policy=mp_policy)
        )
    for module in model.modules():
        names = tuple(name for name, _ in module.named_parameters(recurse=False))
        if names or module in weights:
            module.__class__ = _gathering(cast(Any, type(module)), names)
            gathering = cast(_Gathering, module)
            gathering._sharded, gathering._whole = weights[module], {}
    if mp_policy.output_dtype is not None:
        model.register_forward_hook(partial(_cast, mp_policy.output_dtype))
    sizes = " x ".join(str(size) for size in fsdp_mesh.shape)
    logger.info(
        "simple_fsdp: %d parameters on a mesh of %s, compute in %s, reduction in %s",
        len(places), sizes, mp_policy.param_dtype, mp_policy.reduce_dtype,
    )  # fmt: skip


@dataclass(frozen=True)
class _Weight:
    """A sharded parameter, and what it is when whole."""

    places: tuple[tuple[str, str], ...]
    """Submodules that have it, below the one whose forward it is gathered for, and its names."""
    meshes: list[DeviceMesh]
    """1-D: replicas if there are any, then shards."""
    shard: Shard
    template: nn.Parameter
    """What it is when whole, on the meta device: under tensor parallel a DTensor."""
    mp_policy: MixedPrecisionPolicy

    def show(self, owner: nn.Module) -> None:
        places = [(cast(_Gathering, owner.get_submodule(path)), name) for path, name in self.places]
        first, name = places[0]
        whole = self.gather(first.get_parameter(name))
        for place, name in places:
            place._whole[name] = whole

    def hide(self, owner: nn.Module) -> None:
        for path, name in self.places:
            # A forward that failed, or recomputation that had enough, may not have come this far.
            cast(_Gathering, owner.get_submodule(path))._whole.pop(name, None)

    def gather(self, parameter: torch.Tensor) -> torch.Tensor:
        """The whole weight in the compute dtype; its gradient is summed in the reduction's."""
        assert isinstance(parameter, DTensor)
        part = self.template.to_local() if isinstance(self.template, DTensor) else self.template
        *replicate_meshes, shard_mesh = self.meshes
        local = parameter.to_local()
        # First in forward, where nothing travels, is last in backward: replicas exchange shards.
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
    part = whole.to_local() if isinstance(whole, DTensor) else whole
    *replicate_meshes, shard_mesh = _dims(fsdp_mesh)
    local = distribute_tensor(part, shard_mesh, [shard], src_data_rank=None).to_local()
    mesh, own, others = fsdp_mesh, cast(Placement, shard), list[Placement]()
    if isinstance(whole, DTensor):
        mesh = weight_mesh[(*_names(fsdp_mesh), *_names(whole.device_mesh))]
        others = list(whole.placements)
        if shard in others:
            # Tensor parallel cut this dim first, though its mesh dim comes last.
            own = _StridedShard(shard.dim, split_factor=whole.device_mesh.size())
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


class _Gathering(nn.Module):
    """Mixed into a module's class: while its forward runs, weights are whole.

    A class and not hooks: the ids of hooks differ, so every block would be compiled anew.
    """

    _sharded: list[_Weight]
    _whole: dict[str, torch.Tensor]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            for weight in self._sharded:
                weight.show(self)
            return super().forward(*args, **kwargs)
        finally:
            for weight in self._sharded:
                weight.hide(self)


@cache
def _gathering(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """``cls``, whose parameters of these names are the whole weights when there are any."""
    properties = {name: property(partial(_whole_or_sharded, name=name)) for name in names}
    return type(f"SimpleFSDP{cls.__name__}", (_Gathering, cls), properties)


def _whole_or_sharded(module: _Gathering, name: str) -> torch.Tensor | None:
    return module._whole[name] if name in module._whole else module._parameters[name]


def _cast(
    dtype: torch.dtype, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor
) -> torch.Tensor:
    return output.to(dtype)
