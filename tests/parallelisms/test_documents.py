"""Tests of packed documents on layouts that shard the sequence: parity, isolation and memory.

The rows have document boundaries on, before and after every boundary between shards.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from config.job_config import ActivationCheckpoint, Compile, Parallelism
from data.loader import Microbatch, num_target_tokens
from forward_backward import ModelRunner, SPMDRunner
from models import TransformerArgs, find_model
from models.meta import build_on_meta
from optim.loss import IGNORE_INDEX, cross_entropy_sum
from parallelisms.context_parallel import AllGather, SequenceSharder, Ulysses, sequence_shard
from parallelisms.materialize import materialize
from parallelisms.parallel_dims import ParallelDims
from runtime.distributed import sum_in_order, sum_over
from runtime.dtensor import to_local
from tests.lib.layouts import (
    CP,
    CPU,
    METHOD,
    MODE,
    PP,
    REPLICATE,
    SCHEDULE,
    TP,
    Layout,
    shard_debugmodel,
)
from tests.lib.marks import slow
from tests.lib.ranks import RankPool

LLAMA, QWEN = "llama3", "qwen3"
TOLERANCE = 1e-9
SEQ_LEN, MICROBATCHES, FLOAT64 = 32, 2, 8
# Context parallel on 4 ranks shards at each of these positions, other layouts at some of them.
EDGES = range(4, SEQ_LEN, 4)
# First positions of the documents of each row.
STARTS: tuple[tuple[int, ...], ...] = (
    (0, *EDGES),
    (0, *(edge - 1 for edge in EDGES)),
    (0, *(edge + 1 for edge in EDGES)),
    # Documents of one token on both sides of every edge.
    (0, *sorted(edge + side for edge in EDGES for side in (-1, 0, 1))),
    # Longer than any shard.
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
        """Degrees of context and tensor parallel, which shard the sequence."""
        return self.layout.parallelism.get(CP, 1), self.layout.parallelism.get(TP, 1)

    @property
    def gathers(self) -> bool:
        return self.layout.parallelism.get(METHOD) == "allgather"


GATHER = {METHOD: "allgather"}
CASES = [
    Case(Layout(2, {CP: 2})),
    Case(Layout(2, {CP: 2} | GATHER)),
    # KV heads that are split, and those that several ranks need.
    Case(Layout(2, {CP: 2}), 6, 3),
    Case(Layout(4, {CP: 4})),
    Case(Layout(4, {CP: 4} | GATHER)),
    # Each runs one of the models.
    Case(Layout(2, {TP: 2}), 4, 1, (LLAMA,)),
    Case(Layout(4, {CP: 2, TP: 2}), 12, 3, (QWEN,)),
    Case(Layout(4, {CP: 2, PP: 2} | GATHER), models=(LLAMA,)),
]
INTERLEAVED = {PP: 2, SCHEDULE: "Interleaved1F1B"}
# Without documents' boundaries at every edge, test_parity.py has their pairs of options.
SLOW_CASES = [
    Case(Layout(2, {PP: 2})),
    Case(Layout(4, {CP: 2})),
    Case(Layout(4, {CP: 2} | GATHER)),
    Case(Layout(4, {CP: 2, PP: 2})),
    Case(Layout(2, {TP: 2}), 6, 3),
    Case(Layout(2, {TP: 2}), 4, 1, (QWEN,)),
    Case(Layout(4, {TP: 4})),
    Case(Layout(4, {CP: 2, TP: 2}), 12, 3, (LLAMA,)),
    Case(Layout(4, {CP: 2, TP: 2} | GATHER)),
    Case(Layout(4, {CP: 2, PP: 2} | GATHER), models=(QWEN,)),
    Case(Layout(8, {PP: 2, CP: 2, TP: 2})),
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
        if method or keys[CP] == 2
    ),
]
RECOMPUTED, COMPILED = ActivationCheckpoint(mode="full"), Compile(enable=True, backend="aot_eager")
VARIANTS = [
    Case(Layout(2, {CP: 2} | method, **variant))
    for method in ({}, GATHER)
    for variant in ({"recompute": RECOMPUTED}, {"compile": COMPILED})
]


def args_of(name: str, case: Case) -> TransformerArgs:
    """Return a model tiny enough for many sequences. qwen3's embeddings are tied."""
    args = find_model(name, "debugmodel")[1]
    assert args.tie_embeddings == (name == QWEN)
    args = replace(args, n_heads=case.n_heads, n_kv_heads=case.n_kv_heads, head_dim=8)
    n_layers = 4 if "Interleaved" in str(case) else 2
    return replace(
        args, dim=32, hidden_dim=48, n_layers=n_layers, vocab_size=64, max_seq_len=SEQ_LEN
    )


