from typing import Any

import torch
import torch.nn as nn

from config.job_config import Optimizer
from optim.chunked_adamw import ChunkedAdamW


def build_optimizer(
    model: nn.Module, config: Optimizer, *, is_elastic: bool = False
) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) with weight decay on matrices only.

    Norms, biases and embeddings do not decay; neither does an output tied to the embedding.
    ``is_elastic``: how parameters are sharded changes no bit of the result.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():
        is_matrix = parameter.ndim >= 2 and id(parameter) not in embeddings
        (decayed if is_matrix else others).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    options: dict[str, Any] = {"lr": config.lr, "betas": betas, "eps": config.eps, "fused": True}
    if config.state_dtype == "bfloat16":
        return ChunkedAdamW(groups, moment_dtype=torch.bfloat16, **options)
    return (ChunkedAdamW if is_elastic else torch.optim.AdamW)(groups, **options)
