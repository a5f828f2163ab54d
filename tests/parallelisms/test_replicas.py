"""Tests that ``check_replicas`` finds a single flipped bit, and ``sync_replicas`` removes it."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from config.job_config import ActivationCheckpoint, Optimizer
from models import find_model
from optim.optimizer import build_optimizer
from parallelisms.materialize import materialize
from parallelisms.parallel_dims import ParallelDims
from parallelisms.replicas import (
    BLOCK_WORDS,
    GPU_BLOCK_WORDS,
    _digest,
    _is_tied_pair_equal,
    check_replicas,
    sync_replicas,
)
from tests.lib.layouts import CPU, MODE, REPLICATE, TP, Layout, shard_debugmodel
from tests.lib.ranks import RankPool

FSDP2 = Layout(4, {REPLICATE: 2})
REPLICATED = [
    FSDP2,
    Layout(4, {MODE: "ddp"}),
    Layout(4, {MODE: "simple_fsdp", REPLICATE: 2}),
    Layout(8, {MODE: "simple_fsdp", REPLICATE: 2, TP: 2}),
]


def build(layout: Layout, seed: int) -> tuple[nn.Module, ParallelDims]:
    args = replace(find_model("llama3", "debugmodel")[1], max_seq_len=16, n_layers=2)
    layout = replace(layout, recompute=ActivationCheckpoint(mode="full"))
    sharded = shard_debugmodel("llama3", args, layout)
    model, dims = sharded.module, sharded.dims
    materialize(model, CPU, seed=seed)
    return model, dims


def local_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return this rank's shard of every parameter and buffer."""
    return {
        fqn: local(tensor) for fqn, tensor in [*model.named_parameters(), *model.named_buffers()]
    }


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def check(layout: Layout, *changes: tuple[str, tuple[int, ...]]) -> list[str]:
    """For each change (tensor, ranks), flip a bit there, compare, and flip it back.

    Returns this rank's error messages.
    """
    model, dims = build(layout, seed=0)
    optimizer = build_optimizer(model, Optimizer())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = local_tensors(model)
    for fqn, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"{fqn}.{key}"] = local(value)
    bit = 1 << dist.get_rank()
    found = []
    for name, ranks in changes:
        word = tensors[name].view(-1).view(torch.int32)[-1:]
        if dist.get_rank() in ranks:
            word ^= bit
        found.append(error_text(model, dims, optimizer))
        if dist.get_rank() in ranks:
            word ^= bit
    assert error_text(model, dims, optimizer) == ""
    return found


def error_text(model: nn.Module, dims: ParallelDims, optimizer: torch.optim.Optimizer) -> str:
    try:
        check_replicas(model, dims.weight_mesh, optimizer)
    except RuntimeError as error:
        return str(error)
    return ""


def summary(layout: Layout, has_stepped: bool) -> str:
    model, dims = build(layout, seed=0)
    optimizer = build_optimizer(model, Optimizer())
    if has_stepped:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return check_replicas(model, dims.weight_mesh, optimizer)


def sync(layout: Layout) -> None:
    """Start from another model on every rank; end with the first replica's on all ranks."""
    model, dims = build(layout, seed=dist.get_rank())
    for fqn, local_tensor in local_tensors(model).items():
        if fqn == "rope.cache" or "norm" in fqn:
            local_tensor.fill_(-dist.get_rank())
    with pytest.raises(RuntimeError, match="differ"):
        check_replicas(model, dims.weight_mesh)
    sync_replicas(model, dims.weight_mesh)
    check_replicas(model, dims.weight_mesh)
    names = dims.weight_mesh.mesh_dim_names
    coordinate = dims.weight_mesh.get_coordinate()
    assert names is not None
    assert coordinate is not None
    got = local_tensors(model)
    assert got["rope.cache"].eq(0).all()
    # This rank receives from the first replica's rank with the same shards.
    shards = [
        c if name in ("dp_shard_cp", "tp") else 0 for name, c in zip(names, coordinate, strict=True)
    ]
    source = int(dims.weight_mesh.mesh[tuple(shards)])
    want, _ = build(layout, seed=source)
    same = [fqn for fqn, tensor in local_tensors(want).items() if torch.equal(tensor, got[fqn])]
    assert same == [fqn for fqn in got if fqn != "rope.cache" and "norm" not in fqn]


def test_flipped_bit_is_found_and_named(ranks: RankPool) -> None:
    names = [
        "tok_embeddings.weight",
        "layers.1.ffn_norm.weight",
        "rope.cache",
        "layers.0.attention.wq.weight.exp_avg",
        "output.weight.exp_avg_sq",
    ]
    changes = [(name, (rank,)) for name in names for rank in (0, 3)]
    for rank, texts in enumerate(ranks.run(check, 4, FSDP2, *changes)):
        for (name, (changed,)), text in zip(changes, texts, strict=True):
            message = f"replicas along dp_replicate differ, first in {name}"
            assert (message in text) == (rank % 2 == changed % 2)


