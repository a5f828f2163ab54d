"""The check that replicas agree sees a single bit, and says where it is."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from config.job_config import ActivationCheckpoint
from models import find_model
from parallelisms.materialize import materialize
from parallelisms.replicas import check_replicas
from tests.layouts import CPU, REPLICATE, Layout, build_sharded
from tests.ranks import RankError, RankPool


def check(changed: str | None, rank: int) -> None:
    """Flip one bit of ``changed`` on one rank of two replicas of two shards, then compare."""
    args = replace(find_model("llama3", "debugmodel")[1], max_seq_len=16, n_layers=2)
    layout = Layout(4, {REPLICATE: 2}, recompute=ActivationCheckpoint(mode="full"))
    model, dims = build_sharded("llama3", args, layout)
    materialize(model, CPU, seed=0)
    if changed is not None and dist.get_rank() == rank:
        tensor = dict(model.named_parameters()) | dict(model.named_buffers())
        local = tensor[changed]
        local = local.to_local() if isinstance(local, DTensor) else local
        local.detach().view(torch.int32).view(-1)[-1] ^= 1
    check_replicas(model, dims.weight_mesh["dp_replicate"])


def test_replicas_agree(ranks: RankPool) -> None:
    ranks.run(check, 4, None, 0)


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize(
    "name",
    ["tok_embeddings.weight", "layers.1._checkpoint_wrapped_module.ffn_norm.weight", "rope"],
)
def test_a_flipped_bit_is_found_and_named(ranks: RankPool, name: str, rank: int) -> None:
    canonical = name.replace("_checkpoint_wrapped_module.", "")
    with pytest.raises(RankError, match=f"replicas differ, first in {canonical}"):
        ranks.run(check, 4, name, rank)
