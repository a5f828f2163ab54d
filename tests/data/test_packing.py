"""best_fit: every document once, whole if it fits, no labels across documents."""

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
from data.loader import LoaderConfig, MicrobatchLoader
from data.mixture import Mixture
from data.packing import WINDOW_SEQUENCES, best_fit
from data.sources import ShuffledDocuments
from runtime.labels import IGNORE_INDEX
from tests.lib.corpora import corpora, source
from tests.lib.loaders import UNIQUE

SEQ_LEN = 24


def build(
    mixture: Mixture, dp_degree: int, n_rows: int, seq_len: int = SEQ_LEN, packing: str = "best_fit"
) -> list[MicrobatchLoader]:
    return [
        MicrobatchLoader(
            mixture,
            UNIQUE,
            LoaderConfig(
                vocab_size=UNIQUE.n_vocab,
                seq_len=seq_len,
                microbatch_size=1,
                global_batch_size=n_rows,
                dp_rank=dp_rank,
                dp_degree=dp_degree,
                document_mask=True,
                prefetch=3,
                packing=packing,
            ),
        )
        for dp_rank in range(dp_degree)
    ]


def take(loaders: list[MicrobatchLoader]) -> list[torch.Tensor]:
    """Return tokens, labels, positions and document ids of the next global batch."""
    of_ranks = [list(islice(loader, loader.n_microbatches)) for loader in loaders]
    for loader, batches in zip(loaders, of_ranks, strict=True):
        loader.commit(batches)
    in_order = [batch for step in zip(*of_ranks, strict=True) for batch in step]
    return [torch.cat([batch[i] for batch in in_order]) for i in range(4)]


def ending_mixture(seed: int, n_sources: int) -> tuple[Mixture, list[list[int]]]:
    """Build a mixture that does not repeat; return it and its documents as ids."""
    texts = corpora(random.Random(seed), n_sources, 60)
    mixture = Mixture([source(t, repeat=False) for t in texts], [1.0] * n_sources)
    ids = [[UNIQUE.bos_id, *map(int, text.split()), UNIQUE.eos_id] for t in texts for text in t]
    return mixture, [document for document in ids if len(document) > 2]


