"""Comparison of a cell with one device: logits, losses, gradients, and weights after training.

In float64 rounding cannot hide a wrong factor. Ranks and microbatches have unequal numbers of valid
labels, so averaging over them would give a wrong result.
"""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Shard

from build_model import ShardedModel, build_sharded_model
from config.job_config import Debug, Optimizer, Parallelism
from data.loader import Microbatch, num_target_tokens
from forward_backward import SPMDRunner
from models import ModelSpec, TransformerArgs, find_model
from models.meta import build_on_meta
from optim.grad_norm import clip_grad_norm_
from optim.loss import IGNORE_INDEX
from optim.muon import hidden_matrices
from optim.optimizer import build_optimizer
from parallelisms.materialize import materialize
from parallelisms.parallel_dims import ParallelDims
from runtime.distributed import sum_in_order, sum_over
from tests.lib.cells import ROWS, Cell
from tests.lib.layouts import CPU, SEQ_LEN
from tests.lib.ranks import RankPool

STEPS, MAX_NORM, SEED = 2, 0.05, Debug().seed
# Relative errors. A missing or doubled reduction is off by half or more.
TOLERANCES = {"float64": 1e-9, "bfloat16": 0.3}


@cache
def global_batch(vocab_size: int, documents: bool) -> Microbatch:
    """Return ROWS sequences; with ``documents``, two documents in each."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocab_size, (ROWS, SEQ_LEN + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for row in range(ROWS):
        labels[row, : 5 * row % SEQ_LEN] = IGNORE_INDEX
    positions = document_ids = None
    if documents:
        index = torch.arange(SEQ_LEN).expand(ROWS, -1)
        starts = torch.randint(1, SEQ_LEN, (ROWS, 1), generator=generator)
        document_ids = (index >= starts).long()
        positions = torch.where(index >= starts, index - starts, index)
    return Microbatch(tokens[:, :-1].contiguous(), labels, positions, document_ids)


def rows_of(batch: Microbatch, rows: slice) -> Microbatch:
    return Microbatch(*(None if tensor is None else tensor[rows] for tensor in batch[:4]))


@dataclass
class Reference:
    """Results of one device, which sees the whole batch at once. Arrays, which pickle by value."""

    logits: np.ndarray
    """Before training."""
    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, np.ndarray]]
    weights: dict[str, np.ndarray]


def reference_of(cell: Cell) -> Reference:
    """Train the plain model with PyTorch's own gradient clipping, in float64. Cached."""
    # As text, because a section with a table cannot be hashed.
    optimizer = cell.job_config.optimizer.model_dump_json()
    return _reference(cell.model, cell.frozen, cell.args, cell.documents, optimizer)


@cache
def _reference(
    model: str, frozen: str, args: TransformerArgs, documents: bool, optimizer: str
) -> Reference:
    batch = global_batch(args.vocab_size, documents)
    spec = spec_of(model, frozen)
    module = build_on_meta(spec, args, torch.float64)
    materialize(module, CPU, seed=SEED)
    matrices = hidden_matrices(spec.blocks(module), spec.moes(module))
    config = Optimizer.model_validate_json(optimizer)
    update = build_optimizer(module, config, matrices=matrices)
    runner = SPMDRunner(module, parallelism=Parallelism(), device=CPU)
    found = Reference(runner.logits(batch).numpy(), [], [], [], {})
    for _ in range(STEPS):
        loss = runner.forward_backward([batch], num_target_tokens([batch])).sum()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
        found.losses.append(loss.item())
        found.norms.append(norm.item())
        found.gradients.append(
            {
                fqn: p.grad.numpy().copy()
                for fqn, p in module.named_parameters()
                if p.grad is not None
            }
        )
        update.step()
        update.zero_grad()
    found.weights = {fqn: p.detach().numpy() for fqn, p in module.named_parameters()}
    return found


def spec_of(model: str, frozen: str) -> ModelSpec:
    """Return the spec of a debug model whose parameters with a word of ``frozen`` are frozen."""
    spec, _ = find_model(model, "debugmodel")

    class Frozen(spec.model_cls):  # type: ignore[name-defined]
        def __init__(self, args: TransformerArgs) -> None:
            super().__init__(args)
            for fqn, parameter in self.named_parameters():
                parameter.requires_grad_(not any(word in fqn for word in frozen.split()))

    return replace(spec, model_cls=Frozen) if frozen else spec


