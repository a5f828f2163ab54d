"""Mixtures against a reference of plain lists: weights, order, resume on other ranks, end."""

import gzip
import json
import random
from collections import Counter
from collections.abc import Iterator
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
import zstandard

from checkpoint.checkpointer import merge
from config import ConfigError
from config.job_config import Data, DataSource
from data.loader import LoaderConfig, MicrobatchLoader
from data.mixture import Mixture, RowState
from data.sources import build_sources
from runtime.labels import IGNORE_INDEX
from tests.lib.corpora import corpora, source
from tests.lib.loaders import UNIQUE

Loaders = list[MicrobatchLoader]


def build(mixture: Mixture, dp_degree: int, local: int, *, n_rows: int, seq_len: int) -> Loaders:
    return [
        MicrobatchLoader(
            mixture,
            UNIQUE,
            LoaderConfig(
                vocab_size=UNIQUE.n_vocab,
                seq_len=seq_len,
                microbatch_size=local,
                global_batch_size=n_rows,
                dp_rank=dp_rank,
                dp_degree=dp_degree,
                document_mask=True,
                prefetch=3,
            ),
        )
        for dp_rank in range(dp_degree)
    ]


def take(loaders: Loaders) -> tuple[torch.Tensor, torch.Tensor]:
    """Take and commit one step; return tokens and labels of the global batch."""
    of_ranks = [list(islice(loader, loader.n_microbatches)) for loader in loaders]
    for loader, batches in zip(loaders, of_ranks, strict=True):
        loader.commit(batches)
    in_order = [batch for step in zip(*of_ranks, strict=True) for batch in step]
    return tuple(torch.cat([getattr(b, name) for b in in_order]) for name in ("tokens", "labels"))


def row_tokens(mixture: Mixture, row: int, n_rows: int, length: int) -> tuple[list[int], list[int]]:
    """The first tokens of a row, and their number per source."""
    streams = [s.documents(row, n_rows, 0) for s in mixture.sources]
    seen, count, tokens = [0] * len(streams), [0] * len(streams), []
    live = set(range(len(streams)))
    # Of the first document that is read of each source.
    first = [
        len(UNIQUE.encode(text)) + 2 if (text := next(s.documents(row, n_rows, 0), None)) else 0
        for s in mixture.sources
    ]
    while len(tokens) < length and live:
        # Other tests below check the choice itself.
        known = dict(enumerate(first if any(count) else []))
        chosen = mixture.choose(row, count, seen, sorted(live), known)
        text = next(streams[chosen], None)
        if text is None:
            live.remove(chosen)
            continue
        count[chosen] += 1
        if text:
            ids = [UNIQUE.bos_id, *UNIQUE.encode(text), UNIQUE.eos_id]
            seen[chosen] += len(ids)
            tokens += ids
    return tokens, seen


@pytest.mark.parametrize("seed", range(12))
def test_random_mixtures_ranks_and_restarts_match_reference(seed: int) -> None:
    generator = random.Random(seed)
    n_sources, n_rows = generator.randint(1, 4), generator.choice([4, 6, 7, 8, 10])
    texts = corpora(generator, n_sources, n_documents=generator.choice([9, 40]))
    weights = [generator.choice([0.3, 1.0, 2.5]) for _ in texts]
    repeats = [generator.random() < 0.6 for _ in texts]
    mixture = Mixture([source(t, repeat=r) for t, r in zip(texts, repeats, strict=True)], weights)
    seq_len, n_steps = generator.choice([4, 16]), 30
    want = [row_tokens(mixture, row, n_rows, n_steps * seq_len + 1)[0] for row in range(n_rows)]
    saved = None
    for step in range(n_steps):
        if step == 0 or generator.random() < 0.3:
            # Restart on another number of ranks.
            dp_degree = generator.choice([d for d in range(1, 9) if n_rows % d == 0])
            local = generator.choice([m for m in (1, 2) if n_rows % (dp_degree * m) == 0])
            loaders = build(mixture, dp_degree, local, n_rows=n_rows, seq_len=seq_len)
            for loader in loaders if saved else []:
                loader.load_state_dict(saved["data"])
        tokens, labels = take(loaders)
        for row in range(n_rows):
            begin = step * seq_len
            valid = want[row][begin + 1 : begin + seq_len + 1]
            assert labels[row].tolist() == valid + [IGNORE_INDEX] * (seq_len - len(valid))
            real = want[row][begin : begin + seq_len]
            if valid:
                assert tokens[row, : len(real)].tolist() == real
        states = [{"data": loader.state_dict()} for loader in loaders]
        saved = json.loads(json.dumps(reduce(merge, states)))


