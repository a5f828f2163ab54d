"""Throughput of the data loader on one core.

Compares, in turns, tokenizing with bare tiktoken, prepared tokens with a bare memory map, and the
same documents through ``datasets`` streaming (and torchdata, if installed). Also measures how long
a rank waits for data at a given rate of tokens per second.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from benchmarks.rows import Row
from benchmarks.turns import Loop, Turns
from config.job_config import Count, Data, DataSource, Packing, Section
from data.loader import LoaderConfig, MicrobatchLoader
from data.mixture import Mixture
from data.sources import build_sources, open_documents
from data.tokenizer import Tokenizer, load_tokenizer
from runtime.compat import is_installed
from tools import prepare, train_tokenizer

SEQ_LEN, ROWS = 4096, 8
Counts = Iterator[int]


class Case(Section):
    documents: Count
    """Number of documents read from the built-in corpus."""
    vocab_size: Count
    """Size of the tokenizer that is trained on them."""
    turns: Count
    """Turns per competitor; the fastest one counts, as the least disturbed."""
    turn_seconds: float
    waiting_steps: Count
    waiting_tokens_per_second: Count
    """Rate at which a rank consumes tokens while its waiting is measured."""
    limit_seconds: Count = 300


def run(case: Case) -> Iterator[Row]:
    """Yield a row per competitor, and one per measured waiting share."""
    deadline = time.monotonic() + case.limit_seconds
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with redirect_stdout(StringIO()):
            write_files(folder, case)
        for competitors in (TEXT, IDS):
            measured = rates(folder, case, list(competitors), deadline)
            base, *_ = measured.values()
            for name, rate in measured.items():
                yield {"what": name, "tokens_per_cpu_second": rate, "ratio_cpu": rate / base}
        for name in ("text, concat", "text, best_fit", "ids, concat"):
            with Loop(waiting, folder, name, case, deadline=deadline) as loop:
                waiting_share = loop.turn().note
            rate = case.waiting_tokens_per_second
            yield {"what": f"{name}, at {rate:,} tokens/s", "share_waiting": waiting_share}


def rates(folder: Path, case: Case, names: list[str], deadline: float) -> dict[str, float]:
    """Tokens per CPU second of each competitor in its fastest turn."""
    best = dict.fromkeys(names, 0.0)
    with ExitStack() as stack:
        loops = {
            name: stack.enter_context(Loop(reading, folder, name, case, deadline=deadline))
            for name in names
        }
        for _ in range(case.turns):
            for name, loop in loops.items():
                turn = loop.turn()
                best[name] = max(best[name], turn.note / turn.cpu_seconds)
    return best


def reading(turns: Turns, folder: Path, name: str, case: Case) -> None:
    """Read for ``turn_seconds`` in each turn; prefetched batches carry over to the next turn."""
    torch.set_num_threads(1)
    counts = {**TEXT, **IDS}[name](folder)
    next(counts)
    while True:
        turns.next_step()
        end, turns.note = time.perf_counter() + case.turn_seconds, 0
        while time.perf_counter() < end:
            turns.note += next(counts)


def waiting(turns: Turns, folder: Path, name: str, case: Case) -> None:
    """Measure the share of time spent waiting for data, with steps paced to the given rate."""
    torch.set_num_threads(1)
    counts = {**TEXT, **IDS}[name](folder)
    next(counts)
    turns.next_step()
    waited = total = 0.0
    for _ in range(case.waiting_steps):
        begin = time.perf_counter()
        compute_seconds = next(counts) / case.waiting_tokens_per_second
        waited += time.perf_counter() - begin
        total += compute_seconds
        time.sleep(compute_seconds)
    turns.note = waited / (waited + total)
    turns.next_step()


def write_files(folder: Path, case: Case) -> None:
    """Write a tokenizer, the built-in corpus as JSON lines, and its token ids."""
    tokenizer = str(folder / "tok" / "tokenizer.json")
    size = ["--vocab_size", str(case.vocab_size)]
    assert train_tokenizer.main([str(folder / "tok"), *size]) == 0
    documents, _ = open_documents(DataSource(type="builtin"))
    with (folder / "text.jsonl").open("w") as file:
        for index in islice(range(len(documents)), case.documents):
            file.write(json.dumps({"text": documents[index]}) + "\n")
    source = ["--data.source", "files", "--data.path", str(folder / "text.jsonl")]
    arguments = [str(folder / "ids"), *source, "--data.tokenizer", tokenizer, "--workers", "1"]
    assert prepare.main(arguments) == 0


def encoded(folder: Path) -> Counts:
    """Tokenize with bare tiktoken."""
    tokenizer = trained_tokenizer(folder)
    texts = [json.loads(line)["text"] for line in (folder / "text.jsonl").open()]
    while True:
        for text in texts:
            yield len(tokenizer.encode(text))


def text_batches(packing: Packing) -> Callable[[Path], Counts]:
    return lambda folder: batches(
        folder, Data(source="files", path=str(folder / "text.jsonl")), packing
    )


def id_batches(
    packing: Packing, *, mask: bool = False, thread: bool = True
) -> Callable[[Path], Counts]:
    return lambda folder: batches(
        folder, Data(source="tokens", path=str(folder / "ids")), packing, mask=mask, thread=thread
    )


def batches(
    folder: Path, config: Data, packing: Packing, *, mask: bool = False, thread: bool = True
) -> Counts:
    """Yield tokens per batch; ``thread``: through the loader's prefetch thread."""
    sources, _ = build_sources(config, 0, with_held_out=False)
    loader = MicrobatchLoader(Mixture(sources), trained_tokenizer(folder), LoaderConfig(
vocab_size=1 << 16,
seq_len=SEQ_LEN,
microbatch_size=ROWS,
global_batch_size=ROWS,
dp_rank=0,
dp_degree=1,
document_mask=mask,
prefetch=2,
packing=packing,
))  # fmt: skip
    for batch in loader if thread else loader._microbatches:
        yield batch.tokens.numel()


