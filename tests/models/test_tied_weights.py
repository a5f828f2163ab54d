"""Weights that a user's own model shares inside a block, across blocks and outside of them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn as nn

from config import ConfigError
from config.job_config import ActivationCheckpoint, Compile
from data.loader import num_target_tokens
from models import TransformerArgs, find_spec
from models.transformer import FeedForward, InitFn, Transformer
from parallelisms.materialize import materialize
from parallelisms.replicas import check_replicas
from planner.simulate import fake_ranks
from tests.lib.layouts import CPU, MODE, PP, RESHARD, TP, Layout, args_of, shard_debugmodel
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


class OnceFeedForward(FeedForward):
    """Checks that both of its tied layers read one cast or gathered weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.w1.weight is self.w3.weight
        return super().forward(x)


class TiedOnce(TiedInBlock):
    def build_block(self, index: int) -> nn.Module:
        block: Any = super().build_block(index)
        block.feed_forward.__class__ = OnceFeedForward
        return block


class TwoGains(nn.Module):
    """Two layers in a container, which has no forward."""

    def __init__(self, args: TransformerArgs) -> None:
        super().__init__()
        self.gains = nn.ModuleList([nn.Linear(args.dim, args.dim, bias=False) for _ in range(2)])
        first, second = cast(Any, self.gains)
        second.weight = first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for gain in self.gains:
            x = gain(x)
        return x

    def init_weights(self, trunc_normal_: InitFn, residual_std: float) -> None:
        trunc_normal_(cast(Any, self.gains)[0].weight, std=0.05)


class TiedInList(Transformer):
    def build_block(self, index: int) -> nn.Module:
        block: Any = super().build_block(index)
        block.feed_forward = TwoGains(self.args)
        return block


class TiedAcrossRegions(Transformer):
    def build_block(self, index: int) -> nn.Module:
        block: Any = super().build_block(index)
        block.ffn_norm.weight = block.attention_norm.weight
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
ONCE = replace(LLAMA, model_cls=TiedOnce)
ACROSS_BLOCKS = replace(LLAMA, model_cls=TiedAcrossBlocks)
IN_LIST = replace(LLAMA, model_cls=TiedInList)
IN_REGIONS = replace(LLAMA, model_cls=TiedAcrossRegions, compile_regions={"attend": True})
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


BFLOAT16 = {"compute_dtype": "bfloat16"}
SELECTIVE, FULL = ActivationCheckpoint(), ActivationCheckpoint(mode="full")
MIN_CUT = Compile(enable=True, backend="aot_eager_decomp_partition")
SIMPLE = {MODE: "simple_fsdp"}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("ONCE", Layout(1)),
        ("ONCE", Layout(2, SIMPLE)),
        ("IN_BLOCK", Layout(1, recompute=SELECTIVE)),
        ("IN_BLOCK", Layout(1, recompute=FULL)),
        ("IN_BLOCK", Layout(1, recompute=SELECTIVE, compile=MIN_CUT)),
        ("IN_BLOCK", Layout(2, SIMPLE, recompute=SELECTIVE)),
        ("IN_BLOCK", Layout(2, SIMPLE, compile=MIN_CUT)),
        ("IN_LIST", Layout(1, recompute=SELECTIVE)),
        ("ACROSS_BLOCKS", Layout(1)),
        ("ACROSS_BLOCKS", Layout(1, compile=MIN_CUT)),
        ("ACROSS_BLOCKS", Layout(2, SIMPLE | {RESHARD: "never"})),
    ],
    ids=str,
)
def test_tied_weights_are_cast_or_gathered_once(ranks: RankPool, name: str, layout: Layout) -> None:
    name = f"{__name__}:{name}"
    (want,) = ranks.run(gradients, 1, name, Layout(1), FLOAT64)
    for found in ranks.run(gradients, layout.world_size, name, layout, BFLOAT16):
        assert found.keys() == want.keys()
        for fqn, got in found.items():
            assert (got - want[fqn]).norm() < 0.1 * want[fqn].norm(), fqn


RECOMPUTED = r"mode: layers\.0\.forward would be recomputed without what else has layers\.0\.\S+ = "
APART = r"data_parallel: layers\.0\.\S+ = layers\.1\.\S+ would be sharded apart: fsdp_units"


@pytest.mark.parametrize(
    ("name", "layout", "message"),
    [
        ("ACROSS_BLOCKS", Layout(1, recompute=SELECTIVE), RECOMPUTED),
        ("ACROSS_BLOCKS", Layout(1, recompute=FULL), RECOMPUTED),
        ("ACROSS_BLOCKS", Layout(2, SIMPLE), RECOMPUTED),
        ("ACROSS_BLOCKS", Layout(2), APART),
        ("ACROSS_BLOCKS", Layout(2, {MODE: "ddp"}), APART),
        ("OUTPUT", Layout(2), "tok_embeddings.weight = output.weight would be sharded apart"),
        (
            "IN_REGIONS",
            Layout(1, recompute=SELECTIVE, compile=MIN_CUT),
            r"mode: layers\.0\.attend would be recomputed without what else has layers\.0\.",
        ),
    ],
    ids=str,
)
def test_weight_that_is_recomputed_or_sharded_apart_is_an_error(
    name: str, layout: Layout, message: str
) -> None:
    name = f"{__name__}:{name}"
    with fake_ranks(0, layout.world_size), pytest.raises(ConfigError, match=message):
        shard_debugmodel(name, args_of(name), layout)


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