def test_weights_count_tokens_not_documents() -> None:
    generator = random.Random(0)
    short = [" ".join(["7"] * generator.randint(1, 5)) for _ in range(3000)]
    long = [" ".join(["8"] * generator.randint(50, 400)) for _ in range(300)]
    mixture = Mixture([source(short), source(long)], [3.0, 1.0])
    (loader,) = build(mixture, 1, 4, n_rows=4, seq_len=500)
    for _ in range(40):
        take([loader])
    (_, of_short), (_, of_long) = loader.consumed()
    assert of_short / (of_short + of_long) == pytest.approx(0.75, abs=0.01)
    # All consumed tokens count, also those of unfinished documents.
    assert of_short + of_long == 40 * 4 * 500
    # On every row, within a few documents.
    for row in range(4):
        for length in (5000, 20_000):
            _, (first, second) = row_tokens(mixture, row, 4, length)
            assert abs(first - 3 * second) <= 3 * 6 * 402


@pytest.mark.parametrize("weights", [[0.91] + [0.01] * 9, [3.0, 1.0], [1.0, 1.0, 1.0]])
@pytest.mark.parametrize(("n_tokens", "n_steps"), [(400, 10), (8000, 40)])
def test_every_global_batch_follows_the_weights(
    weights: list[float], n_tokens: int, n_steps: int
) -> None:
    """Rows must not all read one source, and then all another."""
    sources = [source([" ".join([str(i + 2)] * n_tokens)]) for i in range(len(weights))]
    mixture, n_rows, seq_len = Mixture(sources, weights), 128, 1000
    (loader,) = build(mixture, 1, n_rows, n_rows=n_rows, seq_len=seq_len)
    for _ in range(n_steps):
        tokens, _ = take([loader])
        share = (tokens == 2).sum() / (tokens > 1).sum()
        want = weights[0] / sum(weights)
        # Four standard deviations of a random choice per row.
        assert abs(share - want) < 4 * (want * (1 - want) / n_rows) ** 0.5


def test_global_batches_follow_the_weights_with_documents_of_any_length() -> None:
    """Rows must not all begin a long document after their first short one."""
    generator = random.Random(0)
    short = [" ".join(["7"] * generator.randint(10, 40)) for _ in range(500)]
    long = [" ".join(["8"] * round(generator.expovariate(1 / 800))) for _ in range(2000)]
    mixture, n_rows, seq_len = Mixture([source(short), source(long)], [3.0, 1.0]), 256, 20
    (loader,) = build(mixture, 1, n_rows, n_rows=n_rows, seq_len=seq_len)
    for _ in range(100):
        tokens, _ = take([loader])
        share = (tokens == 7).sum() / ((tokens == 7) | (tokens == 8)).sum()
        assert 0.6 < share < 0.9


def test_rows_start_with_sources_by_weight() -> None:
    mixture = Mixture([source(["1"]), source(["2"]), source(["3"])], [5.0, 3.0, 2.0])
    zeros = (0, 0, 0)
    starts = Counter(mixture.choose(row, zeros, zeros, (0, 1, 2), {}) for row in range(1000))
    assert [starts[i] for i in range(3)] == pytest.approx([500, 300, 200], abs=60)


