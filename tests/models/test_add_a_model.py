"""The files of docs/howto/add_a_model.md and its neighbors train on any mesh."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file

from build_model import build_model
from config import load_config
from kernels.block_attention import BlockAttention
from models import find_model
from models.meta import build_on_meta
from models.transformer import InnerAttention, Transformer
from parallelisms.parallel_dims import ParallelDims
from planner.simulate import fake_ranks
from run_spec import resolve
from tests.lib.forked import codes, log, started
from tests.lib.launch import curve, run
from tests.lib.layouts import CP, PP, TP
from tests.lib.repository import ROOT

PAGES = ("resize_a_model.md", "add_a_model.md", "shard_a_model.md", "add_an_attention.md")
NAME = "my_models.relu2_sharding:SPEC"
FILE = re.compile(r"^```\w+\n# (\S+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with the pages' files, in PYTHONPATH."""
    pages = [(ROOT / "docs" / "howto" / name).read_text() for name in PAGES]
    files = dict(FILE.findall("\n".join(pages)))
    models = ["my_models/relu2.py", "relu2_debug.toml", "my_models/relu2_sharding.py"]
    assert list(files) == ["tiny.toml", *models, "my_models/gated.py"]
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
def test_another_attention_is_sharded_and_exported(folder: Path) -> None:
    gated = "my_models.gated:SPEC"
    keys = {"model.name": gated, "training.steps": "2", "checkpoint.interval": "2"}
    for path, more in ((folder / "one", {}), (folder / "tp", {f"parallelism.{TP}": "2"})):
        options = {"plant": partial(add_to_path, folder), **keys, **more}
        with started(path, 1 + bool(more), **options) as ranks:
            assert codes(ranks) == {0}, log(path)
    want, got = curve(folder / "one"), curve(folder / "tp")
    assert got[2] == pytest.approx(want[2], rel=1e-9)
    exported = folder / "exported"
    run_folder = folder / "tp" / "debug_model"
    done = subprocess.run(
        [sys.executable, "-m", "tools.convert", "export", run_folder, exported, "--model", gated],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{folder}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    tensors = load_file(exported / "model.safetensors")
    assert tensors["model.layers.0.self_attn.gate_proj.weight"].abs().max() > 0
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
