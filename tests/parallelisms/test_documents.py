"""Packed documents on layouts that cut the sequence compute what one device does, see only
themselves, and cost each rank only its part.

The rows put the documents' boundaries on, before and after every place where a layout cuts.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from config.job_config import ActivationCheckpoint, Compile, Parallelism
from data.loader import Batch, count_valid
from forward_backward import Runner, WholeModel, _SequenceParts
from models import TransformerArgs, find_model
from models.meta import build_on_meta
from models.transformer import InnerAttention
from optim.loss import IGNORED, cross_entropy_sum
from parallelisms.context_parallel import AllGather, Ulysses, sequence_part
from parallelisms.materialize import materialize
from parallelisms.parallel_dims import ParallelDims
from runtime.distributed import local_part, sum_in_order, sum_over
from tests.layouts import CP, CPU, METHOD, MODE, PP, REPLICATE, SCHEDULE, TP, Layout, spread
from tests.ranks import RankPool

LLAMA, QWEN = "llama3", "qwen3"
TOLERANCE = 1e-9
SEQ_LEN, MICROBATCHES, FLOAT64 = 32, 2, 8
# Context parallel on 4 ranks cuts at each of these places, other layouts at some of them.
EDGES = range(4, SEQ_LEN, 4)
# Where the documents of each row start.
STARTS: tuple[tuple[int, ...], ...] = (
    (0, *EDGES),
    (0, *(edge - 1 for edge in EDGES)),
    (0, *(edge + 1 for edge in EDGES)),
    # Documents of one token on both sides of every edge.
    (0, *sorted(edge + side for edge in EDGES for side in (-1, 0, 1))),
    # Longer than any part.
    (0, 5, 26),
    (0,),
    (0, 15),
    (0, 16),
    (0, 17),
    tuple(range(SEQ_LEN)),
    (0, 1, 2, 8, 24, 31),
    (0, 7, 25),
)
ROWS = len(STARTS)


@dataclass(frozen=True)
class Case:
    layout: Layout
    n_heads: int = 4
    n_kv_heads: int = 2
    models: tuple[str, ...] = (LLAMA, QWEN)

    def __str__(self) -> str:
        heads = f"heads{self.n_heads}-{self.n_kv_heads}"
        return "-".join([str(self.layout), heads, *self.models])

    @property
    def degrees(self) -> tuple[int, int]:
        """Of context and tensor parallel: what cuts the sequence."""
        return self.layout.parallelism.get(CP, 1), self.layout.parallelism.get(TP, 1)

    @property
    def gathers(self) -> bool:
        return self.layout.parallelism.get(METHOD) == "allgather"


GATHER = {METHOD: "allgather"}
CASES = [
    Case(Layout(2, {CP: 2})),
    Case(Layout(2, {CP: 2} | GATHER)),
    # Heads of keys that are split, and those that several ranks need.
    Case(Layout(2, {CP: 2}), 6, 3),
    Case(Layout(2, {PP: 2})),
    Case(Layout(4, {CP: 4})),
    Case(Layout(4, {CP: 4} | GATHER)),
    Case(Layout(4, {CP: 2})),
    Case(Layout(4, {CP: 2} | GATHER)),
    Case(Layout(4, {CP: 2, PP: 2})),
    Case(Layout(4, {CP: 2, PP: 2} | GATHER)),
]
# Each with one of the models; the other is slow.
TENSOR_PARALLEL = [
    Case(Layout(2, {TP: 2}), 6, 3, (QWEN,)),
    Case(Layout(2, {TP: 2}), 4, 1, (LLAMA,)),
    Case(Layout(4, {TP: 4}), models=(QWEN,)),
    Case(Layout(4, {CP: 2, TP: 2}), 12, 3, (QWEN,)),
    Case(Layout(4, {CP: 2, TP: 2} | GATHER), models=(LLAMA,)),
    Case(Layout(8, {PP: 2, CP: 2, TP: 2}), models=(QWEN,)),
]
INTERLEAVED = {PP: 2, SCHEDULE: "Interleaved1F1B"}
SLOW_CASES = [
    *(replace(c, models=(LLAMA if QWEN in c.models else QWEN,)) for c in TENSOR_PARALLEL),
    Case(Layout(4, {CP: 4}), 4, 1),
    Case(Layout(4, {TP: 4}), 4, 1),
    *(
        Case(Layout(world_size, keys | method))
        for world_size, keys in [
            (4, {CP: 2, REPLICATE: 2}),
            (4, {CP: 2, MODE: "ddp"}),
            (4, {CP: 2, MODE: "simple_fsdp"}),
            (4, {CP: 2, **INTERLEAVED}),
            (8, {CP: 2, TP: 2}),
            (8, {CP: 2, TP: 2, **INTERLEAVED}),
            (8, {CP: 4, TP: 2}),
        ]
        for method in ({}, GATHER)
        # Ulysses has no head for each of 8 ranks.
        if method or keys.get(CP) == 2
    ),
]
RECOMPUTED, COMPILED = ActivationCheckpoint(mode="full"), Compile(enable=True, backend="aot_eager")
VARIANTS = [
    Case(Layout(2, {CP: 2} | method, **variant))
    for method in ({}, GATHER)
    for variant in ({"recompute": RECOMPUTED}, {"compile": COMPILED})
]


def args_of(name: str, case: Case) -> TransformerArgs:
    """A tiny model, so that many sequences take little time. qwen3's embeddings are tied."""
    args = find_model(name, "debugmodel")[1]
    assert args.tie_embeddings == (name == QWEN)
    args = replace(args, n_heads=case.n_heads, n_kv_heads=case.n_kv_heads, head_dim=8)
    n_layers = 4 if "Interleaved" in str(case) else 2
    return replace(
        args, dim=32, hidden_dim=48, n_layers=n_layers, vocab_size=64, max_seq_len=SEQ_LEN
    )


