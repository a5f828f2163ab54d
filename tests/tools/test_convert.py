"""Export to transformers, import, and initial load are bit for bit.

Uses real runs of ``train.py`` on two ranks.
"""

import base64
import json
import os
import re
import shutil
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from tokenizers import decoders, models, pre_tokenizers, trainers

import resume
from checkpoint.checkpoint_dir import verify_checkpoint
from checkpoint.manifest import read_manifest, write_manifest
from config import ConfigError
from data.tokenizer import load_tokenizer
from models import MODEL_SPECS
from models.hugging_face import (
    ATTENTION,
    FEED_FORWARD,
    NORMS,
    QK_NORM,
    Table,
    build_hugging_face,
)
from models.transformer import TransformerArgs
from runtime import exit_codes
from saved_model import saved_model
from tests.lib.forked import checkpoints, codes, log, run, started, tensors
from tests.lib.hugging_face import TOLERANCE, float64_for_float32, form_of
from tests.lib.launch import curve
from tests.lib.layouts import CP, EP, TP
from tests.lib.marks import slow
from tools import convert

transformers = pytest.importorskip("transformers")

TEXT = "the other words' 12345\n  of the w\u00f6rld"
STEPS = {"training.steps": "2", "lr_scheduler.total_steps": "2", "training.dtype": "float32"}
TENSOR_PARALLEL, CONTEXT_PARALLEL, EXPERT_PARALLEL = (
    {f"parallelism.{degree}": "2"} for degree in (TP, CP, EP)
)
QWEN3 = NORMS | ATTENTION | QK_NORM | FEED_FORWARD
# Saved by one mesh, loaded by another.
RUNS = {
    "llama3": ({"model.name": "llama3", **TENSOR_PARALLEL}, {}),
    "qwen3": ({"model.name": "qwen3"}, TENSOR_PARALLEL),
    "qwen3_moe": ({"model.name": "qwen3_moe", **EXPERT_PARALLEL}, TENSOR_PARALLEL),
    "qwen3_next": ({"model.name": "qwen3_next", **CONTEXT_PARALLEL}, TENSOR_PARALLEL),
}


