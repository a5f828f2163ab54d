"""Any mesh computes what one device computes: the same logits, loss, gradient norm and gradients.

In float64 rounding cannot hide a wrong factor. The batch has unequal counts of valid labels per
rank and microbatch, which an average anywhere would get wrong.
"""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from config.job_config import ActivationCheckpoint, Compile, Parallelism
from data.loader import Batch
from models import find_model
from models.meta import build_on_meta
from optim.grad_norm import clip_grad_norm_
from optim.loss import IGNORED
from parallelisms.materialize import canonical_fqn, materialize
from runtime.distributed import sum_over
from tests.layouts import CPU, MODE, REDUCE, REPLICATE, RESHARD, TP, Layout, build_sharded
from tests.ranks import RankError, RankPool
from train import count_valid, run_model

ROWS, SEQ_LEN, LOCAL_ROWS = 12, 32, 1
MAX_NORM = 0.05
TOLERANCE = 1e-9
MODELS = [("llama3", "debugmodel"), ("llama3", "debugmodel_tied"), ("qwen3", "debugmodel")]


LAYOUTS = [
    Layout(1),
    Layout(2),
    Layout(3),
    Layout(4),
    Layout(2, {REPLICATE: 2}),
    Layout(4, {REPLICATE: 2}),
    Layout(2, {TP: 2}),
    Layout(4, {TP: 2}),
    Layout(4, {TP: 2, REPLICATE: 2}),
]
VARIANTS = [
    Layout(4, {RESHARD: 2}),
    Layout(2, {REDUCE: "last_microbatch"}),
    Layout(2, {REDUCE: "last_microbatch", RESHARD: "never"}),
    Layout(4, {REDUCE: "last_microbatch", REPLICATE: 2}),
    Layout(1, {MODE: "ddp"}),
    Layout(2, {MODE: "ddp"}),
    Layout(4, {MODE: "ddp"}),
    Layout(4, {MODE: "ddp", TP: 2}),
    Layout(1, {MODE: "simple_fsdp"}),
    Layout(2, {MODE: "simple_fsdp"}),
    Layout(3, {MODE: "simple_fsdp"}),
    Layout(4, {MODE: "simple_fsdp"}),
    Layout(4, {MODE: "simple_fsdp", RESHARD: "never"}),
    Layout(2, {MODE: "simple_fsdp", REPLICATE: 2}),
    Layout(4, {MODE: "simple_fsdp", REPLICATE: 2}),
    Layout(2, {MODE: "simple_fsdp", TP: 2}),
    Layout(4, {MODE: "simple_fsdp", TP: 2}),
    Layout(4, {MODE: "simple_fsdp", TP: 2, REPLICATE: 2}),
    Layout(2, {MODE: "simple_fsdp"}, compile=Compile(enable=True, backend="aot_eager")),
    Layout(4, {MODE: "simple_fsdp", TP: 2}, compile=Compile(enable=True, backend="aot_eager")),
    Layout(2, {MODE: "simple_fsdp"}, recompute=ActivationCheckpoint(mode="full")),
    Layout(2, {MODE: "simple_fsdp"}, recompute=ActivationCheckpoint(mode="selective")),
    Layout(2, {MODE: "ddp"}, recompute=ActivationCheckpoint(mode="selective")),
    Layout(2, {MODE: "ddp"}, compile=Compile(enable=True, backend="aot_eager")),
    Layout(2, {RESHARD: "always"}),
    Layout(2, {RESHARD: "never"}),
    Layout(2, recompute=ActivationCheckpoint(mode="full")),
    Layout(2, recompute=ActivationCheckpoint(mode="selective")),
    Layout(2, recompute=ActivationCheckpoint(mode="selective", selective=3)),
    Layout(4, {TP: 2}, recompute=ActivationCheckpoint(mode="selective")),
    Layout(2, compile=Compile(enable=True, backend="aot_eager")),
    Layout(4, {TP: 2}, compile=Compile(enable=True, backend="aot_eager")),
]


