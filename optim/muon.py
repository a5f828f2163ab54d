"""Muon: orthogonalized momentum updates for hidden matrices, AdamW for all other parameters."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from config import ConfigError
from optim.chunked_adamw import ChunkedAdamW
from optim.one_pass_adamw import read_weight, write_weight
from runtime.dtensor import shard_slices, to_local
from runtime.log import logger
from runtime.torch_device import gpu_has_bfloat16

# Newton-Schulz polynomial and iterations, which move all singular values near 1 (Keller Jordan,
# https://kellerjordan.github.io/posts/muon).
COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5
# Lower bound of a norm that is divided by.
EPS = 1e-7
# RMS of a usual AdamW update, to which Muon's are scaled (arXiv 2502.16982, section 2.2).
RMS = 0.2
# Elements that a rank orthogonalizes at once, unless a single matrix has more.
CHUNK = 1 << 24


def hidden_matrices(blocks: nn.Module, moes: Iterable[Any]) -> list[nn.Parameter]:
    """Return the matrices (m, n) of ``blocks`` and the stacks (e, m, n) of ``moes``' experts.

    Skips embeddings, and matrices with one row or one column. The output is outside the blocks.
    """
    experts = {id(p) for moe in moes for p in moe.experts.parameters()}
    embeddings = {id(m.weight) for m in blocks.modules() if isinstance(m, nn.Embedding)}
    found = [p for p in blocks.parameters() if p.ndim == (3 if id(p) in experts else 2)]
    return [p for p in found if min(p.shape[-2:]) > 1 and id(p) not in embeddings]


class Layout:
    """The ranks' shards of parameters (e, m, n) that share mesh, placements and shape."""

    def __init__(self, parameter: nn.Parameter, ranks: list[int]) -> None:
        self.shards: list[tuple[slice, slice, slice]] = []
        """Each rank's shard of the parameter, as slices of (e, m, n)."""
        self.replicas: list[tuple[int, ...]] = []
        """Each rank's replica: the ranks of one replica hold every element exactly once."""
        coordinates: dict[int, list[int]] = {}
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh.mesh
            # Every element's index, in the order of the elements.
            indices = torch.ones_like(mesh).nonzero().tolist()
            coordinates = dict(zip(mesh.flatten().tolist(), indices, strict=True))
        for rank in ranks:
            coordinate = coordinates.get(rank, [])
            *experts, rows, columns = shard_slices(parameter, coordinate)
            self.shards.append((experts[0] if experts else slice(0, 1), rows, columns))
            placed = zip(coordinate, getattr(parameter, "placements", ()), strict=True)
            replica = tuple(index for index, placement in placed if placement.is_replicate())
            self.replicas.append(replica)
        self._size = math.prod(parameter.shape[-2:])
        self._ranks: dict[tuple[int, int], tuple[list[int], list[int]]] = {}

    def shard(self, rank: int, first: int, stop: int) -> tuple[slice, slice, slice]:
        """Slices of the matrices from ``first`` to ``stop`` that ``rank`` holds."""
        own, rows, columns = self.shards[rank]
        is_held = own.start <= first and stop <= own.stop
        return slice(0, stop - first if is_held else 0), rows, columns

    def ranks(self, first: int, stop: int) -> tuple[list[int], list[int]]:
        """Ranks whose shard of these matrices is not empty, and those that hold them whole."""
        if (first, stop) not in self._ranks:
            sizes = [
                math.prod(map(size_of, self.shard(rank, first, stop)))
                for rank in range(len(self.shards))
            ]
            whole = (stop - first) * self._size
            self._ranks[first, stop] = (
                [rank for rank, size in enumerate(sizes) if size > 0],
                [rank for rank, size in enumerate(sizes) if size == whole],
            )
        return self._ranks[first, stop]


def size_of(part: slice) -> int:
    """Number of elements of ``part``."""
    return int(part.stop - part.start)


@dataclass(frozen=True)
class Stack:
    """Matrices (e, m, n) of one parameter that one rank orthogonalizes; e = 1 for one matrix."""

    parameter: nn.Parameter
    first: int
    stop: int
    layout: Layout

    @property
    def shape(self) -> tuple[int, int, int]:
        m, n = self.parameter.shape[-2:]
        return self.stop - self.first, m, n

    @property
    def cost(self) -> int:
        """Cost of orthogonalizing the stack, up to a constant factor."""
        return math.prod(self.shape) * min(self.shape[1:])

    def shard(self, rank: int) -> tuple[slice, slice, slice]:
        """Slices of this stack that ``rank`` holds."""
        return self.layout.shard(rank, self.first, self.stop)

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        return tuple(map(size_of, self.shard(rank)))

    @property
    def shard_ranks(self) -> list[int]:
        """Ranks whose shard of this stack is not empty."""
        return self.layout.ranks(self.first, self.stop)[0]

    @property
    def whole_ranks(self) -> list[int]:
        """Ranks that hold all of this stack."""
        return self.layout.ranks(self.first, self.stop)[1]

    def view(self, local: torch.Tensor, rank: int) -> torch.Tensor:
        """View of this stack in ``local``, a local tensor of ``rank`` sharded as the parameter."""
        local = local if local.ndim == 3 else local[None]
        count, start = self.shard_shape(rank)[0], self.first - self.layout.shards[rank][0].start
        return local[start : start + count] if count else local[:0]


@dataclass(frozen=True)
class Task:
    """Orthogonalization of one stack of matrices by one rank."""

    stack: Stack
    owner: int
    """Rank that orthogonalizes the stack."""

    @cached_property
    def senders(self) -> list[int]:
        """Ranks of the owner's replica, which send it their shards."""
        replicas = self.stack.layout.replicas
        return [rank for rank in self.stack.shard_ranks if replicas[rank] == replicas[self.owner]]

    @property
    def needs_communication(self) -> bool:
        """True if a rank other than the owner has a shard."""
        return self.stack.shard_ranks != [self.owner]


