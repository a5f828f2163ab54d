"""The files of docs/howto/add_a_model.md and its neighbors train on any mesh."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel

from build_model import build_model
from config import ConfigError, load_config
from config.job_config import ActivationCheckpoint, Compile
from data.loader import num_target_tokens
from kernels.block_attention import BlockAttention
from models import TransformerArgs, find_model, find_spec
from models.meta import build_on_meta
from models.model_spec import Style
from models.transformer import Attention, InitFn, InnerAttention, Transformer, TransformerBlock
from parallelisms.materialize import materialize
from parallelisms.parallel_dims import ParallelDims
from planner.simulate import fake_ranks
from run_spec import resolve
from runtime.outside import mistakes_of
from tests.lib.forked import codes, log, started
from tests.lib.launch import curve, run
from tests.lib.layouts import (
    CP,
    CPU,
    METHOD,
    MODE,
    PP,
    REDUCE,
    REPLICATE,
    TP,
    Layout,
    args_of,
    shard_debugmodel,
)  # fmt: skip
from tests.lib.parity import global_batch, rows_of, whole
from tests.lib.ranks import RankPool
from tests.lib.repository import ROOT

PAGES = (
    "resize_a_model.md",
    "add_a_model.md",
    "shard_a_model.md",
    "add_an_attention.md",
    "outside_the_blocks.md",
)
NAME = "my_models.relu2_sharding:SPEC"
FILE = re.compile(r"^```\w+\n# (\S+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with the pages' files, in PYTHONPATH."""
    pages = [(ROOT / "docs" / "howto" / name).read_text() for name in PAGES]
    files = dict(FILE.findall("\n".join(pages)))
    models = ["my_models/relu2.py", "relu2_debug.toml", "my_models/relu2_sharding.py"]
    assert list(files) == ["tiny.toml", *models, "my_models/gated.py", "my_models/positions.py"]
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CONFIG_FILE", str(tmp_path / "relu2_debug.toml"))
    return tmp_path


def test_other_size_has_the_expected_size(folder: Path) -> None:
    model = load_config(folder / "tiny.toml", []).model
    spec, args = find_model(model.name, model.flavor, model.args)
    module = build_on_meta(spec, args, torch.float32)
    assert len(spec.blocks(module)) == 8
    # Tied embeddings of 151,936 x 256, blocks, and the last norm.
    block = 256 * 32 * (8 + 2 * 4 + 8) + 3 * 256 * 768 + 2 * 256 + 2 * 32
    assert sum(p.numel() for p in module.parameters()) == args.vocab_size * 256 + 8 * block + 256


def add_to_path(folder: Path) -> None:
    sys.path.append(str(folder))


