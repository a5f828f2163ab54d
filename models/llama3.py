"""Llama 3, 3.1 and 3.2: arXiv 2407.21783 and the published model configs."""

from models.model_spec import ModelSpec
from models.transformer import RopeScaling, Transformer, TransformerArgs
from models.transformer_sharding import blocks, fsdp_units, tensor_parallel_plan

_LLAMA31 = RopeScaling(factor=8.0)
_LLAMA32 = RopeScaling(factor=32.0)

FLAVORS = {
    "debugmodel": TransformerArgs(
        dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384, vocab_size=320,
        max_seq_len=2048,
    ),
    "debugmodel_tied": TransformerArgs(
        dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384, vocab_size=320,
        max_seq_len=2048, tie_embeddings=True,
    ),
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

SPEC = ModelSpec(
    model_cls=Transformer,
    flavors=FLAVORS,
    tensor_parallel_plan=tensor_parallel_plan,
    fsdp_units=fsdp_units,
    blocks=blocks,
)
