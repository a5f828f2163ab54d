"""Folders of transformers load here and ours there, bit for bit; broken ones are refused."""

import json
import math
import os
import pickle
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from checkpoint import hugging_face as subject
from checkpoint.hugging_face import (
    Folder,
    is_hugging_face,
    load_weights,
    open_as,
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
from tests.layouts import CPU, MODE, PP, REPLICATE, TP, Layout, build_sharded
from tests.models.test_hugging_face import (
    CASES,
    SHARED,
    TOLERANCE,
    config_of,
    float64_for_float32,
    form_of,
    hugging_face,
)
from tests.parallelisms.test_materialize import digest
from tests.ranks import RankPool

transformers = pytest.importorskip("transformers")

# Of the larger tensors one fits in, of the smaller ones several.
SHARD_BYTES = 20_000
NAMES = {"Llama": "llama3", "Qwen3": "qwen3"}
TWO = Layout(2)


def slow(layout: Layout) -> Any:
    return pytest.param(layout, marks=pytest.mark.slow)


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
    """What transformers saves of each case, every second one in shards, and one as bfloat16."""
    folders = {}
    for number, case in enumerate(CASES):
        folders[case] = tmp_path_factory.mktemp("theirs") / case
        model = hugging_face(case)
        model = model.bfloat16() if case == "qwen3" else model.float()
        size = f"{SHARD_BYTES // 1000}KB" if number % 2 else "5GB"
        model.save_pretrained(folders[case], max_shard_size=size)
    return folders


def args_in(folder: Path) -> TransformerArgs:
    config = json.loads((folder / "config.json").read_text())
    return form_of(config["model_type"]).args(config)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    parts = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for part in parts for name, tensor in part.items()}


def export(
    model: Transformer, model_type: str, folder: Path, form: HuggingFace | None = None
) -> None:
    """In shards, as the tool does it."""
    form = form or form_of(model_type)
    state = model.state_dict()
    pairs = [pair for pair in form.tensors(model.args) if pair.shares is None]
    tensors = (part for pair in pairs for part in split(pair, state[pair.ours]))
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    config = form.config(model.args) | {"dtype": dtype}
    write_folder(folder, config, tensors, files={}, shard_bytes=SHARD_BYTES)


@torch.no_grad()
def distance(case: str, folder: Path, form: HuggingFace | None = None) -> float:
    """Between our logits and those of transformers with what we wrote, in float64."""
    theirs = config_of(case)
    model = Transformer(form_of(theirs.model_type).args(theirs.to_dict())).double()
    model.init_weights()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.add_(noise, alpha=0.3)
    export(model, theirs.model_type, folder, form)
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
def test_transformers_loads_what_we_write(case: str, tmp_path: Path) -> None:
    assert distance(case, tmp_path / "ours") < TOLERANCE
    assert len(list((tmp_path / "ours").glob("model-*-of-*.safetensors"))) > 3
    assert ("lm_head.weight" in tensors_in(tmp_path / "ours")) == ("tied" not in case)


def test_a_wrong_table_is_seen(tmp_path: Path) -> None:
    right = form_of("llama")

    def swapped(args: TransformerArgs) -> list[TensorPair]:
        swaps = {"up_proj": "gate_proj", "gate_proj": "up_proj"}
        return [
            replace(p, theirs=(re.sub("up_proj|gate_proj", lambda m: swaps[m[0]], p.theirs[0]),))
            for p in right.tensors(args)
        ]

    def unscaled(args: TransformerArgs) -> dict[str, Any]:
        return right.config(replace(args, rope_scaling=None))

    assert distance("llama31", tmp_path / "right", right) < TOLERANCE
    faults = [replace(right, tensors=swapped), replace(right, config=unscaled)]
    for number, wrong in enumerate(faults):
        assert distance("llama31", tmp_path / str(number), wrong) > 1e3 * TOLERANCE