def sequences(folder: Path) -> Iterator[torch.Tensor]:
    """Build sequences the common way: stream records, tokenize, concatenate and split."""
    import datasets

    tokenizer = trained_tokenizer(folder)
    buffer: list[int] = []
    file = str(folder / "text.jsonl")
    while True:
        stream = datasets.load_dataset("json", data_files=file, split="train", streaming=True)
        for record in stream:
            buffer += tokenizer.encode_document(record["text"]).tolist()
            while len(buffer) > SEQ_LEN:
                sequence = torch.tensor(buffer[: SEQ_LEN + 1])
                del buffer[:SEQ_LEN]
                yield sequence


def streamed(folder: Path) -> Counts:
    """Stream with ``datasets``, one sequence at a time."""
    for sequence in sequences(folder):
        yield len(sequence) - 1


def streamed_by_torchdata(folder: Path) -> Counts:
    """Microbatch the same sequences with torchdata's resumable ``StatefulDataLoader``."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return sequences(folder)

    for batch in StatefulDataLoader(Stream(), batch_size=ROWS):
        yield batch[:, 1:].numel()


def windows(folder: Path) -> Counts:
    """Read random windows of one memory map, without documents, order or checks."""
    ids = np.memmap(folder / "ids" / "shard-00000.bin", np.uint16, mode="r")
    generator = np.random.default_rng(0)
    while True:
        starts = generator.integers(0, len(ids) - SEQ_LEN - 1, ROWS)
        rows = np.stack([ids[start : start + SEQ_LEN + 1] for start in starts]).astype(np.int64)
        tokens, labels = torch.from_numpy(rows[:, :-1].copy()), rows[:, 1:].copy()
        yield tokens.numel() + 0 * len(labels)


def trained_tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(str(folder / "tok" / "tokenizer.tiktoken"))


TEXT: dict[str, Callable[[Path], Counts]] = {
    "bare tiktoken": encoded,
    "text, concat": text_batches("concat"),
    "text, best_fit": text_batches("best_fit"),
    "datasets streaming": streamed,
}
if is_installed("torchdata"):
    TEXT["datasets with torchdata"] = streamed_by_torchdata
IDS: dict[str, Callable[[Path], Counts]] = {
    "bare memory map": windows,
    "ids, concat": id_batches("concat"),
    "ids, concat, only read": id_batches("concat", thread=False),
    "ids, concat, document_mask": id_batches("concat", mask=True),
    "ids, best_fit": id_batches("best_fit"),
}
