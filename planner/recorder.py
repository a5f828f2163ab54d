"""Records a training step: memory by category, collectives, FLOPs, and bytes moved by operators."""

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd import Function

from config import ConfigError
from planner.fake_operators import KEY, FakeTensor, fake_operators
from planner.operators import Call, flops_of
from planner.step_record import (
    ACTIVATIONS,
    BACKWARD,
    CATEGORIES,
    COMMUNICATION,
    FORWARD,
    GATHERED,
    GRADIENTS,
    LOGITS,
    PARAMETERS,
    RECOMPUTE,
    TEMPORARIES,
    UPDATE,
    Collective,
    Group,
    MemoryTimeline,
    StepRecord,
)
from runtime.compat import require

DispatchMode: Any = require("torch.utils._python_dispatch:TorchDispatchMode", key=KEY)
tree_leaves: Any = require("torch.utils._pytree:tree_leaves", key=KEY)
current_graph_task: Any = require("torch._C:_current_graph_task_id", key=KEY)
active_mode: Any = require("torch._C:_get_dispatch_mode", key=KEY)
FAKE: Any = require("torch._C:_TorchDispatchModeKey.FAKE", key=KEY)

# Bytes to which CUDA's allocator rounds.
GRANULARITY = 512
# Part of an operator's name to the kind of collective.
COLLECTIVES = {
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "receive",
}


@dataclass(eq=False)
class Block:
    """A storage, in the order of allocation."""

    size: int
    phase: str
    category: str = ""
    is_kept: bool = False
    """Forward left it for backward."""
    reference: Any = None