def test_head_start_scales_with_the_sources_mean_length() -> None:
    mixture = Mixture([source(["1"]), source(["2"])], [1.0, 1.0])
    with patch.object(Mixture, "_head_start", return_value=1.0):
        # 31 documents of one token against one of 30: 31 + 1 < 30 + 30.
        assert mixture.choose(0, [31, 1], [31, 30], [0, 1], {}) == 0
        # The second was not read yet.
        assert mixture.choose(0, [31, 0], [31, 0], [0, 1], {}) == 1
        assert mixture.choose(0, [31, 0], [31, 0], [0, 1], {1: 30}) == 1
        assert mixture.choose(0, [31, 0], [31, 0], [0, 1], {1: 60}) == 0


def test_every_token_of_ending_sources_is_a_label_once() -> None:
    texts = corpora(random.Random(1), 3, 100)
    mixture = Mixture([source(t, repeat=False) for t in texts], [1.0, 2.0, 0.5])
    loaders, counts, n_rows = build(mixture, 2, 2, n_rows=8, seq_len=16), Counter(), 8
    firsts: list[int] = []
    for step in range(1000):
        tokens, labels = take(loaders)
        valid = labels[labels != IGNORE_INDEX]
        if len(valid) == 0:
            break
        firsts += tokens[:, 0].tolist() if step == 0 else []
        counts.update(valid.tolist())
    assert step > 5
    want = Counter(int(word) for t in texts for text in t for word in text.split())
    ends = sum(1 for t in texts for text in t if text)
    assert firsts == [UNIQUE.bos_id] * n_rows
    assert counts == want + Counter({UNIQUE.eos_id: ends, UNIQUE.bos_id: ends - n_rows})
    # The loader stays at the end, also after resuming there.
    states = [loader.state_dict() for loader in loaders]
    again = build(mixture, 1, 8, n_rows=8, seq_len=16)
    again[0].load_state_dict(reduce(merge, states))
    assert (take(again)[1] == IGNORE_INDEX).all()


def test_padding_belongs_to_no_document() -> None:
    mixture = Mixture([source(["5 6 7"], repeat=False)])
    (loader,) = build(mixture, 1, 1, n_rows=1, seq_len=12)
    batch = next(loader)
    assert batch.labels[0].tolist() == [5, 6, 7, UNIQUE.eos_id] + [IGNORE_INDEX] * 8
    assert batch.document_ids is not None
    assert batch.document_ids[0].tolist() == [0] * 5 + [1] * 7
    # Its own tokens again, because equal ones would all be routed to the same experts.
    assert batch.tokens[0, 5:].tolist() == [UNIQUE.bos_id, 5, 6, 7, UNIQUE.eos_id, UNIQUE.bos_id, 5]
    batch = next(loader)
    # Uninitialized memory might contain ids out of range.
    assert batch.tokens[0].tolist() == [UNIQUE.eos_id] * 12
    assert (batch.labels == IGNORE_INDEX).all()


@pytest.mark.parametrize("weights", [[1.0, 2.0], [2.0, 1.0]])
def test_resume_with_other_weights_is_rejected(weights: list[float]) -> None:
    sources = [source(["1 2"]), source(["3 4"])]
    (before,) = build(Mixture(sources, [1.0, 1.0]), 1, 1, n_rows=1, seq_len=4)
    (after,) = build(Mixture(sources, weights), 1, 1, n_rows=1, seq_len=4)
    with pytest.raises(ConfigError, match=r"documents of \[data\], their weights"):
        after.load_state_dict(before.state_dict())


def test_row_state_survives_json() -> None:
    state = RowState((1, 2), (30, 40), 6, 1, 5)
    assert RowState.from_json(json.loads(json.dumps(state.as_json()))) == state
    assert state.position == (3, 5)