def to_numpy(tensor: torch.Tensor | None) -> np.ndarray:
    assert tensor is not None
    return tensor.numpy().copy()


def assert_cell_matches_one_device(
    ranks: RankPool, cell: Cell, device_type: str = "cpu"
) -> list[str]:
    """Train ``cell`` on its ranks. Return the FQNs of parameters not sharded over dim 0."""
    return ranks.run(check_cell, cell.world_size, cell, reference_of(cell), device_type)[0]


def build_cell(cell: Cell, device_type: str) -> ShardedModel:
    """Build and initialize the model as ``train.py`` does. Collective."""
    is_gpu = device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if is_gpu else CPU
    # Compilations of other tests in this process count toward the recompile limit.
    torch.compiler.reset()
    spec = spec_of(cell.model, cell.frozen)
    dims = ParallelDims.build(cell.job_config.parallelism, cell.world_size, device.type)
    sharded = build_sharded_model(spec, cell.args, cell.job_config, dims, device)
    sharded.materialize()
    return sharded


def check_cell(cell: Cell, reference: Reference, device_type: str = "cpu") -> list[str]:
    """Compare this rank with ``reference``. Collective."""
    args, config, tolerance = cell.args, cell.job_config, TOLERANCES[cell.compute_dtype]
    batch = global_batch(args.vocab_size, cell.documents)
    sharded = build_cell(cell, device_type)
    spec, dims, model = sharded.spec, sharded.dims, sharded.module
    # Collected now, because forward temporarily replaces them by whole weights.
    parameters = dict(model.named_parameters())
    matrices = hidden_matrices(spec.blocks(model), spec.moes(model))
    optimizer = build_optimizer(
        model, config.optimizer, matrices=matrices, weight_mesh=dims.weight_mesh
    )
    runner = sharded.runner()
    degree, rank = dims.batch_mesh.size(), dims.batch_mesh.get_local_rank()
    # One shape, because each shape is compiled separately.
    rows_per_forward = ROWS // degree // (cell.microbatches[0] if cell.compile else 1)

    def assert_close(got: torch.Tensor, want: np.ndarray | float, what: str) -> None:
        expected = torch.as_tensor(want, dtype=torch.float64)
        error = (got.detach().cpu().double() - expected).norm() / expected.norm()
        assert error < tolerance, f"{what} is off by {error:.1e}"

    for start in range(rank * ROWS // degree, (rank + 1) * ROWS // degree, rows_per_forward):
        rows = slice(start, start + rows_per_forward)
        assert_close(runner.logits(rows_of(batch, rows)), reference.logits[rows], "logits")
    for step, count in enumerate(cell.microbatches):
        n_rows = ROWS // (degree * count)
        starts = range(rank * n_rows, ROWS, degree * n_rows)
        microbatches = [rows_of(batch, slice(start, start + n_rows)) for start in starts]
        assert len(microbatches) == count
        n_tokens = int(sum_over(torch.tensor(num_target_tokens(microbatches)), dims.batch_mesh))
        if step == 0:
            parts = runner.evaluate(microbatches) / n_tokens
            loss = sum_in_order(parts, dims.data_mesh)
            assert_close(loss, reference.losses[0], "validation loss")
        loss = sum_in_order(runner.forward_backward(microbatches, n_tokens), dims.data_mesh)
        assert_close(loss, reference.losses[step], "loss")
        norm = clip_grad_norm_(
            list(parameters.values()),
            MAX_NORM,
            pp_mesh=dims.pp_mesh,
            tied_duplicates=runner.tied_duplicates,
        )
        assert_close(norm, reference.norms[step], "norm")
        for fqn, parameter in parameters.items():
            assert (parameter.grad is not None) == (fqn in reference.gradients[step]), fqn
            if parameter.grad is not None:
                assert_close(whole(parameter.grad), reference.gradients[step][fqn], fqn)
        optimizer.step()
        optimizer.zero_grad()
    not_on_dim0 = []
    for fqn, parameter in parameters.items():
        assert_close(whole(parameter), reference.weights[fqn], fqn)
        assert isinstance(parameter, DTensor) or cell.world_size == 1
        if isinstance(parameter, DTensor) and Shard(0) not in parameter.placements:
            not_on_dim0.append(fqn)
    return not_on_dim0


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
