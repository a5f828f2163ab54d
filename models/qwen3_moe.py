"""Qwen3 with a mixture of experts in every layer: arXiv 2505.09388 and the published configs."""

from dataclasses import dataclass

import torch.nn as nn

from models.hugging_face import ATTENTION, NORMS, QK_NORM, Table, TensorPair, build_hugging_face
from models.moe import MoE
from models.transformer import Transformer, TransformerArgs, TransformerBlock


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeArgs(TransformerArgs):
    """``TransformerArgs``, where ``hidden_dim`` is that of one expert."""

    n_experts: int
    top_k: int
    """Top-k: experts per token."""
    balance_weight: float = 0.0
    """Weight of each layer's auxiliary load-balancing loss."""


class Qwen3Moe(Transformer):
    """Qwen3 with a mixture of experts in every layer (arXiv 2505.09388)."""

    args: Qwen3MoeArgs

    def build_block(self, index: int) -> nn.Module:
        return MoeBlock(self.args)


class MoeBlock(TransformerBlock):
    """Transformer block whose feed-forward is a mixture of experts."""

    def __init__(self, args: Qwen3MoeArgs) -> None:
        super().__init__(args)
        self.feed_forward = MoE(
            dim=args.dim,
            hidden_dim=args.hidden_dim,
            n_experts=args.n_experts,
            top_k=args.top_k,
            balance_weight=args.balance_weight,
        )


def _published(*, dim: int, n_layers: int, n_heads: int, hidden_dim: int) -> Qwen3MoeArgs:
    """Return args with the values that all published sizes share."""
    return Qwen3MoeArgs(
        dim=dim, n_layers=n_layers, n_heads=n_heads, n_kv_heads=4, head_dim=128,
        hidden_dim=hidden_dim, vocab_size=151936, max_seq_len=40960, rope_theta=1e6, norm_eps=1e-6,
        qk_norm=True, n_experts=128, top_k=8,
    )  # fmt: skip


FLAVORS = {
    "debugmodel": Qwen3MoeArgs(
        dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=96, vocab_size=320,
        max_seq_len=2048, rope_theta=1e6, norm_eps=1e-6, qk_norm=True, n_experts=8, top_k=2,
    ),
    "30B-A3B": _published(dim=2048, n_layers=48, n_heads=32, hidden_dim=768),
    "235B-A22B": _published(dim=4096, n_layers=94, n_heads=64, hidden_dim=1536),
}  # fmt: skip


def expert_pairs(args: Qwen3MoeArgs) -> list[TensorPair]:
    """Return the experts' pairs; Hugging Face has a tensor per expert and no router bias."""
    pairs = []
    for i in range(args.n_layers):
        prefix, hf_prefix = f"layers.{i}.feed_forward", f"model.layers.{i}.mlp"
        pairs.append(TensorPair(f"{prefix}.bias", ()))
        for name, hf_name in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            each = (f"{hf_prefix}.experts.{e}.{hf_name}.weight" for e in range(args.n_experts))
            pairs.append(TensorPair(f"{prefix}.experts.{name}", tuple(each), is_stacked=True))
    return pairs


HUGGING_FACE = build_hugging_face(
    Table(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        layer=NORMS | ATTENTION | QK_NORM | {"feed_forward.router": "mlp.gate"},
        others=expert_pairs,
        args_cls=Qwen3MoeArgs,
        family_args={"qk_norm": True},
        numbers={
            "num_experts": "n_experts",
            "num_experts_per_tok": "top_k",
            "moe_intermediate_size": "hidden_dim",
        },
        defaults={
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        aliases={"num_local_experts": "num_experts"},
        required={"norm_topk_prob": True},
        fixed={
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": False,
        },
    )
)
