"""A sequence that comes piece by piece through a cache has the logits of the whole, in float64."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch

from models import MODEL_SPECS, find_model
from models.cache import CachedAttention, CachedDeltaNet, cached
from models.qwen3_next import Qwen3NextArgs
from models.transformer import Transformer
from models.transformer_sharding import attentions

SEQ_LEN, ROWS, N_HEADS = 32, 3, 4
PIECES = [[1] * SEQ_LEN, [SEQ_LEN], [5, 1, 14, 12], [7, 1, 1, 1, 11, 10, 1]]
original, original_of_delta_nets = CachedAttention.forward, CachedDeltaNet.forward
# As models are called: tokens, positions and the documents of the sequence so far.
Facts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@torch.no_grad()
def small_model(name: str, n_kv_heads: int) -> Transformer:
    """With weights large enough that attention is far from uniform."""
    spec, args = find_model(name, "debugmodel")
    args = replace(args, n_layers=2, n_heads=N_HEADS, n_kv_heads=n_kv_heads, max_seq_len=64)
    if isinstance(args, Qwen3NextArgs):
        args = replace(args, attention_every=2)
    torch.manual_seed(0)
    model = cast(Transformer, spec.model_cls(args)).double()
    model.init_weights()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def caches_of(model: Transformer) -> AbstractContextManager[None]:
    spec = next(spec for spec in MODEL_SPECS.values() if spec.model_cls is type(model))
    return cached(spec.attentions(model), spec.delta_nets(model), max_seq_len=SEQ_LEN)


def one_document(model: Transformer) -> Facts:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(model.args.vocab_size, (ROWS, SEQ_LEN), generator=generator)
    return tokens, torch.arange(SEQ_LEN).expand(ROWS, -1), None


def packed(model: Transformer) -> Facts:
    """Each row cut differently."""
    rows = [torch.tensor(lengths) for lengths in ([9, 23], [20, 3, 9], [32])]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    ids = torch.stack([torch.arange(len(row)).repeat_interleave(row) for row in rows])
    return one_document(model)[0], positions, ids


@torch.no_grad()
def piecewise(model: Transformer, facts: Facts, sizes: list[int]) -> torch.Tensor:
    tokens, positions, ids = facts
    logits, begin = [], 0
    with caches_of(model):
        for size in sizes:
            end = begin + size
            so_far = None if ids is None else ids[:, :end]
            logits.append(model(tokens[:, begin:end], positions[:, begin:end], so_far))
            begin = end
    return torch.cat(logits, dim=1)


@torch.no_grad()
def assert_same(model: Transformer, facts: Facts, sizes: list[int]) -> None:
    got = piecewise(model, facts, sizes)
    torch.testing.assert_close(got, model(*facts), rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", PIECES, ids=lambda sizes: f"{len(sizes)} pieces")
@pytest.mark.parametrize("facts_of", [one_document, packed])
@pytest.mark.parametrize("n_kv_heads", [1, 2, N_HEADS])
@pytest.mark.parametrize("name", ["llama3", "qwen3", "qwen3_moe", "qwen3_next"])
def test_pieces_have_the_logits_of_the_whole(
    name: str, n_kv_heads: int, facts_of: Callable[[Transformer], Facts], sizes: list[int]
) -> None:
    model = small_model(name, n_kv_heads)
    assert_same(model, facts_of(model), sizes)


def test_every_sequence_has_a_cache_of_its_own() -> None:
    model = small_model("llama3", 2)
    before = [attention.inner for attention in attentions(model)]
    facts = one_document(model)
    for sizes in PIECES:
        assert_same(model, facts, sizes)
    with pytest.raises(KeyError), caches_of(model):
        raise KeyError
    assert [attention.inner for attention in attentions(model)] == before


def forget(self: CachedAttention, *args: torch.Tensor) -> torch.Tensor:
    return self.inner(*args)


def without_the_last(
    self: CachedAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: None
) -> torch.Tensor:
    """The next piece is written over the last position."""
    out = original(self, q, k, v, ids)
    self.n_seen -= 1
    return out


def without_what_was_seen(self: CachedDeltaNet, *args: Any) -> torch.Tensor:
    self.seen = None
    return original_of_delta_nets(self, *args)


def without_state(self: CachedDeltaNet, *args: Any) -> torch.Tensor:
    self.state = None
    return original_of_delta_nets(self, *args)


@pytest.mark.parametrize("fault", [without_what_was_seen, without_state])
def test_a_fault_of_delta_nets_is_seen(fault: Callable[..., torch.Tensor]) -> None:
    model = small_model("qwen3_next", 2)
    with (
        patch.object(CachedDeltaNet, "forward", fault),
        pytest.raises(AssertionError, match="not close"),
    ):
        assert_same(model, one_document(model), [5, 1, 14, 12])


@pytest.mark.parametrize("fault", [forget, without_the_last])
def test_a_fault_is_seen(fault: Callable[..., torch.Tensor]) -> None:
    model = small_model("llama3", 2)
    with (
        patch.object(CachedAttention, "forward", fault),
        pytest.raises(AssertionError, match="not close"),
    ):
        assert_same(model, one_document(model), [5, 1, 14, 12])


@torch.no_grad()
@pytest.mark.parametrize("at", [5, 6, SEQ_LEN - 1])
def test_a_wrong_position_is_seen_from_there_on(at: int) -> None:
    model = small_model("qwen3", 2)
    tokens, positions, _ = facts = one_document(model)
    wrong = positions.clone()
    wrong[:, at] += 1
    want, got = model(*facts), piecewise(model, (tokens, wrong, None), [5, 1, 14, 12])
    differences = (got - want).abs().amax(dim=(0, 2))
    assert differences[:at].max() < 1e-12
    assert differences[at:].min() > 1e-3


@torch.no_grad()
def test_memory_is_taken_once_and_has_an_end() -> None:
    """What grows with every token would be copied with every token."""
    model = small_model("llama3", 2)
    tokens, positions, _ = one_document(model)
    places = set()
    with caches_of(model):
        for n in range(SEQ_LEN):
            model(tokens[:, n : n + 1], positions[:, n : n + 1])
            inners = [attention.inner for attention in attentions(model)]
            places.add(tuple(cache.data_ptr() for inner in inners for cache in inner.caches))
        with pytest.raises(ValueError, match="a cache of 32 positions has no room for 33"):
            model(tokens[:, :1], positions[:, :1])
    assert len(places) == 1
    assert len(set(places.pop())) == 2 * model.args.n_layers


def test_what_a_cache_cannot_do_is_refused() -> None:
    model = small_model("llama3", 2)
    tokens, positions, _ = one_document(model)
    with caches_of(model):
        with pytest.raises(AssertionError, match="no gradients"):
            model(tokens, positions)
        with torch.no_grad():
            model(tokens[:, :4], positions[:, :4])
            with pytest.raises(AssertionError, match="other sequences"):
                model(tokens[:1, 4:5], positions[:1, 4:5])
