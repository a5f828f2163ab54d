"""Degrees of all parallelisms, and the device meshes built from them."""

import math
from dataclasses import dataclass
from functools import cached_property

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from config.job_config import ContextParallelMethod, Parallelism


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Size of each parallelism; their product is the world size."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int

    @property
    def batch(self) -> int:
        """Number of ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard


def sequence_multiple(degrees: Degrees, method: ContextParallelMethod) -> int:
    """Required divisor of ``seq_len``. Allgather context parallel gives each rank two chunks."""
    chunks = 2 if degrees.cp > 1 and method == "allgather" else 1
    return chunks * degrees.cp * degrees.tp


def resolve_degrees(config: Parallelism, world_size: int) -> Degrees:
    """Replace a shard degree of -1 with the remaining ranks. ddp folds dp_shard into dp_replicate.

    Raises ``ValueError`` if the product of the degrees is not ``world_size``.
    """
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
        raise ValueError(f"parallelism: the degrees {text} must multiply to {world_size} ranks")
    if config.data_parallel == "ddp":
        degrees |= {"dp_replicate": degrees["dp_replicate"] * degrees["dp_shard"], "dp_shard": 1}
    return Degrees(**degrees)


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Two device meshes over the same ranks in the same order. Dims of size 1 exist too.

    Context-parallel ranks read the same sequences. For weights they count as data-parallel ranks:
    dp_shard_cp includes them or, with ddp, the mesh dim dp_replicate, which is then larger than
    ``degrees.dp_replicate``.
    """

    degrees: Degrees
    weight_mesh: DeviceMesh
    """Mesh over which weights are sharded: pp, dp_replicate, dp_shard_cp, tp."""
    data_mesh: DeviceMesh
    """Mesh over which data are sharded: pp, batch (of sequences), cp (of positions), tp."""

    @classmethod
    def build(cls, config: Parallelism, world_size: int, device_type: str) -> "ParallelDims":
        """Create both meshes. Collective. Raises ``ValueError`` as ``resolve_degrees`` does."""
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
        """Create the experts' mesh: pp, dp_replicate, efsdp, ep. Collective.

        Tensor and context parallel ranks hold different tokens, so experts treat them like data
        parallel ranks: ``ep`` neighbors split the experts, and efsdp, the remaining
        dp_shard * cp * tp / ep ranks, shard each of them.
        """
        names = ("pp", "dp_replicate", "dp_shard_cp", "tp")
        pp, replicate, shard, tp = (self.weight_mesh[name].size() for name in names)
        return init_device_mesh(
            self.weight_mesh.device_type,
            (pp, replicate, shard * tp // ep, ep),
            mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep"),
        )

    # Cached because slicing a mesh takes 0.2 ms and each step needs these.
    @cached_property
    def batch_mesh(self) -> DeviceMesh:
        """1-D mesh of ranks that read different sequences."""
        return self.data_mesh["batch"]

    @cached_property
    def cp_mesh(self) -> DeviceMesh:
        """1-D mesh of ranks that read shards of the same sequences."""
        return self.data_mesh["cp"]

    @cached_property
    def pp_mesh(self) -> DeviceMesh:
        """1-D mesh of ranks that hold different layers."""
        return self.data_mesh["pp"]

    @cached_property
    def fsdp_mesh(self) -> DeviceMesh:
        """Mesh for the weights: 1-D for FSDP, 2-D for HSDP."""
        return fsdp_submesh(self.weight_mesh, "dp_shard_cp")


def fsdp_submesh(mesh: DeviceMesh, shard_dim: str) -> DeviceMesh:
    """Submesh (shard_dim,), or with replicas (dp_replicate, shard_dim)."""
    if mesh["dp_replicate"].size() == 1:
        return mesh[shard_dim]
    return mesh["dp_replicate", shard_dim]