class StepRecorder(DispatchMode):
    """Mode that runs operators, on fake tensors unless ``is_real``, and records them."""

    def __init__(
        self,
        groups: Mapping[str, Sequence[Group]],
        vocab_size: int,
        *,
        has_stages: bool = False,
        is_real: bool = False,
    ) -> None:
        """``groups``: of the mesh dims that share a process group, by its name. ``vocab_size``: the
        last dim of logits."""
        super().__init__()
        self._fake = fake_operators()
        self._has_stages, self._is_real = has_stages, is_real
        self.weight = 1.0
        """Times that what runs now counts."""
        self.is_in_block = False
        """True in a block, whose tensors of the size of logits are none."""
        self._groups, self._vocab_size = dict(groups), vocab_size
        self._phase, self._has_graph = FORWARD, False
        """``_has_graph``: inside the forward of an autograd function, which records none itself."""
        self._live: dict[int, Block] = {}
        self._changes: list[tuple[Block, int]] = []
        self._marks: list[tuple[str, int]] = []
        self._collectives: dict[Collective, float] = defaultdict(float)
        self._flops: dict[tuple[str, str], float] = defaultdict(float)
        self._traffic: dict[str, float] = defaultdict(float)

    def begin_forward(self, weight: float = 1.0) -> None:
        """Call before a microbatch's forward, which counts ``weight`` times."""
        self._phase, self.weight = FORWARD, weight
        self._label_gradients(("", COMMUNICATION))

    def restart(self) -> None:
        """Forget what was recorded, but not what is allocated."""
        self._changes = [(block, block.size) for block in self._live.values()]
        self._marks = []
        for counts in (self._collectives, self._flops, self._traffic):
            counts.clear()
        self._phase, self.weight = FORWARD, 1.0

    def mark(self, name: str) -> None:
        """Note that what follows is ``name``; see ``MemoryTimeline``."""
        self._marks.append((name, len(self._changes)))

    def label(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Set the category of the storages of these plain tensors."""
        for tensor in tensors:
            self._block_of(tensor).category = category

    def count_kernel(self, tensors: Sequence[torch.Tensor], *_: object) -> None:
        """Count one kernel that reads and writes ``tensors``, in place of running its operators."""
        self._traffic[UPDATE] += 2 * sum(map(size_of, tensors))

    def record(self) -> StepRecord:
        """Return what was recorded since the last ``restart``."""
        held = self._held()
        at_peak = held[held.sum(1).argmax()].tolist()
        return StepRecord(
            memory=dict(zip(CATEGORIES, at_peak, strict=True)),
            collectives=dict(sorted(self._collectives.items())),
            groups={group.dim: group for group in chain.from_iterable(self._groups.values())},
            flops=dict(sorted(self._flops.items())),
            traffic=dict(self._traffic),
            timeline=MemoryTimeline(held, self._marks),
        )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which operators and changes of storages' sizes are recorded."""
        # A class method of Python, or, from PyTorch 2.15 on, of C.
        resize, apply = torch.UntypedStorage.resize_, Function.__dict__["apply"]

        def resize_tracked(storage: Any, size: int) -> Any:
            self._resized(storage, size)
            return resize(storage, size)

        def apply_tracked(function: Any, *args: Any) -> Any:
            outer = self._has_graph
            self._has_graph |= torch.is_grad_enabled()
            try:
                return apply.__get__(None, function)(*args)
            finally:
                self._has_graph = outer

        with (
            patch.object(torch.UntypedStorage, "resize_", resize_tracked),
            patch.object(Function, "apply", classmethod(apply_tracked)),
            self,
        ):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Half of all calls, marks for profilers, and DTensor's own mode, in which it runs operators
        # on whole shapes to learn those of results.
        is_device = func is torch.ops.prim.device.default
        if is_device or func.namespace == "profiler" or active_mode(FAKE) is not None:
            return func(*args, **kwargs)
        if any(not is_plain(t) for t in types):
            return NotImplemented  # A DTensor comes again as local tensors.
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if inputs and self._is_data(inputs):
            return func(*args, **kwargs)
        if func.name() == "aten::_local_scalar_dense" and not self._is_real:
            return self._vote(args[0])
        phase = self._update_phase()
        fake = self._fake
        result = func(*args, **kwargs) if self._is_real else fake(func, args, kwargs, inputs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        call = Call(phase, func, args, kwargs, result, inputs, outputs)
        self._track(call)
        if func.namespace in ("c10d", "_c10d_functional"):
            self.count_collective(call)
        else:
            self.count_work(call)
        return result

    def _track(self, call: Call) -> None:
        """Note the storages that ``call`` allocated."""
        for output in call.outputs:
            is_new = id(output.untyped_storage()) not in self._live
            block = self._block_of(output, call.phase)
            call.is_new |= is_new
            if is_new and call.name == "_to_copy" and self._is_parameter(call.inputs[0]):
                block.category = GATHERED
            elif is_new and self._is_of_logits(output):
                block.category = LOGITS

    def _label_gradients(self, among: tuple[str, ...]) -> None:
        """Count what backward left as gradients, if it has one ``among`` these categories."""
        for block in self._live.values():
            if block.phase == BACKWARD and block.category in among:
                block.category = GRADIENTS

    def _is_of_logits(self, tensor: torch.Tensor) -> bool:
        has_size = tensor.ndim > 1 and tensor.shape[-1] == self._vocab_size
        return has_size and not self.is_in_block

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        return self._block_of(tensor).category == PARAMETERS

    def _vote(self, value: torch.Tensor) -> int:
        """Return what the host reads: the vote of a pipeline's stages that all know their shapes.

        Raises ``ConfigError`` for any other ``value``, because a fake tensor has none.
        """
        if not self._has_stages or value.dtype != torch.int32:
            raise ConfigError(
                ["model.name: is not planned: its code reads values of tensors on the host"]
            )
        return 1

    def _is_data(self, tensors: list[torch.Tensor]) -> bool:
        """True for tensors from outside, such as those of meshes."""
        return not self._is_real and not any(t.is_meta or is_fake(t) for t in tensors)

    def _update_phase(self) -> str:
        """Return the phase that runs now."""
        if current_graph_task() < 0:
            if self._phase == BACKWARD:
                self._phase, self.weight = UPDATE, 1.0
                self._label_gradients(("",))
                self.mark(UPDATE)
            return self._phase
        if self._phase != BACKWARD:
            for block in self._live.values():
                block.is_kept |= block.phase == FORWARD
            self._phase = BACKWARD
        # Backward records no graph, unless it runs a forward again.
        return RECOMPUTE if torch.is_grad_enabled() or self._has_graph else BACKWARD

    def _block_of(self, tensor: torch.Tensor, phase: str = FORWARD) -> Block:
        storage = tensor.untyped_storage()
        block = self._live.get(id(storage))
        return self._allocated(storage, storage.nbytes(), phase) if block is None else block

    def _allocated(self, storage: Any, size: int, phase: str) -> Block:
        key, block = id(storage), Block(_rounded(size), phase)

        def freed(_: object) -> None:
            self._changes.append((block, -self._live.pop(key).size))

        block.reference = weakref.ref(storage, freed)
        self._live[key] = block
        self._changes.append((block, block.size))
        return block

    def _resized(self, storage: Any, size: int) -> None:
        """FSDP2 frees and allocates gathered weights by resizing their storages."""
        block = self._live.get(id(storage)) or self._allocated(storage, storage.nbytes(), FORWARD)
        block.category = GATHERED
        self._changes.append((block, _rounded(size) - block.size))
        block.size = _rounded(size)

    def count_collective(self, call: Call) -> None:
        kind = next((kind for part, kind in COLLECTIVES.items() if part in call.name), None)
        if kind is None:  # Waits and barriers.
            return
        groups = next(filter(None, map(self._groups_of, call.args)))
        group = _communicating(groups, kind, call)
        if kind in ("send", "receive") and is_scalar(call):
            return  # A vote of pipeline stages, in the first step of a schedule.
        sizes = [sum(map(size_of, tree_leaves(arg))) for arg in (*call.args[:2], call.outputs)]
        self._collectives[Collective(call.phase, kind, group.dim, max(sizes))] += self.weight
        for tensor in (*call.inputs, *call.outputs):
            block = self._block_of(tensor)
            block.category = block.category or COMMUNICATION

    def _groups_of(self, arg: Any) -> Sequence[Group]:
        if isinstance(arg, str):
            return self._groups.get(arg, ())
        if not isinstance(arg, torch.ScriptObject):
            return ()
        try:
            group = dist.ProcessGroup.unbox(arg)
        except (RuntimeError, TypeError):  # Another script object.
            return ()
        if group.group_name not in self._groups:
            ranks = tuple(dist.get_process_group_ranks(group))
            wholes = (groups[0] for groups in self._groups.values())
            whole = next((each for each in wholes if {*ranks} <= {*each.ranks}), None)
            # Muon's, of all ranks of a pipeline stage.
            dim = "stage" if whole is None else whole.dim
            if whole is not None and len(ranks) < len(whole.ranks):
                # FSDP's smaller group that keeps the weights after forward.
                dim = f"{dim} / {len(ranks)}"
            self._groups[group.group_name] = [Group(dim, ranks, dist.get_world_size())]
        return self._groups[group.group_name]

    def count_work(self, call: Call) -> None:
        if not call.is_new and not call.name.endswith("_"):
            return  # A view.
        if "empty" in call.name:
            return  # An allocation.
        if is_scalar(call):
            return  # No traffic to speak of.
        kind, flops = flops_of(call)
        if kind:
            self._flops[call.phase, kind] += self.weight * flops
        else:
            size = sum(map(size_of, (*call.inputs, *call.outputs)))
            self._traffic[call.phase] += self.weight * size

    def _held(self) -> torch.Tensor:
        """Bytes by category after each change (changes, categories)."""
        columns = {category: index for index, category in enumerate(CATEGORIES)}
        changes = torch.zeros(len(self._changes), len(CATEGORIES), dtype=torch.int64)
        indices = [columns[category_of(block)] for block, _ in self._changes]
        sizes = torch.tensor([size for _, size in self._changes], dtype=torch.int64)
        changes[torch.arange(len(indices)), indices] = sizes
        return changes.cumsum(0)


def category_of(block: Block) -> str:
    """Category of a block's bytes, once the step has ended."""
    if block.category in ("", COMMUNICATION) and block.is_kept:
        return ACTIVATIONS
    return block.category or TEMPORARIES


def _communicating(groups: Sequence[Group], kind: str, call: Call) -> Group:
    """The one of these ``groups``, which have the same ranks, whose mesh dim communicates.

    The first is of weights, which are not exchanged, and have three dims at most, those of experts.
    """
    dims: tuple[str, ...] = ()
    if kind == "all_to_all":
        dims = ("cp", "ep")
    elif any(tensor.dim() > 3 for tensor in call.inputs):
        dims = ("cp",)
    return next((group for group in groups if group.dim in dims), groups[0])


def _rounded(size: int) -> int:
    return -(-size // GRANULARITY) * GRANULARITY


def is_scalar(call: Call) -> bool:
    """True for an operator on single elements."""
    return all(tensor.numel() == 1 for tensor in (*call.inputs, *call.outputs))


def is_plain(cls: type) -> bool:
    """True for tensors that are no wrapper of others, as DTensors are."""
    return cls in (torch.Tensor, nn.Parameter, FakeTensor)


def is_fake(tensor: torch.Tensor) -> bool:
    """True for a tensor without data."""
    return isinstance(tensor, FakeTensor)


def size_of(value: Any) -> int:
    """Bytes of a tensor; 0 for anything else."""
    return value.numel() * value.itemsize if isinstance(value, torch.Tensor) else 0
