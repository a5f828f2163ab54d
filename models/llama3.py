"""Llama 3, 3.1 and 3.2: arXiv 2407.21783 and the published model configs."""

from models.hugging_face import ATTENTION, FEED_FORWARD, NORMS, Table, build_hugging_face
from models.transformer import RopeScaling, TransformerArgs
from models.transformer_sharding import transformer_spec

_LLAMA31 = RopeScaling(factor=8.0)
_LLAMA32 = RopeScaling(factor=32.0)


def _small(*, dim: int, n_layers: int, hidden_dim: int) -> TransformerArgs:
    """Return args of a model of our own, in heads of 64 dims."""
    return TransformerArgs(
        dim=dim, n_layers=n_layers, n_heads=dim // 64, n_kv_heads=dim // 64, head_dim=64,
        hidden_dim=hidden_dim, vocab_size=50257, max_seq_len=8192, tie_embeddings=True,
    )  # fmt: skip


FLAVORS = {
    "debugmodel": TransformerArgs(
        dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384, vocab_size=320,
        max_seq_len=2048,
    ),
    "debugmodel_tied": TransformerArgs(
        dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384, vocab_size=320,
        max_seq_len=2048, tie_embeddings=True,
    ),
    # Sizes with a tied embedding of 50,257 tokens; shapes of GPT-2's small and medium models.
    "30M": _small(dim=384, n_layers=6, hidden_dim=1024),
    "60M": _small(dim=512, n_layers=10, hidden_dim=1536),
    "124M": _small(dim=768, n_layers=12, hidden_dim=2048),
    "350M": _small(dim=1024, n_layers=24, hidden_dim=2688),
    "1B": TransformerArgs(
        dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, head_dim=64, hidden_dim=8192,
        vocab_size=128256, max_seq_len=131072, rope_scaling=_LLAMA32, tie_embeddings=True,
    ),
    "3B": TransformerArgs(
        dim=3072, n_layers=28, n_heads=24, n_kv_heads=8, head_dim=128, hidden_dim=8192,
        vocab_size=128256, max_seq_len=131072, rope_scaling=_LLAMA32, tie_embeddings=True,
    ),
    "8B": TransformerArgs(
        dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, hidden_dim=14336,
        vocab_size=128256, max_seq_len=131072, rope_scaling=_LLAMA31,
    ),
    "70B": TransformerArgs(
        dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, head_dim=128, hidden_dim=28672,
        vocab_size=128256, max_seq_len=131072, rope_scaling=_LLAMA31,
    ),
    "405B": TransformerArgs(
        dim=16384, n_layers=126, n_heads=128, n_kv_heads=8, head_dim=128, hidden_dim=53248,
        vocab_size=128256, max_seq_len=131072, rope_scaling=_LLAMA31,
    ),
}  # fmt: skip

HUGGING_FACE = build_hugging_face(
    Table(
        "llama",
        "LlamaForCausalLM",
        layer=NORMS | ATTENTION | FEED_FORWARD,
        family_args={"qk_norm": False},
        defaults={
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
        },
        fixed={"mlp_bias": False},
    )
)
SPEC = transformer_spec(FLAVORS, HUGGING_FACE)
