"""Muon: updates of hidden matrices are orthogonal. Everything else is AdamW's."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from optim.chunked_adamw import ChunkedAdamW
from runtime.distributed import local_part
from runtime.log import logger
from runtime.shards import part_of

# Of the polynomial that, iterated so often, takes all singular values near 1 (Keller Jordan,
# https://kellerjordan.github.io/posts/muon).
COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5
# Smaller norms are raised to this before anything is divided by them.
EPS = 1e-7
# Root mean square of AdamW's usual updates, to which Muon's are scaled (arXiv 2502.16982, 2.2).
RMS = 0.2
# Elements that a rank orthogonalizes at once, unless a single matrix has more.
CHUNK = 1 << 24


def hidden_matrices(blocks: nn.Module, moes: Iterable[Any]) -> list[nn.Parameter]:
    """The matrices (m, n) of ``blocks``, and the stacks (e, m, n) of ``moes``' experts.

    Matrices of one row or one column are left out. Embedding and output are outside the blocks.
    """
    experts = {id(p) for moe in moes for p in moe.experts.parameters()}
    found = [p for p in blocks.parameters() if p.ndim == (3 if id(p) in experts else 2)]
    return [p for p in found if min(p.shape[-2:]) > 1]


@dataclass(frozen=True)
class Stack:
    """Matrices of one parameter (e, m, n) that one rank orthogonalizes; a matrix alone is e = 1."""

    parameter: nn.Parameter
    first: int
    stop: int
    parts: Sequence[tuple[slice, slice, slice]]
    """Each rank's part of all e matrices."""
    copies: Sequence[tuple[int, ...]]
    """Each rank's coordinates among replicas; ranks of equal ones hold the whole exactly once."""

    @property
    def shape(self) -> tuple[int, int, int]:
        m, n = self.parameter.shape[-2:]
        return self.stop - self.first, m, n

    @property
    def work(self) -> int:
        """Cost of orthogonalizing it, up to a constant factor."""
        return math.prod(self.shape) * min(self.shape[1:])

    def part(self, rank: int) -> tuple[slice, slice, slice]:
        """The part of this stack that ``rank`` holds."""
        own, rows, columns = self.parts[rank]
        is_held = own.start <= self.first and self.stop <= own.stop
        return slice(0, self.stop - self.first if is_held else 0), rows, columns

    def part_shape(self, rank: int) -> tuple[int, ...]:
        return tuple(held.stop - held.start for held in self.part(rank))

    @cached_property
    def holders(self) -> list[int]:
        """Ranks that have some of it."""
        return [rank for rank in range(len(self.parts)) if math.prod(self.part_shape(rank)) > 0]

    def view(self, local: torch.Tensor, rank: int) -> torch.Tensor:
        """From ``rank``'s part of a tensor like the parameter, that of this stack."""
        local = local if local.ndim == 3 else local[None]
        count, start = self.part_shape(rank)[0], self.first - self.parts[rank][0].start
        return local[start : start + count] if count else local[:0]


@dataclass(frozen=True)
class Task:
    stack: Stack
    owner: int
    """The rank that orthogonalizes it."""

    @cached_property
    def senders(self) -> list[int]:
        """Ranks whose parts the owner assembles: of several replicas, those of its own."""
        copies = self.stack.copies
        return [rank for rank in self.stack.holders if copies[rank] == copies[self.owner]]

    @property
    def travels(self) -> bool:
        """Whether another rank has some of it."""
        return self.stack.holders != [self.owner]


