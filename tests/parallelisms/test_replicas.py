"""The check that replicas agree sees a single bit and says where; the sync makes them agree."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from config.job_config import ActivationCheckpoint
from models import find_model
from parallelisms.materialize import canonical_fqn, materialize
from parallelisms.parallel_dims import ParallelDims
from parallelisms.replicas import check_replicas, sync_replicas
from tests.layouts import CPU, MODE, REPLICATE, TP, Layout, build_sharded
from tests.ranks import RankPool

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
    model, dims = build_sharded("llama3", args, layout)
    materialize(model, CPU, seed=seed)
    return model, dims


def local_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's part of every parameter and buffer."""
    return {
        canonical_fqn(fqn): (t.to_local() if isinstance(t, DTensor) else t).detach()
        for fqn, t in [*model.named_parameters(), *model.named_buffers()]
    }


def check(layout: Layout, changed: str, rank: int) -> str:
    """Flip one bit of ``changed`` on one rank, then compare; what this rank has to say."""
    model, dims = build(layout, seed=0)
    if dist.get_rank() == rank:
        local_tensors(model)[changed].view(torch.int32).view(-1)[-1] ^= 1
    try:
        check_replicas(model, dims.weight_mesh)
    except RuntimeError as error:
        return str(error)
    return ""


def sync(layout: Layout) -> None:
    """Start from another model on every rank; end with the first replica's everywhere."""
    model, dims = build(layout, seed=dist.get_rank())
    for fqn, local in local_tensors(model).items():
        if fqn == "rope" or "norm" in fqn:
            local.fill_(-dist.get_rank())
    with pytest.raises(RuntimeError, match="differ"):
        check_replicas(model, dims.weight_mesh)
    sync_replicas(model, dims.weight_mesh)
    check_replicas(model, dims.weight_mesh)
    names = dims.weight_mesh.mesh_dim_names
    coordinate = dims.weight_mesh.get_coordinate()
    assert names is not None
    assert coordinate is not None
    got = local_tensors(model)
    assert got["rope"].eq(0).all()
    # The rank that this one copies: first among the replicas, in its own place among the shards.
    shards = [
        c if name in ("dp_shard_cp", "tp") else 0 for name, c in zip(names, coordinate, strict=True)
    ]
    source = int(dims.weight_mesh.mesh[tuple(shards)])
    want, _ = build(layout, seed=source)
    same = [fqn for fqn, local in local_tensors(want).items() if torch.equal(local, got[fqn])]
    assert same == [fqn for fqn in got if fqn != "rope" and "norm" not in fqn]


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("name", ["tok_embeddings.weight", "layers.1.ffn_norm.weight", "rope"])
def test_a_flipped_bit_is_found_and_named(ranks: RankPool, name: str, rank: int) -> None:
    found = ranks.run(check, 4, FSDP2, name, rank)
    message = f"replicas along dp_replicate differ, first in {name}"
    assert [message in text for text in found] == [r % 2 == rank % 2 for r in range(4)]


@pytest.mark.parametrize(
    ("layout", "name", "dim"),
    [
        (Layout(4, {TP: 2}), "layers.0.attention_norm.weight", "tp"),
        (Layout(2), "rope", "dp_shard_cp"),
        (Layout(2, {MODE: "ddp"}), "layers.1.attention.wq.weight", "dp_replicate"),
    ],
)
def test_every_dim_that_replicates_is_compared(
    ranks: RankPool, layout: Layout, name: str, dim: str
) -> None:
    found = ranks.run(check, layout.world_size, layout, name, 1)
    assert f"replicas along {dim} differ, first in {name}" in found


@pytest.mark.parametrize("layout", REPLICATED, ids=str)
def test_sync_gives_all_replicas_the_values_of_the_first(ranks: RankPool, layout: Layout) -> None:
    ranks.run(sync, layout.world_size, layout)