def global_batch(vocab_size: int, document_mask: bool) -> Batch:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocab_size, (ROWS, SEQ_LEN + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for row in range(ROWS):
        labels[row, : 2 * row] = IGNORED
    positions = document_ids = None
    if document_mask:
        index = torch.arange(SEQ_LEN).expand(ROWS, -1)
        starts = torch.randint(1, SEQ_LEN, (ROWS, 1), generator=generator)
        document_ids = (index >= starts).long()
        positions = torch.where(index >= starts, index - starts, index)
    return Batch(tokens[:, :-1].contiguous(), labels, positions, document_ids)


def rows_of(batch: Batch, rows: slice) -> Batch:
    return Batch(*(None if tensor is None else tensor[rows] for tensor in batch))


def one_device(name: str, flavor: str, batch: Batch) -> dict[str, torch.Tensor]:
    """What the plain model gives for the whole batch at once."""
    spec, published = find_model(name, flavor)
    args = replace(published, max_seq_len=SEQ_LEN)
    model = build_on_meta(spec, args, torch.float64)
    materialize(model, CPU, seed=7)
    found = {"logits": model(*batch.inputs).detach()}
    found["loss"] = run_model(model, CPU, Parallelism(), [batch], count_valid([batch]))
    found["norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    return found | {fqn: p.grad for fqn, p in model.named_parameters()}


def check_layout(name: str, flavor: str, layout: Layout, document_mask: bool = False) -> None:
    args = replace(find_model(name, flavor)[1], max_seq_len=SEQ_LEN)
    batch = global_batch(args.vocab_size, document_mask)
    want = one_device(name, flavor, batch)

    model, dims = build_sharded(name, args, layout, dtype="float64")
    materialize(model, CPU, seed=7)

    degree, rank = dims.batch_mesh.size(), dims.batch_mesh.get_local_rank()
    starts = range(rank * LOCAL_ROWS, ROWS, degree * LOCAL_ROWS)
    slices = [slice(start, start + LOCAL_ROWS) for start in starts]
    microbatches = [rows_of(batch, rows) for rows in slices]
    logits = torch.cat([model(*microbatch.inputs).detach() for microbatch in microbatches])
    assert_close(logits, torch.cat([want["logits"][rows] for rows in slices]), "logits")
    n_tokens = sum_over(count_valid(microbatches), dims.batch_mesh)
    loss = run_model(model, CPU, Parallelism(**layout.parallelism), microbatches, n_tokens)
    assert_close(sum_over(loss, dims.batch_mesh), want["loss"], "loss")
    assert_close(clip_grad_norm_(list(model.parameters()), MAX_NORM), want["norm"], "norm")
    for fqn, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        assert_close(parameter.grad.full_tensor(), want[canonical_fqn(fqn)], fqn)


def assert_close(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    error = (got - want).norm() / want.norm()
    assert error < TOLERANCE, f"{what} is off by {error:.1e}"


def average_gradients(name: str, flavor: str, layout: Layout) -> None:
    with patch.object(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None):
        check_layout(name, flavor, layout)


def count_replicas_twice(name: str, flavor: str, layout: Layout) -> None:
    def all_groups(grad: DTensor) -> tuple[dist.ProcessGroup, ...]:
        return tuple(grad.device_mesh.get_all_groups())

    with patch("optim.grad_norm._sharding_groups", all_groups):
        check_layout(name, flavor, layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("name", "flavor"), MODELS)
def test_layout_matches_one_device(ranks: RankPool, name: str, flavor: str, layout: Layout) -> None:
    ranks.run(check_layout, layout.world_size, name, flavor, layout)


@pytest.mark.parametrize("layout", VARIANTS, ids=str)
def test_variant_matches_one_device(ranks: RankPool, layout: Layout) -> None:
    ranks.run(check_layout, layout.world_size, "qwen3", "debugmodel", layout)


@pytest.mark.parametrize("layout", [Layout(2), Layout(4, {TP: 2})], ids=str)
def test_documents_match_one_device(ranks: RankPool, layout: Layout) -> None:
    ranks.run(check_layout, layout.world_size, "qwen3", "debugmodel", layout, True)


@pytest.mark.parametrize(
    ("fault", "layout", "seen"),
    [
        (average_gradients, Layout(2), "norm is off by 5"),
        (count_replicas_twice, Layout(2, {REPLICATE: 2}), "norm is off by 4"),
        (count_replicas_twice, Layout(2, {TP: 2}), "norm is off by"),
    ],
)
def test_parity_catches_a_wrong_scale(ranks: RankPool, fault, layout: Layout, seen: str) -> None:
    with pytest.raises(RankError, match=seen):
        ranks.run(fault, layout.world_size, "llama3", "debugmodel", layout)
