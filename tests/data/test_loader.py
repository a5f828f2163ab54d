"""The loader against a truth without batches, threads and ranks: each row's tokens as one list."""

import gc
import json
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from functools import reduce
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoint.checkpointer import merge
from config.job_config import Data
from data.loader import Batch, BatchLoader
from data.mixture import Mixture
from data.sources import ShuffledDocuments, Source, build_sources
from data.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).parents[2]
SEQ_LEN, ROWS = 16, 8
LAYOUTS = [(1, 8), (1, 2), (2, 4), (2, 1), (4, 2), (4, 1)]  # (degree, local_batch_size)

# No two documents share a token, so that a ledger can tell what was read and how often.
UNIQUE = Tokenizer(
    encode=lambda text: np.array([int(word) for word in text.split()], np.int64),
    decode=lambda ids: " ".join(map(str, ids)),
    n_vocab=1 << 20,
    bos_id=0,
    eos_id=1,
    fingerprint="unique",
)


def documents(count: int, longest: int, seed: int = 0) -> list[str]:
    """Texts of 0 to ``longest`` tokens of their own."""
    lengths = np.random.default_rng(seed).integers(0, longest, count, endpoint=True)
    ends = np.cumsum(lengths) + 2
    return [" ".join(map(str, range(e - n, e))) for e, n in zip(ends, lengths, strict=True)]


def shuffled(texts: list[str], fingerprint: str = "texts") -> ShuffledDocuments:
    return ShuffledDocuments(
        texts, np.arange(len(texts)), seed=5, name="training", fingerprint=fingerprint
    )


def build(source: Source, degree: int = 1, rank: int = 0, **changes: Any) -> BatchLoader:
    keywords: dict[str, Any] = {
        "tokenizer": UNIQUE,
        "vocab_size": UNIQUE.n_vocab,
        "seq_len": SEQ_LEN,
        "local_batch_size": 1,
        "global_batch_size": ROWS,
        "document_mask": False,
        "prefetch": 2,
    }
    return BatchLoader(Mixture([source]), rank=rank, degree=degree, **(keywords | changes))


def build_all(source: Source, degree: int, local: int, **changes: Any) -> list[BatchLoader]:
    return [
        build(source, degree, rank, local_batch_size=local, **changes) for rank in range(degree)
    ]


def take_step(loaders: list[BatchLoader], n_rows: int = ROWS) -> Batch:
    """One global batch, put together from all ranks' microbatches by the order of its rows."""
    count = loaders[0].microbatches * n_rows // ROWS
    of_ranks = [list(islice(loader, count)) for loader in loaders]
    for loader, batches in zip(loaders, of_ranks, strict=True):
        loader.commit(batches)
    in_order = [batch for microbatch in zip(*of_ranks, strict=True) for batch in microbatch]
    *tensors, spans = zip(*in_order, strict=True)
    whole = (None if parts[0] is None else torch.cat(parts) for parts in tensors)
    return Batch(*whole, sum(spans, ()))


def true_row(source: Source, row: int, length: int) -> tuple[list[int], list[int]]:
    """The first tokens of a row, and of each the number of its document."""
    tokens: list[int] = []
    numbers: list[int] = []
    for number, text in enumerate(source.documents(row, ROWS, 0)):
        ids = [UNIQUE.bos_id, *UNIQUE.encode(text), UNIQUE.eos_id] if text else []
        tokens += ids
        numbers += [number] * len(ids)
        if len(tokens) >= length:
            return tokens[:length], numbers[:length]
    raise AssertionError("sources are endless")