def load_on(layout: Layout, folders: list[Path], fault: str) -> list[dict[str, str]]:
    """Digests of a model's weights after each folder. Asserts that a rank reads its parts only."""
    read_ours, n_read = Folder.read_ours, [0]

    def counted(self: Folder, pair: Any, offsets: Any, sizes: Any) -> torch.Tensor:
        n_read[0] += math.prod(sizes)
        if fault == "offsets":
            offsets = [0] * len(offsets)
        return read_ours(self, pair, offsets, sizes)

    found = []
    with patch.object(Folder, "read_ours", counted):
        for folder in folders:
            args = args_in(folder)
            name = "qwen3" if args.qk_norm else "llama3"
            model, _ = build_sharded(name, args, layout)
            materialize(model, CPU, seed=1)
            n_read[0] = 0
            state = ModelState(model)
            load_weights(folder, state, MODEL_SPECS[name].hugging_face, args)
            tensors = state.state_dict()
            parts = [t.to_local() if isinstance(t, DTensor) else t for t in tensors.values()]
            assert n_read[0] == sum(part.numel() for part in parts)
            found.append({fqn: digest(tensor) for fqn, tensor in tensors.items()})
    return found


def digests_in(folder: Path) -> dict[str, str]:
    """By our names, as float32."""
    args, tensors = args_in(folder), tensors_in(folder)
    pairs = form_of("qwen3" if args.qk_norm else "llama").tensors(args)
    places = {pair.ours: pair.theirs[0] for pair in pairs}
    names = {p.ours: places[p.shares or p.ours] for p in pairs}
    return {ours: digest(tensors[name].float()) for ours, name in names.items()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_mesh_loads_what_transformers_saved(
    ranks: RankPool, saved: dict[str, Path], layout: Layout
) -> None:
    folders = list(saved.values())
    answers = ranks.run(load_on, layout.world_size, layout, folders, "")
    for number, folder in enumerate(folders):
        # A stage has some of them.
        merged: dict[str, str] = {}
        for answer in answers:
            merged |= answer[number]
        assert merged == digests_in(folder)
        want = digests_in(folder)
        assert all(want[fqn] == text for a in answers for fqn, text in a[number].items())


def test_parts_read_from_a_wrong_place_are_seen(ranks: RankPool, saved: dict[str, Path]) -> None:
    answers = ranks.run(load_on, 2, TWO, [saved["llama"]], "offsets")
    assert answers[0][0] != digests_in(saved["llama"])


def fail_to_load(folder: Path, path: Path, changed: dict[str, Any]) -> tuple[str, bool]:
    """The message, and whether no weight changed."""
    args = replace(args_in(folder), **changed)
    model, _ = build_sharded("llama3", args, TWO)
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


@pytest.mark.parametrize(("changed", "told"), OTHER_MODELS)
def test_another_model_is_refused(
    saved: dict[str, Path], changed: dict[str, Any], told: str
) -> None:
    args = args_in(saved["llama"])
    assert open_as(saved["llama"], form_of("llama"), args, {}).config["model_type"] == "llama"
    # What is computed, not trained, may differ.
    open_as(saved["llama"], form_of("llama"), replace(args, max_seq_len=7), {})
    with pytest.raises(ValueError, match="another model") as raised:
        open_as(saved["llama"], form_of("llama"), replace(args, **changed), {})
    assert told in str(raised.value)


def test_a_folder_that_one_rank_cannot_read_is_a_mistake_on_all(
    ranks: RankPool, saved: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(saved["llama"], tmp_path / "torn")
    (file,) = (tmp_path / "torn").glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 1)
    for path, told in ((tmp_path / "torn", file.name), (tmp_path / "none", "config.json")):
        for error, is_untouched in ranks.run(fail_to_load, 2, saved["llama"], path, {}):
            assert error.startswith("checkpoint.initial_load_path: ")
            assert told in error
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
    """Of a folder that is in shards first."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / FILE)
        (folder / FILE).unlink()
        config = json.loads((folder / "config.json").read_text())
        scratch = folder / "shards"
        write_folder(scratch, config, iter(tensors.items()), files={}, shard_bytes=SHARD_BYTES)
        for file in scratch.iterdir():
            shutil.move(file, folder / file.name)
        path = folder / subject.INDEX_FILE
        index = json.loads(path.read_text())
        edit(index)
        path.write_text(json.dumps(index))

    return damage


def write_over(name: str, data: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(data) and None


def only_pickles(folder: Path) -> None:
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
    "header too long": (write_over(FILE, b"\xff" * 64), FILE),
    "a pipe": (replace_by_pipe, "not a plain file"),
    "only pickles": (only_pickles, "pytorch_model.bin is a pickle"),
    "no weights": (lambda folder: (folder / FILE).unlink(), f"no {FILE}"),
    "both": (write_over(subject.INDEX_FILE, b"{}"), "both"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "config is no JSON": (write_over("config.json", b"{"), "config.json"),
    "config is a list": (write_over("config.json", b"[]"), "not a table"),
    "config is deep": (write_over("config.json", b"[" * 100_000), "config.json"),
    "config is no text": (write_over("config.json", b"\xff"), "config.json"),
    "rope": (edit_config(rope_parameters={"rope_type": "yarn"}), "rope_type: 'yarn'"),
    "bias": (edit_config(attention_bias=True), "attention_bias: True"),
    "sizes": (edit_config(hidden_size=2**39), ""),
    "layers": (edit_config(num_hidden_layers=2**39), ""),
    "index without names": (edit_index(dict.clear), "no weight_map"),
    "index of numbers": (edit_index(lambda i: i["weight_map"].update({NORM: 1})), "1 is not the"),
    "index leads away": (
        edit_index(lambda i: i["weight_map"].update({NORM: "../model.safetensors"})),
        "'../model.safetensors' is not the name of a file",
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
    """As ``load_weights`` does on one rank."""
    form = form_of("llama")
    model = build_on_meta(MODEL_SPECS["llama3"], args, torch.float32)
    return open_as(folder, form, args, {k: t.shape for k, t in model.state_dict().items()})


@pytest.mark.parametrize("damage", DAMAGES)
def test_broken_folder_is_refused_by_name(
    saved: dict[str, Path], tmp_path: Path, damage: str
) -> None:
    source, args = saved["llama"], args_in(saved["llama"])
    folder = Path(shutil.copytree(source, tmp_path / "folder"))
    assert len(open_folder(folder, args).names) == 30
    act, told = DAMAGES[damage]
    act(folder)
    with pytest.raises(ValueError, match=r".") as raised:
        open_folder(folder, args)
    assert str(folder) in str(raised.value)
    assert told in str(raised.value)
    assert not (folder / "executed").exists()


def test_an_index_that_is_right_is_taken(saved: dict[str, Path], tmp_path: Path) -> None:
    """The damages to an index are not refused for what is made of the folder before."""
    folder = Path(shutil.copytree(saved["llama"], tmp_path / "folder"))
    edit_index(lambda index: None)(folder)
    assert len(open_folder(folder, args_in(folder)).names) == 30


def test_links_of_a_cache_are_followed(saved: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for file in saved["llama"].iterdir():
        (folder / file.name).symlink_to(file)
    assert len(open_folder(folder, args_in(folder)).names) == 30


def test_a_tied_head_may_be_there_if_it_is_equal(saved: dict[str, Path], tmp_path: Path) -> None:
    folder, embedding, edit = tmp_path / "folder", "model.embed_tokens.weight", edit_tensors
    folder.mkdir()
    shutil.copy(saved["llama_tied"] / "config.json", folder)
    save_file(tensors_in(saved["llama_tied"]), folder / FILE)
    edit(lambda t: t.update({HEAD: t[embedding].clone()}))(folder)
    assert HEAD in open_folder(folder, args_in(folder)).names
    edit(lambda t: t[HEAD].view(torch.int32)[60, 31].bitwise_xor_(1))(folder)
    with pytest.raises(ValueError, match=f"{HEAD} and {embedding} are tied, but not equal"):
        open_folder(folder, args_in(folder))
    edit(lambda t: t.update({HEAD: t[embedding].clone()}) or t.pop(embedding))(folder)
    with pytest.raises(ValueError, match=f"{embedding} is missing"):
        open_folder(folder, args_in(folder))


STACKED = tuple(f"experts.{i}.weight" for i in range(5))


def interleave(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)


def undo_interleave(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)


PAIRS = {
    "one": TensorPair("x", ("y",)),
    "stacked": TensorPair("x", STACKED, is_stacked=True),
    "converted": TensorPair("x", ("y",), to_theirs=interleave, to_ours=undo_interleave),
    "both": TensorPair(
        "x", STACKED, is_stacked=True, to_theirs=torch.t, to_ours=torch.t
    ),
    "zero": TensorPair("x", ()),
}  # fmt: skip


@pytest.mark.parametrize("kind", PAIRS)
def test_any_box_of_any_pair_comes_back(kind: str, tmp_path: Path) -> None:
    pair = PAIRS[kind]
    tensor = torch.randn(5, 6, 4) if pair.is_stacked else torch.randn(10, 4)
    tensor = torch.zeros(3) if kind == "zero" else tensor
    rest = [("other", torch.ones(1))]
    written = [*split(pair, tensor), *rest]
    assert {name for name, _ in written} == {*pair.theirs, "other"}
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
        assert torch.equal(folder.read_ours(pair, offsets, sizes), want)
    if kind != "zero":
        transposed = tensor.shape[:-2] + tensor.shape[-2:][::-1]
        with pytest.raises(ValueError, match="not \\["):
            folder.check(family, None, {"x": transposed})


def test_what_has_no_place_there_must_be_zero() -> None:
    with pytest.raises(ValueError, match="x is not zero"):
        list(split(PAIRS["zero"], torch.tensor([0.0, 1.0])))


def test_a_folder_is_whole_or_not_there(tmp_path: Path) -> None:
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
    assert names == {"a", "config.json", subject.INDEX_FILE, *shards}
    for shard in shards:
        with safe_open(tmp_path / "folder" / shard, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
    index = json.loads((tmp_path / "folder" / subject.INDEX_FILE).read_text())
    assert index["metadata"] == {"total_size": 80}
    with pytest.raises(ValueError, match="nothing is overwritten"):
        write_folder(tmp_path / "folder", {}, iter(()), files={})


def test_a_tensor_larger_than_a_file_may_be_has_one_of_its_own(tmp_path: Path) -> None:
    tensors = {"first": torch.ones(10), "second": torch.zeros(10)}
    write_folder(tmp_path / "folder", {}, iter(tensors.items()), files={}, shard_bytes=39)
    assert len(list((tmp_path / "folder").glob("*.safetensors"))) == 2


def test_a_link_to_nowhere_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "folder").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="there already"):
        write_folder(tmp_path / "folder", {}, iter([]), files={})
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


def test_a_stack_of_several_dtypes_has_one_that_holds_all(tmp_path: Path) -> None:
    dtypes = [torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16]
    tensors = {name: torch.ones(1, dtype=d) for name, d in zip(STACKED, dtypes, strict=True)}
    write_folder(tmp_path / "folder", {}, iter(tensors.items()), files={})
    folder = Folder(tmp_path / "folder")
    assert folder.dtype(PAIRS["stacked"]) == torch.float32
    assert folder.dtype(PAIRS["zero"]) == torch.float32


def test_a_checkpoint_with_a_config_of_theirs_is_ours(tmp_path: Path) -> None:
    (tmp_path / subject.CONFIG_FILE).write_text("{}")
    assert is_hugging_face(tmp_path)
    (tmp_path / subject.NAME).write_text("{}")
    assert not is_hugging_face(tmp_path)


def test_a_model_without_a_form_there_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no Hugging Face form of this model\.name"):
        load_weights(tmp_path, ModelState(torch.nn.Linear(1, 1)), None, None)