@cache
def packed() -> Microbatch:
    """Return a batch of the rows of STARTS."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(64, (ROWS, SEQ_LEN + 1), generator=generator)
    is_start = torch.zeros(ROWS, SEQ_LEN, dtype=torch.long)
    for row, starts in enumerate(STARTS):
        is_start[row, list(starts)] = 1
    index = torch.arange(SEQ_LEN)
    positions = index - (index * is_start).cummax(dim=1).values
    labels = tokens[:, 1:].clone()
    # Later labels are ignored less often.
    chance = 0.8 * (index / SEQ_LEN) ** 2
    labels[torch.rand(labels.shape, generator=generator) < chance] = IGNORE_INDEX
    # With Ulysses some ranks have no target tokens in the first microbatch.
    labels[: ROWS // MICROBATCHES, : SEQ_LEN // 2] = IGNORE_INDEX
    return Microbatch(tokens[:, :-1].contiguous(), labels, positions, is_start.cumsum(dim=1))


def rows_of(batch: Microbatch, rows: slice) -> Microbatch:
    return Microbatch(*(None if tensor is None else tensor[rows] for tensor in batch[:4]))


def test_rows_cover_all_document_boundaries():
    assert all(row == tuple(sorted(set(row))) and row[0] == 0 for row in STARTS)
    lengths = [
        [end - start for start, end in zip(row, (*row[1:], SEQ_LEN), strict=True)] for row in STARTS
    ]
    for edge in EDGES:
        for start in (edge - 1, edge, edge + 1):
            assert any(start in row for row in STARTS)
            # Both between two longer documents and as a document of one token.
            found = [(n, row.index(start)) for n, row in enumerate(STARTS) if start in row]
            assert any(min(lengths[n][i - 1 : i + 1]) > 1 for n, i in found)
            assert any(lengths[n][i] == 1 for n, i in found)
        # A document crosses the edge.
        assert any(not {edge - 1, edge, edge + 1} & set(row) for row in STARTS)
    # The longest shard of a sequence is half of it.
    assert any(SEQ_LEN // 2 < length < SEQ_LEN for row in lengths for length in row)
    assert [SEQ_LEN] in lengths
    assert [1] * SEQ_LEN in lengths
    batch = packed()
    for row, starts in enumerate(STARTS):
        assert (batch.positions[row] == 0).nonzero().flatten().tolist() == list(starts)
        assert len(batch.document_ids[row].unique()) == len(starts)


class Measured(NamedTuple):
    """Measurements of one forward and backward, by hooks."""

    blocks: set[int]
    """Sequence lengths of the blocks' inputs."""
    queries: set[tuple[int, int]]
    """(length, heads) of the queries that enter ``attention.inner``."""
    scores: set[tuple[int, int]]
    """(length, heads) of the queries where they are multiplied with keys."""
    saved: int
    """Bytes that a block saves for backward per row."""


class Truth(NamedTuple):
    """Results of one device on ``packed()``."""

    logits: torch.Tensor
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    saved: int
    mask: int
    """Bytes of ``saved`` that the document mask takes."""


