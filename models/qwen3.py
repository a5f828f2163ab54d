"""Dense Qwen3: arXiv 2505.09388 and the published model configs."""

from models.hugging_face import ATTENTION, FEED_FORWARD, NORMS, QK_NORM, Table, build_hugging_face
from models.transformer import TransformerArgs
from models.transformer_sharding import transformer_spec


def _qwen3(
    *, dim: int, n_layers: int, n_heads: int, hidden_dim: int, tie_embeddings: bool = False
) -> TransformerArgs:
    """Return args with the values that all published sizes share."""
    return TransformerArgs(
        dim=dim, n_layers=n_layers, n_heads=n_heads, n_kv_heads=8, head_dim=128,
        hidden_dim=hidden_dim, vocab_size=151936, max_seq_len=40960, rope_theta=1e6, norm_eps=1e-6,
        qk_norm=True, tie_embeddings=tie_embeddings,
    )  # fmt: skip


def _small(*, dim: int, n_layers: int, hidden_dim: int) -> TransformerArgs:
    """Return args of a model of our own, in heads of 64 dims."""
    return TransformerArgs(
        dim=dim, n_layers=n_layers, n_heads=dim // 64, n_kv_heads=dim // 64, head_dim=64,
        hidden_dim=hidden_dim, vocab_size=50257, max_seq_len=8192, rope_theta=1e6, norm_eps=1e-6,
        qk_norm=True, tie_embeddings=True,
    )  # fmt: skip


FLAVORS = {
    # head_dim is not dim / n_heads, as in most published sizes.
    "debugmodel": TransformerArgs(
        dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=48, hidden_dim=384, vocab_size=320,
        max_seq_len=2048, rope_theta=1e6, norm_eps=1e-6, qk_norm=True, tie_embeddings=True,
    ),
    # Sizes with a tied embedding of 50,257 tokens; shapes of GPT-2's small and medium models.
    "30M": _small(dim=384, n_layers=6, hidden_dim=1024),
    "60M": _small(dim=512, n_layers=10, hidden_dim=1536),
    "124M": _small(dim=768, n_layers=12, hidden_dim=2048),
    "350M": _small(dim=1024, n_layers=24, hidden_dim=2688),
    "0.6B": _qwen3(dim=1024, n_layers=28, n_heads=16, hidden_dim=3072, tie_embeddings=True),
    "1.7B": _qwen3(dim=2048, n_layers=28, n_heads=16, hidden_dim=6144, tie_embeddings=True),
    "4B": _qwen3(dim=2560, n_layers=36, n_heads=32, hidden_dim=9728, tie_embeddings=True),
    "8B": _qwen3(dim=4096, n_layers=36, n_heads=32, hidden_dim=12288),
    "14B": _qwen3(dim=5120, n_layers=40, n_heads=40, hidden_dim=17408),
    "32B": _qwen3(dim=5120, n_layers=64, n_heads=64, hidden_dim=25600),
}  # fmt: skip

HUGGING_FACE = build_hugging_face(
    Table(
        "qwen3",
        "Qwen3ForCausalLM",
        layer=NORMS | ATTENTION | QK_NORM | FEED_FORWARD,
        family_args={"qk_norm": True},
        defaults={
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
        },
        fixed={"use_sliding_window": False},
    )
)
SPEC = transformer_spec(FLAVORS, HUGGING_FACE)