@cache
def packed() -> Batch:
    """The rows of STARTS."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(64, (ROWS, SEQ_LEN + 1), generator=generator)
    is_start = torch.zeros(ROWS, SEQ_LEN, dtype=torch.long)
    for row, starts in enumerate(STARTS):
        is_start[row, list(starts)] = 1
    index = torch.arange(SEQ_LEN)
    positions = index - (index * is_start).cummax(dim=1).values
    labels = tokens[:, 1:].clone()
    # Late labels count less often.
    chance = 0.8 * (index / SEQ_LEN) ** 2
    labels[torch.rand(labels.shape, generator=generator) < chance] = IGNORED
    # With ulysses some ranks have no label at all in the first microbatch.
    labels[: ROWS // MICROBATCHES, : SEQ_LEN // 2] = IGNORED
    return Batch(tokens[:, :-1].contiguous(), labels, positions, is_start.cumsum(dim=1))


def rows_of(batch: Batch, rows: slice) -> Batch:
    return Batch(*(None if tensor is None else tensor[rows] for tensor in batch[:4]))


def test_the_rows_hold_every_case():
    assert all(row == tuple(sorted(set(row))) and row[0] == 0 for row in STARTS)
    lengths = [
        [end - start for start, end in zip(row, (*row[1:], SEQ_LEN), strict=True)] for row in STARTS
    ]
    for edge in EDGES:
        for start in (edge - 1, edge, edge + 1):
            assert any(start in row for row in STARTS)
            # With whole documents of more than a token on both sides, and as one token.
            found = [(n, row.index(start)) for n, row in enumerate(STARTS) if start in row]
            assert any(min(lengths[n][i - 1 : i + 1]) > 1 for n, i in found)
            assert any(lengths[n][i] == 1 for n, i in found)
        # A document goes on over the edge.
        assert any(not {edge - 1, edge, edge + 1} & set(row) for row in STARTS)
    # The longest part of a sequence that is cut is half of it.
    assert any(SEQ_LEN // 2 < length < SEQ_LEN for row in lengths for length in row)
    assert [SEQ_LEN] in lengths
    assert [1] * SEQ_LEN in lengths
    batch = packed()
    for row, starts in enumerate(STARTS):
        assert (batch.positions[row] == 0).nonzero().flatten().tolist() == list(starts)
        assert len(batch.document_ids[row].unique()) == len(starts)


class Measured(NamedTuple):
    """What hooks saw of one forward and backward."""

    blocks: set[int]
    """Lengths of the sequence where blocks begin."""
    queries: set[tuple[int, int]]
    """Lengths of the queries, and their heads, where ``attention.inner`` begins."""
    scores: set[tuple[int, int]]
    """The same, where queries are multiplied with keys."""
    saved: int
    """Bytes that a block saves for backward for one more row."""


class Truth(NamedTuple):
    """What one device makes of ``packed()``."""

    logits: torch.Tensor
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    saved: int
    mask: int
    """Bytes of ``saved`` that are there for the documents' sake."""