def of_families(*names: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", names, indirect=True, scope="module")


def write_tokenizer(path: Path) -> str:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the other words of the world"] * 10, trainer)
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture(scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    tokenizer = write_tokenizer(folder / "words.json")
    run(folder, 2, **STEPS, **RUNS[name][0], **{"data.tokenizer": tokenizer})
    return checkpoints(folder)[0]


@pytest.fixture(scope="module")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "folder"
    assert convert.main(["export", str(checkpoint), str(folder)]) == exit_codes.DONE
    return folder


@pytest.fixture(scope="module")
def imported(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imported") / "checkpoint"
    assert convert.main(["import", str(exported), str(folder)]) == exit_codes.DONE
    return folder


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    found = tensors(checkpoint).items()
    return {k.removeprefix("model."): t for k, t in found if k.startswith("model.")}


def bits(found: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {k: (t.dtype, t.shape, t.contiguous().numpy().tobytes()) for k, t in found.items()}


@of_families(slow("llama3"), "qwen3")
def test_exported_model_and_tokenizer_match_the_run(
    name: str, checkpoint: Path, exported: Path
) -> None:
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        exported, output_loading_info=True
    )
    assert not any(report.values()), report
    assert loaded.dtype == torch.float32
    with float64_for_float32():
        hf_model = transformers.AutoModelForCausalLM.from_config(
            loaded.config, dtype=torch.float64, attn_implementation="eager"
        )
        hf_model.load_state_dict(loaded.state_dict())
        tokens = torch.randint(hf_model.config.vocab_size, (2, 32))
        want = hf_model(tokens).logits.detach()
    config = json.loads((exported / "config.json").read_text())
    args = form_of(config["model_type"]).args(config)
    model = MODEL_SPECS[name].model_cls(args).double()
    cast(Any, model).init_weights()
    model.load_state_dict(weights_of(checkpoint))
    assert (model(tokens) - want).abs().max() < TOLERANCE

    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    tokenizer = load_tokenizer(str(exported / "tokenizer.json"))
    ids = hf_tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert ids == tokenizer.encode(TEXT).tolist()
    assert hf_tokenizer.decode(ids) == TEXT
    for found in (hf_tokenizer, hf_model.config):
        assert (
            (found.bos_token_id, found.eos_token_id)
            == (tokenizer.bos_id, tokenizer.eos_id)
            == (0, 1)
        )
    assert hf_tokenizer(TEXT)["input_ids"] == [0, *ids]
    assert hf_model.config.max_position_embeddings == 32, "training.seq_len"
    assert stat.S_IMODE(exported.stat().st_mode) == 0o700


@of_families("qwen3")
def test_argument_that_config_json_lacks_is_not_exported(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Windowed(TransformerArgs):
        window: int = 2

    model = saved_model(checkpoint, read_manifest(checkpoint), None)
    own = replace(model, args=Windowed(**vars(model.args)), name="own:SPEC")
    monkeypatch.setattr(convert, "saved_model", lambda *_: own)
    arguments = ["export", str(checkpoint), str(tmp_path / "folder")]
    assert convert.main(arguments) == exit_codes.BAD_CONFIG
    assert "own:SPEC: window: no key of Qwen3ForCausalLM" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
    # A class of the table's own has the argument, but no key has the value.
    table = Table(
        "own",
        "OwnForCausalLM",
        NORMS | ATTENTION | QK_NORM | FEED_FORWARD,
        args_cls=Windowed,
        family_args={"qk_norm": True},
    )
    spec = replace(model.spec, hugging_face=build_hugging_face(table))
    args = Windowed(**vars(model.args), window=3)
    changed = replace(own, spec=spec, args=args)
    monkeypatch.setattr(convert, "saved_model", lambda *_: changed)
    assert convert.main(arguments) == exit_codes.BAD_CONFIG
    assert "own:SPEC: window: no key of OwnForCausalLM" in capsys.readouterr().err
    monkeypatch.setattr(convert, "saved_model", lambda *_: replace(model, name="own:SPEC"))
    assert convert.main(arguments) == exit_codes.DONE
    assert "own:SPEC: readers run the code of Qwen3ForCausalLM" in capsys.readouterr().out


@of_families("qwen3")
@pytest.mark.parametrize(
    ("modules", "text"),
    [
        (
            NORMS | ATTENTION | FEED_FORWARD,
            r"lacks layers\.0\.attention\.[qk]_norm\.weight \(\d+ in",
        ),
        (
            QWEN3 | {"post_norm": "post_norm"},
            r"lists layers\.0\.post_norm\.weight, which the model",
        ),
        (QWEN3 | {"ffn_norm": "input_layernorm"}, r"two tensors the name model\.layers\.0\.input_"),
    ],
)
def test_table_of_another_model_is_named(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    modules: dict[str, str],
    text: str,
) -> None:
    """Its export would lack weights, silently."""
    model = saved_model(checkpoint, read_manifest(checkpoint), None)
    table = Table("qwen3", "Qwen3ForCausalLM", modules, family_args={"qk_norm": True})
    own = replace(model, spec=replace(model.spec, hugging_face=build_hugging_face(table)))
    monkeypatch.setattr(convert, "saved_model", lambda *_: own)
    arguments = ["export", str(checkpoint), str(tmp_path / "folder")]
    assert convert.main(arguments) == exit_codes.BAD_CONFIG
    assert re.search(f"the model's Hugging Face table .*{text}", capsys.readouterr().err)
    assert not any(tmp_path.iterdir())
    run: Any = SimpleNamespace(model_spec=own.spec, model_args=model.args)
    with pytest.raises(ConfigError, match=text):
        resume._check_table(run)


@of_families(slow("llama3"), "qwen3", slow("qwen3_moe"), "qwen3_next")
def test_export_and_import_round_trip_bit_for_bit(
    checkpoint: Path, exported: Path, imported: Path, tmp_path: Path
) -> None:
    assert bits(weights_of(imported)) == bits(weights_of(checkpoint))
    assert not verify_checkpoint(imported)
    convert.export_checkpoint(imported, tmp_path / "again", shard_bytes=200_000)
    parts = [load_file(file) for file in (tmp_path / "again").glob("model-*.safetensors")]
    assert len(parts) > 3
    again = {name: tensor for part in parts for name, tensor in part.items()}
    assert bits(again) == bits(load_file(exported / "model.safetensors"))
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (exported / file).read_bytes()
    # In several files; the import keeps bfloat16.
    narrow = {name: tensor.bfloat16() for name, tensor in again.items()}
    source = Path(shutil.copytree(exported, tmp_path / "narrow"))
    convert.write_folder(tmp_path / "w", {}, iter(narrow.items()), files={})
    shutil.move(tmp_path / "w" / "model.safetensors", source / "model.safetensors")
    convert.import_folder(source, tmp_path / "checkpoint", file_bytes=200_000)
    assert len(list((tmp_path / "checkpoint").glob("part-*.bin"))) > 3
    assert not verify_checkpoint(tmp_path / "checkpoint")
    found = weights_of(tmp_path / "checkpoint")
    want = {fqn: t.bfloat16() for fqn, t in weights_of(checkpoint).items()}
    assert found.keys() == want.keys()
    # Biases that Hugging Face does not have are zero, in float32.
    found = {fqn: t for fqn, t in found.items() if not fqn.endswith("feed_forward.bias")}
    assert all(t.dtype == torch.bfloat16 and t.equal(want[fqn]) for fqn, t in found.items())


def first_step(folder: Path, name: str, initial: Path) -> Any:
    """Loss and gradient norm of a new run on another mesh, from the weights of ``initial``."""
    folder.mkdir()
    tokenizer = write_tokenizer(folder / "words.json")
    keys = STEPS | {"training.steps": "1"} | RUNS[name][1]
    keys |= {"model.name": name, "data.tokenizer": tokenizer}
    run(folder, 2, **keys, **{"checkpoint.initial_load_path": str(initial)})
    assert f"weights from {initial}" in log(folder)
    assert "is not the tokenizer of" not in log(folder)
    return curve(folder)


@of_families(slow("llama3"), "qwen3", slow("qwen3_moe"), "qwen3_next")
def test_run_starts_from_checkpoint_export_or_import(
    name: str, checkpoint: Path, exported: Path, imported: Path, tmp_path: Path
) -> None:
    sources = {"checkpoint": checkpoint, "exported": exported}
    # Its weights are those of the checkpoint, bit for bit: one family less has to start from it.
    sources |= {} if name == "qwen3_next" else {"imported": imported}
    curves = [first_step(tmp_path / kind, name, path) for kind, path in sources.items()]
    assert all(found == curves[0] for found in curves)
    before = curve(checkpoint.parents[2])
    assert curves[0][1] != before[1], "the initial weights were not loaded"


@of_families(slow("llama3"), "qwen3")
def test_run_of_another_model_rejects_the_folder(exported: Path, name: str, tmp_path: Path) -> None:
    other = {"llama3": "qwen3", "qwen3": "llama3"}[name]
    keys = {"model.name": other, "checkpoint.initial_load_path": str(exported)}
    with started(tmp_path, 2, **STEPS, **keys) as processes:
        assert codes(processes) == {exit_codes.BAD_CONFIG}
    assert "checkpoint.initial_load_path: " in log(tmp_path)
    assert "model_type" in log(tmp_path)
    assert "Traceback" not in log(tmp_path)
    assert not (tmp_path / "debug_model" / "config.toml").exists()


def forge_manifest(checkpoint: Path, **changed: Any) -> None:
    """Change the manifest's metadata, with a valid checksum; None deletes a key."""
    manifest = read_manifest(checkpoint) | changed
    files = manifest.pop("files")
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint, files, {k: v for k, v in manifest.items() if v is not None})


def error_of(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """Run the tool, which must fail; return its error."""
    assert convert.main([str(argument) for argument in arguments]) == exit_codes.BAD_CONFIG
    output = capsys.readouterr()
    assert output.out == ""
    assert "Traceback" not in output.err
    return output.err


@of_families(slow("llama3"), "qwen3")
def test_export_errors(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, copy = tmp_path / "target", tmp_path / "copy"
    manifest = read_manifest(checkpoint)
    cases = {
        "has no valid model.name and model_args": {"model_args": None},
        "'other' is not one of": {"config": {"model": {"name": "other"}}},
        "has changed since it was saved": {"model_args": manifest["model_args"] | {"n_experts": 8}},
        "not [64, 128]": {"model_args": manifest["model_args"] | {"vocab_size": 64}},
        "not absent": {"model_args": manifest["model_args"] | {"n_layers": 1}},
        "is absent": {"model_args": manifest["model_args"] | {"n_layers": 5}},
        "is not the tokenizer that": {"fingerprints": {"tokenizer": "0"}},
    }
    for text, changed in cases.items():
        shutil.copytree(checkpoint, copy)
        forge_manifest(copy, **changed)
        assert text in error_of(capsys, "export", copy, target)
        shutil.rmtree(copy)
    shutil.copytree(checkpoint, copy)
    (data,) = sorted(copy.glob("rank-00001.bin"))
    os.truncate(data, data.stat().st_size - 1)
    assert "rank-00001.bin" in error_of(capsys, "export", copy, target)
    assert "no such folder" in error_of(capsys, "export", tmp_path / "none", target)
    gone = error_of(capsys, "export", checkpoint, target, "--tokenizer", tmp_path / "gone.json")
    assert gone.startswith(f"argument --tokenizer: {tmp_path / 'gone.json'}")
    assert "is not the tokenizer that" in error_of(
        capsys, "export", checkpoint, target, "--tokenizer", "bytes"
    )
    assert not target.exists()
    (tmp_path / "target").mkdir()
    assert "nothing is overwritten" in error_of(capsys, "export", checkpoint, target)
    assert {path.name for path in tmp_path.iterdir()} == {"copy", "target"}


@of_families(slow("llama3"), "qwen3")
def test_import_errors(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, copy = tmp_path / "target", tmp_path / "copy"
    config = json.loads((exported / "config.json").read_text())
    cases = {
        "model_type: 'mamba' is not one of llama, qwen3": {"model_type": "mamba"},
        "model_type: ['llama']": {"model_type": ["llama"]},
        "attention_bias: True": {"attention_bias": True},
        "model.embed_tokens.weight is [320, 128], not [384, 128]": {"vocab_size": 384},
        "is missing": {"num_hidden_layers": 5},
        "is unknown": {"num_hidden_layers": 1},
        "tensors for": {"num_hidden_layers": 10**9},
        "calculation overflowed": {"hidden_size": 1 << 36, "vocab_size": 1 << 36},
    }
    for text, changed in cases.items():
        shutil.copytree(exported, copy)
        (copy / "config.json").write_text(json.dumps(config | changed))
        assert text in error_of(capsys, "import", copy, target)
        shutil.rmtree(copy)
    assert "config.json" in error_of(capsys, "import", tmp_path / "none", target)
    target.mkdir()
    assert "nothing is overwritten" in error_of(capsys, "import", exported, target)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def with_tokenizer(checkpoint: Path, copy: Path, name: str, **keys: str) -> Path:
    """Copy of ``checkpoint`` that says it was trained with another tokenizer."""
    shutil.copytree(checkpoint, copy)
    tokenizer = load_tokenizer(name, **keys)
    config = read_manifest(copy)["config"] | {"data": {"tokenizer": name, **keys}}
    forge_manifest(copy, config=config, fingerprints={"tokenizer": tokenizer.fingerprint})
    return copy


@of_families(slow("llama3"), "qwen3")
def test_export_writes_bytes_for_transformers(checkpoint: Path, tmp_path: Path) -> None:
    copy = with_tokenizer(checkpoint, tmp_path / "copy", "bytes")
    folder = tmp_path / "bytes"
    assert convert.main(["export", str(copy), str(folder)]) == exit_codes.DONE
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer(TEXT)["input_ids"] == [256, *TEXT.encode()]
    for config in (tokenizer, *configs_of(folder)):
        assert (config.bos_token_id, config.eos_token_id) == (256, 257)


def configs_of(folder: Path) -> tuple[Any, Any]:
    """config.json, and the settings with which the model generates."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return model.config, model.generation_config


@of_families("qwen3")
def test_export_of_ranks_also_has_the_files_of_the_run(checkpoint: Path, tmp_path: Path) -> None:
    merged = {"ab": 256, "th": 257}
    ids = {bytes([value]): value for value in range(256)} | {
        token.encode(): rank for token, rank in merged.items()
    }
    lines = [b"%b %d" % (base64.b64encode(token), rank) for token, rank in ids.items()]
    ranks = tmp_path / "own.tiktoken"
    ranks.write_bytes(b"\n".join(lines))
    special = {"<|begin_of_text|>": 258, "<|end_of_text|>": 259}
    for pattern, code, n_files in (
        (r"\S+|\s+", "[258, 257, 32", 7),
        (r"(?:[a-z]){1,2}+|[^a-z]", "", 4),
    ):
        (tmp_path / "own.tiktoken.json").write_text(
            json.dumps({"pattern": pattern, "special_tokens": special})
        )
        copy = with_tokenizer(checkpoint, tmp_path / f"copy{n_files}", str(ranks))
        to = tmp_path / f"to{n_files}"
        assert convert.main(["export", str(copy), str(to)]) == exit_codes.DONE
        exported = load_tokenizer(str(to / "own.tiktoken"))
        assert exported.fingerprint == load_tokenizer(str(ranks)).fingerprint
        assert len(list(to.iterdir())) == n_files
        if code:
            assert (
                str(transformers.AutoTokenizer.from_pretrained(to)("th a").input_ids)[:13] == code
            )


@of_families("qwen3")
def test_files_of_an_imported_folder_survive(
    checkpoint: Path, exported: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(exported, tmp_path / "source"))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "special_tokens_map.json").write_text('{"eos_token": "<|end_of_text|>"}')
    generation = {"eos_token_id": [1, 5], "temperature": 0.7, "top_k": 20}
    (source / "generation_config.json").write_text(json.dumps(generation))
    config = json.loads((source / "config.json").read_text())
    ids = {"bos_token_id": 0, "eos_token_id": [1, 5], "pad_token_id": 7}
    (source / "config.json").write_text(json.dumps(config | ids))
    assert convert.main(["import", str(source), str(tmp_path / "imported")]) == exit_codes.DONE
    # A run that began with these weights.
    with_tokenizer(checkpoint, tmp_path / "trained", str(source))
    for name in ("imported", "trained"):
        folder = tmp_path / f"{name}-again"
        arguments = ["export", str(tmp_path / name), str(folder)]
        assert convert.main(arguments) == exit_codes.DONE
        files = {path.name for path in source.iterdir()}
        assert {path.name for path in folder.iterdir()} == files
        for file in files - {"config.json", "model.safetensors"}:
            assert (folder / file).read_bytes() == (source / file).read_bytes()
        found = json.loads((folder / "config.json").read_text())
        assert {key: found[key] for key in ids} == ids
    # Other markers of the run replace those of the folder.
    other = with_tokenizer(
        checkpoint, tmp_path / "other", str(source), bos="", eos="<|begin_of_text|>"
    )
    assert convert.main(["export", str(other), str(tmp_path / "end")]) == exit_codes.DONE
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "end")
    assert tokenizer.eos_token_id == 0
    assert 0 not in tokenizer(TEXT)["input_ids"]
    for config in configs_of(tmp_path / "end"):
        assert (config.bos_token_id, config.eos_token_id) == (None, 0)


@of_families("qwen3")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_export_in_another_dtype(checkpoint: Path, tmp_path: Path, dtype: str) -> None:
    folder = tmp_path / "narrow"
    assert convert.main(["export", str(checkpoint), str(folder), "--dtype", dtype]) == 0
    convert.export_checkpoint(checkpoint, tmp_path / "saved")
    saved, narrow = (load_file(p / "model.safetensors") for p in (tmp_path / "saved", folder))
    assert narrow.keys() == saved.keys()
    for key, tensor in narrow.items():
        assert tensor.dtype == getattr(torch, dtype)
        assert tensor.equal(saved[key].to(tensor.dtype))
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == dtype
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == getattr(torch, dtype)


def test_weights_beyond_the_range_of_a_dtype_are_an_error() -> None:
    large = torch.tensor([70_000.0, torch.inf])
    assert convert._cast("w", large, torch.bfloat16).isfinite().tolist() == [True, False]
    with pytest.raises(
        ValueError, match=r"--dtype: w has values beyond the range of torch\.float16"
    ):
        convert._cast("w", large, torch.float16)


@pytest.mark.parametrize("arguments", [[], ["export"], ["import", "a"], ["other", "a", "b"]])
def test_wrong_arguments_are_rejected(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert error_of(capsys, *arguments)
