"""Weights that a user's own model shares inside a block, across blocks and outside of them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn as nn

from config import ConfigError
from data.loader import num_target_tokens
from models import TransformerArgs, find_spec
from models.transformer import Transformer
from parallelisms.materialize import materialize
from parallelisms.replicas import check_replicas
from planner.simulate import fake_ranks
from tests.lib.layouts import CPU, PP, TP, Layout, args_of, shard_debugmodel
from tests.lib.parity import global_batch, rows_of, whole
from tests.lib.ranks import RankPool


class TiedInBlock(Transformer):
    """Also ties two modules of the last pipeline stage."""

    def __init__(self, args: TransformerArgs) -> None:
        super().__init__(args)
        output, norm = cast(Any, self.output), cast(Any, self.norm)
        output.scale = norm.weight

    def build_block(self, index: int) -> nn.Module:
        block: Any = super().build_block(index)
        block.feed_forward.w3.weight = block.feed_forward.w1.weight
        return block


class TiedAcrossBlocks(Transformer):
    def __init__(self, args: TransformerArgs) -> None:
        super().__init__(args)
        first, second = (block.feed_forward for block in self.layers.values())
        second.w2.weight = first.w2.weight


class TiedOutput(Transformer):
    """Not by ``tie_embeddings``, from which the stages would know it."""

    def __init__(self, args: TransformerArgs) -> None:
        super().__init__(args)
        output, embeddings = cast(Any, self.output), cast(Any, self.tok_embeddings)
        output.weight = embeddings.weight


LLAMA = find_spec("llama3")
IN_BLOCK = replace(LLAMA, model_cls=TiedInBlock)
ACROSS_BLOCKS = replace(LLAMA, model_cls=TiedAcrossBlocks)
OUTPUT = replace(LLAMA, model_cls=TiedOutput)


def gradients(
    name: str, layout: Layout, dtypes: Mapping[str, Any], tie_embeddings: bool = False
) -> dict[str, torch.Tensor]:
    """Gradients of four rows, in two microbatches per rank."""
    args = replace(args_of(name), tie_embeddings=tie_embeddings)
    model = shard_debugmodel(name, args, layout, **dtypes)
    materialize(model.module, CPU, seed=7)
    # Collected now, because forward may replace them.
    parameters = dict(model.module.named_parameters())
    batch = global_batch(args.vocab_size, False)
    rank, size = model.dims.batch_mesh.get_local_rank(), 2 // model.dims.batch_mesh.size()
    starts = [2 * size * rank, 2 * size * rank + size]
    rows = [rows_of(batch, slice(start, start + size)) for start in starts]
    model.runner().forward_backward(rows, num_target_tokens([rows_of(batch, slice(0, 4))]))
    check_replicas(model.module, model.dims.weight_mesh, tied=model.tied)
    return {fqn: whole(p.grad) for fqn, p in parameters.items() if p.grad is not None}


FLOAT64 = {"dtype": "float64"}


@pytest.mark.parametrize("tie_embeddings", [False, True])
@pytest.mark.parametrize("layout", [Layout(2, {PP: 2}), Layout(2), Layout(2, {TP: 2})], ids=str)
def test_gradients_of_weights_tied_in_blocks(
    ranks: RankPool, layout: Layout, tie_embeddings: bool
) -> None:
    name = f"{__name__}:IN_BLOCK"
    (want,) = ranks.run(gradients, 1, name, Layout(1), FLOAT64, tie_embeddings)
    found = ranks.run(gradients, layout.world_size, name, layout, FLOAT64, tie_embeddings)
    assert {fqn for got in found for fqn in got} == want.keys()
    for fqn, got in [each for of_rank in found for each in of_rank.items()]:
        torch.testing.assert_close(got, want[fqn], rtol=1e-9, atol=1e-14, msg=fqn)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ACROSS_BLOCKS", r"layers\.0\.\S+ = layers\.1\.\S+ is on stages 0, 1, which would train"),
        ("OUTPUT", r"tok_embeddings\.weight = output\.weight is on stages 0, 1, which would train"),
    ],
)
def test_weight_that_stages_share_is_an_error(name: str, message: str) -> None:
    name = f"{__name__}:{name}"
    with fake_ranks(0, 2), pytest.raises(ConfigError, match=message):
        shard_debugmodel(name, args_of(name), Layout(2, {PP: 2}))