@pytest.mark.parametrize(
    ("layout", "name", "dim"),
    [
        (Layout(4, {TP: 2}), "layers.0.attention_norm.weight", "tp"),
        (Layout(2), "rope.cache", "dp_shard_cp"),
        (Layout(2, {MODE: "ddp"}), "layers.1.attention.wq.weight", "dp_replicate"),
    ],
)
def test_all_replicating_dims_are_compared(
    ranks: RankPool, layout: Layout, name: str, dim: str
) -> None:
    found = ranks.run(check, layout.world_size, layout, (name, (1,)))
    assert any(f"replicas along {dim} differ, first in {name}:" in text for (text,) in found)


def test_minority_ranks_are_named(ranks: RankPool) -> None:
    no_majority = "no majority among ranks 0, 1, 2, 3"
    cases = {
        (3,): "rank 3 against 3 that agree",
        (0,): "rank 0 against 3 that agree",
        (1, 2): no_majority,
        (0, 1, 2): no_majority,
    }
    changes = [("output.weight", changed) for changed in cases]
    for texts in ranks.run(check, 4, Layout(4, {MODE: "ddp"}), *changes):
        for text, ending in zip(texts, cases.values(), strict=True):
            assert text.endswith(f"differ, first in output.weight: {ending}")


def test_both_of_two_ranks_are_named(ranks: RankPool) -> None:
    found = ranks.run(check, 4, FSDP2, ("output.weight", (3,)))
    assert [text[text.rindex(":") :] for (text,) in found[1::2]] == [
        ": no majority among ranks 1, 3"
    ] * 2


def test_two_of_five_ranks_are_named(ranks: RankPool) -> None:
    (text,) = ranks.run(check, 5, Layout(5, {MODE: "ddp"}), ("norm.weight", (1, 4)))[0]
    assert text.endswith("rank 1, 4 against 3 that agree")


def test_summary_counts_tensors_per_dim(ranks: RankPool) -> None:
    count = 2 * 9 + 3
    before, after = (ranks.run(summary, 4, FSDP2, stepped) for stepped in (False, True))
    # The RoPE buffer is replicated on all ranks, and after a step so are the step counts.
    want = "{} tensors on 2 ranks of dp_replicate, {} on 2 ranks of dp_shard_cp"
    assert set(before) == {want.format(count + 1, "1 tensor")}
    assert set(after) == {want.format(4 * count + 1, f"{1 + count} tensors")}
    assert ranks.run(summary, 1, Layout(1), True) == [""]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("count", [1, 7, 8, 1001, BLOCK_WORDS + 3])
def test_digest_depends_on_every_bit(dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    digest = _digest(data.view(dtype))
    for index in {0, len(data) // 2, len(data) - 1}:
        for bit in range(8):
            data[index] ^= 1 << bit
            assert _digest(data.view(dtype)) != digest
            data[index] ^= 1 << bit
    assert _digest(data.view(dtype)) == digest
    # The order of 8-byte words matters.
    if len(data) > 16:
        swapped = torch.cat([data[8:16], data[:8], data[16:]])
        assert _digest(swapped.view(dtype)) != digest
    # Neither the address nor the memory layout matters.
    shifted = torch.cat([torch.ones(1, dtype=dtype), data.view(dtype)])
    assert _digest(shifted[1:]) == digest


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_digest_on_gpu_depends_on_every_word() -> None:
    data = torch.zeros(GPU_BLOCK_WORDS + 3, dtype=torch.int64, device="cuda")
    digests = [int(_digest(data))]
    for index in (0, GPU_BLOCK_WORDS - 1, GPU_BLOCK_WORDS, len(data) - 1):
        data[index] = 1
        digests.append(int(_digest(data)))
    assert len(set(digests)) == len(digests)


def test_digest_depends_on_order() -> None:
    values = torch.arange(4 * BLOCK_WORDS, dtype=torch.float64)
    digests = {int(_digest(values.roll(shift))) for shift in (0, 1, 2, BLOCK_WORDS)}
    assert len(digests) == 4
    transposed = values.view(2, -1).t()
    assert _digest(transposed) == _digest(transposed.contiguous()) != _digest(values)
    assert _digest(values[:0]) == 0


@pytest.mark.parametrize("layout", REPLICATED, ids=str)
def test_sync_broadcasts_the_first_replica(ranks: RankPool, layout: Layout) -> None:
    ranks.run(sync, layout.world_size, layout)


def tied_pairs_equal() -> list[bool]:
    """Compare embeddings of two stages, beside a parameter whose name begins alike."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    rank = dist.get_rank()
    same = {"tok.weight": torch.ones(4), "tok.weight.exp_avg": torch.zeros(4)}
    other = same | {"tok.weight_scale": torch.full((1,), float(rank))}
    state = same | {"tok.weight.exp_avg": torch.full((4,), float(rank))}
    return [_is_tied_pair_equal("tok.weight", tensors, mesh) for tensors in (same, other, state)]


def test_tied_pair_is_compared_by_whole_names(ranks: RankPool) -> None:
    assert ranks.run(tied_pairs_equal, 2) == [[True, True, False]] * 2
