"""``[model.args]``: sizes from a config, and the sizes that come with the families."""

import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from checkpoint.manifest import read_manifest
from config import load_config
from config.resume_compat import changed_arguments
from models import MODEL_SPECS, ModelSpec, TransformerArgs, find_model, find_spec
from models.arguments import find_problem
from models.meta import build_on_meta
from run_spec import resolve
from saved_model import saved_model
from tests.lib.layouts import small_args
from tests.lib.saved import write_checkpoint

BASE = find_model("llama3", "debugmodel")[1]


def resolved(folder: Path, toml: str, *overrides: str) -> TransformerArgs:
    path = folder / "run.toml"
    path.write_text(toml)
    return resolve(load_config(path, list(overrides)), world_size=1).model_args


def test_arguments_of_file_and_command_line_replace_the_flavors(tmp_path: Path) -> None:
    toml = "[model.args]\nn_layers = 6\nrope_theta = 10000\n"
    args = resolved(
        tmp_path, toml, "--model.args.n_layers", "3", "--model.args.tie_embeddings=true"
    )
    want = replace(BASE, n_layers=3, rope_theta=1e4, tie_embeddings=True)
    assert args == replace(want, max_seq_len=args.max_seq_len)
    assert isinstance(args.rope_theta, float)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"n_layer": 3}, r"model\.args\.n_layer: unknown argument; did you mean n_layers\?"),
        ({"vocab_size": 3}, r"model\.args\.vocab_size: set model\.vocab_size instead"),
        ({"max_seq_len": 3}, r"model\.args\.max_seq_len: set training\.seq_len instead"),
        ({"n_layers": "3"}, r"model\.args\.n_layers: must be an integer, got '3'"),
        ({"n_layers": True}, r"model\.args\.n_layers: must be an integer, got True"),
        ({"n_layers": 3.0}, r"model\.args\.n_layers: must be an integer, got 3\.0"),
        ({"n_layers": 0}, r"model\.args: n_layers = 0 must be positive"),
        ({"norm_eps": -1.0}, r"model\.args: norm_eps = -1\.0 must be positive"),
        ({"tie_embeddings": 1}, r"model\.args\.tie_embeddings: must be true or false, got 1"),
        ({"n_heads": 5}, r"n_heads = 5 must be a multiple of n_kv_heads = 2"),
        ({"head_dim": 33}, r"head_dim = 33 must be even"),
        ({"rope_scaling": 8}, r"rope_scaling: must be a table, got 8"),
        ({"rope_scaling": {"low_freq_factor": 2}}, r"rope_scaling\.factor: must be set"),
        (
            {"rope_scaling": {"factors": 2}},
            r"rope_scaling\.factors: unknown argument; known:",
        ),
        (
            {"rope_scaling": {"factor": 2.0, "low_freq_factor": 5.0}},
            r"rope_scaling.*low_freq_factor must not exceed high_freq_factor",
        ),
        ({"rope_scaling": {"factor": 0}}, r"rope_scaling\.factor: must be positive"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        find_model("llama3", "debugmodel", changes)


def test_argument_that_a_family_does_not_read_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"model\.args\.qk_norm: has no effect: attention always"):
        find_model("qwen3_next", "debugmodel", {"qk_norm": True})


@dataclass(frozen=True, kw_only=True)
class OwnArgs(TransformerArgs):
    windows: tuple[int, ...] = (8, 16)
    spans: tuple[tuple[int, float], ...] | None = None
    n_prefix: int = 0
    shift: float = -1.0
    dtype: Any = "float32"
    window: int | None = None
    scale: float | None = None
    kind: Literal["a", "b"] | None = None
    rule: int | str | None = None


def own_spec(**changes: Any) -> ModelSpec:
    return replace(find_spec("llama3"), flavors={"debugmodel": OwnArgs(**vars(BASE), **changes)})


OWN, SPANS = own_spec(), own_spec(spans=((1, 0.5),), windows=(4,), n_prefix=-1)
IN_TORCH = own_spec(dtype=torch.float32)


@pytest.mark.parametrize("name", ["OWN", "SPANS"])
def test_own_arguments_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    name = f"{__name__}:{name}"
    _, found = find_model(name, "debugmodel", {"windows": [4, 4]})
    assert vars(found)["windows"] == (4, 4)
    args = replace(small_args("llama3", "debugmodel"), vocab_size=264)
    args = replace(found, **vars(args))
    config = {"model": {"name": name}}
    folder = write_checkpoint(tmp_path / "saved", config=config, model_args=asdict(args))
    manifest = read_manifest(folder)
    assert changed_arguments(manifest["model_args"], args) == []
    assert len(changed_arguments(manifest["model_args"], replace(args, **{"windows": (4, 5)}))) == 1
    assert saved_model(folder, manifest, name).args == args