class Ids:
    """Source of token ids with the same three documents for each row."""

    description = fingerprint = "ids"
    resumable_fingerprints = frozenset[str]()

    def __init__(self, *last: int, dtype: str) -> None:
        self._documents = [np.array(ids, dtype=dtype) for ids in ([5], [5, 6], last)]

    def documents(self, row: int, n_rows: int, start: int) -> Iterator[np.ndarray]:
        return iter(self._documents[start:])

    def place(self, row: int, n_rows: int, number: int) -> str:
        return f"ids.bin, document {number}"


@pytest.mark.parametrize(
    ("bad", "dtype"), [(20, "uint16"), (20, "int32"), (2**31, "uint32"), (-1, "int32"), (-1, "i8")]
)
def test_id_outside_the_vocabulary_is_an_error(bad: int, dtype: str) -> None:
    def read_all(last: int) -> list[int]:
        mixture = cast(Any, Mixture([cast(Any, Ids(1, last, 2, dtype=dtype))]))
        loader = MicrobatchLoader(mixture, UNIQUE, LoaderConfig(
vocab_size=20,
seq_len=5,
microbatch_size=1,
global_batch_size=1,
dp_rank=0,
dp_degree=1,
document_mask=False,
prefetch=1,
))  # fmt: skip
        batch = next(loader)
        return [*batch.tokens[0].tolist(), int(batch.labels[0, -1])]

    assert read_all(19) == [5, 5, 6, 1, 19, 2]
    with pytest.raises(
        ValueError, match=r"ids: document 2 of row 0 \(ids.bin, document 2\) has"
    ) as error:
        read_all(bad)
    assert f" has the id {bad}; model.vocab_size is 20" in str(error.value)


BAD_LINES = {
    3: b'{"text": "un',
    5: b'{"text": null}',
    8: b'{"other": "5"}',
    11: b'{"text": "caf\xe9"}',
    12: b"[1]",
    15: b'{"text": 7}',
}


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_bad_records_are_skipped_and_counted_on_any_ranks(tmp_path: Path, suffix: str) -> None:
    lines = [BAD_LINES.get(i, b'{"text": "%d %d"}' % (2 * i, 2 * i + 1)) for i in range(1, 21)]
    pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(Path(suffix).suffix, bytes)
    (tmp_path / f"a{suffix}").write_bytes(pack(b"\n".join(lines) + b"\n"))
    path = {"source": "files", "path": str(tmp_path / "*"), "validation_percent": 0.0}
    with pytest.raises(ValueError, match=rf"a{suffix}, line 3, byte 32: "):
        build_sources(Data(**path), 0)
    (plain,), _ = build_sources(Data(**path, on_bad_record="skip"), 0)
    for dp_degree in (1, 2, 4):
        loaders = build(Mixture([plain]), dp_degree, 1, n_rows=4, seq_len=4)
        counts: Counter[int] = Counter()
        # Each row has 5 of the 20 records in an epoch; the next epoch starts with other tokens.
        while min(sum(state.taken) for x in loaders for state in x._committed.values()) < 6:
            counts.update(take(loaders)[1].flatten().tolist())
        assert sum(loader.n_bad for loader in loaders) >= len(BAD_LINES)
        read = {2 * i for i in range(1, 21) if i not in BAD_LINES}
        assert read <= set(counts)
        assert set(counts) <= read | {n + 1 for n in read} | {UNIQUE.bos_id, UNIQUE.eos_id}
    # Without repeat, a run reads each record once.
    config = Data(
        on_bad_record="skip",
        validation_percent=0.0,
        sources=[DataSource(path=path["path"], repeat=False)],
    )
    n_bad = set()
    for dp_degree in (1, 2, 4):
        loaders = build(Mixture(build_sources(config, 0)[0]), dp_degree, 1, n_rows=4, seq_len=4)
        while (take(loaders)[1] != IGNORE_INDEX).any():
            pass
        n_bad.add(sum(loader.n_bad for loader in loaders))
        again = build(Mixture(build_sources(config, 0)[0]), dp_degree, 1, n_rows=4, seq_len=4)
        states = reduce(merge, [loader.state_dict() for loader in loaders])
        for loader in again:
            loader.load_state_dict(states)
        assert sum(loader.n_bad for loader in again) == len(BAD_LINES)
        assert (take(again)[1] == IGNORE_INDEX).all()
    assert n_bad == {len(BAD_LINES)}


