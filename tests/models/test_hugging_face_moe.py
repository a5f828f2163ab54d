"""Qwen3 MoE and Qwen3-Next match Hugging Face's logits, and convert both ways."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.hugging_face import Folder, split, write_folder
from models import qwen3_moe, qwen3_next_hugging_face
from models.qwen3_moe import Qwen3Moe
from models.qwen3_next import Qwen3Next
from tests.lib.hugging_face import float64_for_float32

transformers = pytest.importorskip("transformers")

VOCAB_SIZE, SEQ_LEN = 61, 150


SHARED = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "moe_intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": SEQ_LEN,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
FAMILIES = {
    "Qwen3Moe": (qwen3_moe.HUGGING_FACE, Qwen3Moe, {"num_hidden_layers": 2}),
    "Qwen3Next": (
        qwen3_next_hugging_face.HUGGING_FACE,
        Qwen3Next,
        {
            "num_hidden_layers": 5,
            "shared_expert_intermediate_size": 40,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
        },
    ),
}


def build_hf(family: str, **changed: Any) -> Any:
    """Build a small float64 model; every parameter is far from its initial value."""
    torch.manual_seed(0)
    with float64_for_float32():
        options = SHARED | FAMILIES[family][2] | changed
        config = getattr(transformers, f"{family}Config")(**options)
        model = getattr(transformers, f"{family}ForCausalLM")(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("A_log"):
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def read_folder(family: str, path: Path) -> Any:
    form, model_cls, _ = FAMILIES[family]
    folder = Folder(path)
    args: Any = form.args(folder.config)
    model = cast(Any, model_cls(args)).double()
    model.init_weights()
    state = model.state_dict()
    pairs = form.tensors(args)
    folder.check(form, args, {fqn: tensor.shape for fqn, tensor in state.items()})
    found = {
        pair.fqn: folder.read_box(pair, [0] * state[pair.fqn].ndim, state[pair.fqn].shape)
        for pair in pairs
        if pair.tied_to is None
    }
    found |= {pair.fqn: found[pair.tied_to] for pair in pairs if pair.tied_to is not None}
    model.load_state_dict(found)
    return model


CASES = [
    pytest.param("Qwen3Moe", {}, id="6-experts"),
    pytest.param("Qwen3Moe", {"num_experts": 5, "num_experts_per_tok": 3}, id="3-of-5"),
    pytest.param("Qwen3Moe", {"num_key_value_heads": 1, "tie_word_embeddings": True}, id="tied"),
    pytest.param("Qwen3Next", {}, id="next"),
    pytest.param("Qwen3Next", {"tie_word_embeddings": True}, id="next-tied"),
    pytest.param("Qwen3Next", {"linear_num_key_heads": 4, "num_key_value_heads": 1}, id="next-4"),
    pytest.param("Qwen3Next", {"num_hidden_layers": 3}, id="next-without-attention"),
]


@pytest.mark.parametrize(("family", "changed"), CASES)
@torch.no_grad()
def test_logits_match_hugging_face(family: str, changed: dict[str, Any], tmp_path: Path) -> None:
    hf_model = build_hf(family, **changed)
    hf_model.save_pretrained(tmp_path)
    tokens = torch.randint(VOCAB_SIZE, (2, SEQ_LEN))
    with float64_for_float32():
        want = hf_model(tokens, use_cache=False).logits
    got = read_folder(family, tmp_path)(tokens)
    assert want.dtype == got.dtype == torch.float64
    assert (got - want).abs().max() < 1e-10


@pytest.mark.parametrize(("family", "changed"), CASES)
def test_export_equals_hugging_face_bit_for_bit(
    family: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    form = FAMILIES[family][0]
    hf_model = build_hf(family, **changed)
    hf_model.save_pretrained(tmp_path / "hugging_face")
    model = read_folder(family, tmp_path / "hugging_face")
    state, pairs = model.state_dict(), form.tensors(model.args)
    written = [pair for pair in pairs if pair.tied_to is None]
    tensors = (part for pair in written for part in split(pair, state[pair.fqn]))
    config = form.config(model.args) | {"dtype": "float64"}
    write_folder(tmp_path / "shardloom", config, tensors, files={}, shard_bytes=50_000)
    back, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "shardloom", dtype=torch.float64, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for fqn, tensor in hf_model.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[fqn]), fqn
    assert form.args(form.config(model.args)) == model.args


@torch.no_grad()
def test_packed_documents_match_separate_documents(tmp_path: Path) -> None:
    """Hugging Face ignores document boundaries on CPUs, so it gets one document at a time."""
    sizes = (37, 64, 1, 48)
    with float64_for_float32():
        hf_model = build_hf("Qwen3Next")
        tokens = torch.randint(VOCAB_SIZE, (1, SEQ_LEN))
        parts = [hf_model(part, use_cache=False).logits for part in tokens.split(sizes, dim=1)]
    hf_model.save_pretrained(tmp_path)
    ids = torch.cat([torch.full((1, size), number) for number, size in enumerate(sizes)], dim=1)
    positions = torch.cat([torch.arange(size)[None] for size in sizes], dim=1)
    model = read_folder("Qwen3Next", tmp_path)
    got = model(tokens, positions, ids)
    assert (got - torch.cat(parts, dim=1)).abs().max() < 1e-10
    assert (model(tokens, positions) - got).abs().max() > 0.1, "documents make no difference"


def test_multi_token_prediction_weights_are_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build_hf("Qwen3Next").save_pretrained(tmp_path)
    want = read_folder("Qwen3Next", tmp_path).state_dict()
    assert not caplog.records
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"mtp.fc.weight": torch.ones(2, 2)}, file)
    got = read_folder("Qwen3Next", tmp_path).state_dict()
    assert all(torch.equal(tensor, want[fqn]) for fqn, tensor in got.items())
    assert "skipped 1 tensors mtp.*" in caplog.text
    save_file(tensors | {"other.weight": torch.ones(2, 2)}, file)
    with pytest.raises(ValueError, match=r"other\.weight is unknown \(1 in all\)"):
        read_folder("Qwen3Next", tmp_path)


def test_unnormalized_router_weights_raise(tmp_path: Path) -> None:
    build_hf("Qwen3Moe", norm_topk_prob=False).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="norm_topk_prob"):
        read_folder("Qwen3Moe", tmp_path)


def test_unsupported_layer_order_raises(tmp_path: Path) -> None:
    config = build_hf("Qwen3Next").config.to_dict()
    config["layer_types"] = ["full_attention", *["linear_attention"] * 4]
    with pytest.raises(ValueError, match="layer_types"):
        FAMILIES["Qwen3Next"][0].args(config)