class Muon(ChunkedAdamW):
    """Groups with a ``muon_momentum`` are Muon's, with Nesterov's momentum; the others AdamW's.

    Scaled by 0.2 sqrt(max(m, n)), so that learning rate and weight decay of AdamW serve both
    (arXiv 2502.16982). As ``torch.optim.Muon`` with ``match_rms_adamw``, except that it computes in
    bfloat16 always: here float32 weights on a GPU do, all others compute in their own dtype.

    Each matrix is gathered on one rank, orthogonalized, and sent back in parts. Work is dealt out
    to all ranks that hold weights of the same layers; experts that are whole on a rank stay there.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, weight_mesh: DeviceMesh | None, **options: Any
    ) -> None:
        """``weight_mesh`` has every rank; None: there is one. A collective."""
        super().__init__(groups, **options)
        self._group, ranks = _stage_group(weight_mesh)
        self._rank = ranks.index(dist.get_rank()) if weight_mesh is not None else 0
        matrices = list(self._groups())
        if not matrices:
            raise ValueError("muon: the model has no hidden matrices")
        self._dtype, self._device = _compute_dtype(matrices[0]), local_part(matrices[0]).device
        stacks = [stack for matrix in matrices for stack in _stacks(matrix, ranks)]
        self._rounds = list(_rounds(_deal(stacks, len(ranks)), len(ranks)))
        own = [task.stack for tasks in self._rounds for task in tasks if task.owner == self._rank]
        logger.info(
            "muon: %d of %d parameters, %d matrices; this rank orthogonalizes %d, in %d rounds",
            len(matrices), sum(len(g["params"]) for g in self.param_groups),
            sum(stack.shape[0] for stack in stacks), sum(stack.shape[0] for stack in own),
            len(self._rounds),
        )  # fmt: skip

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Mutates parameters and state; obeys ``found_inf`` as a fused optimizer does.

        A collective; no host synchronization.
        """
        super().step()
        is_masked = getattr(self, "found_inf", torch.zeros((), device=self._device)) != 0
        groups = self._groups()
        for tasks in self._rounds:
            self._step_together(tasks, groups, is_masked)

    def _groups(self) -> dict[nn.Parameter, dict[str, Any]]:
        """The group of each matrix, looked up in each step: loading a state replaces the groups."""
        return {p: g for g in self.param_groups if _is_muon(g) for p in g["params"]}

    def adamw_groups(self) -> list[dict[str, Any]]:
        """Those without hidden matrices."""
        return [group for group in self.param_groups if not _is_muon(group)]

    def _step_together(
        self,
        tasks: list[Task],
        groups: Mapping[nn.Parameter, dict[str, Any]],
        is_masked: torch.Tensor,
    ) -> None:
        """Send parts of matrices to their owners, get back orthogonal ones, and update."""
        rank, n_ranks = self._rank, len(tasks[0].stack.parts)
        to: list[list[torch.Tensor]] = [[] for _ in range(n_ranks)]
        come: list[list[int]] = [[] for _ in range(n_ranks)]
        for task in tasks:
            update = self._advance(task.stack, groups[task.stack.parameter], is_masked)
            if rank in task.senders:
                to[task.owner].append(update)
            for sender in task.senders if task.owner == rank else ():
                come[sender].append(math.prod(task.stack.part_shape(sender)))
        travels = any(task.travels for task in tasks)
        arrived = self._exchange(to, come, travels=travels)
        own = [task for task in tasks if task.owner == rank]
        to, come = [[] for _ in range(n_ranks)], [[] for _ in range(n_ranks)]
        for task, whole in zip(own, _orthogonal(own, arrived), strict=True):
            for holder in task.stack.holders:
                to[holder].append(whole[task.stack.part(holder)])
        for task in tasks:
            if rank in task.stack.holders:
                come[task.owner].append(math.prod(task.stack.part_shape(rank)))
        arrived = self._exchange(to, come, travels=travels)
        for task in tasks:
            if rank in task.stack.holders:
                update = next(arrived[task.owner]).view(task.stack.part_shape(rank))
                self._apply(task.stack, groups[task.stack.parameter], update, is_masked)

    def _advance(
        self, stack: Stack, group: dict[str, Any], is_masked: torch.Tensor
    ) -> torch.Tensor:
        """Move this rank's part of the momentum; return what to orthogonalize, (e, rows, columns).

        0 where the update is masked, so that nothing that is not finite travels.
        """
        parameter = stack.parameter
        assert parameter.grad is not None, "a matrix without a gradient"
        state = self.state[parameter]
        if not state:
            dtype = self.moment_dtype or parameter.dtype
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=dtype)
        gradient = stack.view(local_part(parameter.grad), self._rank)
        momentum = stack.view(local_part(state["momentum_buffer"]), self._rank)
        share = group["muon_momentum"]
        moved = momentum.to(gradient.dtype).lerp(gradient, 1 - share)
        update = torch.where(is_masked, 0.0, gradient.lerp(moved, share))
        momentum.copy_(torch.where(is_masked, momentum, moved))
        return update.to(self._dtype)

    def _apply(
        self,
        stack: Stack,
        group: dict[str, Any],
        update: torch.Tensor,
        is_masked: torch.Tensor,
    ) -> None:
        weight = stack.view(local_part(stack.parameter), self._rank)
        scale = RMS * math.sqrt(max(stack.shape[1:]))
        kept = weight * (1 - group["lr"] * group["weight_decay"])
        updated = kept.add_(update, alpha=-group["lr"] * scale)
        weight.copy_(torch.where(is_masked, weight, updated))

    def _exchange(
        self, to: list[list[torch.Tensor]], come: list[list[int]], *, travels: bool
    ) -> list[Iterator[torch.Tensor]]:
        """Send flat tensors ``to`` each rank; return those that ``come``, by sender, in its order.

        ``travels``: whether any rank has something for another.
        """
        nothing = torch.empty(0, dtype=self._dtype, device=self._device)
        sent = torch.cat([nothing, *(tensor.flatten() for tensor in chain.from_iterable(to))])
        received = sent
        if travels:
            received = sent.new_empty(sum(map(sum, come)))
            sizes_sent = [sum(tensor.numel() for tensor in tensors) for tensors in to]
            sizes = [sum(own) for own in come]
            dist.all_to_all_single(received, sent, sizes, sizes_sent, group=self._group)
        by_rank = received.split([sum(sizes) for sizes in come])
        return [iter(part.split(sizes)) for part, sizes in zip(by_rank, come, strict=True)]


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """U f(S) V' of each U S V' in (k, m, n), with f(S) between about 0.7 and 1.2; zeros stay.

    Newton-Schulz iteration of a polynomial of degree 5: matrix products alone.
    """
    a, b, c = COEFFICIENTS
    x = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    precise = torch.promote_types(x.dtype, torch.float32)
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=precise)
    # No singular value is above the root of the sum of their squares.
    x = (x / norms.clamp(min=EPS)).to(x.dtype)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if matrices.shape[-2] > matrices.shape[-1] else x