@pytest.mark.usefixtures("warm_starts")
def test_losses_match_on_any_mesh_and_generate_works(folder: Path) -> None:
    # The folder of a run is that of the debug model in tests/lib.
    keys = {"job.name": "debug_model", "training.steps": "3"}
    run(folder / "one", 1, **keys)
    want = curve(folder / "one")
    options = {"config": folder / "relu2_debug.toml", "plant": partial(add_to_path, folder)}
    for key in (PP, TP, CP):
        with started(folder / key, 2, **options, **keys, **{f"parallelism.{key}": "2"}) as ranks:
            assert codes(ranks) == {0}, log(folder / key)
        got = curve(folder / key)
        assert [*got] == [1, 2, 3]
        for step, values in got.items():
            assert values == pytest.approx(want[step], rel=1e-9)
    path = f"{ROOT}:{folder}"
    checkpoint = folder / PP / "debug_model"
    written = subprocess.run(
        [sys.executable, "-m", "tools.generate", checkpoint, "--tokens", "4", "--model", NAME],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert written.returncode == 0, written.stderr
    assert NAME in written.stderr


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.parametrize(
    ("name", "degrees", "tensor"),
    [
        ("my_models.gated:SPEC", [TP], "model.layers.0.self_attn.gate_proj.weight"),
        ("my_models.positions:SPEC", [CP, PP, TP], "model.embed_positions.weight"),
    ],
)
def test_model_is_sharded_and_exported(
    folder: Path, name: str, degrees: list[str], tensor: str
) -> None:
    keys = {"model.name": name, "training.steps": "2", "checkpoint.interval": "2"}
    for degree in ["one", *degrees]:
        path, more = folder / degree, {} if degree == "one" else {f"parallelism.{degree}": "2"}
        options = {"plant": partial(add_to_path, folder), **keys, **more}
        with started(path, 1 + bool(more), **options) as ranks:
            assert codes(ranks) == {0}, log(path)
        if degree == "one":
            want = curve(path)
        assert curve(path)[2] == pytest.approx(want[2], rel=1e-9)
    exported = folder / "exported"
    run_folder = folder / TP / "debug_model"
    done = subprocess.run(
        [sys.executable, "-m", "tools.convert", "export", run_folder, exported, "--model", name],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{folder}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    tensors = load_file(exported / "model.safetensors")
    assert tensors[tensor].abs().max() > 0
    options = {"plant": partial(add_to_path, folder), **keys}
    options["checkpoint.initial_load_path"] = str(exported)
    with started(folder / "loaded", 1, **options) as ranks:
        assert codes(ranks) == {0}, log(folder / "loaded")
    assert curve(folder / "loaded")[1][0] < want[1][0]


class Window(InnerAttention):
    """Sees the last 300 positions, which differs from causal attention only in longer sequences."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, document_ids: torch.Tensor | None
    ) -> torch.Tensor:
        n_queries, n_keys = q.shape[1], k.shape[1]
        mask = torch.ones(n_queries, n_keys, dtype=torch.bool).tril(n_keys - n_queries)
        mask = mask.triu(n_keys - n_queries - 299)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)


class EveryOtherWindow(Transformer):
    def build_block(self, index: int) -> nn.Module:
        block = super().build_block(index)
        if index % 2:
            block.attention.inner = Window()
        return block


def test_kernels_replace_no_attention_of_the_model(captured_log: pytest.LogCaptureFixture) -> None:
    run = resolve(load_config(ROOT / "train_configs" / "debug_model.toml", []), world_size=1)
    spec = replace(run.model_spec, model_cls=EveryOtherWindow)
    with fake_ranks(0, 1):
        dims = ParallelDims.build(run.config.parallelism, 1, "cpu")
        model = build_model(replace(run, model_spec=spec), dims, torch.device("cpu"))
        inners = [type(each.inner) for each in spec.attentions(model.module)]
    assert inners == [BlockAttention, Window] * (len(inners) // 2)
    assert f"kernels: not used in {len(inners) // 2} layers" in captured_log.text


class Gain(InnerAttention):
    """Has a parameter and a buffer of its own, and a method that fills them."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(head_dim))
        self.register_buffer("scale", torch.empty(1))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, document_ids: torch.Tensor | None
    ) -> torch.Tensor:
        return super().forward(q * self.gain * self.scale, k, v, document_ids)

    def init_weights(self) -> None:
        nn.init.constant_(self.gain, 0.5)
        self.scale.fill_(3.0)


class GainAttention(Attention):
    def __init__(self, args: TransformerArgs) -> None:
        super().__init__(args)
        self.inner = Gain(args.head_dim)

    def init_weights(self, trunc_normal_: InitFn, residual_std: float) -> None:
        super().init_weights(trunc_normal_, residual_std)
        self.inner.init_weights()


class WithGain(Transformer):
    def build_block(self, index: int) -> nn.Module:
        block = TransformerBlock(self.args)
        block.attention = GainAttention(self.args)
        return block


WITH_GAIN = replace(find_spec("llama3"), model_cls=WithGain)
MIN_CUT = Compile(enable=True, backend="aot_eager_decomp_partition")
GAIN_LAYOUTS = [
    Layout(2, {CP: 2, METHOD: "ulysses"}),
    Layout(2, {CP: 2, METHOD: "allgather"}, ActivationCheckpoint(mode="full")),
    Layout(2, {CP: 2, MODE: "simple_fsdp", METHOD: "ulysses"}),
    Layout(2, {CP: 2, MODE: "ddp", METHOD: "allgather"}),
    Layout(2, {CP: 2, METHOD: "ulysses"}, compile=MIN_CUT),
    Layout(2, {CP: 2, METHOD: "allgather"}, compile=MIN_CUT),
]


def gradients_of_gain(layout: Layout) -> dict[str, torch.Tensor]:
    name = f"{__name__}:WITH_GAIN"
    args = args_of(name)
    model = shard_debugmodel(name, args, layout, dtype="float64")
    materialize(model.module, CPU, seed=7)
    batch = rows_of(global_batch(args.vocab_size, False), slice(0, 1))
    model.runner().forward_backward([batch], num_target_tokens([batch]))
    state = {name: torch.ones(()) for name in model.module.state_dict()}
    for name, parameter in model.module.named_parameters():
        assert parameter.grad is not None
        grad = parameter.grad
        state[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return state


@pytest.mark.parametrize("layout", GAIN_LAYOUTS, ids=str)
def test_own_attention_keeps_its_weights_in_context_parallel(
    ranks: RankPool, layout: Layout
) -> None:
    (want,) = ranks.run(gradients_of_gain, 1, Layout(1))
    for got in ranks.run(gradients_of_gain, 2, layout):
        assert [*got] == [*want]
        for name, gradient in want.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-9, atol=1e-14)


class WithScales(Transformer):
    """Has one parameter for all layers."""

    def __init__(self, args: TransformerArgs) -> None:
        super().__init__(args)
        self.scales = nn.Parameter(torch.empty(args.n_layers, args.dim))


WITH_SCALES = replace(find_spec("llama3"), model_cls=WithScales)


def test_parameter_of_several_stages_is_an_error() -> None:
    name = f"{__name__}:WITH_SCALES"
    message = r"pipeline_parallel_degree: scales is on stages 0, 1, which would train it apart"
    with fake_ranks(0, 2), pytest.raises(ConfigError, match=message):
        shard_debugmodel(name, args_of(name), Layout(2, {PP: 2}))


class WithTable(Transformer):
    """Has a parameter that belongs to no block, on the first stage."""

    def __init__(self, args: TransformerArgs) -> None:
        super().__init__(args)
        self.table: nn.Embedding | None = nn.Embedding(args.max_seq_len, args.dim)


class DrawsTable(WithTable):
    def init_weights(self, trunc_normal_: InitFn = nn.init.trunc_normal_) -> None:
        super().init_weights(trunc_normal_)
        assert self.table is not None
        nn.init.normal_(self.table.weight)


class InBfloat16(Transformer):
    """Its norm has another dtype than ``training.dtype``."""

    def __init__(self, args: TransformerArgs) -> None:
        super().__init__(args)
        self.norm = nn.RMSNorm(args.dim, dtype=torch.bfloat16)


class Misspells(Transformer):
    def init_weights(self, trunc_normal_: InitFn = nn.init.trunc_normal_) -> None:
        self.tabel.weight.fill_(0.0)


def split_table(model: WithTable, layers: range) -> None:
    find_spec("llama3").split_stage(model, layers)
    if layers.start > 0:
        model.table = None


def plan_of(path: str, style: Any) -> Callable[[TransformerArgs], dict[str, Style]]:
    return lambda args: {**find_spec("llama3").tensor_parallel_plan(args), path: style}


WITH_TABLE = replace(find_spec("llama3"), model_cls=WithTable, split_stage=split_table)
DRAWS_TABLE = replace(WITH_TABLE, model_cls=DrawsTable)
ON_NO_STAGE = replace(
    WITH_TABLE, split_stage=lambda model, layers: split_table(model, range(1, layers.stop))
)
IN_BFLOAT16 = replace(WITH_TABLE, model_cls=InBfloat16)
MISSPELLS = replace(WITH_TABLE, model_cls=Misspells)
WRONG_STYLE = replace(find_spec("llama3"), tensor_parallel_plan=plan_of("*norm", ColwiseParallel()))
NO_STYLE = replace(find_spec("llama3"), tensor_parallel_plan=plan_of("norm", 3))


@pytest.mark.parametrize(
    ("spec", "layout", "message"),
    [
        ("WITH_TABLE", Layout(1), r"init_weights does not fill table\.weight"),
        ("WITH_TABLE", Layout(2, {TP: 2}), r"plan does not cover table\.weight"),
        ("WITH_TABLE", Layout(2, {PP: 2}), r"merge_stages does not handle table\.weight"),
        (
            "ON_NO_STAGE",
            Layout(2, {PP: 2}),
            r"split_stage leaves tok_embeddings\.weight on no stage",
        ),
        ("DRAWS_TABLE", Layout(1), r"init_weights calls normal_ on table\.weight, .*\.py, line"),
        ("IN_BFLOAT16", Layout(1), r"norm\.weight is in torch\.bfloat16, and training\.dtype is "),
        ("MISSPELLS", Layout(1), r"has no attribute 'tabel' \(.*test_add_a_model\.py, line \d+\)"),
        ("WRONG_STYLE", Layout(2, {TP: 2}), r"'\*norm' .* is a RMSNorm: ColwiseParallel currently"),
        ("NO_STYLE", Layout(2, {TP: 2}), r"TypeError: 'int' object is not callable"),
    ],
)
def test_mistake_of_a_spec_is_an_error_of_the_config(
    spec: str, layout: Layout, message: str
) -> None:
    name = f"{__name__}:{spec}"
    whole_message = f"model\\.name: '{re.escape(name)}': .*{message}"
    for rank in range(layout.world_size):
        with fake_ranks(rank, layout.world_size), pytest.raises(ConfigError, match=whole_message):
            shard_debugmodel(name, args_of(name), layout).materialize()


UNMATCHED = replace(find_spec("llama3"), tensor_parallel_plan=plan_of("atention.q", None))


def test_plan_of_no_module_is_a_warning(captured_log: pytest.LogCaptureFixture) -> None:
    name, layout = f"{__name__}:UNMATCHED", Layout(2, {TP: 2})
    with fake_ranks(0, 2):
        shard_debugmodel(name, args_of(name), layout)
    assert "tensor parallel plan: no module matches 'atention.q'" in captured_log.messages


def test_errors_of_the_machine_are_not_the_models() -> None:
    with pytest.raises(RuntimeError, match="out of memory"), mistakes_of("model.name", "x:SPEC"):
        raise torch.OutOfMemoryError("out of memory")


class SkippingBlock(TransformerBlock):
    """Skips itself, or only its attention, in every other microbatch."""

    def __init__(self, args: TransformerArgs, *, is_whole: bool) -> None:
        super().__init__(args)
        self.is_whole, self.calls = is_whole, 0

    def forward(
        self, x: torch.Tensor, rope: torch.Tensor, document_ids: torch.Tensor | None
    ) -> torch.Tensor:
        self.calls += 1
        if self.calls % 2:
            return super().forward(x, rope, document_ids)
        return x if self.is_whole else x + self.feed_forward(self.ffn_norm(x))


class SkippingModel(Transformer):
    def build_block(self, index: int) -> nn.Module:
        return SkippingBlock(self.args, is_whole=index == 0)


SKIPPING = replace(find_spec("llama3"), model_cls=SkippingModel)


def gradients_of_skipping(layout: Layout) -> dict[str, torch.Tensor]:
    """Of a step of two microbatches of four rows."""
    name = f"{__name__}:SKIPPING"
    args = args_of(name)
    model = shard_debugmodel(name, args, layout, dtype="float64")
    materialize(model.module, CPU, seed=7)
    batch = global_batch(args.vocab_size, False)
    size = 2 // model.dims.batch_mesh.size()
    first = size * model.dims.batch_mesh.get_local_rank()
    rows = [slice(start + first, start + first + size) for start in (0, 2)]
    n_tokens = num_target_tokens([rows_of(batch, slice(0, 4))])
    model.runner().forward_backward([rows_of(batch, each) for each in rows], n_tokens)
    gradients = {fqn: p.grad for fqn, p in model.module.named_parameters() if p.grad is not None}
    return {fqn: whole(gradient) for fqn, gradient in gradients.items()}


SKIPPING_LAYOUTS = [
    Layout(2),
    Layout(2, {MODE: "ddp"}),
    Layout(2, {REPLICATE: 2}),
    Layout(2, {REPLICATE: 2, REDUCE: "last_microbatch"}),
]


@pytest.mark.parametrize("layout", SKIPPING_LAYOUTS, ids=str)
def test_gradients_of_layers_that_a_microbatch_skips(ranks: RankPool, layout: Layout) -> None:
    (want,) = ranks.run(gradients_of_skipping, 1, Layout(1))
    assert want["layers.0.attention.wq.weight"].norm() > 0
    for got in ranks.run(gradients_of_skipping, 2, layout):
        assert [*got] == [*want]
        for name, gradient in want.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_models:SPEC", "cannot be imported: ModuleNotFoundError: No module named"),
        ("models:SPEC", "cannot be imported: AttributeError"),
        ("models:MODEL_SPECS", "is not a ModelSpec"),
        ("models:", "is not a ModelSpec"),
    ],
)
def test_invalid_spec_raises_by_name(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        find_model(name, "debugmodel")
    assert str(caught.value).startswith(f"model.name: {name!r} ")