@cache
def one_device(name: str, args: TransformerArgs) -> Truth:
    spec, batch = find_model(name, "debugmodel")[0], packed()
    model = build_on_meta(spec, args, torch.float64)
    materialize(model, CPU, seed=7)
    runner = SPMDRunner(model, parallelism=Parallelism(), device=CPU)
    logits = runner.logits(batch)
    loss = runner.forward_backward([batch], num_target_tokens([batch])).sum()
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
    """Results of one rank."""

    errors: dict[str, float]
    """Relative errors of logits, loss, and gradients by FQN, against one device."""
    leaks: dict[str, int]
    """Counts of pairs of positions, by kind of leak."""
    measured: Measured | None
    shard_starts: set[int]
    """First positions of this rank's sequence shards."""
    coordinate: tuple[int, int]
    """This rank's index among the shards of rows and of sequences."""
    n_targets: int
    """Target tokens in the shard."""

    @property
    def large_errors(self) -> dict[str, float]:
        return {name: error for name, error in self.errors.items() if not error < TOLERANCE}

    def excess(self, name: str, case: Case) -> dict[str, str]:
        """Return what the rank holds beyond its sequence shard."""
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

    def failures(self, name: str, case: Case) -> set[str]:
        """Return the kinds of properties that fail."""
        values = {key if key in ("logits", "loss") else "gradients" for key in self.large_errors}
        isolation = {"isolation"} if any(self.leaks.values()) else set()
        return values | isolation | set(self.excess(name, case))