class Muon(ChunkedAdamW):
    """Muon with Nesterov momentum for groups with a ``muon_momentum``, AdamW for the others.

    Updates are scaled by 0.2 sqrt(max(m, n)), so that AdamW's learning rate and weight decay fit
    both (arXiv 2502.16982). Equals ``torch.optim.Muon`` with ``match_rms_adamw``, except that
    PyTorch's always computes in bfloat16, and this one only for such weights, or on a GPU.

    Each matrix is gathered on its owner rank, orthogonalized there, and sent back in shards. All
    ranks that hold weights of the same layers share the work. Experts that are whole on a rank are
    not communicated.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, weight_mesh: DeviceMesh | None, **options: Any
    ) -> None:
        """``weight_mesh`` has every rank; None: one rank. Collective.

        Raises ``ConfigError`` without hidden matrices.
        """
        super().__init__(groups, **options)
        self._group, ranks = _stage_group(weight_mesh)
        self._rank = ranks.index(dist.get_rank()) if weight_mesh is not None else 0
        matrices = list(self._groups())
        if not matrices:
            text = "the model, or a pipeline stage, has no hidden matrices that are trained"
            raise ConfigError([f"optimizer.name: muon, but {text}"])
        self._dtype, self._device = _compute_dtype(matrices[0]), to_local(matrices[0]).device
        stacks = list(_stacks(matrices, ranks))
        self._rounds = list(_rounds(_assign_owners(stacks, len(ranks)), len(ranks)))
        own = [task.stack for tasks in self._rounds for task in tasks if task.owner == self._rank]
        logger.info(
            "muon: %d of %d parameters, %d matrices; this rank orthogonalizes %d, in %d rounds",
            len(matrices), sum(len(g["params"]) for g in self.param_groups),
            sum(stack.shape[0] for stack in stacks), sum(stack.shape[0] for stack in own),
            len(self._rounds),
        )  # fmt: skip

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters. Collective.

        Mutates parameters and state; obeys ``found_inf``, if set. Never waits for the device.
        """
        super().step()
        found_inf = self.found_inf
        if found_inf is None:
            found_inf = torch.zeros((), device=self._device)
        is_skipped = found_inf != 0
        groups = self._groups()
        for tasks in self._rounds:
            # As AdamW does, skip what took no part in the loss, on all ranks alike.
            used = [task for task in tasks if task.stack.parameter.grad is not None]
            if used:
                self._step_round(used, groups, is_skipped)

    def _groups(self) -> dict[nn.Parameter, dict[str, Any]]:
        """Group of each matrix. Not cached, because loading a state replaces the groups."""
        return {p: g for g in self.param_groups if _is_muon(g) for p in g["params"]}

    def adamw_groups(self) -> list[dict[str, Any]]:
        """Parameter groups without hidden matrices."""
        return [group for group in self.param_groups if not _is_muon(group)]

    def _step_round(
        self,
        tasks: list[Task],
        groups: Mapping[nn.Parameter, dict[str, Any]],
        is_skipped: torch.Tensor,
    ) -> None:
        """Gather matrices on their owners, orthogonalize, scatter the updates, and apply them."""
        rank, n_ranks = self._rank, len(tasks[0].stack.layout.shards)
        outgoing: list[list[torch.Tensor]] = [[] for _ in range(n_ranks)]
        sizes: list[list[int]] = [[] for _ in range(n_ranks)]
        for task in tasks:
            update = self._update_momentum(task.stack, groups[task.stack.parameter], is_skipped)
            if rank in task.senders:
                outgoing[task.owner].append(update)
            for sender in task.senders if task.owner == rank else ():
                sizes[sender].append(math.prod(task.stack.shard_shape(sender)))
        needs_communication = any(task.needs_communication for task in tasks)
        received = self._all_to_all(outgoing, sizes, needs_communication=needs_communication)
        own = [task for task in tasks if task.owner == rank]
        outgoing, sizes = [[] for _ in range(n_ranks)], [[] for _ in range(n_ranks)]
        for task, whole in zip(own, _orthogonalize_tasks(own, received), strict=True):
            for receiver in task.stack.shard_ranks:
                outgoing[receiver].append(whole[task.stack.shard(receiver)])
        for task in tasks:
            if rank in task.stack.shard_ranks:
                sizes[task.owner].append(math.prod(task.stack.shard_shape(rank)))
        received = self._all_to_all(outgoing, sizes, needs_communication=needs_communication)
        for task in tasks:
            if rank in task.stack.shard_ranks:
                update = next(received[task.owner]).view(task.stack.shard_shape(rank))
                self._apply(task.stack, groups[task.stack.parameter], update, is_skipped)

    def _update_momentum(
        self, stack: Stack, group: dict[str, Any], is_skipped: torch.Tensor
    ) -> torch.Tensor:
        """Update this rank's shard of the momentum; return the Nesterov update (e, rows, columns).

        The update is 0 if ``is_skipped``, so that only finite values are communicated.
        """
        parameter = stack.parameter
        assert parameter.grad is not None, "a task without a gradient"
        state = self.state[parameter]
        if not state:
            dtype = self.moment_dtype or parameter.dtype
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=dtype)
            self.init_remainder(parameter)
        gradient = stack.view(to_local(parameter.grad), self._rank)
        momentum = stack.view(to_local(state["momentum_buffer"]), self._rank)
        mu = group["muon_momentum"]
        updated = momentum.to(gradient.dtype).lerp(gradient, 1 - mu)
        update = torch.where(is_skipped, 0.0, gradient.lerp(updated, mu))
        momentum.copy_(torch.where(is_skipped, momentum, updated))
        return update.to(self._dtype)

    def _apply(
        self,
        stack: Stack,
        group: dict[str, Any],
        update: torch.Tensor,
        is_skipped: torch.Tensor,
    ) -> None:
        weight = stack.view(to_local(stack.parameter), self._rank)
        remainder = self.state[stack.parameter].get("remainder")
        if remainder is not None:
            remainder = stack.view(to_local(remainder), self._rank)
        old = read_weight(weight, remainder)
        scale = RMS * math.sqrt(max(stack.shape[1:]))
        decayed = old * (1 - group["lr"] * group["weight_decay"])
        updated = decayed.add_(update, alpha=-group["lr"] * scale)
        write_weight(torch.where(is_skipped, old, updated), weight=weight, remainder=remainder)

    def _all_to_all(
        self,
        outgoing: list[list[torch.Tensor]],
        sizes: list[list[int]],
        *,
        needs_communication: bool,
    ) -> list[Iterator[torch.Tensor]]:
        """Send tensors to each rank; return the flat tensors from each rank, in its order.

        ``sizes``: numels of the tensors from each rank. ``needs_communication``: whether any rank
        has a tensor for another.
        """
        nothing = torch.empty(0, dtype=self._dtype, device=self._device)
        sent = torch.cat([nothing, *(tensor.flatten() for tensor in chain.from_iterable(outgoing))])
        received = sent
        if needs_communication:
            received = sent.new_empty(sum(map(sum, sizes)))
            input_splits = [sum(tensor.numel() for tensor in tensors) for tensors in outgoing]
            output_splits = [sum(own) for own in sizes]
            dist.all_to_all_single(received, sent, output_splits, input_splits, group=self._group)
        by_rank = received.split([sum(own) for own in sizes])
        return [iter(flat.split(own)) for flat, own in zip(by_rank, sizes, strict=True)]


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Return U f(S) V' of each U S V' in (k, m, n), with f(S) about 0.7 to 1.2; zeros stay zero.

    Newton-Schulz iteration with a polynomial of degree 5: matmuls only.
    """
    a, b, c = COEFFICIENTS
    x = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    precise = torch.promote_types(x.dtype, torch.float32)
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=precise)
    # The Frobenius norm bounds every singular value.
    x = (x / norms.clamp(min=EPS)).to(x.dtype)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if matrices.shape[-2] > matrices.shape[-1] else x


def _orthogonalize_tasks(
    tasks: list[Task], received: list[Iterator[torch.Tensor]]
) -> tuple[torch.Tensor, ...]:
    """Assemble each task's matrices (e, m, n) from the senders' shards, and orthogonalize them."""
    if not tasks:
        return ()
    counts = [task.stack.shape[0] for task in tasks]
    shards = [[next(received[sender]) for sender in task.senders] for task in tasks]
    whole = shards[0][0].new_empty(sum(counts), *tasks[0].stack.shape[1:])
    for task, own, target in zip(tasks, shards, whole.split(counts), strict=True):
        for sender, shard in zip(task.senders, own, strict=True):
            target[task.stack.shard(sender)] = shard.view(task.stack.shard_shape(sender))
    return orthogonalize(whole).split(counts)


def _compute_dtype(parameter: torch.Tensor) -> torch.dtype:
    """bfloat16 for float32 weights on a GPU: accurate enough for an approximate iteration."""
    is_lowered = parameter.is_cuda and parameter.dtype == torch.float32 and gpu_has_bfloat16()
    return torch.bfloat16 if is_lowered else parameter.dtype


def _is_muon(group: dict[str, Any]) -> bool:
    return "muon_momentum" in group


def _stage_group(weight_mesh: DeviceMesh | None) -> tuple[dist.ProcessGroup | None, list[int]]:
    """Return the group and the ranks that hold weights of this rank's layers. Collective."""
    if weight_mesh is None:
        return None, [0]
    # Pipeline stages are the first dim.
    stages = weight_mesh.mesh.flatten(1).tolist()
    groups = [dist.new_group(ranks) for ranks in stages] if len(stages) > 1 else [dist.group.WORLD]
    [own] = [index for index, ranks in enumerate(stages) if dist.get_rank() in ranks]
    return groups[own], stages[own]