def _orthogonal(
    tasks: list[Task], arrived: list[Iterator[torch.Tensor]]
) -> tuple[torch.Tensor, ...]:
    """Each task's matrices, made whole from the senders' parts, and orthogonal."""
    if not tasks:
        return ()
    counts = [task.stack.shape[0] for task in tasks]
    parts = [[next(arrived[sender]) for sender in task.senders] for task in tasks]
    whole = parts[0][0].new_empty(sum(counts), *tasks[0].stack.shape[1:])
    for task, own, target in zip(tasks, parts, whole.split(counts), strict=True):
        for sender, part in zip(task.senders, own, strict=True):
            target[task.stack.part(sender)] = part.view(task.stack.part_shape(sender))
    return orthogonalize(whole).split(counts)


def _compute_dtype(parameter: torch.Tensor) -> torch.dtype:
    """bfloat16 for float32 on a GPU: exact enough for an iteration that is not exact either."""
    is_lowered = parameter.is_cuda and parameter.dtype == torch.float32
    return torch.bfloat16 if is_lowered else parameter.dtype


def _is_muon(group: dict[str, Any]) -> bool:
    return "muon_momentum" in group


def _stage_group(weight_mesh: DeviceMesh | None) -> tuple[dist.ProcessGroup | None, list[int]]:
    """The ranks that hold weights of the same layers as this one. A collective."""
    if weight_mesh is None:
        return None, [0]
    # Pipeline stages are the first dim.
    stages = weight_mesh.mesh.flatten(1).tolist()
    groups = [dist.new_group(ranks) for ranks in stages] if len(stages) > 1 else [dist.group.WORLD]
    [own] = [index for index, ranks in enumerate(stages) if dist.get_rank() in ranks]
    return groups[own], stages[own]


def _stacks(parameter: nn.Parameter, ranks: list[int]) -> Iterator[Stack]:
    """Cut a parameter into stacks, where a rank's part of the experts ends, and to ``CHUNK``."""
    parts, copies = [], []
    for rank in ranks:
        coordinate: list[int] = []
        if isinstance(parameter, DTensor):
            [coordinate] = (parameter.device_mesh.mesh == rank).nonzero().tolist()
        *experts, rows, columns = part_of(parameter, coordinate)
        parts.append((experts[0] if experts else slice(0, 1), rows, columns))
        placed = zip(coordinate, getattr(parameter, "placements", ()), strict=True)
        copies.append(tuple(at for at, placement in placed if placement.is_replicate()))
    limit = max(1, CHUNK // math.prod(parameter.shape[-2:]))
    for start, stop in pairwise(sorted({end for p, *_ in parts for end in (p.start, p.stop)})):
        for first in range(start, stop, limit):
            yield Stack(parameter, first, min(stop, first + limit), parts, copies)


def _deal(stacks: list[Stack], n_ranks: int) -> list[Task]:
    """Give each stack to the rank with least to do, of those that hold it whole if any do."""
    loads = [0] * n_ranks
    tasks = []
    # The largest first, so that small ones even out what large ones leave uneven.
    for stack in sorted(stacks, key=lambda stack: -stack.work):
        whole = [rank for rank in range(n_ranks) if stack.part_shape(rank) == stack.shape]
        owner = min(whole or range(n_ranks), key=loads.__getitem__)
        loads[owner] += stack.work
        tasks.append(Task(stack, owner))
    return tasks


def _rounds(tasks: list[Task], n_ranks: int) -> Iterator[list[Task]]:
    """Rounds of tasks of one shape; in each, a rank has at most ``CHUNK`` elements or one task."""
    by_shape: dict[tuple[int, ...], list[Task]] = defaultdict(list)
    for task in tasks:
        by_shape[task.stack.shape[1:]].append(task)
    for same in by_shape.values():
        rounds: list[list[Task]] = []
        counts, at = [0] * n_ranks, [0] * n_ranks
        for task in same:
            owner, size = task.owner, math.prod(task.stack.shape)
            if counts[owner] and counts[owner] + size > CHUNK:
                counts[owner], at[owner] = 0, at[owner] + 1
            counts[owner] += size
            if at[owner] == len(rounds):
                rounds.append([])
            rounds[at[owner]].append(task)
        yield from rounds
