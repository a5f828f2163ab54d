"""SimpleFSDP (arXiv 2411.00284): weights made whole by DTensor operations that autograd reverses.

The redistribution in forward is an all-gather, its derivative a reduce-scatter. There is nothing
else, so a compiler sees all of it in a block's graph and may bucket and overlap it.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

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
    dims of ``weight_mesh``. While a module's forward runs, a plain attribute with the whole weight
    hides the parameter of that name.
    """
    places: dict[nn.Parameter, list[tuple[str, str]]] = defaultdict(list)
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        path, _, name = fqn.rpartition(".")
        places[parameter].append((path, name))
    weights: dict[nn.Module, list[_Weight]] = defaultdict(list)
    for parameter, shared in places.items():
        dp_placements, sharded = _shard(parameter, fsdp_mesh, weight_mesh)
        for path, name in shared:
            model.get_submodule(path).register_parameter(name, sharded)
        owner = model
        if len(shared) == 1:
            owner, shared = model.get_submodule(path), [("", name)]
        # What several modules share is gathered once, while the whole model runs.
        weights[owner].append(
            _Weight(tuple(shared), fsdp_mesh, dp_placements, whole=parameter, mp_policy=mp_policy)
        )
    for module, own in weights.items():
        module.__class__ = _gathering(type(module))
        module.__dict__["_weights"] = own
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
    fsdp_mesh: DeviceMesh
    dp_placements: tuple[Placement, ...]
    whole: nn.Parameter
    """On the meta device: one device's parameter, or tensor parallel's DTensor."""
    mp_policy: MixedPrecisionPolicy

    def show(self, module: nn.Module) -> None:
        """Let plain attributes, the whole weight, hide the parameter."""
        places = [(module.get_submodule(path), name) for path, name in self.places]
        first, name = places[0]
        whole = self.gather(first._parameters[name])
        for place, name in places:
            place.__dict__[name] = whole

    def hide(self, module: nn.Module) -> None:
        for path, name in self.places:
            # A forward that failed, or recomputation that had enough, may not have come this far.
            module.get_submodule(path).__dict__.pop(name, None)

    def gather(self, parameter: torch.Tensor) -> torch.Tensor:
        """The whole weight in the compute dtype; its gradient is summed in the reduction's."""
        assert isinstance(parameter, DTensor)
        whole = self.whole
        if isinstance(whole, DTensor):
            part = whole.to_local()
            parameter = DTensor.from_local(
                parameter.to_local(),
                self.fsdp_mesh,
                self.dp_placements,
                run_check=False,
                shape=part.shape,
                stride=part.stride(),
            )
        gathered = parameter.redistribute(
            placements=[Replicate()] * self.fsdp_mesh.ndim,
            forward_dtype=self.mp_policy.param_dtype,
            backward_dtype=self.mp_policy.reduce_dtype,
        ).to_local(grad_placements=[Partial()] * self.fsdp_mesh.ndim)
        if isinstance(whole, DTensor):
            return DTensor.from_local(
                gathered,
                whole.device_mesh,
                whole.placements,
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
        return gathered


def _shard(
    parameter: nn.Parameter, fsdp_mesh: DeviceMesh, weight_mesh: DeviceMesh
) -> tuple[tuple[Placement, ...], nn.Parameter]:
    """This rank's shard of a parameter that every data-parallel rank holds whole."""
    shard = shard_placement(parameter, fsdp_mesh.size(-1))
    dp_placements = (*[Replicate()] * (fsdp_mesh.ndim - 1), shard)
    whole = parameter.detach()
    part = whole.to_local() if isinstance(whole, DTensor) else whole
    sharded = distribute_tensor(part, fsdp_mesh, dp_placements, src_data_rank=None)
    if isinstance(parameter, DTensor):
        (tp_placement,) = parameter.placements
        if isinstance(tp_placement, Shard) and tp_placement.dim == shard.dim:
            # Tensor parallel cut this dim first, though its mesh dim comes last.
            tp_size = parameter.device_mesh.size()
            shard = _StridedShard(shard.dim, split_factor=tp_size)
        fsdp_dims, tp_dims = fsdp_mesh.mesh_dim_names, parameter.device_mesh.mesh_dim_names
        assert fsdp_dims is not None
        assert tp_dims is not None
        sharded = DTensor.from_local(
            sharded.to_local(),
            weight_mesh[(*fsdp_dims, *tp_dims)],
            (*dp_placements[:-1], shard, tp_placement),
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return dp_placements, nn.Parameter(sharded, requires_grad=parameter.requires_grad)


@cache
def _gathering(cls: type[nn.Module]) -> type[nn.Module]:
    """``cls``, with a forward that sees whole weights.

    A class and not hooks: the ids of hooks differ, so every block would be compiled anew.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        weights: list[_Weight] = self.__dict__["_weights"]
        try:
            for weight in weights:
                weight.show(self)
            return cls.forward(self, *args, **kwargs)
        finally:
            for weight in weights:
                weight.hide(self)

    return type(f"SimpleFSDP{cls.__name__}", (cls,), {"forward": forward})


def _cast(
    dtype: torch.dtype, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor
) -> torch.Tensor:
    return output.to(dtype)
