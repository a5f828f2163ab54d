"""Replicas agree by construction. This proves it, and makes those that differ agree."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from runtime.distributed import local_part

# So few that the int64 temporaries of a block stay in a CPU's cache. A GPU waits for launches.
BLOCK_WORDS, GPU_BLOCK_WORDS = 1 << 16, 1 << 22


@torch.no_grad()
def check_replicas(
    model: nn.Module,
    weight_mesh: DeviceMesh,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    tied: Collection[str] = (),
) -> str:
    """Compare, bit for bit, every tensor along each dim that replicates it; say what agrees.

    Parameters, buffers and the state of ``optimizer``. ``tied``: FQNs of parameters that the first
    and the last stage of a pipeline both have. Raises ``RuntimeError`` that names the first
    that differs, and the ranks that are unlike the majority. A collective.
    """
    found, agreed = [], []
    named = _named(model, optimizer)
    for fqn in tied if weight_mesh["pp"].size() > 1 else ():
        if not _is_same_on_both_ends(fqn, named, weight_mesh["pp"]):
            found.append(f"the first and the last stage differ in {fqn}")
    for dim, copies in _replicated(named, weight_mesh):
        mesh = weight_mesh[dim]
        digests = torch.stack([_digest(local).to(mesh.device_type) for local in copies.values()])
        gathered = [torch.empty_like(digests) for _ in range(mesh.size())]
        dist.all_gather(gathered, digests, group=mesh.get_group())
        columns = dict(zip(copies, torch.stack(gathered, dim=1).tolist(), strict=True))
        different = [fqn for fqn, column in columns.items() if len(set(column)) > 1]
        if different:
            ranks = dist.get_process_group_ranks(mesh.get_group())
            odd = _unlike_most(dict(zip(ranks, columns[different[0]], strict=True)))
            found.append(f"replicas along {dim} differ, first in {different[0]}: {odd}")
        else:
            agreed.append(f"{len(copies)} tensors on {mesh.size()} ranks of {dim}")
    # Only now: ranks that see no difference would wait for this one in the next comparison.
    if found:
        raise RuntimeError("; ".join(found))
    return ", ".join(agreed)


@torch.no_grad()
def sync_replicas(model: nn.Module, weight_mesh: DeviceMesh) -> None:
    """Give all replicas the values of the first, in place: parameters, then buffers. A collective.

    For weights that did not come from ``materialize`` or a checkpoint but from one rank's hands:
    load them into the ranks whose coordinate on the replicating dims is 0, then call this. It is
    what ``sync_module_states`` was to ``FullyShardedDataParallel``.
    """
    for dim, copies in _replicated(_named(model), weight_mesh):
        for local in copies.values():
            dist.broadcast(local, group=weight_mesh.get_group(dim), group_src=0)


def _named(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, torch.Tensor]:
    """Parameters, then buffers, then what the optimizer keeps, by FQN."""
    state = [
        (f"{fqn}.{key}", value)
        for fqn, parameter in model.named_parameters()
        for key, value in (optimizer.state.get(parameter, {}) if optimizer else {}).items()
    ]
    named = [*model.named_parameters(), *model.named_buffers(), *state]
    return dict(named)


def _replicated(
    named: Mapping[str, torch.Tensor], weight_mesh: DeviceMesh
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Each mesh dim of several ranks, with this rank's part of what it replicates, by FQN."""
    for dim in weight_mesh.mesh_dim_names or ():
        # Stages hold different layers.
        if dim == "pp" or weight_mesh[dim].size() == 1:
            continue
        own = [(fqn, tensor) for fqn, tensor in named.items() if _is_copy(tensor, dim)]
        copies = {fqn: local_part(tensor).detach() for fqn, tensor in own}
        if copies:
            yield dim, copies


def _is_same_on_both_ends(fqn: str, named: Mapping[str, torch.Tensor], pp_mesh: DeviceMesh) -> bool:
    """Whether a parameter and its optimizer state agree there. Stages between have neither."""
    own = [_digest(local_part(tensor)) for name, tensor in named.items() if name.startswith(fqn)]
    digest = torch.stack(own) if own else torch.zeros(1, dtype=torch.int64)
    total = _digest(digest).to(pp_mesh.device_type).view(1)
    gathered = [torch.empty_like(total) for _ in range(pp_mesh.size())]
    dist.all_gather(gathered, total, group=pp_mesh.get_group())
    return bool(gathered[0] == gathered[-1])


def _is_copy(tensor: torch.Tensor, dim: str) -> bool:
    if not isinstance(tensor, DTensor):
        return True
    dims = tensor.device_mesh.mesh_dim_names or ()
    if "dp_shard_ep" in dims and dim != "dp_replicate":
        # Experts are on a mesh of their own, all of whose other dims shard.
        return False
    return dim not in dims or tensor.placements[dims.index(dim)].is_replicate()


def _digest(local: torch.Tensor) -> torch.Tensor:
    """An int64 that depends on every bit of this rank's part, and on their order."""
    data = local.contiguous().view(-1).view(torch.uint8)
    if data.numel() % 8 or data.storage_offset() % 8:
        data = F.pad(data, (0, -data.numel() % 8))
    words = data.view(torch.int64)
    size = GPU_BLOCK_WORDS if words.is_cuda else BLOCK_WORDS
    # Odd weights: a change of any one word changes the sum modulo 2^64.
    weights = 2 * torch.arange(min(size, words.numel()), device=words.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for block in words.split(size):
        total = total * 1_000_003 + (block * weights[: block.numel()]).sum()
    return total


def _unlike_most(digests: Mapping[int, int]) -> str:
    """The ranks whose digest is not that of the majority; all of them if there is none."""
    digest, count = Counter(digests.values()).most_common(1)[0]
    if 2 * count <= len(digests):
        return f"no majority among ranks {', '.join(map(str, digests))}"
    odd = [str(rank) for rank, other in digests.items() if other != digest]
    return f"rank {', '.join(odd)} against {count} that agree"
