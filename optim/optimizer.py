"""Which optimizer updates which parameters, and which of them decay."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from config.job_config import Optimizer
from optim.chunked_adamw import ChunkedAdamW
from optim.muon import Muon


def build_optimizer(
    model: nn.Module,
    config: Optimizer,
    *,
    matrices: Sequence[nn.Parameter] = (),
    weight_mesh: DeviceMesh | None = None,
    is_elastic: bool = False,
) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) or Muon, with weight decay on matrices only.

    Norms, biases and embeddings do not decay; neither does an output tied to the embedding.
    ``matrices``: the ``hidden_matrices``, which Muon updates. ``weight_mesh`` has every rank; None:
    there is one. ``is_elastic``: how parameters are sharded changes no bit of the result. Raises
    ``ValueError`` if Muon has nothing to do.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    hidden = {id(p) for p in matrices} if config.name == "muon" else set()
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():
        is_matrix = parameter.ndim >= 2 and id(parameter) not in embeddings
        if id(parameter) not in hidden:
            (decayed if is_matrix else others).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    options: dict[str, Any] = {"lr": config.lr, "betas": betas, "eps": config.eps, "fused": True}
    moment_dtype = torch.bfloat16 if config.state_dtype == "bfloat16" else None
    if config.name == "muon":
        muon = {"weight_decay": config.weight_decay, "muon_momentum": config.muon_momentum}
        groups.append({"params": list(matrices), **muon})
        # With a tied output Muon may have all that decays, and an empty group cannot be loaded.
        groups = [group for group in groups if group["params"]]
        return Muon(groups, weight_mesh=weight_mesh, moment_dtype=moment_dtype, **options)
    if moment_dtype is not None or is_elastic:
        return ChunkedAdamW(groups, moment_dtype=moment_dtype, **options)
    return torch.optim.AdamW(groups, **options)
