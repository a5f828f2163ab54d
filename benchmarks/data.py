"""How fast text becomes batches: ``python -m benchmarks.data``

Tokenizing beside bare tiktoken, prepared tokens beside a bare memory map, the same documents
through ``datasets`` streaming (and torchdata, if installed), each in a process of its own, on one
core, in turns; and how long one of
eight ranks waits for its data while a node takes a million tokens a second.
"""

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from config.job_config import Data, DataSource, Packing
from data.loader import BatchLoader
from data.mixture import Mixture
from data.sources import build_sources, open_documents
from data.tokenizer import Tokenizer, load_tokenizer
from tools import prepare, train_tokenizer

SEQ_LEN, ROWS, VOCAB_SIZE = 4096, 8, 8192
TURNS, SECONDS = 20, 0.25
TOKENS_PER_SECOND, STEPS = 1e6 / 8, 100

Counts = Iterator[int]


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with redirect_stdout(StringIO()):
            write_files(folder)
        for competitors in ({**TEXT, **STREAMS}, IDS):
            base, *_ = competitors
            measured = rates(folder, competitors)
            for name, rate in measured.items():
                ratio = f"{rate / measured[base]:.2f} of {base}" if name != base else ""
                print(f"{name:28}  {rate / 1e6:7.2f} M tokens/s  {ratio}", flush=True)
        for name in ("text, concat", "text, best_fit", "ids, concat"):
            share = in_process(folder, name, waiting)
            print(f"{name:28}  {share:7.2%} of a step is waiting, at 1 M tokens/s of 8 ranks")
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")


def write_files(folder: Path) -> None:
    """A tokenizer, the built-in corpus as JSON lines, and its ids."""
    tokenizer = str(folder / "tok" / "tokenizer.json")
    assert train_tokenizer.main([str(folder / "tok"), "--vocab_size", str(VOCAB_SIZE)]) == 0
    documents, _ = open_documents(DataSource(type="builtin"))
    with (folder / "text.jsonl").open("w") as file:
        for index in islice(range(len(documents)), 3000):
            file.write(json.dumps({"text": documents[index]}) + "\n")
    source = ["--data.source", "files", "--data.path", str(folder / "text.jsonl")]
    arguments = [str(folder / "ids"), *source, "--data.tokenizer", tokenizer, "--workers", "1"]
    assert prepare.main(arguments) == 0


def rates(folder: Path, names: dict[str, Any]) -> dict[str, float]:
    """Tokens a CPU second in the fastest turn, the one that the machine disturbed least."""
    turns: dict[str, list[float]] = {name: [] for name in names}
    workers = {name: start(folder, name, turn) for name in names}
    for _ in range(TURNS):
        for name, (_, connection) in workers.items():
            connection.send(None)
            turns[name].append(connection.recv())
    for process, connection in workers.values():
        connection.close()
        process.join()
    return {name: max(found) for name, found in turns.items()}


def in_process(folder: Path, name: str, measure: Callable[[Counts], Iterator[float]]) -> float:
    process, connection = start(folder, name, measure)
    connection.send(None)
    found: float = connection.recv()
    connection.close()
    process.join()
    return found


def start(
    folder: Path, name: str, measure: Callable[[Counts], Iterator[float]]
) -> tuple[Any, Connection]:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, folder, name, measure))
    process.start()
    theirs.close()
    return process, ours


def work(
    connection: Connection,
    folder: Path,
    name: str,
    measure: Callable[[Counts], Iterator[float]],
) -> None:
    """Measure whenever asked, until nobody listens."""
    torch.set_num_threads(1)
    counts = {**TEXT, **STREAMS, **IDS}[name](folder)
    found = measure(counts)
    next(counts)
    try:
        while True:
            connection.recv()
            connection.send(next(found))
    except EOFError:
        # Threads that still read ahead have nothing to tell.
        os._exit(0)


def turn(counts: Counts) -> Iterator[float]:
    """Tokens a CPU second of all threads; what is read ahead in a turn's end is the next one's."""
    begin = time.process_time()
    while True:
        end, total = time.perf_counter() + SECONDS, 0
        while time.perf_counter() < end:
            total += next(counts)
        now = time.process_time()
        yield total / (now - begin)
        begin = now


def waiting(counts: Counts) -> Iterator[float]:
    """The share of waiting in steps that take a rank's part of a million tokens a second."""
    waited = total = 0.0
    for _ in range(STEPS):
        begin = time.perf_counter()
        tokens = next(counts)
        waited += time.perf_counter() - begin
        total += tokens / TOKENS_PER_SECOND
        time.sleep(tokens / TOKENS_PER_SECOND)
    yield waited / (waited + total)


def encoded(folder: Path) -> Counts:
    tokenizer = the_tokenizer(folder)
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
    """``thread``: with the loader's hand-over from its thread, which no step here overlaps."""
    sources, _ = build_sources(config, 0, with_held_out=False)
    loader = BatchLoader(
        Mixture(sources), the_tokenizer(folder), vocab_size=VOCAB_SIZE, seq_len=SEQ_LEN,
        local_batch_size=ROWS, global_batch_size=ROWS, rank=0, degree=1, document_mask=mask,
        prefetch=2, packing=packing,
    )  # fmt: skip
    for batch in loader if thread else loader._microbatches:
        yield batch.tokens.numel()


def sequences(folder: Path) -> Iterator[torch.Tensor]:
    """As it is often done: a stream of records, tokenized, concatenated and cut."""
    import datasets

    tokenizer = the_tokenizer(folder)
    buffer: list[int] = []
    file = str(folder / "text.jsonl")
    while True:
        stream = datasets.load_dataset("json", data_files=file, split="train", streaming=True)
        for record in stream:
            buffer += [tokenizer.bos_id, *tokenizer.encode(record["text"]), tokenizer.eos_id]
            while len(buffer) > SEQ_LEN:
                sequence = torch.tensor(buffer[: SEQ_LEN + 1])
                del buffer[:SEQ_LEN]
                yield sequence


def streamed(folder: Path) -> Counts:
    for sequence in sequences(folder):
        yield len(sequence) - 1


def streamed_by_torchdata(folder: Path) -> Counts:
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return sequences(folder)

    for batch in StatefulDataLoader(Stream(), batch_size=ROWS):
        yield batch[:, 1:].numel()


def windows(folder: Path) -> Counts:
    """Random windows of one map, with no documents, no order and nothing checked."""
    ids = np.memmap(folder / "ids" / "shard-00000.bin", np.uint16, mode="r")
    generator = np.random.default_rng(0)
    while True:
        starts = generator.integers(0, len(ids) - SEQ_LEN - 1, ROWS)
        rows = np.stack([ids[start : start + SEQ_LEN + 1] for start in starts]).astype(np.int64)
        tokens, labels = torch.from_numpy(rows[:, :-1].copy()), rows[:, 1:].copy()
        yield tokens.numel() + 0 * len(labels)


def the_tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(str(folder / "tok" / "tokenizer.tiktoken"))


TEXT = {
    "bare tiktoken": encoded,
    "text, concat": text_batches("concat"),
    "text, best_fit": text_batches("best_fit"),
}
STREAMS = {"datasets streaming": streamed}
if find_spec("torchdata"):
    STREAMS["datasets with torchdata"] = streamed_by_torchdata
IDS = {
    "bare memory map": windows,
    "ids, concat": id_batches("concat"),
    "ids, concat, only read": id_batches("concat", thread=False),
    "ids, concat, document_mask": id_batches("concat", mask=True),
    "ids, best_fit": id_batches("best_fit"),
}


if __name__ == "__main__":
    main()