def loader_of_text(path: Path, packing: str, *, repeat: bool) -> MicrobatchLoader:
    """Loader that skips bad records of the files ``path``/*."""
    source = DataSource(path=str(path / "*"), repeat=repeat)
    config = Data(on_bad_record="skip", validation_percent=0.0, sources=[source])
    return MicrobatchLoader(Mixture(build_sources(config, 0)[0]), UNIQUE, LoaderConfig(
vocab_size=UNIQUE.n_vocab,
seq_len=4,
microbatch_size=2,
global_batch_size=2,
dp_rank=0,
dp_degree=1,
document_mask=False,
prefetch=1,
packing=packing,
))  # fmt: skip


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_only_bad_records_are_counted(tmp_path: Path, packing: str) -> None:
    for i in range(10):
        (tmp_path / f"{i}.txt").write_bytes(b"caf\xe9")
    loader = loader_of_text(tmp_path, packing, repeat=False)
    assert (next(loader).labels == IGNORE_INDEX).all()
    assert loader.n_bad == 10


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_bad_records_are_counted_when_they_are_read(tmp_path: Path, packing: str) -> None:
    """Best fit reads them long before its window of documents ends."""
    for i in range(8):
        (tmp_path / f"{i}.txt").write_bytes(b"caf\xe9" if i % 4 == 0 else b"%d %d" % (i, i))
    loader = loader_of_text(tmp_path, packing, repeat=True)
    counts = list[int]()
    for _ in range(20):
        batch = next(loader)
        loader.commit([batch])
        counts.append(loader.n_bad)
    assert counts == sorted(counts)
    assert counts[7] > 2
    again = loader_of_text(tmp_path, packing, repeat=True)
    again.load_state_dict(loader.state_dict())
    next(loader), next(again)
    assert again.n_bad == loader.n_bad


@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("keeps", [0.0, 0.5, 0.99])
def test_truncated_file_is_named(tmp_path: Path, policy: str, suffix: str, keeps: float) -> None:
    """Includes truncation between two lines, which its reader reports as the end."""
    path = tmp_path / f"a.jsonl{suffix}"
    lines = [b'{"text": "%d"}\n' % random.Random(i).getrandbits(200) for i in range(2000)]
    compressor = zstandard.ZstdCompressor().compressobj() if suffix == ".zst" else None
    if compressor is None:
        whole = gzip.compress(b"".join(lines))
    else:
        parts = [compressor.compress(line) + compressor.flush(1) for line in lines]
        whole = b"".join(parts) + compressor.flush()
    path.write_bytes(whole[: int(len(whole) * keeps)] or whole[:20])
    config = Data(source="files", path=str(path), on_bad_record=policy)
    with pytest.raises(
        ValueError, match=rf"a\.jsonl{suffix}, after byte \d+ of its text: truncated or"
    ):
        build_sources(config, 0)
    path.write_bytes(whole)
    (whole_source,), _ = build_sources(config.model_copy(update={"validation_percent": 0.0}), 0)
    assert whole_source.n_documents == 2000


def test_bad_record_policy_does_not_change_the_documents(tmp_path: Path) -> None:
    lines = ['{"text": "a"}', "", '{"text": "b"}', "  ", '{"text": ""}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    config = Data(source="files", path=str(tmp_path / "*"), validation_percent=0.0)
    fingerprints = set()
    for policy in ("error", "skip"):
        (found,), _ = build_sources(config.model_copy(update={"on_bad_record": policy}), 0)
        assert found.n_documents == 3
        fingerprints.add(found.fingerprint)
    assert len(fingerprints) == 1