def _stacks(parameters: Iterable[nn.Parameter], ranks: list[int]) -> Iterator[Stack]:
    """Split parameters into stacks, at the ends of the ranks' expert shards and by ``CHUNK``."""
    layouts: dict[Any, Layout] = {}
    for parameter in parameters:
        key = (
            getattr(parameter, "device_mesh", None),
            getattr(parameter, "placements", ()),
            parameter.shape,
        )
        if key not in layouts:
            # With a thousand ranks, each takes a third of a second.
            layouts[key] = Layout(parameter, ranks)
        layout = layouts[key]
        limit = max(1, CHUNK // math.prod(parameter.shape[-2:]))
        ends = sorted({end for own, *_ in layout.shards for end in (own.start, own.stop)})
        for start, stop in pairwise(ends):
            for first in range(start, stop, limit):
                yield Stack(parameter, first, min(stop, first + limit), layout)


def _assign_owners(stacks: list[Stack], n_ranks: int) -> list[Task]:
    """Assign each stack to the least loaded rank, among those that hold it whole if any do."""
    loads = [0] * n_ranks
    tasks = []
    # The largest first, so that small stacks balance the loads that large ones leave.
    for stack in sorted(stacks, key=lambda stack: -stack.cost):
        owner = min(stack.whole_ranks or range(n_ranks), key=loads.__getitem__)
        loads[owner] += stack.cost
        tasks.append(Task(stack, owner))
    return tasks


def _rounds(tasks: list[Task], n_ranks: int) -> Iterator[list[Task]]:
    """Group tasks of one shape into rounds with, per rank, one task or up to ``CHUNK`` elements."""
    by_shape: dict[tuple[int, ...], list[Task]] = defaultdict(list)
    for task in tasks:
        by_shape[task.stack.shape[1:]].append(task)
    for same in by_shape.values():
        rounds: list[list[Task]] = []
        counts, current = [0] * n_ranks, [0] * n_ranks
        for task in same:
            owner, size = task.owner, math.prod(task.stack.shape)
            if counts[owner] and counts[owner] + size > CHUNK:
                counts[owner], current[owner] = 0, current[owner] + 1
            counts[owner] += size
            if current[owner] == len(rounds):
                rounds.append([])
            rounds[current[owner]].append(task)
        yield from rounds
