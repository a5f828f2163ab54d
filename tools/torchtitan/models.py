"""The flavors of torchtitan's Llama and Qwen3 models, as arguments of ours.

Sizes: torchtitan/models/{llama,llama3,qwen3}/__init__.py in its history.
"""

from dataclasses import asdict
from typing import Any

from models import MODEL_SPECS

# Months in which torchtitan changed a model.
DEBUG_8_LAYERS, DEBUG_6_LAYERS, OWN_VOCABULARY, SCALED_ROPE = (
    "2024-07", "2025-05", "2025-08", "2025-11",
)  # fmt: skip
LLAMA3_VOCABULARY, QWEN3_VOCABULARY, DEBUG_VOCABULARY = 128_256, 151_936, 2048


def _llama(
    dim: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int = 0,
    *,
    multiplier: float = 1.0,
    multiple_of: int = 256,
    rope_theta: float = 5e5,
) -> dict[str, Any]:
    hidden_dim = int(multiplier * int(8 * dim / 3))
    return {
        "dim": dim, "n_layers": n_layers, "n_heads": n_heads, "n_kv_heads": n_kv_heads or n_heads,
        "head_dim": dim // n_heads, "hidden_dim": -(-hidden_dim // multiple_of) * multiple_of,
        "rope_theta": rope_theta, "norm_eps": 1e-5, "tie_embeddings": False, "rope_scaling": None,
    }  # fmt: skip


def _qwen3(
    dim: int, n_layers: int, n_heads: int, hidden_dim: int, *, n_kv_heads: int = 8, **more: Any
) -> dict[str, Any]:
    return {
        "dim": dim, "n_layers": n_layers, "n_heads": n_heads, "n_kv_heads": n_kv_heads,
        "head_dim": 128, "hidden_dim": hidden_dim, "rope_theta": 1e6, "norm_eps": 1e-6,
        "tie_embeddings": False,
    } | more  # fmt: skip


LLAMA2 = {
    "debugmodel": _llama(256, 2, 16, rope_theta=1e4),
    "271M": _llama(1024, 16, 8, rope_theta=1e4),
    "1B": _llama(2048, 18, 16, rope_theta=1e4),
    "7B": _llama(4096, 32, 32, rope_theta=1e4),
    "13B": _llama(5120, 40, 40, rope_theta=1e4),
    "26B": _llama(5120, 80, 40, rope_theta=1e4),
    "70B": _llama(8192, 80, 64, 8, multiplier=1.3, multiple_of=4096, rope_theta=1e4),
}
LLAMA3 = {
    "debugmodel": _llama(256, 6, 16),
    "8B": _llama(4096, 32, 32, 8, multiplier=1.3, multiple_of=1024),
    "70B": _llama(8192, 80, 64, 8, multiplier=1.3, multiple_of=4096),
    "405B": _llama(16384, 126, 128, 8, multiplier=1.2, multiple_of=4096),
}
QWEN3 = {
    "debugmodel": _qwen3(256, 8, 16, 3072, tie_embeddings=True),
    "0.6B": _qwen3(1024, 28, 16, 3072, tie_embeddings=True),
    "1.7B": _qwen3(2048, 28, 16, 6144, tie_embeddings=True),
    "4B": _qwen3(2560, 36, 32, 9728, tie_embeddings=True),
    "8B": _qwen3(4096, 36, 32, 12288),
    "14B": _qwen3(5120, 40, 40, 17408),
    "32B": _qwen3(5120, 64, 64, 25600),
}
# hidden_dim is that of one expert.
QWEN3_MOE = {
    "debugmodel_moe": _qwen3(256, 8, 16, 768, n_experts=64, top_k=8),
    "30B-A3B": _qwen3(2048, 48, 32, 768, n_kv_heads=4, n_experts=128, top_k=8),
    "235B-A22B": _qwen3(4096, 94, 64, 1536, n_kv_heads=4, rope_theta=5e6, n_experts=128, top_k=8),
}
# torchtitan's name of a family: pairs of ours and its flavors.
FAMILIES = {
    "llama": [("llama3", LLAMA2 | LLAMA3)],
    "llama2": [("llama3", LLAMA2)],
    "llama3": [("llama3", LLAMA3)],
    "qwen3": [("qwen3", QWEN3), ("qwen3_moe", QWEN3_MOE)],
}
# Ends of the names of flavors whose attention is masked by document.
MASKED = ("_flex_attn", "_varlen_attn", "_flex", "_varlen")


def model_keys(name: str, flavor: str, month: str) -> dict[str, Any]:
    """Return our keys for a model of torchtitan as it was in ``month`` (ISO format).

    Raises ``ValueError`` that names the key of torchtitan.
    """
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(
            f"model.name: {name!r} is not supported, only {known}; to add it see"
            " docs/howto/add_a_model.md"
        )
    plain = next((flavor.removesuffix(end) for end in MASKED if flavor.endswith(end)), flavor)
    for family, flavors in FAMILIES[name]:
        if plain in flavors:
            keys = _family_keys(family, plain, _args_in(month, name, plain, flavors[plain]))
            vocabulary = _vocabulary(name, plain)
            if vocabulary and month >= OWN_VOCABULARY:
                keys["model.vocab_size"] = vocabulary
            return keys | ({"data.document_mask": True} if plain != flavor else {})
    known = ", ".join(flavor for _, flavors in FAMILIES[name] for flavor in flavors)
    raise ValueError(f"model.flavor: {flavor!r} of {name} is not one of {known}")


def _args_in(month: str, name: str, flavor: str, args: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a flavor as they were in ``month``."""
    if name == "llama3" and month >= SCALED_ROPE:
        args = args | {"rope_scaling": {"factor": 8.0}}
    if name == "llama3" and flavor == "debugmodel" and month < DEBUG_6_LAYERS:
        args = args | {"n_layers": 8 if month >= DEBUG_8_LAYERS else 2}
    if name == "llama2" and flavor == "debugmodel" and month >= DEBUG_8_LAYERS:
        args = args | {"n_layers": 8}
    return args


def _family_keys(family: str, flavor: str, args: dict[str, Any]) -> dict[str, Any]:
    """Keys of ours for ``args``: a flavor, and what differs from it."""
    flavors = MODEL_SPECS[family].flavors
    base = flavor if flavor in flavors else "debugmodel"
    ours = asdict(flavors[base])
    scaling = ours.pop("rope_scaling")
    differ = {key: value for key, value in args.items() if key in ours and ours[key] != value}
    wanted = args.get("rope_scaling")
    if (wanted or {}).get("factor") != (scaling or {}).get("factor"):
        differ["rope_scaling"] = wanted or {}
    keys: dict[str, Any] = {"model.name": family, "model.flavor": base}
    return keys | ({"model.args": differ} if differ else {})


def _vocabulary(name: str, flavor: str) -> int | None:
    """Size of the embedding; None: the tokenizer's."""
    if name not in ("llama3", "qwen3"):
        return None
    if flavor.startswith("debugmodel"):
        return DEBUG_VOCABULARY
    return LLAMA3_VOCABULARY if name == "llama3" else QWEN3_VOCABULARY
