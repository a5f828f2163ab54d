"""Hugging Face folders convert both ways bit for bit, and damaged ones are rejected."""

import json
import math
import os
import pickle
import re
import resource
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from checkpoint import hugging_face as subject
from checkpoint.hugging_face import (
    Folder,
    is_hugging_face,
    load_weights,
    open_checked,
    split,
    write_folder,
)
from checkpoint.states import ModelState
from config import ConfigError
from models import MODEL_SPECS, TransformerArgs
from models.hugging_face import HuggingFace, TensorPair
from models.meta import build_on_meta
from models.transformer import Transformer
from parallelisms.materialize import materialize
from tests.lib.durability import assert_durable, recorded_durability
from tests.lib.hugging_face import (
    CASES,
    SHARED,
    TOLERANCE,
    config_of,
    float64_for_float32,
    form_of,
    hugging_face,
)
from tests.lib.layouts import CPU, MODE, PP, REPLICATE, TP, Layout, digest, shard_debugmodel
from tests.lib.marks import slow
from tests.lib.ranks import RankPool

transformers = pytest.importorskip("transformers")

# One of the larger tensors fits into a shard, or several of the smaller ones.
SHARD_BYTES = 20_000
NAMES = {"Llama": "llama3", "Qwen3": "qwen3"}
TWO = Layout(2)


