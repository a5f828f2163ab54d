"""The degree of each parallelism, and the meshes made of them."""

import math
from dataclasses import dataclass
from functools import cached_property

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from config.job_config import ContextParallelMethod, Parallelism


@dataclass(frozen=True, kw_only=True)
class Degrees:
    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int

    @property
    def batch(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard


def sequence_multiple(degrees: Degrees, method: ContextParallelMethod) -> int:
    """What must divide the length of a sequence. With allgather, each rank has two chunks."""
    chunks = 2 if degrees.cp > 1 and method == "allgather" else 1
    return chunks * degrees.cp * degrees.tp


def resolve_degrees(config: Parallelism, world_size: int) -> Degrees:
    """Replace -1 by the ranks that are left; ``ValueError`` if the product is not the world."""
    shard = config.data_parallel_shard_degree
    degrees = {
        "pp": config.pipeline_parallel_degree,
        "dp_replicate": config.data_parallel_replicate_degree,
        "dp_shard": 1 if shard == -1 else shard,
        "cp": config.context_parallel_degree,
        "tp": config.tensor_parallel_degree,
    }
    if shard == -1:
        degrees["dp_shard"] = world_size // math.prod(degrees.values())
    if math.prod(degrees.values()) != world_size:
        text = " * ".join(f"{name} {degree}" for name, degree in degrees.items())
        raise ValueError(f"parallelism: the degrees {text} do not make {world_size} ranks")
    if config.data_parallel == "ddp":
        degrees |= {"dp_replicate": degrees["dp_replicate"] * degrees["dp_shard"], "dp_shard": 1}
    return Degrees(**degrees)


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Every dim exists at size 1 too, so no caller asks whether a parallelism is on.

    Two views of the same ranks, in the same order: context parallel ranks read one batch, but hold
    the weights as shards (with ddp as copies), like the data-parallel ranks beside them.
    """

    degrees: Degrees
    weight_mesh: DeviceMesh
    """How weights are spread: pp, dp_replicate, dp_shard_cp, tp."""
    data_mesh: DeviceMesh
    """How a batch is spread: pp, batch, cp, tp."""

    @classmethod
    def build(cls, config: Parallelism, world_size: int, device_type: str) -> "ParallelDims":
        d = resolve_degrees(config, world_size)
        replicate, shard = d.dp_replicate, d.dp_shard * d.cp
        if config.data_parallel == "ddp":
            replicate, shard = replicate * shard, 1
        weight_dims = {"pp": d.pp, "dp_replicate": replicate, "dp_shard_cp": shard, "tp": d.tp}
        data_dims = {"pp": d.pp, "batch": d.batch, "cp": d.cp, "tp": d.tp}
        weight_mesh, data_mesh = (
            init_device_mesh(device_type, tuple(dims.values()), mesh_dim_names=tuple(dims))
            for dims in (weight_dims, data_dims)
        )
        return cls(degrees=d, weight_mesh=weight_mesh, data_mesh=data_mesh)

    def build_expert_mesh(self, ep: int) -> DeviceMesh:
        """How experts are spread: pp, dp_replicate, dp_shard_ep, ep. A collective.

        Tensor and context parallel ranks have other tokens, so to experts they are ranks like all
        others: ``ep`` neighbours split the experts, and the rest shard what each of them has.
        """
        names = ("pp", "dp_replicate", "dp_shard_cp", "tp")
        pp, replicate, shard, tp = (self.weight_mesh[name].size() for name in names)
        return init_device_mesh(
            self.weight_mesh.device_type,
            (pp, replicate, shard * tp // ep, ep),
            mesh_dim_names=("pp", "dp_replicate", "dp_shard_ep", "ep"),
        )

    # Slicing a mesh takes a fifth of a millisecond, and each step asks.
    @cached_property
    def batch_mesh(self) -> DeviceMesh:
        """1-D: ranks that read different sequences."""
        return self.data_mesh["batch"]

    @cached_property
    def cp_mesh(self) -> DeviceMesh:
        """1-D: ranks that read parts of the same sequences."""
        return self.data_mesh["cp"]

    @cached_property
    def pp_mesh(self) -> DeviceMesh:
        """1-D: ranks that hold different layers."""
        return self.data_mesh["pp"]

    @cached_property
    def fsdp_mesh(self) -> DeviceMesh:
        """1-D for FSDP, 2-D for HSDP."""
        return fsdp_dims(self.weight_mesh, "dp_shard_cp")


def fsdp_dims(mesh: DeviceMesh, shard_dim: str) -> DeviceMesh:
    """1-D, the ranks that shard; with replicas 2-D, ``dp_replicate`` before these."""
    if mesh["dp_replicate"].size() == 1:
        return mesh[shard_dim]
    return mesh["dp_replicate", shard_dim]