@cache
def one_device(name: str, args: TransformerArgs) -> Truth:
    spec, batch = find_model(name, "debugmodel")[0], packed()
    model = build_on_meta(spec, args, torch.float64)
    materialize(model, CPU, seed=7)
    runner = WholeModel(model, parallelism=Parallelism(), device=CPU)
    logits = runner.logits(batch)
    loss = runner.train([batch], count_valid([batch])).sum()
    gradients = {}
    for fqn, parameter in model.named_parameters():
        assert parameter.grad is not None
        gradients[fqn] = parameter.grad.clone()
    saved = measure(model, spec, runner, batch).saved
    mask = saved - measure(model, spec, runner, batch._replace(document_ids=None)).saved
    assert mask > 0
    return Truth(logits, loss, gradients, saved, mask)


@dataclass
class Report:
    """What a rank found."""

    errors: dict[str, float]
    """Relative to one device: of logits, of the loss, and of gradients by FQN."""
    leaks: dict[str, int]
    """Counts of pairs of positions, by what is wrong with them."""
    measured: Measured | None
    cuts: set[int]
    """Where this rank's part of a sequence has a beginning."""
    part: tuple[int, int]
    """What part of the batch the rank has, by rows and by sequence."""
    n_valid: int
    """Labels in it."""

    @property
    def wrong(self) -> dict[str, float]:
        return {what: error for what, error in self.errors.items() if not error < TOLERANCE}

    def excess(self, name: str, case: Case) -> dict[str, str]:
        """What the rank holds beyond its part of the sequence."""
        assert self.measured is not None
        cp, tp = case.degrees
        heads, length = case.n_heads // tp, SEQ_LEN // cp
        scores = (length // 2, heads) if case.gathers else (SEQ_LEN, heads // cp)
        want = {length // tp}, {(length, heads)}, {scores}
        (*lengths, saved), found = self.measured, {}
        if tuple(lengths) != want:
            found["lengths"] = f"{lengths}, not {want}"
        bound = saved_bound(args_of(name, case), one_device(name, args_of(name, case)), case)
        if not 0 < saved <= bound:
            found["saved"] = f"{saved} bytes, not {bound}"
        return found

    def caught(self, name: str, case: Case) -> set[str]:
        """The kinds of what is wrong."""
        values = {what if what in ("logits", "loss") else "gradients" for what in self.wrong}
        isolation = {"isolation"} if any(self.leaks.values()) else set()
        return values | isolation | set(self.excess(name, case))


def saved_bound(args: TransformerArgs, truth: Truth, case: Case) -> float:
    """Bytes per row of which a block's backward may need no more.

    The share of what one device saves, and what attention to the whole sequence takes:

    - its output is saved twice, before and after it is in this rank's order;
    - allgather has keys and values of the whole sequence, ulysses some heads of them for others;
    - the mask is for queries and keys: all of both with ulysses. With allgather chunks r and
      2n-1-r see r+1 and 2n-r chunks, together 2n+1 of (2n)^2 pairs of chunks.
    """
    cp, _ = case.degrees
    output = SEQ_LEN * args.n_heads * args.head_dim * FLOAT64 / cp
    keys = 2 * SEQ_LEN * args.n_kv_heads * args.head_dim * FLOAT64
    if case.gathers:
        more, seen = keys * (1 - 1 / cp), (2 * cp + 1) / (4 * cp**2)
    else:
        more, seen = keys / cp * (math.lcm(args.n_kv_heads, cp) / args.n_kv_heads - 1), 1.0
    return (truth.saved - truth.mask) / cp + output + more + truth.mask * seen


def inspect(
    name: str, case: Case, fault: Callable[[], AbstractContextManager] = nullcontext
) -> Report:
    """Everything this file asks of a layout, of one model on this rank."""
    layout, spec, args = case.layout, find_model(name, "debugmodel")[0], args_of(name, case)
    truth = one_device(name, args)
    is_plain = layout.recompute.mode == "none" and not layout.compile.enable
    # What other tests compiled in this process counts against PyTorch's limit for a function.
    torch.compiler.reset()
    with fault():
        sharded = spread(name, args, layout, dtype="float64")
        materialize(sharded.model, CPU, seed=7)
        runner, dims = sharded.runner(), sharded.dims
        errors = compare(sharded.model, runner, dims, truth)
        leaks = find_leaks(runner)
        measured = measure(sharded.model, spec, runner, packed()) if is_plain else None
    own = own_positions(case, dims)
    # Between the matrices tensor parallel cuts it again.
    cut = own.chunk(dims.degrees.tp)[dims.data_mesh["tp"].get_local_rank()]
    labels = torch.cat([batch.labels[:, own] for batch in own_microbatches(dims)])
    return Report(
        errors,
        leaks,
        measured,
        {int(start) for start in cut if int(start) - 1 not in cut},
        (dims.batch_mesh.get_local_rank(), dims.cp_mesh.get_local_rank()),
        int((labels != IGNORED).sum()),
    )


def own_positions(case: Case, dims: ParallelDims) -> torch.Tensor:
    if dims.degrees.cp == 1:
        return torch.arange(SEQ_LEN)
    method = "allgather" if case.gathers else "ulysses"
    return sequence_part(SEQ_LEN, dims.cp_mesh, method=method)


def compare(model: nn.Module, runner: Runner, dims: ParallelDims, truth: Truth) -> dict[str, float]:
    """Relative errors of a step with several microbatches.

    They are only returned: a rank that raised would leave the others in their collectives.
    """
    # Forward gives the modules whole weights for a while.
    parameters = dict(model.named_parameters())
    degree, rank = dims.batch_mesh.size(), dims.batch_mesh.get_local_rank()
    rows = slice(rank * ROWS // degree, (rank + 1) * ROWS // degree)
    logits = runner.logits(rows_of(packed(), rows))
    microbatches = own_microbatches(dims)
    n_tokens = int(sum_over(torch.tensor(count_valid(microbatches)), dims.batch_mesh))
    loss = sum_in_order(runner.train(microbatches, n_tokens), dims.data_mesh)
    errors = {"logits": off(logits, truth.logits[rows]), "loss": off(loss, truth.loss)}
    for fqn, parameter in parameters.items():
        assert isinstance(parameter.grad, DTensor)
        errors[fqn] = off(parameter.grad.full_tensor(), truth.gradients[fqn])
    return errors


def own_microbatches(dims: ParallelDims) -> list[Batch]:
    degree, rank = dims.batch_mesh.size(), dims.batch_mesh.get_local_rank()
    n_rows = ROWS // (degree * MICROBATCHES)
    starts = range(rank * n_rows, ROWS, degree * n_rows)
    return [rows_of(packed(), slice(start, start + n_rows)) for start in starts]


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def find_leaks(runner: Runner) -> dict[str, int]:
    """Change each token of each row in turn, and see which logits change at all.

    To the last bit: both times the same operations are done in the same order, and what a mask
    hides has a weight of exactly 0.
    """
    tokens, positions, document_ids = packed().inputs
    assert document_ids is not None
    whole = torch.zeros(1, SEQ_LEN, dtype=torch.long)
    leaks = {}
    for what, inputs, ids in [
        ("documents", (tokens, positions, document_ids), document_ids),
        ("one document", (tokens[:1],), whole),
    ]:
        sees = influence(runner, *inputs)
        is_later = torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool).triu()
        is_same = ids[:, :, None] == ids[:, None, :]
        leaks[f"other documents see {what}"] = int((sees & ~is_same).sum())
        leaks[f"earlier positions see {what}"] = int((sees & is_same & ~is_later).sum())
        leaks[f"own later positions do not see {what}"] = int((~sees & is_same & is_later).sum())
    return leaks


def influence(runner: Runner, tokens: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Which position's token changes which position's logits (rows, s, s)."""
    before, *rest = (t[:, None].expand(-1, SEQ_LEN, -1) for t in (tokens, *others))
    after = before.clone()
    after.diagonal(dim1=1, dim2=2).add_(1).remainder_(64)
    before, after, *rest = (t.flatten(0, 1) for t in (before, after, *rest))
    facts = rest or [None, None]
    logits = [runner.logits(Batch(tokens, tokens, *facts)) for tokens in (before, after)]
    is_changed = logits[0] != logits[1]
    return is_changed.any(dim=-1).unflatten(0, (-1, SEQ_LEN))


def measure(model: nn.Module, spec: Any, runner: Runner, batch: Batch) -> Measured:
    """Train on one row of ``batch`` and then on two: weights cost nothing for one more row."""
    lengths: tuple[set[int], set[Any], set[Any]] = (set(), set(), set())
    saved = []
    for n_rows in (1, 2):
        with watched(model, spec, lengths) as sizes:
            runner.train([rows_of(batch, slice(n_rows))] * MICROBATCHES, SEQ_LEN)
        saved.append(max(sizes))
    return Measured(*lengths, saved[1] - saved[0])


@contextmanager
def watched(
    model: nn.Module, spec: Any, lengths: tuple[set[int], set[Any], set[Any]]
) -> Iterator[list[int]]:
    """Gives the bytes that each call of a block saves for backward. Adds to ``lengths``."""
    sizes: list[int] = []
    open_hooks: list[saved_tensors_hooks] = []
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        local = local_part(tensor)
        local = local.elem if isinstance(local, AsyncCollectiveTensor) else local
        # Many tensors are views of one storage; one that is kept has an address of its own.
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage()
        return tensor

    def enter(block: nn.Module, inputs: tuple[Any, ...]) -> None:
        lengths[0].add(inputs[0].shape[1])
        storages.clear()
        open_hooks.append(saved_tensors_hooks(pack, lambda tensor: tensor))
        open_hooks[-1].__enter__()

    def leave(block: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        open_hooks.pop().__exit__(None, None, None)
        sizes.append(sum(storage.nbytes() for storage in storages.values()))

    def add_to(seen: set[Any]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda module, inputs: seen.add(tuple(inputs[0].shape[1:3]))

    handles = []
    for block in spec.blocks(model).values():
        handles += [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]
        handles += [
            module.register_forward_pre_hook(add_to(lengths[2]))
            for module in block.modules()
            if isinstance(module, InnerAttention)
        ]
    for attention in spec.attentions(model):
        handles.append(attention.inner.register_forward_pre_hook(add_to(lengths[1])))
    yield sizes
    for handle in handles:
        handle.remove()


def inspect_models(case: Case) -> dict[str, Report]:
    return {name: inspect(name, case) for name in case.models}


@pytest.fixture(scope="module")
def reports(ranks: RankPool) -> Callable[[Case], list[dict[str, Report]]]:
    """Of each rank, by model; a layout is started once for all tests."""
    found: dict[str, list[dict[str, Report]]] = {}

    def of(case: Case) -> list[dict[str, Report]]:
        if str(case) not in found:
            found[str(case)] = ranks.run(inspect_models, case.layout.world_size, case)
        return found[str(case)]

    return of


def marked(cases: list[Case], *others: Case) -> list[Any]:
    slow = [pytest.param(case, marks=pytest.mark.slow, id=str(case)) for case in others]
    return [*(pytest.param(case, id=str(case)) for case in cases), *slow]


@pytest.mark.parametrize("case", marked([*CASES, *TENSOR_PARALLEL], *SLOW_CASES, *VARIANTS))
def test_packed_documents_match_one_device(reports, case: Case):
    for name in case.models:
        found = [report[name] for report in reports(case)]
        assert [report.wrong for report in found] == [{}] * len(found)
        want = {"logits", "loss", *one_device(name, args_of(name, case)).gradients}
        assert set().union(*(report.errors for report in found)) == want
        # What the rows are made for: each part begins at an edge, and has other counts of labels.
        assert set().union(*(report.cuts for report in found)) <= {0, *EDGES}
        counts = {report.part: report.n_valid for report in found}
        assert len(set(counts.values())) == len(counts)


@pytest.mark.parametrize("case", marked([*CASES, *TENSOR_PARALLEL], *SLOW_CASES, *VARIANTS))
def test_a_token_changes_its_document_from_there_on_and_nothing_else(reports, case: Case):
    leaks = [report[name].leaks for report in reports(case) for name in case.models]
    assert all(leaks), "nothing was compared"
    assert [{what: n for what, n in each.items() if n} for each in leaks] == [{}] * len(leaks)


@pytest.mark.parametrize("case", marked([*CASES, *TENSOR_PARALLEL], *SLOW_CASES))
def test_a_rank_holds_its_part_of_the_sequence_only(reports, case: Case):
    for name in case.models:
        found = [report[name].excess(name, case) for report in reports(case)]
        assert found == [{}] * len(found)


def with_heads_in_turn() -> AbstractContextManager:
    """Copies of heads as 0 1 0 1, not 0 0 1 1."""

    def repeat(tensor: torch.Tensor, copies: int, dim: int) -> torch.Tensor:
        return torch.cat([tensor] * copies, dim=dim)

    return patch.object(torch.Tensor, "repeat_interleave", repeat)


def in_order_of_ranks() -> AbstractContextManager:
    """Keys of rank 0's chunks first, then of rank 1's, as they arrive."""

    def gather(self: AllGather, kv: torch.Tensor) -> torch.Tensor:
        parts = DTensor.from_local(kv, self.cp_mesh, [Shard(2)], run_check=False)
        return parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    return patch.object(AllGather, "_gather", gather)


def without_others_gradients() -> AbstractContextManager:
    """Of keys that were gathered, the gradient of this rank's queries only."""
    return patch("parallelisms.context_parallel.Partial", Replicate)


def without_gradients_of_shared_heads() -> AbstractContextManager:
    """Of heads of keys that several ranks need, the gradient of this rank's queries only."""
    return patch("models.transformer_sharding.Partial", Replicate)


def without_documents() -> AbstractContextManager:
    return _with_document_ids(lambda document_ids: None)


def with_boundaries_moved() -> AbstractContextManager:
    """Every document but the first begins a token late."""

    def moved(document_ids: torch.Tensor | None) -> torch.Tensor | None:
        return None if document_ids is None else document_ids[:, [0, *range(SEQ_LEN - 1)]]

    return _with_document_ids(moved)


@contextmanager
def _with_document_ids(change: Callable[[Any], Any]) -> Iterator[None]:
    """As context parallel's attention sees them."""
    with ExitStack() as stack:
        for kind in (Ulysses, AllGather):
            stack.enter_context(patch.object(kind, "forward", _changed(kind.forward, change)))
        yield


def _changed(forward: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda self, q, k, v, ids: forward(self, q, k, v, change(ids))


def with_positions_of_the_first_part() -> AbstractContextManager:
    """Each rank counts from where rank 0 does."""
    original = _SequenceParts.inputs

    def inputs(
        self: _SequenceParts, tokens: torch.Tensor, positions: Any = None, ids: Any = None
    ) -> Any:
        x, options = original(self, tokens, positions, ids)
        if positions is None:
            positions = torch.arange(SEQ_LEN).expand(tokens.shape)
        return x, options | {"positions": positions[:, : x.shape[1]]}

    return patch.object(_SequenceParts, "inputs", inputs)


def with_a_look_ahead() -> AbstractContextManager:
    """Each query sees the next key too, if its chunk ends later."""
    original = torch.Tensor.tril
    return patch.object(torch.Tensor, "tril", lambda mask, n: original(mask, n + 1))


@contextmanager
def without_cutting() -> Iterator[None]:
    """A degree that is accepted and does nothing: each rank computes the same, and all is right."""

    def whole(self: _SequenceParts, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def loss(
        logits: torch.Tensor, labels: torch.Tensor, n_tokens: int, compile: Compile | None
    ) -> torch.Tensor:
        return cross_entropy_sum(logits, labels, n_tokens * dist.get_world_size(), compile)

    with (
        patch("parallelisms.parallelize.apply_context_parallel"),
        patch.object(_SequenceParts, "own", whole),
        patch.object(_SequenceParts, "whole", whole),
        patch("forward_backward.cross_entropy_sum", loss),
    ):
        yield


def inspect_faults(case: Case, faults: list[Callable[[], AbstractContextManager]]) -> list[Report]:
    return [inspect(LLAMA, case, fault) for fault in faults]


VALUES = {"logits", "loss", "gradients"}


@pytest.mark.parametrize(
    ("case", "faults"),
    [
        pytest.param(case, faults, id=str(case))
        for case, faults in [
            (
                Case(Layout(4, {CP: 4})),
                {
                    with_heads_in_turn: VALUES,
                    with_positions_of_the_first_part: VALUES,
                    without_documents: VALUES | {"isolation"},
                    with_boundaries_moved: VALUES | {"isolation"},
                    without_cutting: {"lengths", "saved"},
                },
            ),
            (
                Case(Layout(2, {CP: 2} | GATHER)),
                {
                    in_order_of_ranks: VALUES | {"isolation"},
                    without_others_gradients: {"gradients"},
                    with_positions_of_the_first_part: VALUES,
                    without_documents: VALUES | {"isolation"},
                    with_boundaries_moved: VALUES | {"isolation"},
                    with_a_look_ahead: VALUES | {"isolation"},
                    without_cutting: {"lengths", "saved"},
                },
            ),
            (
                Case(Layout(4, {TP: 4})),
                {with_heads_in_turn: VALUES, without_gradients_of_shared_heads: {"gradients"}},
            ),
        ]
    ],
)
def test_a_fault_is_seen(
    ranks: RankPool, case: Case, faults: dict[Callable[[], AbstractContextManager], set[str]]
):
    for reports in ranks.run(inspect_faults, case.layout.world_size, case, list(faults)):
        found = [report.caught(LLAMA, case) for report in reports]
        assert dict(zip(faults, found, strict=True)) == faults