@pytest.mark.parametrize("seed", range(6))
def test_every_token_is_a_label_once_within_its_document(seed: int) -> None:
    mixture, documents = ending_mixture(seed, n_sources=1 + seed % 3)
    successors = {pair for ids in documents for pair in pairwise(ids)}
    document_of = {token: i for i, ids in enumerate(documents) for token in ids[1:-1]}
    loaders, counts = build(mixture, 2, 4), Counter()
    n_steps, n_chunks = 0, Counter()
    while True:
        tokens, labels, positions, numbers = take(loaders)
        valid = labels != IGNORE_INDEX
        if not valid.any():
            break
        n_steps += 1
        counts.update(labels[valid].tolist())
        pairs = zip(tokens[valid].tolist(), labels[valid].tolist(), strict=True)
        assert set(pairs) <= successors
        for row in range(len(tokens)):
            for number in set(numbers[row][valid[row]].tolist()):
                mine = numbers[row] == number
                (document,) = {
                    document_of[t] for t in tokens[row][mine].tolist() if t in document_of
                } or {-1}
                assert positions[row][mine].tolist() == list(range(int(mine.sum())))
                n_chunks[document] += 1
    want = Counter(token for ids in documents for token in ids[1:])
    assert counts == want
    assert n_steps > 1
    for document, ids in enumerate(documents):
        if len(ids) > 3:
            assert n_chunks[document] == -(-(len(ids) - 1) // SEQ_LEN), "split though it fits"


@pytest.mark.parametrize("seed", range(6))
def test_resume_on_other_ranks_continues_the_same_sequences(seed: int) -> None:
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
    assert saved["data"]["rows"]["0"]["taken"] > [30, 30], "too few windows and epochs"


def test_window_of_more_sequences_than_its_tokens_fill_resumes() -> None:
    """Documents over half a sequence get one each; short ones, of any of them, fill the first."""
    texts = [" ".join(["7"] * (2 if i % 9 == 0 else 12)) for i in range(1000)]
    mixture = Mixture([source(texts)])
    (reference,), most = build(mixture, 1, 1), 0
    (loader,) = build(mixture, 1, 1)
    for step in range(300):
        if step % 50 == 0:
            saved = loader.state_dict()
            (loader,) = build(mixture, 1, 1)
            loader.load_state_dict(saved)
        for got, want in zip(take([loader]), take([reference]), strict=True):
            assert torch.equal(got, want), f"step {step}"
        most = max(most, reference.state_dict()["rows"]["0"]["token"])
    assert most > WINDOW_SEQUENCES


def test_padding_is_below_two_percent() -> None:
    generator = random.Random(0)
    texts = [" ".join(["7"] * int(generator.lognormvariate(3.0, 1.0) + 1)) for _ in range(4000)]
    (loader,) = build(Mixture([source(texts)]), 1, 1, seq_len=256)
    labels = torch.cat([take([loader])[1] for _ in range(256)])
    assert (labels == IGNORE_INDEX).float().mean() < 0.02


def test_padding_repeats_the_tokens_of_its_sequence() -> None:
    (loader,) = build(Mixture([source(["5 6", "7 8 9 10"])]), 1, 1, seq_len=7)
    for _ in range(4):
        tokens, labels = (part[0].tolist() for part in take([loader])[:2])
        filled = labels.index(IGNORE_INDEX)
        assert labels[filled:] == [IGNORE_INDEX] * (7 - filled)
        assert filled >= 3
        assert tokens[filled:] == (tokens[:filled] * 2)[: 7 - filled]


@pytest.mark.parametrize("capacity", [1, 7, 30])
def test_bins_hold_each_size_once_within_capacity(capacity: int) -> None:
    generator = random.Random(capacity)
    sizes = [generator.randint(1, capacity) for _ in range(500)]
    bins = best_fit(sizes, capacity)
    assert sorted(index for indices in bins for index in indices) == list(range(500))
    assert max(sum(sizes[i] for i in indices) for indices in bins) <= capacity
    # Best fit decreasing needs at most 11/9 OPT + 4 bins (D. S. Johnson, 1973).
    assert len(bins) <= 11 / 9 * (-(-sum(sizes) // capacity)) + 4
    assert [indices[0] for indices in bins] == sorted(indices[0] for indices in bins)


@pytest.mark.parametrize("capacity", [7, 30])
def test_each_size_goes_to_the_fullest_bin_with_room(capacity: int) -> None:
    generator = random.Random(capacity)
    sizes = [generator.randint(1, capacity) for _ in range(500)]
    bins: list[list[int]] = []
    for index in sorted(range(500), key=lambda i: -sizes[i]):
        filled = [sum(sizes[i] for i in indices) for indices in bins]
        room = [n for n, size in enumerate(filled) if size + sizes[index] <= capacity]
        if room:
            bins[max(room, key=lambda n: filled[n])].append(index)
        else:
            bins.append([index])
    assert best_fit(sizes, capacity) == sorted(sorted(indices) for indices in bins)


@pytest.mark.parametrize("changes", [{"packing": "concat"}, {"seq_len": 12}])
def test_resume_with_other_packing_is_rejected(changes: dict[str, object]) -> None:
    mixture, _ = ending_mixture(0, 1)
    (before,), (after,) = build(mixture, 1, 1), build(mixture, 1, 1, **changes)
    with pytest.raises(ConfigError, match=r"data\.packing"):
        after.load_state_dict(before.state_dict())


def test_consumed_counts_whole_documents() -> None:
    (loader,) = build(Mixture([source(["7 8 9"])]), 1, 1)
    for _ in range(70):
        take([loader])
        ((n_documents, n_tokens),) = loader.consumed()
        assert n_tokens == 5 * n_documents
    assert n_documents > 0


def test_documents_of_one_token_do_not_end_the_data() -> None:
    """Use more of them than fit a window."""
    ids = [np.array([5])] * 5000 + [np.array([6, 7, 8])]
    indices = np.arange(len(ids))
    documents = ShuffledDocuments(ids, indices, seed=0, name="training", fingerprint="")
    (loader,) = build(Mixture([documents]), 1, 1)
    for _ in range(20):
        labels = take([loader])[1]
        assert set(labels[labels != IGNORE_INDEX].tolist()) == {7, 8}
