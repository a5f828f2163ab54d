"""Degrees of all parallelisms, and the device meshes built from them."""

import math
from dataclasses import dataclass
from functools import cached_property

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from config.job_config import ContextParallelMethod, Parallelism

# Keys whose product is the number of ranks, in the order of the meshes.
DEGREE_KEYS = (
    "pipeline_parallel_degree",
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "context_parallel_degree",
    "tensor_parallel_degree",
)


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


def resolve_degrees(config: Parallelism, world_size: int, *, n_nodes: int = 1) -> Degrees:
    """Replace a shard degree of -1 with the remaining ranks. ddp folds dp_shard into dp_replicate.

    Raises ``ValueError`` if the product of the degrees is not ``world_size``; it says which number
    of ranks on each of ``n_nodes`` would fit.
    """
    shard = config.data_parallel_shard_degree
    degrees = {
        "pp": config.pipeline_parallel_degree,
        "dp_replicate": config.data_parallel_replicate_degree,
        "dp_shard": 1 if shard == -1 else shard,
        "cp": config.context_parallel_degree,
        "tp": config.tensor_parallel_degree,
    }
    product = math.prod(degrees.values())
    if shard == -1 and world_size % product == 0:
        degrees["dp_shard"] = world_size // product
    elif product != world_size:
        raise ValueError(_misfit(config, product, world_size, n_nodes))
    if config.data_parallel == "ddp":
        degrees |= {"dp_replicate": degrees["dp_replicate"] * degrees["dp_shard"], "dp_shard": 1}
    return Degrees(**degrees)


def _misfit(config: Parallelism, product: int, world_size: int, n_nodes: int) -> str:
    """Message for degrees with a ``product`` that does not fit ``world_size``, and what would."""
    shard = config.data_parallel_shard_degree
    given = {key: getattr(config, key) for key in DEGREE_KEYS if getattr(config, key) > 1}
    if shard == 1:
        given["data_parallel_shard_degree"] = shard
    text = " * ".join(f"parallelism.{key}" for key in given)
    text += " = " + " * ".join(map(str, given.values()))
    text += f" = {product}" if len(given) > 1 else ""
    ranks = f"{world_size} rank" + ("s" if world_size > 1 else "")
    if shard == -1:
        # With several nodes, each has the same number of ranks.
        multiple = math.lcm(product, n_nodes)
        below = world_size // multiple * multiple
        fits = [n // n_nodes for n in (below, below + multiple) if n > 0]
        text += f" does not divide {ranks}"
    else:
        fits = [product // n_nodes] if product % n_nodes == 0 else []
        text += f" is not the number of ranks, {world_size}"
    hints = [f"NGPU={' or '.join(map(str, fits))}"] if fits else []
    hints = [f"{hint} on each of {n_nodes} nodes" if n_nodes > 1 else hint for hint in hints]
    if shard != -1 and world_size % (product // shard) == 0:
        hints.append(f"data_parallel_shard_degree = {world_size * shard // product} (or -1)")
    return text + (f"; {' or '.join(hints)} would" if hints else "")


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