def saved_bound(args: TransformerArgs, truth: Truth, case: Case) -> float:
    """Return the most bytes per row that a block may save for backward.

    This rank's share of what one device saves, and what attention to the whole sequence takes:

    - its output is saved twice, before and after it is reordered;
    - allgather has K and V of the whole sequence, Ulysses repeats some of their heads;
    - with Ulysses the mask covers all queries and keys. With allgather chunks r and 2n-1-r see
      r+1 and 2n-r chunks, together 2n+1 of (2n)^2 pairs of chunks.
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
    """Run all checks of this file for one model on this rank. Collective."""
    layout, spec, args = case.layout, find_model(name, "debugmodel")[0], args_of(name, case)
    truth = one_device(name, args)
    is_plain = layout.recompute.mode == "none" and not layout.compile.enable
    # Functions that other tests compiled in this process count against PyTorch's recompile limit.
    torch.compiler.reset()
    with fault():
        sharded = shard_debugmodel(name, args, layout, dtype="float64")
        materialize(sharded.module, CPU, seed=7)
        runner, dims = sharded.runner(), sharded.dims
        errors = compare(sharded.module, runner, dims, truth)
        leaks = find_leaks(runner)
        measured = measure(sharded.module, spec, runner, packed()) if is_plain else None
    positions = local_positions(case, dims)
    # Tensor parallel shards the sequence again between the matmuls.
    shard = positions.chunk(dims.degrees.tp)[dims.data_mesh["tp"].get_local_rank()]
    labels = torch.cat([batch.labels[:, positions] for batch in local_microbatches(dims)])
    return Report(
        errors,
        leaks,
        measured,
        {int(start) for start in shard if int(start) - 1 not in shard},
        (dims.batch_mesh.get_local_rank(), dims.cp_mesh.get_local_rank()),
        int((labels != IGNORE_INDEX).sum()),
    )


def local_positions(case: Case, dims: ParallelDims) -> torch.Tensor:
    if dims.degrees.cp == 1:
        return torch.arange(SEQ_LEN)
    method = "allgather" if case.gathers else "ulysses"
    return sequence_shard(SEQ_LEN, dims.cp_mesh, method=method)


def compare(
    model: nn.Module, runner: ModelRunner, dims: ParallelDims, truth: Truth
) -> dict[str, float]:
    """Return the relative errors of a step with several microbatches. Collective.

    It does not assert, because a rank that raises leaves the others hanging in collectives.
    """
    # During forward the modules read unsharded weights.
    parameters = dict(model.named_parameters())
    degree, rank = dims.batch_mesh.size(), dims.batch_mesh.get_local_rank()
    rows = slice(rank * ROWS // degree, (rank + 1) * ROWS // degree)
    logits = runner.logits(rows_of(packed(), rows))
    microbatches = local_microbatches(dims)
    n_tokens = int(sum_over(torch.tensor(num_target_tokens(microbatches)), dims.batch_mesh))
    loss = sum_in_order(runner.forward_backward(microbatches, n_tokens), dims.data_mesh)
    errors = {"logits": distance(logits, truth.logits[rows]), "loss": distance(loss, truth.loss)}
    for fqn, parameter in parameters.items():
        assert isinstance(parameter.grad, DTensor)
        errors[fqn] = distance(parameter.grad.full_tensor(), truth.gradients[fqn])
    return errors


def local_microbatches(dims: ParallelDims) -> list[Microbatch]:
    degree, rank = dims.batch_mesh.size(), dims.batch_mesh.get_local_rank()
    n_rows = ROWS // (degree * MICROBATCHES)
    starts = range(rank * n_rows, ROWS, degree * n_rows)
    return [rows_of(packed(), slice(start, start + n_rows)) for start in starts]


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def find_leaks(runner: ModelRunner) -> dict[str, int]:
    """Change each token of each row in turn, and count the logits that wrongly change or do not.

    Compares bits: both runs do the same operations in the same order, and masked positions have a
    weight of exactly 0.
    """
    tokens, positions, document_ids = packed().inputs
    assert document_ids is not None
    whole = torch.zeros(1, SEQ_LEN, dtype=torch.long)
    leaks = {}
    for name, inputs, ids in [
        ("documents", (tokens, positions, document_ids), document_ids),
        ("one document", (tokens[:1],), whole),
    ]:
        sees = influence(runner, *inputs)
        is_later = torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool).triu()
        is_same = ids[:, :, None] == ids[:, None, :]
        leaks[f"other documents see {name}"] = int((sees & ~is_same).sum())
        leaks[f"earlier positions see {name}"] = int((sees & is_same & ~is_later).sum())
        leaks[f"own later positions do not see {name}"] = int((~sees & is_same & is_later).sum())
    return leaks


def influence(runner: ModelRunner, tokens: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Return whether token i changes the logits of position j: (rows, s, s), [row, i, j]."""
    before, *rest = (t[:, None].expand(-1, SEQ_LEN, -1) for t in (tokens, *others))
    after = before.clone()
    after.diagonal(dim1=1, dim2=2).add_(1).remainder_(64)
    before, after, *rest = (t.flatten(0, 1) for t in (before, after, *rest))
    others_or_none = rest or [None, None]
    logits = [
        runner.logits(Microbatch(tokens, tokens, *others_or_none)) for tokens in (before, after)
    ]
    is_changed = logits[0] != logits[1]
    return is_changed.any(dim=-1).unflatten(0, (-1, SEQ_LEN))


def measure(model: nn.Module, spec: Any, runner: ModelRunner, batch: Microbatch) -> Measured:
    """Measure training on one row of ``batch`` and on two, to exclude the weights."""
    lengths: tuple[set[int], set[Any], set[Any]] = (set(), set(), set())
    saved = []
    for n_rows in (1, 2):
        with watched(model, spec, lengths) as sizes:
            runner.forward_backward([rows_of(batch, slice(n_rows))] * MICROBATCHES, SEQ_LEN)
        saved.append(max(sizes))
    return Measured(*lengths, saved[1] - saved[0])


