"""Build the optimizer: parameter groups with and without weight decay."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from config.job_config import Optimizer
from optim.chunked_adamw import ChunkedAdamW
from optim.local_adamw import LocalAdamW
from optim.muon import Muon
from optim.outside import build_outside


def build_optimizer(
    model: nn.Module,
    config: Optimizer,
    *,
    matrices: Sequence[nn.Parameter] = (),
    weight_mesh: DeviceMesh | None = None,
    is_elastic: bool = False,
) -> torch.optim.Optimizer:
    """Build AdamW (arXiv 1711.05101), Muon or one outside, with weight decay on matrices.

    Norms, biases, embeddings and an output tied to the embedding do not decay; the ``weight`` of a
    module with ``decays_weight = True`` does. It has no frozen parameters. ``matrices``: the
    ``hidden_matrices``, which Muon updates. ``weight_mesh`` has every rank; None: one rank.
    ``is_elastic``: updates are bitwise identical however parameters are sharded. Raises
    ``ConfigError`` if Muon has no matrices, or one outside breaks its contract. Collective for
    Muon.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    others = {id(m.weight) for m in model.modules() if getattr(m, "decays_weight", False)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [matrix for matrix in matrices if matrix.requires_grad]
    muon_ids = {id(p) for p in matrices} if config.name == "muon" else set()
    decayed: list[nn.Parameter] = []
    not_decayed: list[nn.Parameter] = []
    for parameter in trained:
        is_matrix = parameter.ndim >= 2 and id(parameter) not in embeddings
        is_decayed = is_matrix or id(parameter) in others
        if id(parameter) not in muon_ids:
            (decayed if is_decayed else not_decayed).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": not_decayed, "weight_decay": 0.0},
    ]
    # A pipeline stage that is frozen gives one outside nothing to update.
    if config.is_outside and trained:
        has_stages = weight_mesh is not None and weight_mesh["pp"].size() > 1
        groups = [group for group in groups if group["params"]]
        return build_outside(config, groups, has_stages=has_stages)
    betas = (config.beta1, config.beta2)
    options: dict[str, Any] = {"lr": config.lr, "betas": betas, "eps": config.eps, "fused": True}
    own: dict[str, Any] = {
        "moment_dtype": torch.bfloat16 if config.state_dtype == "bfloat16" else None,
        "has_remainders": config.param_remainders
        and next(model.parameters()).dtype == torch.bfloat16,
    }
    if config.name == "muon":
        muon = {"weight_decay": config.weight_decay, "muon_momentum": config.muon_momentum}
        groups.append({"params": list(matrices), **muon})
        return Muon(groups, weight_mesh=weight_mesh, **own, **options)
    if any(own.values()) or is_elastic:
        return ChunkedAdamW(groups, **own, **options)
    return LocalAdamW(groups, **options)