def true_step(source: Source, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of the global batch of a step (from 0)."""
    begin = step * SEQ_LEN
    rows = [true_row(source, row, begin + SEQ_LEN + 1)[0][begin:] for row in range(ROWS)]
    sequences = torch.tensor(rows)
    return sequences[:, :-1], sequences[:, 1:]


def assert_steps(source: Source, loaders: list[BatchLoader], steps: range) -> None:
    for step in steps:
        batch = take_step(loaders)
        tokens, labels = true_step(source, step)
        assert torch.equal(batch.tokens, tokens), f"step {step}"
        assert torch.equal(batch.labels, labels), f"step {step}"


@pytest.mark.parametrize(("degree", "local"), LAYOUTS)
def test_global_batches_do_not_depend_on_the_layout(degree: int, local: int) -> None:
    source = shuffled(documents(40, longest=3 * SEQ_LEN))
    assert_steps(source, build_all(source, degree, local), range(12))


def test_every_token_is_predicted_once_an_epoch() -> None:
    texts = documents(101, longest=40)
    source = shuffled(texts)
    n_documents = len(range(0, len(texts), ROWS))
    tokens = sum(len(text.split()) + 2 for text in texts if text)
    loaders = build_all(source, 2, 2)
    # More than the first epoch of every row; what lies beyond is cut off.
    batches = [take_step(loaders) for _ in range(tokens // SEQ_LEN)]
    ledger: Counter[int] = Counter()
    for row in range(ROWS):
        labels = torch.cat([batch.labels[row] for batch in batches]).tolist()
        own = list(islice(source.documents(row, ROWS, 0), n_documents))
        in_epoch = own if row < len(texts) % ROWS else own[:-1]
        ledger.update(labels[: sum(len(text.split()) + 2 for text in in_epoch if text) - 1])
    ends = sum(1 for text in texts if text)
    # The token that opens a row has none before it that could predict it.
    want = Counter({UNIQUE.eos_id: ends, UNIQUE.bos_id: ends - ROWS})
    want.update(int(word) for text in texts for word in text.split())
    assert ledger == want


class CountsPrefetched(BatchLoader):
    """The fault that the state is of what was prepared, and not of what was committed."""

    def commit(self, microbatches: list[Batch]) -> None:
        super().commit([*microbatches, *(prepared.result() for prepared in self._ahead)])


class CountsTaken(BatchLoader):
    """The fault that the state is of what was taken, and not of what was committed."""

    def __next__(self) -> Batch:
        batch = super().__next__()
        self.commit([batch])
        return batch


def resume(
    source: Source, taken: int, before: tuple[int, int], after: tuple[int, int], cls: type
) -> None:
    """Take steps in one layout, go through a checkpoint's JSON, and go on in another."""
    loaders = build_all(source, *before, prefetch=8)
    for loader in loaders:
        loader.__class__ = cls
    assert_steps(source, loaders, range(taken))
    for loader in loaders:
        next(loader)  # of a step that is never finished
    states = [{"data": loader.state_dict()} for loader in loaders]
    saved = json.loads(json.dumps(reduce(merge, states)))
    assert len(saved["data"]["rows"]) == ROWS
    resumed = build_all(source, *after, prefetch=8)
    for loader in resumed:
        loader.load_state_dict(saved["data"])
    assert reduce(merge, [loader.state_dict() for loader in resumed]) == saved["data"]
    assert_steps(source, resumed, range(taken, taken + 6))


@pytest.mark.parametrize(
    ("before", "after"),
    [((1, 4), (4, 1)), ((4, 2), (2, 1)), ((2, 2), (1, 8)), ((2, 1), (2, 4))],
)
@pytest.mark.parametrize("longest", [3, 100])
def test_resume_repeats_and_skips_nothing(
    before: tuple[int, int], after: tuple[int, int], longest: int
) -> None:
    source = shuffled(documents(40, longest))
    for taken in (0, 1, 7):
        resume(source, taken, before, after, BatchLoader)


@pytest.mark.parametrize("fault", [CountsPrefetched, CountsTaken])
def test_resume_test_catches_a_state_of_what_was_not_committed(fault: type) -> None:
    source = shuffled(documents(40, longest=20))
    with pytest.raises(AssertionError, match="step 3"):
        resume(source, 3, (2, 2), (2, 2), fault)


SIZES = (2, 4, 4, 2, 6, 8, 8, 8)
"""Of steps; after most of them, the next row is amid the global batch."""


def assert_ramp(source: Source, loaders: list[BatchLoader], steps: range) -> None:
    """Each step takes the next sequences of the order that steps of all rows have."""
    whole = torch.cat([true_step(source, step)[0] for step in range(len(SIZES))])
    for step in steps:
        begin = sum(SIZES[:step])
        batch = take_step(loaders, SIZES[step])
        assert torch.equal(batch.tokens, whole[begin : begin + SIZES[step]]), f"step {step}"


@pytest.mark.parametrize(("degree", "local"), [(1, 2), (1, 1), (2, 1)])
def test_small_batches_take_the_same_order_apart(degree: int, local: int) -> None:
    source = shuffled(documents(40, longest=3 * SEQ_LEN))
    assert_ramp(source, build_all(source, degree, local), range(len(SIZES)))


class ForgetsNextRow(BatchLoader):
    """The fault that a resumed run begins with the first row."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state | {"next_row": 0})


class CountsOwnRows(BatchLoader):
    """The fault that other ranks' rows are forgotten."""

    def commit(self, microbatches: list[Batch]) -> None:
        self._rows_at_once = 1
        super().commit(microbatches)


def resume_ramp(taken: int, before: tuple[int, int], after: tuple[int, int], cls: type) -> None:
    source = shuffled(documents(40, longest=3 * SEQ_LEN))
    loaders, resumed = build_all(source, *before), build_all(source, *after)
    for loader in [*loaders, *resumed]:
        loader.__class__ = cls
    assert_ramp(source, loaders, range(taken))
    for loader in loaders:
        next(loader)  # of a step that is never finished
    saved = json.loads(json.dumps(reduce(merge, [loader.state_dict() for loader in loaders])))
    for _ in range(2):
        for loader in resumed:
            loader.load_state_dict(saved)
    assert reduce(merge, [loader.state_dict() for loader in resumed]) == saved
    assert_ramp(source, resumed, range(taken, len(SIZES)))


@pytest.mark.parametrize(
    ("before", "after"), [((1, 2), (2, 1)), ((2, 1), (1, 1)), ((1, 1), (1, 2))]
)
def test_small_batches_go_on_amid_the_rows(before: tuple[int, int], after: tuple[int, int]) -> None:
    for taken in range(len(SIZES)):
        resume_ramp(taken, before, after, BatchLoader)


@pytest.mark.parametrize("after", [(1, 8), (4, 2), (8, 1)])
def test_after_small_batches_go_on_those_that_they_did_not_fit(after: tuple[int, int]) -> None:
    assert sum(SIZES[:5]) % ROWS != 0
    resume_ramp(5, (2, 1), after, BatchLoader)


@pytest.mark.parametrize("fault", [ForgetsNextRow, CountsOwnRows, CountsPrefetched, CountsTaken])
def test_a_wrong_place_amid_the_rows_is_seen(fault: type) -> None:
    with pytest.raises(AssertionError, match=r"step 1|next_row"):
        resume_ramp(1, (2, 1), (2, 1), fault)


def test_states_from_before_there_were_small_batches_are_loaded() -> None:
    source = shuffled(documents(40, longest=50))
    loader = build(source)
    take_step([loader])
    state = loader.state_dict()
    assert state.pop("next_row") == 0
    resumed = build(source)
    resumed.load_state_dict(state)
    assert_steps(source, [resumed], range(1, 3))


def test_resume_at_another_sequence_length_goes_on_at_the_same_token() -> None:
    source = shuffled(documents(40, longest=50))
    loader = build(source, seq_len=3 * SEQ_LEN)
    take_step([loader])
    resumed = build(source)
    resumed.load_state_dict(loader.state_dict())
    assert_steps(source, [resumed], range(3, 6))


@pytest.mark.parametrize("longest", [3, SEQ_LEN, 4 * SEQ_LEN])
def test_document_mask_tells_the_documents_apart(longest: int) -> None:
    source = shuffled(documents(50, longest))
    loaders = build_all(source, 2, 2, document_mask=True)
    for step in range(8):
        batch = take_step(loaders)
        begin = step * SEQ_LEN
        for row in range(ROWS):
            numbers = true_row(source, row, begin + SEQ_LEN)[1][begin:]
            assert batch.document_ids is not None
            assert batch.positions is not None
            assert batch.document_ids[row].tolist() == numbers
            places = [i - numbers.index(number) for i, number in enumerate(numbers)]
            assert batch.positions[row].tolist() == places


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"source": shuffled(documents(40, 20), fingerprint="edited")}, r"documents of \[data\]"),
        ({"source": shuffled(documents(41, 20))}, r"documents of \[data\]"),
        ({"tokenizer": load_tokenizer("bytes")}, r"data\.tokenizer"),
        ({"global_batch_size": 2 * ROWS}, r"training\.global_batch_size"),
    ],
)
def test_resume_on_other_data_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    source = shuffled(documents(40, 20))
    state = build(source).state_dict()
    loader = build(changes.pop("source", source), **changes)
    with pytest.raises(ValueError, match=named):
        loader.load_state_dict(state)