@contextmanager
def watched(
    model: nn.Module, spec: Any, lengths: tuple[set[int], set[Any], set[Any]]
) -> Iterator[list[int]]:
    """Yield a list of the bytes each call of a block saves for backward. Mutates ``lengths``."""
    sizes: list[int] = []
    open_hooks: list[saved_tensors_hooks] = []
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        local = to_local(tensor)
        local = local.elem if isinstance(local, AsyncCollectiveTensor) else local
        # Count each storage once: many tensors are views of one.
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
    for inner in (cast(nn.Module, attention.inner) for attention in spec.attentions(model)):
        # Context parallel wraps its forward.
        whole = getattr(cast(Any, inner.forward).__self__, "inner", inner)
        handles.append(whole.register_forward_pre_hook(add_to(lengths[2])))
        handles.append(inner.register_forward_pre_hook(add_to(lengths[1])))
    yield sizes
    for handle in handles:
        handle.remove()


def inspect_models(case: Case) -> dict[str, Report]:
    return {name: inspect(name, case) for name in case.models}


@pytest.fixture(scope="module")
def reports(ranks: RankPool) -> Callable[[Case], list[dict[str, Report]]]:
    """Return each rank's reports by model. A layout runs once for all tests."""
    found: dict[str, list[dict[str, Report]]] = {}

    def reports_of(case: Case) -> list[dict[str, Report]]:
        if str(case) not in found:
            found[str(case)] = ranks.run(inspect_models, case.layout.world_size, case)
        return found[str(case)]

    return reports_of


def params(cases: list[Case], *others: Case) -> list[Any]:
    fast = (pytest.param(case, id=str(case)) for case in cases)
    return [*fast, *(slow(case, id=str(case)) for case in others)]


@pytest.mark.parametrize("case", params(CASES, *SLOW_CASES, *VARIANTS))
def test_packed_documents_match_one_device(reports, case: Case):
    for name in case.models:
        found = [report[name] for report in reports(case)]
        assert [report.large_errors for report in found] == [{}] * len(found)
        want = {"logits", "loss", *one_device(name, args_of(name, case)).gradients}
        assert set().union(*(report.errors for report in found)) == want
        # By design each shard starts at an edge, and has its own count of target tokens.
        assert set().union(*(report.shard_starts for report in found)) <= {0, *EDGES}
        counts = {report.coordinate: report.n_targets for report in found}
        assert len(set(counts.values())) == len(counts)


@pytest.mark.parametrize("case", params(CASES, *SLOW_CASES, *VARIANTS))
def test_tokens_change_only_later_tokens_of_their_document(reports, case: Case):
    leaks = [report[name].leaks for report in reports(case) for name in case.models]
    assert all(leaks), "nothing was compared"
    assert [{name: n for name, n in each.items() if n} for each in leaks] == [{}] * len(leaks)


@pytest.mark.parametrize("case", params(CASES, *SLOW_CASES))
def test_ranks_hold_only_their_sequence_shard(reports, case: Case):
    for name in case.models:
        found = [report[name].excess(name, case) for report in reports(case)]
        assert found == [{}] * len(found)


def with_interleaved_heads() -> AbstractContextManager:
    """Repeat heads as 0 1 0 1, not 0 0 1 1."""

    def repeat(tensor: torch.Tensor, copies: int, dim: int) -> torch.Tensor:
        return torch.cat([tensor] * copies, dim=dim)

    return patch.object(torch.Tensor, "repeat_interleave", repeat)


def without_chunk_reordering() -> AbstractContextManager:
    """Leave gathered keys in the order of the ranks."""

    def gather(self: AllGather, kv: torch.Tensor) -> torch.Tensor:
        parts = DTensor.from_local(kv, self.cp_mesh, [Shard(2)], run_check=False)
        return parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    return patch.object(AllGather, "_gather", gather)


def without_kv_reduce_scatter() -> AbstractContextManager:
    """Give gathered keys the gradient of this rank's queries only."""
    return patch("parallelisms.context_parallel.Partial", Replicate)