LAYOUTS = [
    Layout(1),
    Layout(2, {TP: 2}),
    Layout(2, {PP: 2}),
    Layout(4, {TP: 2}),
    slow(Layout(3)),
    slow(Layout(4)),
    slow(Layout(2, {MODE: "ddp"})),
    slow(Layout(2, {MODE: "simple_fsdp"})),
    slow(Layout(4, {TP: 2, MODE: "simple_fsdp"})),
    slow(Layout(4, {REPLICATE: 2})),
    slow(Layout(4, {TP: 4})),
    slow(Layout(4, {PP: 2, TP: 2})),
    slow(Layout(3, {PP: 3})),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each case saved by transformers: every second one in shards, one in bfloat16."""
    folders = {}
    for number, case in enumerate(CASES):
        folders[case] = tmp_path_factory.mktemp("hf") / case
        model = hugging_face(case)
        model = model.bfloat16() if case == "qwen3" else model.float()
        size = f"{SHARD_BYTES // 1000}KB" if number % 2 else "5GB"
        model.save_pretrained(folders[case], max_shard_size=size)
    return folders


def args_of(folder: Path) -> TransformerArgs:
    config = json.loads((folder / "config.json").read_text())
    return form_of(config["model_type"]).args(config)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    parts = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for part in parts for name, tensor in part.items()}


def export(
    model: Transformer, model_type: str, folder: Path, form: HuggingFace | None = None
) -> None:
    """Export in shards, as ``tools.convert`` does."""
    form = form or form_of(model_type)
    state = model.state_dict()
    pairs = [pair for pair in form.tensors(model.args) if pair.tied_to is None]
    tensors = (part for pair in pairs for part in split(pair, state[pair.fqn]))
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    config = form.config(model.args) | {"dtype": dtype}
    write_folder(folder, config, tensors, files={}, shard_bytes=SHARD_BYTES)


@torch.no_grad()
def max_logit_difference(case: str, folder: Path, form: HuggingFace | None = None) -> float:
    """Export a model; compare its logits to those of transformers, in float64."""
    hf_config = config_of(case)
    model = Transformer(form_of(hf_config.model_type).args(hf_config.to_dict())).double()
    model.init_weights()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.add_(noise, alpha=0.3)
    export(model, hf_config.model_type, folder, form)
    tokens = torch.randint(SHARED["vocab_size"], (2, SHARED["max_position_embeddings"]))
    with float64_for_float32():
        loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", output_loading_info=True
        )
        want = loaded(tokens).logits
    assert not any(report.values()), report
    assert want.dtype == torch.float64
    return (model(tokens) - want).abs().max().item()


@pytest.mark.parametrize("case", CASES)
def test_transformers_loads_exported_folder(case: str, tmp_path: Path) -> None:
    assert max_logit_difference(case, tmp_path / "folder") < TOLERANCE
    assert len(list((tmp_path / "folder").glob("model-*-of-*.safetensors"))) > 3
    assert ("lm_head.weight" in read_tensors(tmp_path / "folder")) == ("tied" not in case)


def test_wrong_conversion_table_is_detected(tmp_path: Path) -> None:
    right = form_of("llama")

    def swapped(args: TransformerArgs) -> list[TensorPair]:
        swaps = {"up_proj": "gate_proj", "gate_proj": "up_proj"}
        return [
            replace(
                pair,
                hf_names=(re.sub("up_proj|gate_proj", lambda m: swaps[m[0]], pair.hf_names[0]),),
            )
            for pair in right.tensors(args)
        ]

    def unscaled(args: TransformerArgs) -> dict[str, Any]:
        return right.config(replace(args, rope_scaling=None))

    assert max_logit_difference("llama31", tmp_path / "right", right) < TOLERANCE
    faults = [replace(right, tensors=swapped), replace(right, config=unscaled)]
    for number, wrong in enumerate(faults):
        assert max_logit_difference("llama31", tmp_path / str(number), wrong) > 1e3 * TOLERANCE


def digests_after_load(layout: Layout, folders: list[Path], fault: str) -> list[dict[str, str]]:
    """Digests of a model's weights loaded from each folder. Each rank must read only its shards."""
    read_box, n_read = Folder.read_box, [0]

    def counted(self: Folder, pair: Any, offsets: Any, sizes: Any) -> torch.Tensor:
        n_read[0] += math.prod(sizes)
        if fault == "offsets":
            offsets = [0] * len(offsets)
        return read_box(self, pair, offsets, sizes)

    found = []
    with patch.object(Folder, "read_box", counted):
        for folder in folders:
            args = args_of(folder)
            name = "qwen3" if args.qk_norm else "llama3"
            model = shard_debugmodel(name, args, layout).module
            materialize(model, CPU, seed=1)
            n_read[0] = 0
            state = ModelState(model)
            load_weights(folder, state, MODEL_SPECS[name].hugging_face, args)
            tensors = state.state_dict()
            shards = [t.to_local() if isinstance(t, DTensor) else t for t in tensors.values()]
            assert n_read[0] == sum(shard.numel() for shard in shards)
            found.append({fqn: digest(tensor) for fqn, tensor in tensors.items()})
    return found


def expected_digests(folder: Path) -> dict[str, str]:
    """Digests of a folder's tensors in float32, by Shardloom FQN."""
    args, tensors = args_of(folder), read_tensors(folder)
    pairs = form_of("qwen3" if args.qk_norm else "llama").tensors(args)
    hf_names = {pair.fqn: pair.hf_names[0] for pair in pairs}
    names = {p.fqn: hf_names[p.tied_to or p.fqn] for p in pairs}
    return {fqn: digest(tensors[name].float()) for fqn, name in names.items()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_mesh_loads_a_transformers_folder(
    ranks: RankPool, saved: dict[str, Path], layout: Layout
) -> None:
    folders = list(saved.values())
    answers = ranks.run(digests_after_load, layout.world_size, layout, folders, "")
    for number, folder in enumerate(folders):
        # A pipeline stage has some of the weights.
        merged: dict[str, str] = {}
        for answer in answers:
            merged |= answer[number]
        assert merged == expected_digests(folder)
        want = expected_digests(folder)
        assert all(want[fqn] == text for a in answers for fqn, text in a[number].items())


def test_wrong_offsets_are_detected(ranks: RankPool, saved: dict[str, Path]) -> None:
    answers = ranks.run(digests_after_load, 2, TWO, [saved["llama"]], "offsets")
    assert answers[0][0] != expected_digests(saved["llama"])


def fail_to_load_on_local_disks(folder: Path, disks: list[Path]) -> tuple[str, bool]:
    with chdir(disks[dist.get_rank()]):
        return fail_to_load(folder, Path("model"), {})


def test_ranks_that_find_different_weights_load_none(
    ranks: RankPool, saved: dict[str, Path], tmp_path: Path
) -> None:
    disks = [tmp_path / "a", tmp_path / "b"]
    for disk in disks:
        shutil.copytree(saved["llama"], disk / "model")
    with (disks[1] / "model" / FILE).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    for error, is_untouched in ranks.run(fail_to_load_on_local_disks, 2, saved["llama"], disks):
        assert error.startswith("checkpoint.initial_load_path model must be equal on all ranks: ")
        assert is_untouched


def fail_to_load(folder: Path, path: Path, changed: dict[str, Any]) -> tuple[str, bool]:
    """Error of ``load_weights``, and whether no weight changed."""
    args = replace(args_of(folder), **changed)
    model = shard_debugmodel("llama3", args, TWO).module
    materialize(model, CPU, seed=1)
    state = ModelState(model)
    before = {fqn: digest(tensor) for fqn, tensor in state.state_dict().items()}
    with pytest.raises(ConfigError) as raised:
        load_weights(path, state, form_of("llama"), args)
    after = {fqn: digest(tensor) for fqn, tensor in state.state_dict().items()}
    return str(raised.value), before == after


OTHER_MODELS = [
    ({"norm_eps": 1e-4}, "norm_eps: 0.001 to 0.0001"),
    ({"rope_theta": 1e6}, "rope_theta: 10000.0 to 1000000.0"),
    ({"n_heads": 8, "head_dim": 4}, "n_heads: 4 to 8"),
    ({"tie_embeddings": True}, "tie_embeddings: false to true"),
    ({"vocab_size": 64}, "set model.vocab_size = 61"),
    ({"n_layers": 2}, "n_layers: 3 to 2"),
]


@pytest.mark.parametrize(("changed", "message"), OTHER_MODELS)
def test_folder_of_another_model_is_rejected(
    saved: dict[str, Path], changed: dict[str, Any], message: str
) -> None:
    args = args_of(saved["llama"])
    assert open_checked(saved["llama"], form_of("llama"), args, {}).config["model_type"] == "llama"
    # max_seq_len does not affect the weights and may differ.
    open_checked(saved["llama"], form_of("llama"), replace(args, max_seq_len=7), {})
    with pytest.raises(ValueError, match="does not match the model") as raised:
        open_checked(saved["llama"], form_of("llama"), replace(args, **changed), {})
    assert message in str(raised.value)


def test_unreadable_folder_is_a_config_error_on_all_ranks(
    ranks: RankPool, saved: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(saved["llama"], tmp_path / "torn")
    (file,) = (tmp_path / "torn").glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 1)
    for path, message in ((tmp_path / "torn", file.name), (tmp_path / "none", "config.json")):
        for error, is_untouched in ranks.run(fail_to_load, 2, saved["llama"], path, {}):
            assert error.startswith("checkpoint.initial_load_path: ")
            assert message in error
            assert error.count("\n") == 0
            assert is_untouched
    wrong = {"vocab_size": 64}
    for error, is_untouched in ranks.run(fail_to_load, 2, saved["llama"], saved["llama"], wrong):
        assert "set model.vocab_size = 61" in error
        assert is_untouched


Damage = Callable[[Path], None]
FILE = "model.safetensors"
NORM, HEAD = "model.norm.weight", "lm_head.weight"


def edit_tensors(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / FILE)
        edit(tensors)
        save_file(tensors, folder / FILE, metadata={"format": "pt"})

    return damage


def edit_config(**changed: Any) -> Damage:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changed))

    return damage


def edit_index(edit: Callable[[dict[str, Any]], Any]) -> Damage:
    """Write the folder in shards, then edit the index."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / FILE)
        (folder / FILE).unlink()
        config = json.loads((folder / "config.json").read_text())
        scratch = folder / "shards"
        write_folder(scratch, config, iter(tensors.items()), files={}, shard_bytes=SHARD_BYTES)
        for file in scratch.iterdir():
            shutil.move(file, folder / file.name)
        path = folder / subject.SAFETENSORS_INDEX_FILE
        index = json.loads(path.read_text())
        edit(index)
        path.write_text(json.dumps(index))

    return damage


def overwrite(name: str, data: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(data) and None


def leave_only_pickles(folder: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(folder / "executed"),))

    (folder / FILE).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Attack()))


def replace_by_pipe(folder: Path) -> None:
    (folder / FILE).unlink()
    os.mkfifo(folder / FILE)


def truncate(n_bytes: int) -> Damage:
    return lambda folder: os.truncate(folder / FILE, n_bytes)


DAMAGES: dict[str, tuple[Damage, str]] = {
    "missing tensor": (edit_tensors(lambda t: t.pop(NORM)), f"{NORM} is missing"),
    "unknown tensor": (edit_tensors(lambda t: t.update(bias=t[NORM] + 1)), "bias is unknown"),
    "shape": (
        edit_tensors(lambda t: t.update({NORM: torch.ones(31)})),
        f"{NORM} is [31], not ",
    ),
    "transposed": (
        edit_tensors(lambda t: t.update({HEAD: t[HEAD].t().contiguous()})),
        f"{HEAD} is [32, 61], not [61, 32]",
    ),
    "integers": (edit_tensors(lambda t: t.update({NORM: t[NORM].int()})), "torch.int32"),
    "float8": (
        edit_tensors(lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)})),
        "torch.float8_e4m3fn",
    ),
    "truncated": (lambda folder: os.truncate(folder / FILE, 9_999), FILE),
    "no header": (truncate(7), FILE),
    "empty": (truncate(0), FILE),
    "header too long": (overwrite(FILE, b"\xff" * 64), FILE),
    "a pipe": (replace_by_pipe, "not a regular file"),
    "only pickles": (leave_only_pickles, "pytorch_model.bin is a pickle"),
    "no weights": (lambda folder: (folder / FILE).unlink(), f"no {FILE}"),
    "both": (overwrite(subject.SAFETENSORS_INDEX_FILE, b"{}"), "both"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "config is no JSON": (overwrite("config.json", b"{"), "config.json"),
    "config is a list": (overwrite("config.json", b"[]"), "not a JSON object"),
    "config is deep": (overwrite("config.json", b"[" * 100_000), "config.json"),
    "config is no text": (overwrite("config.json", b"\xff"), "config.json"),
    "rope": (edit_config(rope_parameters={"rope_type": "yarn"}), "rope_type: 'yarn'"),
    "bias": (edit_config(attention_bias=True), "attention_bias: True"),
    "sizes": (edit_config(hidden_size=2**39), ""),
    "layers": (edit_config(num_hidden_layers=2**39), ""),
    "index without names": (edit_index(dict.clear), "no weight_map"),
    "index of numbers": (edit_index(lambda i: i["weight_map"].update({NORM: 1})), "1 is not a"),
    "index leads away": (
        edit_index(lambda i: i["weight_map"].update({NORM: "../model.safetensors"})),
        "'../model.safetensors' is not a plain file name",
    ),
    "index names no file": (
        edit_index(lambda i: i["weight_map"].update({NORM: "none.safetensors"})),
        "none.safetensors",
    ),
    "index misses a tensor": (
        edit_index(lambda i: i["weight_map"].pop(NORM)),
        f"{NORM} is in the file only",
    ),
    "index has one more": (
        edit_index(lambda i: i["weight_map"].update(x=i["weight_map"][NORM])),
        "x is in model.safetensors.index.json only",
    ),
    "index has another place": (
        edit_index(lambda i: i["weight_map"].update({NORM: i["weight_map"][HEAD]})),
        NORM,
    ),
}


def open_folder(folder: Path, args: TransformerArgs) -> Folder:
    """Open a folder as ``load_weights`` does on one rank."""
    form = form_of("llama")
    model = build_on_meta(MODEL_SPECS["llama3"], args, torch.float32)
    return open_checked(folder, form, args, {k: t.shape for k, t in model.state_dict().items()})


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folder_error_names_the_fault(
    saved: dict[str, Path], tmp_path: Path, damage: str
) -> None:
    source, args = saved["llama"], args_of(saved["llama"])
    folder = Path(shutil.copytree(source, tmp_path / "folder"))
    assert len(open_folder(folder, args).names) == 30
    act, message = DAMAGES[damage]
    act(folder)
    with pytest.raises(ValueError, match=r".") as raised:
        open_folder(folder, args)
    assert str(folder) in str(raised.value)
    assert message in str(raised.value)
    assert not (folder / "executed").exists()


def test_intact_index_is_accepted(saved: dict[str, Path], tmp_path: Path) -> None:
    """Verify that ``edit_index`` alone does not damage the folder."""
    folder = Path(shutil.copytree(saved["llama"], tmp_path / "folder"))
    edit_index(lambda index: None)(folder)
    assert len(open_folder(folder, args_of(folder)).names) == 30


def test_symlinks_of_the_hub_cache_are_followed(saved: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for file in saved["llama"].iterdir():
        (folder / file.name).symlink_to(file)
    assert len(open_folder(folder, args_of(folder)).names) == 30


LAYER = "model.layers.0.self_attn"
LEFTOVERS = {
    **{f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.rand(4).double() for i in range(3)},
    "model.rotary_emb.inv_freq": torch.rand(4).double(),
    f"{LAYER}.rotary_emb.cos_cached": torch.ones(1, 1, 96, 8),
    f"{LAYER}.bias": torch.ones(1, 1, 96, 96, dtype=torch.bool).tril(),
    f"{LAYER}.masked_bias": torch.tensor(-1e4),
    "model.layers.1.attn.bias": torch.ones(1, 1, 96, 96, dtype=torch.uint8).tril(),
    "model.layers.1.attn.masked_bias": torch.tensor(-1e9),
}


def make_older(folder: Path) -> None:
    """Write what the first versions of transformers wrote: buffers, and few keys."""
    config = json.loads((folder / "config.json").read_text())
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "vocab_size", "rms_norm_eps", "hidden_act", "model_type")  # fmt: skip
    older = {key: config[key] for key in kept}
    older |= {"architectures": ["LLaMAForCausalLM"], "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(older))
    edit_tensors(lambda tensors: tensors.update(LEFTOVERS))(folder)


@pytest.mark.parametrize("in_shards", [False, True], ids=["one file", "shards"])
@torch.no_grad()
def test_older_folder_is_read_as_transformers_reads_it(
    saved: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, in_shards: bool
) -> None:
    folder = Path(shutil.copytree(saved["llama_without_groups"], tmp_path / "folder"))
    # The case is saved in shards. In float64, because transformers cannot read float32 here.
    tensors = {name: tensor.double() for name, tensor in read_tensors(folder).items()}
    for file in [*folder.glob("*.safetensors"), folder / subject.SAFETENSORS_INDEX_FILE]:
        file.unlink(missing_ok=True)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    make_older(folder)
    if in_shards:
        edit_index(lambda index: None)(folder)
    args = args_of(folder)
    opened = open_folder(folder, args)
    messages = [record.getMessage() for record in caplog.records]
    (defaults,) = (message for message in messages if "config.json" in message)
    for text in ("rope_theta = 10000.0", "num_key_value_heads = 4", "head_dim = 8",
                 "max_position_embeddings = 2048", "tie_word_embeddings = false"):  # fmt: skip
        assert text in defaults
    skipped = sorted(
        message.partition("skipped ")[2] for message in messages if message != defaults
    )
    assert [text.partition(",")[0] for text in skipped] == [
        "1 tensors *.attn.bias",
        "1 tensors *.attn.masked_bias",
        "1 tensors *.rotary_emb.cos_cached",
        "1 tensors *.self_attn.bias",
        "1 tensors *.self_attn.masked_bias",
        "4 tensors *.rotary_emb.inv_freq",
    ]
    model = Transformer(args).double()
    model.init_weights()
    model.load_state_dict(
        {
            pair.fqn: opened.read_box(pair, [0] * value.ndim, value.shape).double()
            for pair in form_of("llama").tensors(args)
            for value in [model.state_dict()[pair.fqn]]
        }
    )
    tokens = torch.randint(SHARED["vocab_size"], (2, 96))
    with float64_for_float32():
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager"
        )
        want = loaded(tokens).logits
    assert (model(tokens) - want).abs().max().item() < TOLERANCE


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        # Parameters of other models, whose names are only similar.
        (f"{LAYER}.bias", torch.ones(32)),
        (f"{LAYER}.masked_bias", torch.ones(32)),
        (f"{LAYER}.q_proj.bias", torch.ones(32)),
        (f"{LAYER}.rotary_emb.inv_freq", torch.ones(4, 4)),
        (f"{LAYER}.rotary_emb.weight", torch.ones(4)),
        ("rotary_emb.inv_freq", torch.ones(4)),
        ("model.layers.x.self_attn.rotary_emb.inv_freq", torch.ones(4)),
        (f"x.{LAYER}.rotary_emb.inv_freq", torch.ones(4)),
        ("model.causal", torch.ones(1, 1, 4, 4)),
    ],
)
def test_similar_tensors_stay_errors_by_name(
    saved: dict[str, Path], tmp_path: Path, name: str, tensor: torch.Tensor
) -> None:
    folder = Path(shutil.copytree(saved["llama"], tmp_path / "folder"))
    edit_tensors(lambda tensors: tensors.update(LEFTOVERS | {name: tensor}))(folder)
    with pytest.raises(ValueError, match=re.escape(f"{name} is unknown (1 in all)")):
        open_folder(folder, args_of(folder))


def test_complete_folder_logs_nothing(
    saved: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    open_folder(saved["llama"], args_of(saved["llama"]))
    assert not caplog.records


def test_tied_head_may_be_present_if_equal(saved: dict[str, Path], tmp_path: Path) -> None:
    folder, embedding, edit = tmp_path / "folder", "model.embed_tokens.weight", edit_tensors
    folder.mkdir()
    shutil.copy(saved["llama_tied"] / "config.json", folder)
    save_file(read_tensors(saved["llama_tied"]), folder / FILE)
    edit(lambda t: t.update({HEAD: t[embedding].clone()}))(folder)
    assert HEAD in open_folder(folder, args_of(folder)).names
    edit(lambda t: t[HEAD].view(torch.int32)[60, 31].bitwise_xor_(1))(folder)
    with pytest.raises(ValueError, match=f"{HEAD} and {embedding} are tied, but not equal"):
        open_folder(folder, args_of(folder))
    edit(lambda t: t.update({HEAD: t[embedding].clone()}) or t.pop(embedding))(folder)
    with pytest.raises(ValueError, match=f"{embedding} is missing"):
        open_folder(folder, args_of(folder))


STACKED = tuple(f"experts.{i}.weight" for i in range(5))


def interleave(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)


def undo_interleave(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)


PAIRS = {
    "one": TensorPair("x", ("y",)),
    "stacked": TensorPair("x", STACKED, is_stacked=True),
    "converted": TensorPair("x", ("y",), to_hf=interleave, from_hf=undo_interleave),
    "both": TensorPair(
        "x", STACKED, is_stacked=True, to_hf=torch.t, from_hf=torch.t
    ),
    "zero": TensorPair("x", ()),
}  # fmt: skip


@pytest.mark.parametrize("kind", PAIRS)
def test_any_box_of_any_pair_reads_back(kind: str, tmp_path: Path) -> None:
    pair = PAIRS[kind]
    tensor = torch.randn(5, 6, 4) if pair.is_stacked else torch.randn(10, 4)
    tensor = torch.zeros(3) if kind == "zero" else tensor
    rest = [("other", torch.ones(1))]
    written = [*split(pair, tensor), *rest]
    assert {name for name, _ in written} == {*pair.hf_names, "other"}
    write_folder(tmp_path / "folder", {}, iter(written), files={})
    folder = Folder(tmp_path / "folder")
    pairs = [pair, TensorPair("other", ("other",))]
    family = HuggingFace("", config=dict, args=dict, tensors=lambda args: pairs)
    folder.check(family, None, {"x": tensor.shape})
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        ends = [torch.randint(n + 1, (2,), generator=generator).sort()[0] for n in tensor.shape]
        offsets, sizes = [int(e[0]) for e in ends], [int(e[1] - e[0]) for e in ends]
        want = tensor[tuple(slice(int(e[0]), int(e[1])) for e in ends)]
        assert torch.equal(folder.read_box(pair, offsets, sizes), want)
    if kind != "zero":
        transposed = tensor.shape[:-2] + tensor.shape[-2:][::-1]
        with pytest.raises(ValueError, match="not \\["):
            folder.check(family, None, {"x": transposed})


def test_tensor_without_hf_counterpart_must_be_zero() -> None:
    with pytest.raises(ValueError, match="x is not zero"):
        list(split(PAIRS["zero"], torch.tensor([0.0, 1.0])))


def test_full_disk_is_an_os_error(tmp_path: Path) -> None:
    """Although safetensors raises its own."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_folder(tmp_path / "folder", {}, [("x", torch.ones(1000))], files={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_write_folder_is_all_or_nothing(tmp_path: Path) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "first", torch.ones(10)
        yield "second", torch.ones(10)
        raise OSError("disk on fire")

    with pytest.raises(OSError, match="disk on fire"):
        write_folder(tmp_path / "folder", {}, failing(), files={}, shard_bytes=40)
    assert list(tmp_path.iterdir()) == []
    tensors = {"first": torch.ones(10), "second": torch.zeros(10)}
    write_folder(tmp_path / "folder", {}, iter(tensors.items()), files={"a": b"b"}, shard_bytes=40)
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o700
    names = {file.name for file in (tmp_path / "folder").iterdir()}
    shards = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    assert names == {"a", "config.json", subject.SAFETENSORS_INDEX_FILE, *shards}
    for shard in shards:
        with safe_open(tmp_path / "folder" / shard, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
    index = json.loads((tmp_path / "folder" / subject.SAFETENSORS_INDEX_FILE).read_text())
    assert index["metadata"] == {"total_size": 80}
    with pytest.raises(ValueError, match="nothing is overwritten"):
        write_folder(tmp_path / "folder", {}, iter(()), files={})


def test_written_folder_survives_a_power_cut(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(4), "b": torch.ones(4)}
    with recorded_durability() as calls:
        write_folder(tmp_path / "folder", {}, iter(tensors.items()), files={}, shard_bytes=20)
    assert_durable(calls, tmp_path / "folder")


def test_tensor_larger_than_shard_bytes_gets_its_own_file(tmp_path: Path) -> None:
    tensors = {"first": torch.ones(10), "second": torch.zeros(10)}
    write_folder(tmp_path / "folder", {}, iter(tensors.items()), files={}, shard_bytes=39)
    assert len(list((tmp_path / "folder").glob("*.safetensors"))) == 2


def test_write_folder_keeps_a_dangling_symlink(tmp_path: Path) -> None:
    (tmp_path / "folder").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="already exists"):
        write_folder(tmp_path / "folder", {}, iter([]), files={})
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


def test_stacked_dtypes_are_promoted(tmp_path: Path) -> None:
    dtypes = [torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16]
    tensors = {name: torch.ones(1, dtype=d) for name, d in zip(STACKED, dtypes, strict=True)}
    write_folder(tmp_path / "folder", {}, iter(tensors.items()), files={})
    folder = Folder(tmp_path / "folder")
    assert folder.dtype(PAIRS["stacked"]) == torch.float32
    assert folder.dtype(PAIRS["zero"]) == torch.float32


def test_folder_with_manifest_is_not_hugging_face(tmp_path: Path) -> None:
    (tmp_path / subject.CONFIG_FILE).write_text("{}")
    assert is_hugging_face(tmp_path)
    (tmp_path / subject.MANIFEST_FILE).write_text("{}")
    assert not is_hugging_face(tmp_path)


def test_model_without_hf_format_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"this model\.name has no Hugging Face format"):
        load_weights(tmp_path, ModelState(torch.nn.Linear(1, 1)), None, None)
