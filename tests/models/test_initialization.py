"""Standard deviations of initial weights, and buffers that no comparison of meshes would notice."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from models import find_model
from models.gated_delta_net import GatedDeltaNet
from models.transformer import Rope

# Weights that add to the residual stream, twice in each block.
RESIDUAL = re.compile(r"\.(wo|w2)(\.weight)?$")


def stds_of(name: str, *, is_tied: bool) -> tuple[dict[str, float], Any]:
    """Std of each weight that the model draws at random, by FQN; and the model's arguments."""
    spec, args = find_model(name, "debugmodel")
    args = replace(args, tie_embeddings=is_tied)
    with torch.device("meta"):
        model = spec.model_cls(args)
    model.to_empty(device="cpu")
    fqns = {parameter: fqn for fqn, parameter in model.named_parameters()}
    found: dict[str, float] = {}

    def record(parameter: torch.Tensor, *, std: float) -> None:
        found[fqns[parameter]] = std
        parameter.zero_()

    model.init_weights(record)
    return found, args


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("name", ["llama3", "qwen3", "qwen3_moe", "qwen3_next"])
def test_std_of_each_weight(name: str, is_tied: bool) -> None:
    found, args = stds_of(name, is_tied=is_tied)
    assert found.pop("tok_embeddings.weight") == (0.02 if is_tied else 1.0)
    assert found.pop("output.weight", None) == (None if is_tied else args.dim**-0.5)
    assert any(RESIDUAL.search(fqn) for fqn in found)
    for fqn, std in found.items():
        if fqn.endswith((".conv", ".a_log")):
            continue
        # The variance of the residual stream does not depend on the depth.
        want = 0.02 / (2 * args.n_layers) ** 0.5 if RESIDUAL.search(fqn) else 0.02
        assert std == pytest.approx(want), fqn


@torch.no_grad()
@pytest.mark.parametrize("dim", [64, 256, 512])
def test_tied_model_begins_with_a_uniform_guess(dim: int) -> None:
    spec, args = find_model("llama3", "debugmodel_tied")
    args = replace(args, dim=dim, hidden_dim=3 * dim, n_layers=dim // 32)
    model = spec.model_cls(args)
    torch.manual_seed(0)
    model.init_weights()
    tokens = torch.randint(args.vocab_size, (4, 65))
    loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).mT, tokens[:, 1:])
    assert loss.item() == pytest.approx(math.log(args.vocab_size), abs=0.3)


@torch.no_grad()
def test_initial_decays_are_uniform() -> None:
    spec, args = find_model("qwen3_next", "debugmodel")
    model = spec.model_cls(args)
    (net, *_) = (module for module in model.modules() if isinstance(module, GatedDeltaNet))
    found = []
    torch.manual_seed(0)
    while len(found) < 500:
        net.init_weights(torch.nn.init.trunc_normal_, 0.02)
        found.append(net.a_log.detach().exp().clone())
    decays = torch.cat(found).sort().values
    uniform = torch.linspace(1, 16, len(decays))
    # Kolmogorov-Smirnov: larger only with a chance below 0.001.
    assert (decays - uniform).abs().max() / 15 < 1.95 / len(decays) ** 0.5


@pytest.mark.parametrize(
    ("flavor", "factor"), [("1B", 32.0), ("3B", 32.0), ("8B", 8.0), ("70B", 8.0), ("405B", 8.0)]
)
def test_rope_scaling_is_the_published_one(flavor: str, factor: float) -> None:
    scaling = find_model("llama3", flavor)[1].rope_scaling
    assert scaling is not None
    assert scaling.factor == factor


def test_rope_of_a_bfloat16_model_is_in_float32() -> None:
    args = find_model("llama3", "debugmodel")[1]
    torch.set_default_dtype(torch.bfloat16)
    rope = Rope(args)
    rope.init_weights()
    assert rope.cache.dtype == torch.float32
