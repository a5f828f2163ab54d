from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from metrics.flops import flops_per_token, matmul_parameters, peak_flops
from models import find_model, gated_delta_net
from models.meta import build_on_meta
from tests.lib.delta_rule import token_by_token


def flops_of(flavor: str, seq_len: int, name: str = "llama3") -> tuple[float, float]:
    spec, args = find_model(name, flavor)
    model = build_on_meta(spec, args, torch.float32)
    return flops_per_token(
        model,
        n_attentions=len(spec.attentions(model)),
        n_heads=args.n_heads,
        head_dim=args.head_dim,
        seq_len=seq_len,
        delta_nets=spec.delta_nets(model),
    )


@pytest.mark.parametrize(
    ("name", "flavor"),
    [
        ("llama3", "debugmodel"),
        ("llama3", "debugmodel_tied"),
        ("qwen3_moe", "debugmodel"),
        ("qwen3_next", "debugmodel"),
    ],
)
def test_formula_is_three_times_the_counted_forward_flops(
    monkeypatch: pytest.MonkeyPatch, name: str, flavor: str
) -> None:
    # The chunked form needs more FLOPs than the recurrence, which the formula counts.
    monkeypatch.setattr(gated_delta_net, "delta_rule", token_by_token)
    seq_len = 64
    spec, args = find_model(name, flavor)
    model = spec.model_cls(replace(args, max_seq_len=seq_len))
    cast(Any, model).init_weights()
    tokens = torch.zeros(2, seq_len, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens)
    palm, causal = flops_of(flavor, seq_len, name)
    assert palm * tokens.numel() == 3 * counter.get_total_flops()
    # The causal mask halves attention and nothing else.
    states = sum(cast(Any, net).state_size for net in spec.delta_nets(model))
    linear = 6 * matmul_parameters(model) + 18 * states
    assert palm - causal == causal - linear


def test_flops_and_parameters_of_8b_are_as_published() -> None:
    spec, args = find_model("llama3", "8B")
    assert matmul_parameters(build_on_meta(spec, args, torch.float32)) == 7_504_658_432
    palm, causal = flops_of("8B", 8192)
    assert (round(palm / 1e9, 1), round(causal / 1e9, 1)) == (57.9, 51.5)


def test_peak_flops_is_given_or_known_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert peak_flops(cpu, 12.5) == 12.5e12
    assert peak_flops(cpu, None) is None
    names = {
        "NVIDIA H200": 989e12,
        "NVIDIA H200 NVL": 835e12,
        "NVIDIA B200": 2250e12,
        "NVIDIA GB200": 2500e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA A100-SXM4-40GB": 312e12,
        "NVIDIA H100 NVL": 835e12,
        "NVIDIA GeForce RTX 4090": 165e12,
        "NVIDIA L40S": 362e12,
        "NVIDIA GB300": 2500e12,
        "AMD Instinct MI300X": 1307e12,
        "Tesla T4": None,
        "NVIDIA GeForce GTX 1080": None,
    }
    for name, peak in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(cuda, None) == peak
