"""Models have the published sizes; attention is causal and stays within documents."""

from dataclasses import replace

import pytest
import torch

from models import MODEL_SPECS, find_model
from models.transformer import InnerAttention, Transformer, TransformerArgs, unshared_heads

PUBLISHED = {
    ("llama3", "1B"): 1_235_814_400,
    ("llama3", "3B"): 3_212_749_824,
    ("llama3", "8B"): 8_030_261_248,
    ("llama3", "70B"): 70_553_706_496,
    ("llama3", "405B"): 405_853_388_800,
    ("qwen3", "0.6B"): 596_049_920,
    ("qwen3", "1.7B"): 1_720_574_976,
    ("qwen3", "4B"): 4_022_468_096,
    ("qwen3", "8B"): 8_190_735_360,
    ("qwen3", "14B"): 14_768_307_200,
    ("qwen3", "32B"): 32_762_123_264,
    ("qwen3_moe", "30B-A3B"): 30_532_122_624,
    ("qwen3_moe", "235B-A22B"): 235_093_634_560,
    ("qwen3_next", "80B-A3B"): 79_674_391_296,
}
DEBUG = [("llama3", "debugmodel"), ("qwen3", "debugmodel")]
DOCUMENTS = [5, 1, 14, 12]
SEQ_LEN = sum(DOCUMENTS)


@torch.no_grad()
def small_model(name: str, flavor: str) -> Transformer:
    """Build a float64 model with weights so large that attention is far from uniform."""
    args = replace(find_model(name, flavor)[1], n_layers=2, max_seq_len=2 * SEQ_LEN)
    torch.manual_seed(0)
    model = Transformer(args).double()
    model.init_weights()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def random_tokens(args: TransformerArgs, rows: int = 2) -> torch.Tensor:
    return torch.randint(
        args.vocab_size, (rows, SEQ_LEN), generator=torch.Generator().manual_seed(1)
    )


@pytest.mark.parametrize(("name", "flavor"), PUBLISHED)
def test_parameter_count_matches_published(name: str, flavor: str) -> None:
    spec, args = find_model(name, flavor)
    with torch.device("meta"):
        model = spec.model_cls(args)
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name, flavor]


def test_every_published_flavor_has_a_count() -> None:
    flavors = {(name, flavor) for name, spec in MODEL_SPECS.items() for flavor in spec.flavors}
    # Those in millions are our own.
    own = {(n, f) for n, f in flavors if f.startswith("debugmodel") or f.endswith("M")}
    assert flavors - own == set(PUBLISHED)


@torch.no_grad()
@pytest.mark.parametrize(("name", "flavor"), DEBUG)
def test_packed_documents_match_separate_documents(name: str, flavor: str) -> None:
    model = small_model(name, flavor)
    tokens = random_tokens(model.args)
    # Rows have different boundaries, so a mask that mixes them up fails.
    lengths_of_rows = [DOCUMENTS, DOCUMENTS[::-1]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths_of_rows])
    document_ids = torch.stack(
        [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths_of_rows]
    )
    packed = model(tokens, positions, document_ids)
    for row, lengths in enumerate(lengths_of_rows):
        alone = [model(part[None])[0] for part in tokens[row].split(lengths)]
        torch.testing.assert_close(packed[row], torch.cat(alone), rtol=0, atol=1e-12)
    assert not torch.allclose(model(tokens, positions), packed, atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize(("name", "flavor"), DEBUG)
def test_only_relative_positions_matter(name: str, flavor: str) -> None:
    model = small_model(name, flavor)
    tokens = random_tokens(model.args)
    positions = torch.arange(SEQ_LEN).expand_as(tokens)
    logits = model(tokens)
    assert torch.equal(model(tokens, positions), logits)
    torch.testing.assert_close(model(tokens, positions + SEQ_LEN), logits, rtol=0, atol=1e-12)
    assert not torch.allclose(model(tokens, 2 * positions), logits, atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("name", "flavor"), DEBUG)
def test_logits_depend_on_earlier_tokens_only(name: str, flavor: str, packed: bool) -> None:
    model = small_model(name, flavor)
    tokens = random_tokens(model.args)
    changed = tokens.clone()
    at = SEQ_LEN // 2
    changed[:, at] = (tokens[:, at] + 1) % model.args.vocab_size
    document_ids = torch.zeros_like(tokens) if packed else None
    before, after = (model(t, document_ids=document_ids) for t in (tokens, changed))
    differs = (before != after).any(dim=-1).all(dim=0)
    assert not (before[:, :at] != after[:, :at]).any()
    assert differs[at:].all()


@pytest.mark.parametrize("documents", [False, True])
def test_unshared_heads_attend_as_shared_ones(documents: bool) -> None:
    """As on GPUs in float32."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 8, h, 4, dtype=torch.float64, requires_grad=True) for h in (6, 2, 2))
    ids = torch.arange(8).expand(2, 8) // 3 if documents else None
    inner, weight = InnerAttention(), torch.randn(2, 8, 6, 4, dtype=torch.float64)
    found = []
    for keys, values in ((k, v), unshared_heads(q, k, v)):
        out = inner(q, keys, values, ids)
        found.append((out, *torch.autograd.grad((out * weight).sum(), (q, k, v))))
    assert unshared_heads(q, k, v)[0].shape == q.shape
    torch.testing.assert_close(*found)
    half = k.bfloat16(), v.bfloat16()
    assert unshared_heads(q.bfloat16(), *half) == half