def files_source(folder: Path, count: int) -> Source:
    for i in range(count):
        (folder / f"{i}.txt").write_text(f"document {i}\n")
    config = Data(source="files", path=str(folder / "*.txt"), validation_percent=0)
    return build_sources(config, 0)[0][0]


@pytest.mark.parametrize("fault", ["vanished", "not UTF-8"])
def test_unreadable_file_is_named_where_the_batch_is_taken(tmp_path: Path, fault: str) -> None:
    source = files_source(tmp_path, 200)
    broken = tmp_path / "123.txt"
    if fault == "vanished":
        broken.unlink()
    else:
        broken.write_bytes(b"caf\xe9")
    loader = build(source, tokenizer=load_tokenizer("bytes"))
    for _ in range(2):  # nor is it forgotten
        with pytest.raises((OSError, ValueError), match=r"123\.txt"):
            list(islice(loader, 1000))


def test_panic_of_a_library_reaches_the_caller() -> None:
    class Panic(BaseException): ...

    def encode(text: str) -> np.ndarray:
        raise Panic(text)

    tokenizer = Tokenizer(encode, UNIQUE.decode, 2, 0, 1, "panics")
    with pytest.raises(Panic):
        next(build(shuffled(["7"]), tokenizer=tokenizer))


class Sparse:
    """Documents with empty ones before each."""

    fingerprint = description = "sparse"
    n_documents = None

    def __init__(self, n_empty: int) -> None:
        self._texts = [*[""] * n_empty, "7 8"]

    def documents(self, row: int, n_rows: int, start: int) -> Iterator[str]:
        return islice(cycle(self._texts), start % len(self._texts), None)


@pytest.mark.parametrize("count", [1, 3, 5000])
def test_documents_without_text_are_an_error(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr("data.mixture.MAX_EMPTY_DOCUMENTS", 1000)
    with pytest.raises(ValueError, match="1,000 documents in a row have no text"):
        next(build(shuffled([""] * count)))
    with pytest.raises(ValueError, match="1,000 documents in a row have no text"):
        next(build(Sparse(n_empty=1000)))
    assert_steps(Sparse(n_empty=999), [build(Sparse(n_empty=999))], range(2))


def data_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("data")]


def test_dropped_loader_leaves_no_thread_and_no_memory() -> None:
    others = set(data_threads())
    source = Sparse(n_empty=0)
    loader = build(source, prefetch=4)
    next(loader)
    (thread,) = set(data_threads()) - others
    is_alive = weakref.ref(source)
    del loader, source
    thread.join(timeout=10)
    assert not thread.is_alive()
    gc.collect()
    assert is_alive() is None


def test_interpreter_exits_cleanly_while_batches_are_prepared() -> None:
    program = """if True:
        from config.job_config import Data
        from data.loader import BatchLoader
        from data.mixture import Mixture
        from data.sources import build_sources
        from data.tokenizer import load_tokenizer
        mixture = Mixture(build_sources(Data(), 0)[0])
        loader = BatchLoader(
            mixture, load_tokenizer("bytes"), vocab_size=320, seq_len=128, local_batch_size=2,
            global_batch_size=2, rank=0, degree=1, document_mask=True, prefetch=50,
        )
        next(loader)
    """
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
