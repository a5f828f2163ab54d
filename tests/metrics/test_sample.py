from dataclasses import replace

import pytest
import torch
import torch.nn as nn

from metrics.sample import TEMPERATURE, sample
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
