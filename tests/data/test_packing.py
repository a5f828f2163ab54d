"""Best fit: every document once, whole where it fits, nothing predicted across documents."""

import json
import random
from collections import Counter
from functools import reduce
from itertools import islice, pairwise

import numpy as np
import pytest
import torch

from checkpoint.checkpointer import merge
from config import ConfigError
from data.loader import BatchLoader
from data.mixture import Mixture
from data.packing import best_fit
from data.sources import ShuffledDocuments
from runtime.labels import IGNORED
from tests.data.test_loader import UNIQUE
from tests.data.test_mixture import corpora, source

SEQ_LEN = 24


def build(
    mixture: Mixture, degree: int, n_rows: int, seq_len: int = SEQ_LEN, packing: str = "best_fit"
) -> list[BatchLoader]:
    return [
        BatchLoader(
            mixture, UNIQUE, vocab_size=UNIQUE.n_vocab, seq_len=seq_len, local_batch_size=1,
            global_batch_size=n_rows, rank=rank, degree=degree, document_mask=True, prefetch=3,
            packing=packing,
        )
        for rank in range(degree)
    ]  # fmt: skip


def take(loaders: list[BatchLoader]) -> list[torch.Tensor]:
    """Tokens, labels, positions and document ids of a global batch."""
    of_ranks = [list(islice(loader, loader.microbatches)) for loader in loaders]
    for loader, batches in zip(loaders, of_ranks, strict=True):
        loader.commit(batches)
    in_order = [batch for step in zip(*of_ranks, strict=True) for batch in step]
    return [torch.cat([batch[i] for batch in in_order]) for i in range(4)]


def texts_of(seed: int, n_sources: int) -> tuple[Mixture, list[list[int]]]:
    """A mixture that ends, and all its documents as ids."""
    texts = corpora(random.Random(seed), n_sources, 60)
    mixture = Mixture([source(t, repeat=False) for t in texts], [1.0] * n_sources)
    ids = [[UNIQUE.bos_id, *map(int, text.split()), UNIQUE.eos_id] for t in texts for text in t]
    return mixture, [document for document in ids if len(document) > 2]


@pytest.mark.parametrize("seed", range(6))
def test_every_token_has_its_own_document_and_is_predicted_once(seed: int) -> None:
    mixture, documents = texts_of(seed, n_sources=1 + seed % 3)
    follows = {pair for ids in documents for pair in pairwise(ids)}
    home = {token: i for i, ids in enumerate(documents) for token in ids[1:-1]}
    loaders, ledger = build(mixture, 2, 4), Counter()
    n_steps, n_cut = 0, Counter()
    while True:
        tokens, labels, positions, numbers = take(loaders)
        valid = labels != IGNORED
        if not valid.any():
            break
        n_steps += 1
        ledger.update(labels[valid].tolist())
        pairs = zip(tokens[valid].tolist(), labels[valid].tolist(), strict=True)
        assert set(pairs) <= follows
        for row in range(len(tokens)):
            for number in set(numbers[row][valid[row]].tolist()):
                mine = numbers[row] == number
                (place,) = {home[t] for t in tokens[row][mine].tolist() if t in home} or {-1}
                assert positions[row][mine].tolist() == list(range(int(mine.sum())))
                n_cut[place] += 1
    want = Counter(token for ids in documents for token in ids[1:])
    assert ledger == want
    assert n_steps > 1
    for place, ids in enumerate(documents):
        if len(ids) > 3:
            assert n_cut[place] == -(-(len(ids) - 1) // SEQ_LEN), "cut though it fits"


@pytest.mark.parametrize("seed", range(6))
def test_resume_on_other_ranks_goes_on_with_the_same_sequences(seed: int) -> None:
    generator = random.Random(seed)
    texts = corpora(generator, 2, 30)
    mixture = Mixture([source(t) for t in texts], [1.0, 3.0])
    reference, saved = build(mixture, 1, 4), None
    for step in range(150):
        if step == 0 or generator.random() < 0.1:
            loaders = build(mixture, generator.choice([1, 2, 4]), 4)
            for loader in loaders if saved else []:
                loader.load_state_dict(saved["data"])
        for got, want in zip(take(loaders), take(reference), strict=True):
            assert torch.equal(got, want), f"step {step}"
        states = [{"data": loader.state_dict()} for loader in loaders]
        saved = json.loads(json.dumps(reduce(merge, states)))
    assert saved["data"]["rows"]["0"]["taken"] > [30, 30], "windows and epochs end on the way"


def test_little_is_filled() -> None:
    generator = random.Random(0)
    texts = [" ".join(["7"] * int(generator.lognormvariate(3.0, 1.0) + 1)) for _ in range(4000)]
    (loader,) = build(Mixture([source(texts)]), 1, 1, seq_len=256)
    labels = torch.cat([take([loader])[1] for _ in range(256)])
    assert (labels == IGNORED).float().mean() < 0.02


@pytest.mark.parametrize("capacity", [1, 7, 30])
def test_bins_hold_each_once_and_no_more_than_fits(capacity: int) -> None:
    generator = random.Random(capacity)
    sizes = [generator.randint(1, capacity) for _ in range(500)]
    bins = best_fit(sizes, capacity)
    assert sorted(index for indices in bins for index in indices) == list(range(500))
    assert max(sum(sizes[i] for i in indices) for indices in bins) <= capacity
    # Best fit decreasing needs at most 11/9 of the best (D. S. Johnson, 1973), and so of the sum.
    assert len(bins) <= 11 / 9 * (-(-sum(sizes) // capacity)) + 4
    assert [indices[0] for indices in bins] == sorted(indices[0] for indices in bins)


@pytest.mark.parametrize("changes", [{"packing": "concat"}, {"seq_len": 12}])
def test_what_is_packed_otherwise_is_refused(changes: dict[str, object]) -> None:
    mixture, _ = texts_of(0, 1)
    (before,), (after,) = build(mixture, 1, 1), build(mixture, 1, 1, **changes)
    with pytest.raises(ConfigError, match=r"data\.packing"):
        after.load_state_dict(before.state_dict())


def test_what_is_consumed_is_whole_documents() -> None:
    (loader,) = build(Mixture([source(["7 8 9"])]), 1, 1)
    for _ in range(70):
        take([loader])
        ((n_documents, n_tokens),) = loader.consumed()
        assert n_tokens == 5 * n_documents
    assert n_documents > 0


def test_documents_of_one_token_are_not_the_end() -> None:
    """More of them than a window has."""
    alone = [np.array([5])] * 5000 + [np.array([6, 7, 8])]
    indices = np.arange(len(alone))
    documents = ShuffledDocuments(alone, indices, seed=0, name="training", fingerprint="")
    (loader,) = build(Mixture([documents]), 1, 1)
    for _ in range(20):
        labels = take([loader])[1]
        assert set(labels[labels != IGNORED].tolist()) == {7, 8}
