"""What is drawn: the window of a model's text, and one token of given logits."""

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn

from metrics.sample import TEMPERATURE, draw, printable, sample
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


def sample_plainly(model: nn.Module, prompt: list[int], count: int, seed: int) -> list[int]:
    """One window after the other, each as long as it is."""
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([tokens[-SEQ_LEN:]]))[0, -1, :N_IDS].detach()
        weights = (logits.float() / TEMPERATURE).softmax(-1)
        tokens.append(int(torch.multinomial(weights, 1, generator=generator)))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("length", [1, 63, 64, SEQ_LEN - 2, SEQ_LEN, 3 * SEQ_LEN])
def test_padding_changes_no_token_and_the_window_is_the_last(model: nn.Module, length: int) -> None:
    prompt = torch.randint(N_IDS, (length,), generator=torch.Generator().manual_seed(2)).tolist()
    drawn = sample(model, prompt, count=6, n_ids=N_IDS, seq_len=SEQ_LEN, multiple_of=1, seed=3)
    assert drawn == sample_plainly(model, prompt, 6, seed=3)
    cropped = sample(
        model, prompt[-SEQ_LEN:], count=6, n_ids=N_IDS, seq_len=SEQ_LEN, multiple_of=1, seed=3
    )
    assert drawn == cropped


def test_seed_decides_and_ids_stay_below_the_vocabulary(model: nn.Module) -> None:
    def draw(seed: int, n_ids: int = N_IDS) -> list[int]:
        return sample(model, [7], count=20, n_ids=n_ids, seq_len=SEQ_LEN, multiple_of=1, seed=seed)

    assert draw(0) == draw(0) != draw(1)
    assert max(draw(0, n_ids=3)) < 3


def test_a_terminal_is_told_nothing_but_text() -> None:
    assert printable("a\x1b[2J\x07\x0e\x9b b\r\tc\n\u00e9\ufffd") == (
        "a\\x1b[2J\\x07\\x0e\\x9b b\\r\tc\n\u00e9\ufffd"
    )


def test_certain_token_is_drawn() -> None:
    class Successor(nn.Module):
        """Sure that n + 1 comes after n."""

        def __init__(self) -> None:
            super().__init__()
            self.certainty = nn.Parameter(torch.tensor(1e4))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.certainty * nn.functional.one_hot((tokens + 1) % 50, 50)

    drawn = sample(Successor(), [3, 9], count=8, n_ids=50, seq_len=4, multiple_of=1, seed=0)
    assert drawn == list(range(10, 18))


def probabilities(logits: list[float], **choice: float) -> list[float]:
    """What ``draw`` draws by."""
    with patch("torch.multinomial", return_value=torch.tensor([0])) as drawn:
        draw(torch.tensor(logits), torch.Generator(), **choice)
    (weights,) = drawn.call_args.args[:1]
    return (weights.double() / weights.double().sum()).tolist()


def plain_probabilities(
    logits: list[float], temperature: float, top_k: int | None = None, top_p: float = 1.0
) -> list[float]:
    weights = [math.exp((logit - max(logits)) / temperature) for logit in logits]
    likeliest = sorted(range(len(logits)), key=lambda i: -weights[i])[:top_k]
    total, kept = sum(weights[i] for i in likeliest), []
    for i in likeliest:
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
def test_choice_is_the_plain_one(choice: dict[str, float], temperature: float) -> None:
    generator = torch.Generator().manual_seed(4)
    for scale in (0.5, 2.0):
        logits = (torch.randn(40, generator=generator) * scale).tolist()
        want = plain_probabilities(logits, temperature, **choice)
        got = probabilities(logits, temperature=temperature, **choice)
        assert got == pytest.approx(want, rel=1e-5, abs=1e-30)
        # Those left out are never drawn, however seldom they would be.
        assert [p == 0.0 for p in got] == [p == 0.0 for p in want]


def test_of_equals_no_more_are_kept_than_asked() -> None:
    assert probabilities([1.0, 1.0, 1.0, 0.0], temperature=1.0, top_k=2) == [0.5, 0.5, 0.0, 0.0]
    assert probabilities([0.0] * 4, temperature=1.0, top_p=0.5) == [0.5, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-9])
def test_cold_draws_are_the_likeliest(temperature: float) -> None:
    logits = torch.randn(N_IDS, generator=torch.Generator().manual_seed(5)) * 1e4
    got = draw(logits, torch.Generator().manual_seed(0), temperature=temperature)
    assert got == int(logits.argmax())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_not_finite_is_not_drawn(value: float, temperature: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        draw(torch.tensor([0.0, value]), torch.Generator(), temperature=temperature)
