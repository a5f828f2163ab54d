"""Our logits are those of Hugging Face's models, from their configs and no download.

In float64, so that a wrong epsilon or a frequency off by a little cannot pass for rounding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from models.transformer import RopeScaling, Transformer, TransformerArgs

transformers = pytest.importorskip("transformers")

SEQ_LEN = 96
TOLERANCE = 1e-9
SHARED = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQ_LEN,
    "attn_implementation": "eager",
}
LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Turns in 32 positions: 5.1 (kept), 1.6 (blended), 0.5 and fewer (divided by the factor).
    "original_max_position_embeddings": 32,
}
CASES = {
    "llama": ("Llama", {"rms_norm_eps": 1e-3}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_without_groups": ("Llama", {"num_key_value_heads": 4}),
    "llama31": ("Llama", {"head_dim": 16, "rope_parameters": LLAMA31}),
    "qwen3": ("Qwen3", {"head_dim": 12, "rms_norm_eps": 1e-3}),
    "qwen3_tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}
NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.layers": "layers",
    "model.norm": "norm",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}


def config_of(case: str, **changed: Any) -> Any:
    family, options = CASES[case]
    return getattr(transformers, f"{family}Config")(**SHARED | options | changed)


def hugging_face(case: str) -> Any:
    """A small model in float64; every parameter is far from its initial value."""
    torch.manual_seed(0)
    model_cls = getattr(transformers, f"{CASES[case][0]}ForCausalLM")
    model = model_cls(config_of(case)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def ours(config: Any, weights: dict[str, torch.Tensor]) -> Transformer:
    """The model that Hugging Face's ``config`` and ``weights`` describe."""
    rope = config.rope_parameters
    scaling = None
    if rope["rope_type"] == "llama3":
        scaling = RopeScaling(
            factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_max_seq_len=rope["original_max_position_embeddings"],
        )
    args = TransformerArgs(
        dim=config.hidden_size,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        hidden_dim=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_seq_len=config.max_position_embeddings,
        rope_theta=rope["rope_theta"],
        rope_scaling=scaling,
        norm_eps=config.rms_norm_eps,
        qk_norm=config.model_type == "qwen3",
        tie_embeddings=config.tie_word_embeddings,
    )
    model = Transformer(args).double()
    model.init_weights()
    model.load_state_dict({our_name(fqn): tensor for fqn, tensor in weights.items()})
    return model


def our_name(fqn: str) -> str:
    for name, our in NAMES.items():
        fqn = fqn.replace(name, our)
    return fqn


@contextmanager
def float64_for_float32() -> Iterator[None]:
    """Hugging Face computes norms and angles in float32, whatever the model's dtype."""
    with (
        patch.object(torch, "float32", torch.float64),
        patch.object(torch, "float", torch.float64),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield


@torch.no_grad()
def distance(case: str, **changed: Any) -> float:
    """Between their logits and ours, where our config has ``changed`` options."""
    with float64_for_float32():
        theirs = hugging_face(case)
        tokens = torch.randint(SHARED["vocab_size"], (2, SEQ_LEN))
        want = theirs(tokens).logits
    got = ours(config_of(case, **changed), theirs.state_dict())(tokens)
    assert want.dtype == got.dtype == torch.float64
    return (got - want).abs().max().item()


@pytest.mark.parametrize("case", CASES)
def test_logits_are_hugging_faces(case: str) -> None:
    assert distance(case) < TOLERANCE


@pytest.mark.parametrize(
    ("case", "changed"),
    [
        ("llama", {"rms_norm_eps": 1.001e-3}),
        ("qwen3", {"rms_norm_eps": 1.001e-3}),
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 10_010.0}}),
        *(("llama31", {"rope_parameters": LLAMA31 | {key: 1.001 * LLAMA31[key]}})
          for key in ("factor", "low_freq_factor", "high_freq_factor")),
    ],
)  # fmt: skip
def test_one_option_off_by_a_thousandth_is_seen(case: str, changed: dict[str, Any]) -> None:
    assert distance(case, **changed) > 100 * TOLERANCE