def without_gradients_of_shared_heads() -> AbstractContextManager:
    """Give KV heads that several ranks need the gradient of this rank's queries only."""
    return patch("models.transformer_sharding.Partial", Replicate)


def without_documents() -> AbstractContextManager:
    return _with_document_ids(lambda document_ids: None)


def with_shifted_boundaries() -> AbstractContextManager:
    """Start every document but the first one token late."""

    def shifted(document_ids: torch.Tensor | None) -> torch.Tensor | None:
        return None if document_ids is None else document_ids[:, [0, *range(SEQ_LEN - 1)]]

    return _with_document_ids(shifted)


@contextmanager
def _with_document_ids(change: Callable[[Any], Any]) -> Iterator[None]:
    """Change the document ids that context parallel's attention gets."""
    with ExitStack() as stack:
        for kind in (Ulysses, AllGather):
            stack.enter_context(patch.object(kind, "forward", _changed(kind.forward, change)))
        yield


def _changed(forward: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda self, q, k, v, ids: forward(self, q, k, v, change(ids))


def with_positions_of_rank_0() -> AbstractContextManager:
    """Give all ranks the positions of rank 0."""
    original = SequenceSharder.inputs

    def inputs(
        self: SequenceSharder, tokens: torch.Tensor, positions: Any = None, ids: Any = None
    ) -> Any:
        x, options = original(self, tokens, positions, ids)
        if positions is None:
            positions = torch.arange(SEQ_LEN).expand(tokens.shape)
        return x, options | {"positions": positions[:, : x.shape[1]]}

    return patch.object(SequenceSharder, "inputs", inputs)


def with_visible_next_token() -> AbstractContextManager:
    """Unmask the next key of each query, unless its chunk ends there."""
    original = torch.Tensor.tril
    return patch.object(torch.Tensor, "tril", lambda mask, n: original(mask, n + 1))


@contextmanager
def without_sharding() -> Iterator[None]:
    """Ignore the degree: each rank computes the whole, correct result."""

    def unchanged(self: SequenceSharder, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def loss(
        logits: torch.Tensor, labels: torch.Tensor, n_tokens: int, compile: Compile | None
    ) -> torch.Tensor:
        return cross_entropy_sum(logits, labels, n_tokens * dist.get_world_size(), compile)

    with (
        patch("parallelisms.parallelize.apply_context_parallel"),
        patch.object(SequenceSharder, "shard", unchanged),
        patch.object(SequenceSharder, "unshard", unchanged),
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
                Case(Layout(2, {CP: 2}), 6, 3),
                {
                    with_interleaved_heads: VALUES,
                    with_positions_of_rank_0: VALUES,
                    without_documents: VALUES | {"isolation"},
                    with_shifted_boundaries: VALUES | {"isolation"},
                    without_sharding: {"lengths", "saved"},
                },
            ),
            (
                Case(Layout(2, {CP: 2} | GATHER)),
                {
                    without_chunk_reordering: VALUES | {"isolation"},
                    without_kv_reduce_scatter: {"gradients"},
                    with_positions_of_rank_0: VALUES,
                    without_documents: VALUES | {"isolation"},
                    with_shifted_boundaries: VALUES | {"isolation"},
                    with_visible_next_token: VALUES | {"isolation"},
                    without_sharding: {"lengths", "saved"},
                },
            ),
            (
                Case(Layout(2, {TP: 2}), 6, 3),
                {with_interleaved_heads: VALUES, without_gradients_of_shared_heads: {"gradients"}},
            ),
        ]
    ],
)
def test_faults_are_detected(
    ranks: RankPool, case: Case, faults: dict[Callable[[], AbstractContextManager], set[str]]
):
    for reports in ranks.run(inspect_faults, case.layout.world_size, case, list(faults)):
        found = [report.failures(LLAMA, case) for report in reports]
        assert dict(zip(faults, found, strict=True)) == faults
