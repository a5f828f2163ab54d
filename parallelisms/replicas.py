"""Compare replicas of weights and optimizer state bit for bit, or synchronize the weights."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from runtime.dtensor import to_local

# On a CPU a block's int64 temporaries fit its cache; on a GPU large blocks save kernel launches.
BLOCK_WORDS, GPU_BLOCK_WORDS = 1 << 16, 1 << 22


@torch.no_grad()
def check_replicas(
    model: nn.Module,
    weight_mesh: DeviceMesh,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    tied: Collection[str] = (),
) -> str:
    """Compare all tensors bit for bit along each mesh dim that replicates them. Collective.

    Covers parameters, buffers and the state of ``optimizer``. ``tied``: FQNs of parameters that the
    first and the last pipeline stage share. Returns a summary of what agrees. Raises
    ``RuntimeError`` that names the first tensor that differs, and the ranks outside the majority.
    """
    differences, agreed = [], []
    tensors = _named_tensors(model, optimizer)
    for fqn in tied if weight_mesh["pp"].size() > 1 else ():
        if not _is_tied_pair_equal(fqn, tensors, weight_mesh["pp"]):
            differences.append(f"the first and the last stage differ in {fqn}")
    for dim, local_tensors in _replicated_tensors(tensors, weight_mesh):
        mesh = weight_mesh[dim]
        digests = torch.stack([_digest(t).to(mesh.device_type) for t in local_tensors.values()])
        gathered = [torch.empty_like(digests) for _ in range(mesh.size())]
        dist.all_gather(gathered, digests, group=mesh.get_group())
        columns = dict(zip(local_tensors, torch.stack(gathered, dim=1).tolist(), strict=True))
        different = [fqn for fqn, column in columns.items() if len(set(column)) > 1]
        if different:
            ranks = dist.get_process_group_ranks(mesh.get_group())
            minority = _minority(dict(zip(ranks, columns[different[0]], strict=True)))
            differences.append(f"replicas along {dim} differ, first in {different[0]}: {minority}")
        else:
            count = len(local_tensors)
            agreed.append(f"{count} tensor{'s' * (count > 1)} on {mesh.size()} ranks of {dim}")
    # Raise last, because ranks that see no difference would wait for this one in the next dim.
    if differences:
        raise RuntimeError("; ".join(differences))
    return ", ".join(agreed)


@torch.no_grad()
def sync_replicas(model: nn.Module, weight_mesh: DeviceMesh) -> None:
    """Broadcast parameters and buffers from the first replica. Mutates ``model``. Collective.

    Only weights that come from neither ``materialize`` nor a checkpoint need it: load them on the
    ranks whose coordinate on the replicating dims is 0, then call this. It replaces
    ``sync_module_states`` of ``FullyShardedDataParallel``.
    """
    for dim, local_tensors in _replicated_tensors(_named_tensors(model), weight_mesh):
        for local in local_tensors.values():
            dist.broadcast(local, group=weight_mesh.get_group(dim), group_src=0)


def _named_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, torch.Tensor]:
    """Return parameters, then buffers, then optimizer state, by FQN."""
    state = [
        (f"{fqn}.{key}", value)
        for fqn, parameter in model.named_parameters()
        for key, value in (optimizer.state.get(parameter, {}) if optimizer else {}).items()
        if isinstance(value, torch.Tensor)
    ]
    tensors = [*model.named_parameters(), *model.named_buffers(), *state]
    return dict(tensors)


def _replicated_tensors(
    tensors: Mapping[str, torch.Tensor], weight_mesh: DeviceMesh
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield each mesh dim of several ranks with the local tensors that it replicates, by FQN."""
    for dim in weight_mesh.mesh_dim_names or ():
        # Pipeline stages have different layers.
        if dim == "pp" or weight_mesh[dim].size() == 1:
            continue
        replicated = [(fqn, t) for fqn, t in tensors.items() if _is_replicated(t, dim)]
        local_tensors = {fqn: to_local(t).detach() for fqn, t in replicated}
        if local_tensors:
            yield dim, local_tensors


def _is_tied_pair_equal(fqn: str, tensors: Mapping[str, torch.Tensor], pp_mesh: DeviceMesh) -> bool:
    """True if the first and last stage agree on a parameter and its optimizer state. Collective."""
    own = (t for name, t in tensors.items() if name == fqn or name.startswith(f"{fqn}."))
    found = [_digest(to_local(t)) for t in own]
    # Stages between have neither.
    digest = torch.stack(found) if found else torch.zeros(1, dtype=torch.int64)
    total = _digest(digest).to(pp_mesh.device_type).view(1)
    gathered = [torch.empty_like(total) for _ in range(pp_mesh.size())]
    dist.all_gather(gathered, total, group=pp_mesh.get_group())
    return bool(gathered[0] == gathered[-1])


def _is_replicated(tensor: torch.Tensor, dim: str) -> bool:
    if not isinstance(tensor, DTensor):
        return True
    dims = tensor.device_mesh.mesh_dim_names or ()
    if "efsdp" in dims and dim != "dp_replicate":
        # Experts have a mesh of their own, whose other dims all shard.
        return False
    return dim not in dims or tensor.placements[dims.index(dim)].is_replicate()


def _digest(local: torch.Tensor) -> torch.Tensor:
    """Return an int64 () that depends on every bit of ``local``, and on their order."""
    data = local.contiguous().view(-1).view(torch.uint8)
    if data.numel() % 8 or data.storage_offset() % 8:
        data = F.pad(data, (0, -data.numel() % 8))
    words = data.view(torch.int64)
    size = GPU_BLOCK_WORDS if words.is_cuda else BLOCK_WORDS
    # The weights are odd, so a change of any one word changes the sum modulo 2^64.
    weights = 2 * torch.arange(min(size, words.numel()), device=words.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for block in words.split(size):
        total = total * 1_000_003 + (block * weights[: block.numel()]).sum()
    return total


def _minority(digests: Mapping[int, int]) -> str:
    """Describe the ranks whose digest is not the majority's, or all ranks if there is none."""
    digest, count = Counter(digests.values()).most_common(1)[0]
    if 2 * count <= len(digests):
        return f"no majority among ranks {', '.join(map(str, digests))}"
    minority = [str(rank) for rank, other in digests.items() if other != digest]
    return f"rank {', '.join(minority)} against {count} that agree"
