"""Sampling: the window of a model's text, and one token of given logits."""

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn

from generation import TEMPERATURE, sample_batch, sample_token, window_length
from models import find_model
from models.meta import build_on_meta
from parallelisms.materialize import materialize

SEQ_LEN, N_IDS = 96, 300


@pytest.fixture(scope="module")
def model() -> nn.Module:
    spec, args = find_model("llama3", "debugmodel")
    args = replace(args, n_layers=2, max_seq_len=SEQ_LEN)
    model = build_on_meta(spec, args, torch.float64)
    materialize(model, torch.device("cpu"), seed=1)
    return model


def sample(model: nn.Module, prompt: list[int], *, seed: int, **options: int) -> list[int] | None:
    return sample_batch(model, [prompt], seeds=[seed], **options)[0]


def sample_plainly(model: nn.Module, prompt: list[int], count: int, seed: int) -> list[int]:
    """Reference: recompute each window without padding."""
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([tokens[-SEQ_LEN:]]))[0, -1, :N_IDS].detach()
        weights = (logits.float() / TEMPERATURE).softmax(-1)
        tokens.append(int(torch.multinomial(weights, 1, generator=generator)))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("length", [1, 63, 64, SEQ_LEN - 2, SEQ_LEN, 3 * SEQ_LEN])
def test_padding_changes_nothing_and_window_is_the_last(model: nn.Module, length: int) -> None:
    prompt = torch.randint(N_IDS, (length,), generator=torch.Generator().manual_seed(2)).tolist()
    window = window_length([prompt], 6, seq_len=SEQ_LEN, multiple_of=1)
    tokens = sample(model, prompt, count=6, n_ids=N_IDS, length=window, seed=3)
    assert tokens == sample_plainly(model, prompt, 6, seed=3)
    cropped = sample(model, prompt[-SEQ_LEN:], count=6, n_ids=N_IDS, length=window, seed=3)
    assert tokens == cropped


@pytest.mark.parametrize("lengths", [(1, 70, 9), (SEQ_LEN - 2, 3 * SEQ_LEN, 1)])
def test_prompts_of_a_batch_are_sampled_as_alone(model: nn.Module, lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(N_IDS, (n,), generator=generator).tolist() for n in lengths]
    seeds = [5, 6, 7]
    options = {"count": 6, "n_ids": N_IDS, "length": SEQ_LEN}
    rows = zip(prompts, seeds, strict=True)
    alone = [sample_plainly(model, prompt, 6, seed=seed) for prompt, seed in rows]
    assert sample_batch(model, prompts, seeds=seeds, **options) == alone


def test_nonfinite_logits_end_no_other_sample(model: nn.Module) -> None:
    def logits_of(tokens: torch.Tensor) -> torch.Tensor:
        logits = model(tokens)
        logits[0, 2] = math.nan
        calls.append(tokens.shape[0])
        return logits

    calls = list[int]()
    options = {"count": 6, "n_ids": N_IDS, "length": SEQ_LEN}
    with torch.no_grad():
        first, second = sample_batch(logits_of, [[1, 2], [3]], seeds=[5, 6], **options)
    assert (first, second) == (None, sample_plainly(model, [3], 6, seed=6))
    # A rank that stopped would keep the others waiting.
    assert calls == [2] * 6


def test_samples_depend_on_the_seed_and_stay_below_n_ids(model: nn.Module) -> None:
    def sample_token(seed: int, n_ids: int = N_IDS) -> list[int]:
        return sample(model, [7], count=20, n_ids=n_ids, length=SEQ_LEN, seed=seed)

    assert sample_token(0) == sample_token(0) != sample_token(1)
    assert max(sample_token(0, n_ids=3)) < 3


def test_certain_token_is_sampled() -> None:
    class Successor(nn.Module):
        """Model that predicts n + 1 after n with certainty."""

        def __init__(self) -> None:
            super().__init__()
            self.certainty = nn.Parameter(torch.tensor(1e4))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.certainty * nn.functional.one_hot((tokens + 1) % 50, 50)

    tokens = sample(Successor(), [3, 9], count=8, n_ids=50, length=4, seed=0)
    assert tokens == list(range(10, 18))


def probabilities(logits: list[float], **choice: float) -> list[float]:
    """Return the probabilities that ``sample_token`` samples from."""
    with patch("torch.multinomial", return_value=torch.tensor([0])) as multinomial:
        sample_token(torch.tensor(logits), torch.Generator(), **choice)
    (weights,) = multinomial.call_args.args[:1]
    return (weights.double() / weights.double().sum()).tolist()


def plain_probabilities(
    logits: list[float], temperature: float, top_k: int | None = None, top_p: float = 1.0
) -> list[float]:
    weights = [math.exp((logit - max(logits)) / temperature) for logit in logits]
    candidates = sorted(range(len(logits)), key=lambda i: -weights[i])[:top_k]
    total, kept = sum(weights[i] for i in candidates), []
    for i in candidates:
        if top_p == 1.0 or sum(weights[j] for j in kept) < top_p * total:
            kept.append(i)
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


CHOICES = [
    {},
    *({"top_k": k} for k in (1, 2, 5, 40)),
    *({"top_p": p} for p in (1e-9, 0.3, 0.5, 0.9, 0.999)),
    *({"top_k": k, "top_p": p} for k in (1, 3, 12) for p in (0.2, 0.7)),
]


@pytest.mark.parametrize("temperature", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_top_k_and_top_p_match_the_plain_ones(choice: dict[str, float], temperature: float) -> None:
    generator = torch.Generator().manual_seed(4)
    for scale in (0.5, 2.0):
        logits = (torch.randn(40, generator=generator) * scale).tolist()
        want = plain_probabilities(logits, temperature, **choice)
        got = probabilities(logits, temperature=temperature, **choice)
        assert got == pytest.approx(want, rel=1e-5, abs=1e-30)
        # Excluded ids have probability 0 exactly.
        assert [p == 0.0 for p in got] == [p == 0.0 for p in want]


def test_ties_keep_no_more_than_top_k() -> None:
    assert probabilities([1.0, 1.0, 1.0, 0.0], temperature=1.0, top_k=2) == [0.5, 0.5, 0.0, 0.0]
    assert probabilities([0.0] * 4, temperature=1.0, top_p=0.5) == [0.5, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-9])
def test_low_temperature_is_argmax(temperature: float) -> None:
    logits = torch.randn(N_IDS, generator=torch.Generator().manual_seed(5)) * 1e4
    got = sample_token(logits, torch.Generator().manual_seed(0), temperature=temperature)
    assert got == int(logits.argmax())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nonfinite_logits_raise(value: float, temperature: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        sample_token(torch.tensor([0.0, value]), torch.Generator(), temperature=temperature)
