from dataclasses import replace

import pytest
import torch

from config.job_config import Optimizer
from models import find_model
from models.transformer import Transformer
from optim.muon import Muon, hidden_matrices
from optim.optimizer import build_optimizer

CONFIG = Optimizer(lr=0.5, weight_decay=0.25, beta1=0.8, beta2=0.9, eps=1e-6)
MUON = CONFIG.model_copy(update={"name": "muon", "muon_momentum": 0.75})


def small_model(tie_embeddings: bool) -> Transformer:
    _, args = find_model("qwen3", "debugmodel")
    args = replace(args, n_layers=2, vocab_size=64, tie_embeddings=tie_embeddings)
    return Transformer(args)


def build(model: Transformer, config: Optimizer) -> torch.optim.AdamW:
    matrices = hidden_matrices(model.layers, moes=[])
    return build_optimizer(model, config, matrices=matrices)


@pytest.mark.parametrize("config", [CONFIG, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_only_matrices_decay(tie_embeddings: bool, config: Optimizer) -> None:
    model = small_model(tie_embeddings)
    # A model of one's own may have some in its blocks.
    model.layers["0"].positions = torch.nn.Embedding(8, 4)
    before = {}
    for fqn, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter)
        before[fqn] = parameter.detach().clone()
        parameter.grad = torch.zeros_like(parameter)
    build(model, config).step()
    # With zero gradients, a step only decays.
    decayed = {fqn for fqn, p in model.named_parameters() if not torch.equal(p, before[fqn])}
    projections = {
        f"layers.{i}.{name}.weight"
        for i in range(2)
        for name in [f"attention.w{x}" for x in "qkvo"] + [f"feed_forward.w{x}" for x in "123"]
    }
    assert decayed == projections | ({"output.weight"} if not tie_embeddings else set())
    for fqn in decayed:
        torch.testing.assert_close(model.get_parameter(fqn), before[fqn] * (1 - 0.5 * 0.25))


def test_norms_around_zero_decay() -> None:
    spec, args = find_model("qwen3_next", "debugmodel")
    model = spec.model_cls(replace(args, vocab_size=64))
    group, _ = build_optimizer(model, CONFIG).param_groups
    decayed = {id(parameter) for parameter in group["params"]}
    norms = {
        fqn: id(parameter) in decayed
        for fqn, parameter in model.named_parameters()
        if "norm" in fqn
    }
    # The norm of a delta net's output has a scale of weight.
    assert norms == {fqn: not fqn.endswith("attention.norm.weight") for fqn in norms}
    assert set(norms.values()) == {True, False}


@pytest.mark.parametrize("config", [CONFIG, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_every_parameter_has_the_same_options(tie_embeddings: bool, config: Optimizer) -> None:
    model = small_model(tie_embeddings)
    optimizer = build(model, config)
    updated = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(updated) == sorted(id(p) for p in model.parameters())
    options = [(g["lr"], g["betas"], g["eps"]) for g in optimizer.param_groups]
    assert set(options) == {(0.5, (0.8, 0.9), 1e-6)}


def test_muon_has_configured_options() -> None:
    optimizer = build(small_model(False), MUON.model_copy(update={"state_dtype": "bfloat16"}))
    assert isinstance(optimizer, Muon)
    assert optimizer.moment_dtype == torch.bfloat16
    momenta = [group.get("muon_momentum") for group in optimizer.param_groups]
    assert momenta == [None, None, MUON.muon_momentum]