def test_own_arguments_without_a_default_have_the_kind_of_their_annotation() -> None:
    changes = {"window": 256, "scale": 2, "kind": "a", "rule": "x", "spans": [[1, 0.5], [2, 0.25]]}
    _, found = find_model(f"{__name__}:OWN", "debugmodel", changes)
    assert vars(found).items() >= (changes | {"spans": ((1, 0.5), (2, 0.25))}).items()
    assert isinstance(vars(found)["scale"], float)
    with pytest.raises(ValueError, match=r"model\.args\.window: must be an integer, got 'a'"):
        find_model(f"{__name__}:OWN", "debugmodel", {"window": "a"})
    with pytest.raises(ValueError, match=r"model\.args\.spans: must be an array, got 4"):
        find_model(f"{__name__}:OWN", "debugmodel", {"spans": 4})


def test_wrong_own_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"model\.args\.windows: must be an integer, got 'a'"):
        find_model(f"{__name__}:OWN", "debugmodel", {"windows": [4, "a"]})
    with pytest.raises(ValueError, match=r"model\.args\.windows: must be an array, got 4"):
        find_model(f"{__name__}:OWN", "debugmodel", {"windows": 4})
    message = r"model\.args: dtype = torch\.float32 is of a type that checkpoints"
    with pytest.raises(ValueError, match=message):
        find_model(f"{__name__}:IN_TORCH", "debugmodel")


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next"])
def test_arguments_of_other_families(name: str) -> None:
    _, args = find_model(name, "debugmodel", {"n_experts": 6, "top_k": 6})
    assert vars(args)["n_experts"] == 6
    with pytest.raises(ValueError, match=r"top_k = 7 must not exceed n_experts = 6"):
        find_model(name, "debugmodel", {"n_experts": 6, "top_k": 7})
    with pytest.raises(ValueError, match=r"balance_weight: set experts\.balance_loss instead"):
        find_model(name, "debugmodel", {"balance_weight": 1.0})


def test_rope_scaling_is_replaced_by_entry_or_turned_off() -> None:
    scaling = find_model("llama3", "8B")[1].rope_scaling
    assert scaling is not None
    _, args = find_model("llama3", "8B", {"rope_scaling": {"factor": 4}})
    assert args.rope_scaling == replace(scaling, factor=4)
    assert find_model("llama3", "8B", {"rope_scaling": {}})[1].rope_scaling is None


@pytest.mark.parametrize("name", MODEL_SPECS)
def test_flavors_have_possible_arguments_and_their_size(name: str) -> None:
    for flavor, args in MODEL_SPECS[name].flavors.items():
        assert find_problem(args) == ""
        if name in ("llama3", "qwen3") and (millions := re.fullmatch(r"(\d+)M", flavor)):
            model = build_on_meta(MODEL_SPECS[name], args, torch.float32)
            count = sum(parameter.numel() for parameter in model.parameters())
            assert count == pytest.approx(1e6 * int(millions[1]), rel=0.01), flavor


@pytest.mark.parametrize("name", MODEL_SPECS)
def test_flavor_may_be_a_config_of_hugging_face(tmp_path: Path, name: str) -> None:
    spec = MODEL_SPECS[name]
    assert spec.hugging_face is not None
    want = replace(spec.flavors["debugmodel"], n_layers=2, dim=192)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(spec.hugging_face.config(want)))
    for flavor in (path, tmp_path):
        assert find_model(name, str(flavor))[1] == want
    assert find_model(name, str(path), {"n_layers": 3})[1] == replace(want, n_layers=3)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, r"model\.flavor: .*config\.json: No such file"),
        ("[]", r"config\.json: not a JSON object"),
        ('{"model_type": "gemma"}', r"config\.json: model_type: 'gemma' \(supported: llama\)"),
        ("{", r"config\.json: Expecting property name"),
        ("[" * 100_000, r"config\.json: maximum recursion depth"),
        (" " * (1 << 20) + "{}", r"config\.json: larger than 1,048,576 bytes"),
    ],
)
def test_wrong_config_of_hugging_face_is_named(
    tmp_path: Path, content: str | None, error: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=error):
        find_model("llama3", str(tmp_path))
