"""Small models of transformers, in float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from models import MODEL_SPECS
from models.hugging_face import HuggingFace

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
    # Rotations in 32 positions: 5.1 (kept), 1.6 (interpolated), 0.5 or fewer (divided).
    "original_max_position_embeddings": 32,
}
CASES = {
    "llama": ("Llama", {"rms_norm_eps": 1e-3}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_without_groups": ("Llama", {"num_key_value_heads": 4}),
    "llama_with_one_group": ("Llama", {"num_key_value_heads": 1}),
    "llama31": ("Llama", {"head_dim": 16, "rope_parameters": LLAMA31}),
    "qwen3": ("Qwen3", {"head_dim": 12, "rms_norm_eps": 1e-3}),
    "qwen3_tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}


def config_of(case: str, **changed: Any) -> Any:
    family, options = CASES[case]
    return getattr(transformers, f"{family}Config")(**SHARED | options | changed)


def hugging_face(case: str) -> Any:
    """Build a small float64 model; every parameter is far from its initial value."""
    torch.manual_seed(0)
    model_cls = getattr(transformers, f"{CASES[case][0]}ForCausalLM")
    model = model_cls(config_of(case)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def form_of(model_type: str) -> HuggingFace:
    found = [spec.hugging_face for spec in MODEL_SPECS.values() if spec.hugging_face is not None]
    return next(form for form in found if form.model_type == model_type)


@contextmanager
def float64_for_float32() -> Iterator[None]:
    """Context in which Hugging Face computes norms and angles in float64, not float32."""
    with (
        patch.object(torch, "float32", torch.float64),
        patch.object(torch, "float", torch.float64),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield
