"""The loader against a reference without batches, threads or ranks: each row's tokens as a list."""

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
from config import ConfigError
from config.job_config import Data
from data.loader import Microbatch, MicrobatchLoader
from data.mixture import Mixture
from data.sources import ShuffledDocuments, Source, build_sources
from data.tokenizer import Tokenizer, load_tokenizer
from runtime.labels import IGNORE_INDEX
from tests.lib.loaders import ROWS, SEQ_LEN, UNIQUE, CountsPrefetched, CountsTaken, build, documents
from tests.lib.patience import PATIENCE_SECONDS
from tests.lib.repository import ROOT

LAYOUTS = [(1, 8), (1, 2), (2, 4), (2, 1), (4, 2), (4, 1)]  # (dp_degree, microbatch_size)


def shuffled(
    texts: list[str], fingerprint: str = "texts", *, repeat: bool = True
) -> ShuffledDocuments:
    return ShuffledDocuments(
        texts, None, seed=5, name="training", fingerprint=fingerprint, repeat=repeat
    )


def build_all(source: Source, dp_degree: int, local: int, **changes: Any) -> list[MicrobatchLoader]:
    return [
        build(source, dp_degree, dp_rank, microbatch_size=local, **changes)
        for dp_rank in range(dp_degree)
    ]


def take_step(loaders: list[MicrobatchLoader], n_rows: int = ROWS) -> Microbatch:
    """Take and commit one step; return the global batch, in the order of its rows."""
    count = loaders[0].n_microbatches * n_rows // ROWS
    of_ranks = [list(islice(loader, count)) for loader in loaders]
    for loader, batches in zip(loaders, of_ranks, strict=True):
        loader.commit(batches)
    in_order = [batch for microbatch in zip(*of_ranks, strict=True) for batch in microbatch]
    *tensors, spans, _ = zip(*in_order, strict=True)
    whole = (None if parts[0] is None else torch.cat(parts) for parts in tensors)
    return Microbatch(*whole, sum(spans, ()))


def reference_row(source: Source, row: int, length: int) -> tuple[list[int], list[int]]:
    """The first ``length`` tokens of a row, and the document number of each."""
    tokens: list[int] = []
    numbers: list[int] = []
    for number, text in enumerate(source.documents(row, ROWS, 0)):
        ids = [UNIQUE.bos_id, *UNIQUE.encode(text), UNIQUE.eos_id] if text else []
        tokens += ids
        numbers += [number] * len(ids)
        if len(tokens) >= length:
            return tokens[:length], numbers[:length]
    raise AssertionError("sources are endless")


def reference_step(source: Source, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels (b, s) of the global batch of ``step`` (from 0)."""
    begin = step * SEQ_LEN
    rows = [reference_row(source, row, begin + SEQ_LEN + 1)[0][begin:] for row in range(ROWS)]
    sequences = torch.tensor(rows)
    return sequences[:, :-1], sequences[:, 1:]


def assert_steps(source: Source, loaders: list[MicrobatchLoader], steps: range) -> None:
    for step in steps:
        batch = take_step(loaders)
        tokens, labels = reference_step(source, step)
        assert torch.equal(batch.tokens, tokens), f"step {step}"
        assert torch.equal(batch.labels, labels), f"step {step}"


@pytest.mark.parametrize(("dp_degree", "local"), LAYOUTS)
def test_global_batch_does_not_depend_on_the_layout(dp_degree: int, local: int) -> None:
    source = shuffled(documents(40, longest=3 * SEQ_LEN))
    assert_steps(source, build_all(source, dp_degree, local), range(12))


def test_every_token_is_a_label_once_per_epoch() -> None:
    texts = documents(101, longest=40)
    source = shuffled(texts)
    n_documents = len(range(0, len(texts), ROWS))
    tokens = sum(len(text.split()) + 2 for text in texts if text)
    loaders = build_all(source, 2, 2)
    # Take more than the first epoch of every row; the slice below drops the rest.
    batches = [take_step(loaders) for _ in range(tokens // SEQ_LEN)]
    counts: Counter[int] = Counter()
    for row in range(ROWS):
        labels = torch.cat([batch.labels[row] for batch in batches]).tolist()
        own = list(islice(source.documents(row, ROWS, 0), n_documents))
        in_epoch = own if row < len(texts) % ROWS else own[:-1]
        counts.update(labels[: sum(len(text.split()) + 2 for text in in_epoch if text) - 1])
    ends = sum(1 for text in texts if text)
    # The first token of a row is never a label.
    want = Counter({UNIQUE.eos_id: ends, UNIQUE.bos_id: ends - ROWS})
    want.update(int(word) for text in texts for word in text.split())
    assert counts == want


def test_source_that_ended_goes_on_if_it_repeats() -> None:
    texts = documents(40, longest=3 * SEQ_LEN)
    ended = build_all(shuffled(texts, repeat=False), 2, 2)
    while take_step(ended).labels.ne(IGNORE_INDEX).any():
        pass
    saved = reduce(merge, [loader.state_dict() for loader in ended])
    source = shuffled(texts)
    [resumed] = build_all(source, 1, 8)
    resumed.load_state_dict(saved)
    batch = take_step([resumed])
    for row in range(ROWS):
        n_read = len(range(row, len(texts), ROWS))
        text = next(text for text in source.documents(row, ROWS, n_read) if text)
        ids = [UNIQUE.bos_id, *UNIQUE.encode(text), UNIQUE.eos_id][:SEQ_LEN]
        assert batch.tokens[row, : len(ids)].tolist() == ids


def test_ended_one_of_several_sources_does_not_go_on() -> None:
    def mixture(repeat: bool) -> Mixture:
        return Mixture([shuffled(["1"], repeat=repeat), shuffled(["2"], "others")], [0.5, 0.5])

    saved = build(mixture(repeat=False)).state_dict()
    build(mixture(repeat=False)).load_state_dict(saved)
    with pytest.raises(ConfigError, match="repeat of one of several sources"):
        build(mixture(repeat=True)).load_state_dict(saved)


def resume(
    source: Source, taken: int, before: tuple[int, int], after: tuple[int, int], cls: type
) -> None:
    """Take ``taken`` steps in one layout, then resume in another from the state as JSON."""
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
def test_resume_neither_repeats_nor_skips(
    before: tuple[int, int], after: tuple[int, int], longest: int
) -> None:
    source = shuffled(documents(40, longest))
    for taken in (0, 1, 7):
        resume(source, taken, before, after, MicrobatchLoader)


@pytest.mark.parametrize("fault", [CountsPrefetched, CountsTaken])
def test_resume_check_detects_uncommitted_state(fault: type) -> None:
    source = shuffled(documents(40, longest=20))
    with pytest.raises(AssertionError, match="step 3"):
        resume(source, 3, (2, 2), (2, 2), fault)


SIZES = (2, 4, 4, 2, 6, 8, 8, 8)
"""Microbatch sizes of steps; most steps end in the middle of the global batch."""


def assert_ramp(source: Source, loaders: list[MicrobatchLoader], steps: range) -> None:
    """Assert that steps of a ramp take the same sequences as whole global batches."""
    whole = torch.cat([reference_step(source, step)[0] for step in range(len(SIZES))])
    for step in steps:
        begin = sum(SIZES[:step])
        batch = take_step(loaders, SIZES[step])
        assert torch.equal(batch.tokens, whole[begin : begin + SIZES[step]]), f"step {step}"


@pytest.mark.parametrize(("dp_degree", "local"), [(1, 2), (1, 1), (2, 1)])
def test_ramp_keeps_the_order_of_sequences(dp_degree: int, local: int) -> None:
    source = shuffled(documents(40, longest=3 * SEQ_LEN))
    assert_ramp(source, build_all(source, dp_degree, local), range(len(SIZES)))


class ForgetsNextRow(MicrobatchLoader):
    """Fault: a resumed run starts at the first row."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state | {"next_row": 0})


class CountsOwnRows(MicrobatchLoader):
    """Fault: the next row ignores the rows of other ranks."""

    def commit(self, microbatches: list[Microbatch]) -> None:
        self._rows_per_microbatch = 1
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
def test_ramp_resumes_at_any_row(before: tuple[int, int], after: tuple[int, int]) -> None:
    for taken in range(len(SIZES)):
        resume_ramp(taken, before, after, MicrobatchLoader)


@pytest.mark.parametrize("after", [(1, 8), (4, 2), (8, 1)])
def test_larger_microbatches_resume_after_a_ramp(after: tuple[int, int]) -> None:
    assert sum(SIZES[:5]) % ROWS != 0
    resume_ramp(5, (2, 1), after, MicrobatchLoader)


@pytest.mark.parametrize("fault", [ForgetsNextRow, CountsOwnRows, CountsPrefetched, CountsTaken])
def test_ramp_check_detects_a_wrong_row(fault: type) -> None:
    with pytest.raises(AssertionError, match=r"step 1|next_row"):
        resume_ramp(1, (2, 1), (2, 1), fault)


def test_state_without_next_row_is_loaded() -> None:
    source = shuffled(documents(40, longest=50))
    loader = build(source)
    take_step([loader])
    state = loader.state_dict()
    assert state.pop("next_row") == 0
    resumed = build(source)
    resumed.load_state_dict(state)
    assert_steps(source, [resumed], range(1, 3))


def test_resume_with_another_seq_len_continues_at_the_token() -> None:
    source = shuffled(documents(40, longest=50))
    loader = build(source, seq_len=3 * SEQ_LEN)
    take_step([loader])
    resumed = build(source)
    resumed.load_state_dict(loader.state_dict())
    assert_steps(source, [resumed], range(3, 6))


@pytest.mark.parametrize("longest", [3, SEQ_LEN, 4 * SEQ_LEN])
def test_document_mask_separates_documents(longest: int) -> None:
    source = shuffled(documents(50, longest))
    loaders = build_all(source, 2, 2, document_mask=True)
    for step in range(8):
        batch = take_step(loaders)
        begin = step * SEQ_LEN
        for row in range(ROWS):
            numbers = reference_row(source, row, begin + SEQ_LEN)[1][begin:]
            assert batch.document_ids is not None
            assert batch.positions is not None
            assert batch.document_ids[row].tolist() == numbers
            positions = [i - numbers.index(number) for i, number in enumerate(numbers)]
            assert batch.positions[row].tolist() == positions


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"source": shuffled(documents(40, 20), fingerprint="edited")}, r"documents of \[data\]"),
        ({"source": shuffled(documents(41, 20))}, r"documents of \[data\]"),
        ({"tokenizer": load_tokenizer("bytes")}, r"data\.tokenizer"),
        ({"global_batch_size": 2 * ROWS}, r"training\.global_batch_size"),
    ],
)
def test_resume_on_other_data_names_the_key(changes: dict[str, Any], named: str) -> None:
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
def test_unreadable_file_is_named_by_next(tmp_path: Path, fault: str) -> None:
    source = files_source(tmp_path, 200)
    broken = tmp_path / "123.txt"
    if fault == "vanished":
        broken.unlink()
    else:
        broken.write_bytes(b"caf\xe9")
    loader = build(source, tokenizer=load_tokenizer("bytes"))
    for _ in range(2):  # the error persists
        with pytest.raises((OSError, ValueError), match=r"123\.txt"):
            list(islice(loader, 1000))


def test_base_exception_of_the_thread_reaches_the_caller() -> None:
    class Panic(BaseException): ...

    def encode(text: str) -> np.ndarray:
        raise Panic(text)

    tokenizer = Tokenizer(encode, UNIQUE.decode, 2, 0, 1, "panics")
    with pytest.raises(Panic):
        next(build(shuffled(["7"]), tokenizer=tokenizer))


class Sparse:
    """Source with ``n_empty`` empty documents before each other one."""

    fingerprint = description = "sparse"
    resumable_fingerprints = frozenset[str]()
    n_documents = None

    def __init__(self, n_empty: int) -> None:
        self._texts = [*[""] * n_empty, "7 8"]

    def documents(self, row: int, n_rows: int, start: int) -> Iterator[str]:
        return islice(cycle(self._texts), start % len(self._texts), None)


@pytest.mark.parametrize("count", [1, 3, 5000])
def test_source_without_text_is_an_error(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr("data.mixture.MAX_EMPTY_DOCUMENTS", 1000)
    with pytest.raises(ValueError, match="1,000 consecutive documents have no text"):
        next(build(shuffled([""] * count)))
    with pytest.raises(ValueError, match="1,000 consecutive documents have no text"):
        next(build(Sparse(n_empty=1000)))
    assert_steps(Sparse(n_empty=999), [build(Sparse(n_empty=999))], range(2))


def data_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("data")]


def test_deleted_loader_leaves_no_thread_and_no_memory() -> None:
    others = set(data_threads())
    source = Sparse(n_empty=0)
    loader = build(source, prefetch=4)
    next(loader)
    (thread,) = set(data_threads()) - others
    is_alive = weakref.ref(source)
    del loader, source
    thread.join(timeout=PATIENCE_SECONDS)
    assert not thread.is_alive()
    gc.collect()
    assert is_alive() is None


def test_closed_loader_ends_after_the_microbatch_that_it_reads() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def encode(text: str) -> np.ndarray:
        begun.set()
        assert go_on.wait(PATIENCE_SECONDS)
        return UNIQUE.encode(text)

    others = set(data_threads())
    tokenizer = Tokenizer(encode, UNIQUE.decode, UNIQUE.n_vocab, 0, 1, "waits")
    loader = build(Sparse(n_empty=0), tokenizer=tokenizer, prefetch=4)
    loader.start()
    (thread,) = set(data_threads()) - others
    assert begun.wait(PATIENCE_SECONDS)
    loader.close()
    go_on.set()
    thread.join(timeout=PATIENCE_SECONDS)
    assert not thread.is_alive()
    read, *queued = loader._prefetched
    assert read.result().tokens.shape == (1, SEQ_LEN)
    assert all(future.cancelled() for future in queued)


def test_interpreter_exits_cleanly_while_prefetching() -> None:
    program = """if True:
        from config.job_config import Data
        from data.loader import MicrobatchLoader, LoaderConfig
        from data.mixture import Mixture
        from data.sources import build_sources
        from data.tokenizer import load_tokenizer
        mixture = Mixture(build_sources(Data(), 0)[0])
        config = LoaderConfig(
            vocab_size=320, seq_len=128, microbatch_size=2, global_batch_size=2, dp_rank=0,
            dp_degree=1, document_mask=True, prefetch=50,
        )
        loader = MicrobatchLoader(mixture, load_tokenizer("bytes"), config)
        next(loader)
    """
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert (done.returncode, done.stderr) == (0, "")
