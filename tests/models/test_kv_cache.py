"""Incremental inference with a KV cache has the logits of the whole sequence, in float64."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch

from models import MODEL_SPECS, find_model
from models.kv_cache import CachedAttention, CachedDeltaNet, cached
from models.qwen3_next import Qwen3NextArgs
from models.transformer import Transformer
from models.transformer_sharding import attentions

SEQ_LEN, ROWS, N_HEADS = 32, 3, 4
CHUNK_SIZES = [[1] * SEQ_LEN, [SEQ_LEN], [5, 1, 14, 12], [7, 1, 1, 1, 11, 10, 1]]
attention_forward, delta_net_forward = CachedAttention.forward, CachedDeltaNet.forward
# Arguments of a model: tokens, positions and document_ids of the sequence so far.
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@torch.no_grad()
def small_model(name: str, n_kv_heads: int) -> Transformer:
    """Build a model with weights so large that attention is far from uniform."""
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


def one_document(model: Transformer) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(model.args.vocab_size, (ROWS, SEQ_LEN), generator=generator)
    return tokens, torch.arange(SEQ_LEN).expand(ROWS, -1), None


def packed(model: Transformer) -> Inputs:
    """Rows of documents with different lengths."""
    rows = [torch.tensor(lengths) for lengths in ([9, 23], [20, 3, 9], [32])]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    ids = torch.stack([torch.arange(len(row)).repeat_interleave(row) for row in rows])
    return one_document(model)[0], positions, ids


@torch.no_grad()
def in_chunks(model: Transformer, inputs: Inputs, sizes: list[int]) -> torch.Tensor:
    tokens, positions, ids = inputs
    logits, begin = [], 0
    with caches_of(model):
        for size in sizes:
            end = begin + size
            so_far = None if ids is None else ids[:, :end]
            logits.append(model(tokens[:, begin:end], positions[:, begin:end], so_far))
            begin = end
    return torch.cat(logits, dim=1)


@torch.no_grad()
def assert_chunks_match(model: Transformer, inputs: Inputs, sizes: list[int]) -> None:
    got = in_chunks(model, inputs, sizes)
    torch.testing.assert_close(got, model(*inputs), rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", CHUNK_SIZES, ids=lambda sizes: f"{len(sizes)} chunks")
@pytest.mark.parametrize("inputs_of", [one_document, packed])
@pytest.mark.parametrize("n_kv_heads", [1, 2, N_HEADS])
@pytest.mark.parametrize("name", ["llama3", "qwen3", "qwen3_moe", "qwen3_next"])
def test_chunks_have_the_logits_of_the_whole(
    name: str,
    n_kv_heads: int,
    inputs_of: Callable[[Transformer], Inputs],
    sizes: list[int],
) -> None:
    model = small_model(name, n_kv_heads)
    assert_chunks_match(model, inputs_of(model), sizes)


def test_each_context_has_new_caches() -> None:
    model = small_model("llama3", 2)
    before = [attention.inner for attention in attentions(model)]
    inputs = one_document(model)
    for sizes in CHUNK_SIZES:
        assert_chunks_match(model, inputs, sizes)
    with pytest.raises(KeyError), caches_of(model):
        raise KeyError
    assert [attention.inner for attention in attentions(model)] == before


def without_cache(self: CachedAttention, *args: torch.Tensor) -> torch.Tensor:
    return self.inner(*args)


def without_last_position(
    self: CachedAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: None
) -> torch.Tensor:
    """Overwrite the last position with the next chunk."""
    out = attention_forward(self, q, k, v, ids)
    self.n_cached -= 1
    return out


def without_conv_inputs(self: CachedDeltaNet, *args: Any) -> torch.Tensor:
    self.conv_inputs = None
    return delta_net_forward(self, *args)


def without_state(self: CachedDeltaNet, *args: Any) -> torch.Tensor:
    self.state = None
    return delta_net_forward(self, *args)


@pytest.mark.parametrize("fault", [without_conv_inputs, without_state])
def test_delta_net_cache_fault_is_detected(fault: Callable[..., torch.Tensor]) -> None:
    model = small_model("qwen3_next", 2)
    with (
        patch.object(CachedDeltaNet, "forward", fault),
        pytest.raises(AssertionError, match="not close"),
    ):
        assert_chunks_match(model, one_document(model), [5, 1, 14, 12])


@pytest.mark.parametrize("fault", [without_cache, without_last_position])
def test_attention_cache_fault_is_detected(fault: Callable[..., torch.Tensor]) -> None:
    model = small_model("llama3", 2)
    with (
        patch.object(CachedAttention, "forward", fault),
        pytest.raises(AssertionError, match="not close"),
    ):
        assert_chunks_match(model, one_document(model), [5, 1, 14, 12])


@torch.no_grad()
@pytest.mark.parametrize("at", [5, 6, SEQ_LEN - 1])
def test_wrong_position_changes_later_logits(at: int) -> None:
    model = small_model("qwen3", 2)
    tokens, positions, _ = inputs = one_document(model)
    wrong = positions.clone()
    wrong[:, at] += 1
    want, got = model(*inputs), in_chunks(model, (tokens, wrong, None), [5, 1, 14, 12])
    differences = (got - want).abs().amax(dim=(0, 2))
    assert differences[:at].max() < 1e-12
    assert differences[at:].min() > 1e-3


@torch.no_grad()
def test_cache_is_allocated_once_and_raises_when_full() -> None:
    """A cache that grows would be copied for every token."""
    model = small_model("llama3", 2)
    tokens, positions, _ = one_document(model)
    addresses = set()
    with caches_of(model):
        for n in range(SEQ_LEN):
            model(tokens[:, n : n + 1], positions[:, n : n + 1])
            inners = [attention.inner for attention in attentions(model)]
            addresses.add(tuple(cache.data_ptr() for inner in inners for cache in inner.caches))
        with pytest.raises(ValueError, match="KV cache is full: max_seq_len = 32, positions = 33"):
            model(tokens[:, :1], positions[:, :1])
    assert len(addresses) == 1
    assert len(set(addresses.pop())) == 2 * model.args.n_layers


def test_gradients_and_other_batch_sizes_raise() -> None:
    model = small_model("llama3", 2)
    tokens, positions, _ = one_document(model)
    with caches_of(model):
        with pytest.raises(AssertionError, match="inference only"):
            model(tokens, positions)
        with torch.no_grad():
            model(tokens[:, :4], positions[:, :4])
            with pytest.raises(AssertionError, match="batch size changed"):
                model(tokens[:1, 4:5], positions[:1, 4:5])
