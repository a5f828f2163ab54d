"""Qwen3's mixture of experts has the logits of Hugging Face's, and its folders, both ways."""

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.hugging_face import Folder, split, write_folder
from models.qwen3_moe import HUGGING_FACE, Qwen3Moe
from tests.models.test_hugging_face import float64_for_float32

transformers = pytest.importorskip("transformers")

VOCAB_SIZE, SEQ_LEN = 61, 64


def theirs(**changed: Any) -> Any:
    """A small model in float64, every parameter far from its initial value."""
    options = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": SEQ_LEN,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
    }
    torch.manual_seed(0)
    with float64_for_float32():
        config = transformers.Qwen3MoeConfig(**options | changed)
        model = transformers.Qwen3MoeForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def read(path: Path) -> Qwen3Moe:
    folder = Folder(path)
    args: Any = HUGGING_FACE.args(folder.config)
    model = Qwen3Moe(args).double()
    model.init_weights()
    own = model.state_dict()
    pairs = HUGGING_FACE.tensors(args)
    folder.check(pairs, {fqn: tensor.shape for fqn, tensor in own.items()})
    found = {
        pair.ours: folder.read_ours(pair, [0] * own[pair.ours].ndim, own[pair.ours].shape)
        for pair in pairs
        if pair.shares is None
    }
    found |= {pair.ours: found[pair.shares] for pair in pairs if pair.shares is not None}
    model.load_state_dict(found)
    return model


CASES = [
    pytest.param({}, id="6-experts"),
    pytest.param({"num_experts": 5, "num_experts_per_tok": 3}, id="3-of-5"),
    pytest.param({"num_key_value_heads": 1, "tie_word_embeddings": True}, id="tied"),
]


@pytest.mark.parametrize("changed", CASES)
@torch.no_grad()
def test_their_folder_has_our_logits(changed: dict[str, Any], tmp_path: Path) -> None:
    other = theirs(**changed)
    other.save_pretrained(tmp_path)
    tokens = torch.randint(VOCAB_SIZE, (2, SEQ_LEN))
    with float64_for_float32():
        want = other(tokens).logits
    got = read(tmp_path)(tokens)
    assert want.dtype == got.dtype == torch.float64
    assert (got - want).abs().max() < 1e-10


@pytest.mark.parametrize("changed", CASES)
def test_our_folder_is_theirs_to_the_last_bit(changed: dict[str, Any], tmp_path: Path) -> None:
    other = theirs(**changed)
    other.save_pretrained(tmp_path / "theirs")
    model = read(tmp_path / "theirs")
    own, pairs = model.state_dict(), HUGGING_FACE.tensors(model.args)
    written = [pair for pair in pairs if pair.shares is None]
    tensors = (part for pair in written for part in split(pair, own[pair.ours]))
    config = HUGGING_FACE.config(model.args) | {"dtype": "float64"}
    write_folder(tmp_path / "ours", config, tensors, files={}, shard_bytes=50_000)
    back, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float64, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for fqn, tensor in other.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[fqn]), fqn


def test_weights_that_do_not_add_up_to_1_are_refused(tmp_path: Path) -> None:
    theirs(norm_topk_prob=False).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="norm_topk_prob"):
        read(tmp_path)
