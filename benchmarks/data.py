"""How fast text becomes batches: ``python -m benchmarks.data``

Tokenizing beside bare tiktoken, prepared tokens beside a bare memory map, packing, and the same
documents through ``datasets`` streaming, all on one core, in CPU seconds, in one run.
"""

import json
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from config.job_config import Data, DataSource, Packing
from data.loader import BatchLoader
from data.mixture import Mixture
from data.sources import build_sources, open_documents
from data.tokenizer import Tokenizer, load_tokenizer
from tools import prepare, train_tokenizer

SEQ_LEN, ROWS, VOCAB_SIZE = 4096, 8, 8192
TURNS, SECONDS = 7, 0.5


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with redirect_stdout(StringIO()):
            write_files(folder)
        rows = measure(folder)
    width = max(map(len, rows))
    for name, (rate, base) in rows.items():
        ratio = f"{rate / rows[base][0]:.2f} of {base}" if base else ""
        print(f"{name:{width}}  {rate / 1e6:8.2f} M tokens/s  {ratio}")
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


def measure(folder: Path) -> dict[str, tuple[float, str]]:
    """Tokens a CPU second, and what to compare with."""
    file = str(folder / "tok" / "tokenizer.tiktoken")
    tokenizer = load_tokenizer(file)
    texts = [json.loads(line)["text"] for line in (folder / "text.jsonl").open()]
    text = Data(source="files", path=str(folder / "text.jsonl"))
    ids = Data(source="tokens", path=str(folder / "ids"))
    found: dict[str, tuple[float, str]] = {}
    for competitors in (
        {
            "bare tiktoken": encoded(tokenizer, texts),
            # Each with its own: regular expressions are faster for the thread that is the first.
            "text, concat": batches(text, load_tokenizer(file)),
            "text, best_fit": batches(text, load_tokenizer(file), packing="best_fit"),
            "datasets streaming": streamed(load_tokenizer(file), folder / "text.jsonl"),
        },
        {
            "bare memory map": windows(folder / "ids" / "shard-00000.bin"),
            "ids, concat": batches(ids, tokenizer),
            "ids, concat, document_mask": batches(ids, tokenizer, mask=True),
            "ids, best_fit": batches(ids, tokenizer, packing="best_fit"),
        },
    ):
        base = next(iter(competitors))
        measured = rates(competitors)
        found |= {n: (rate, "" if n == base else base) for n, rate in measured.items()}
    return found


def rates(competitors: dict[str, Iterator[int]]) -> dict[str, float]:
    """Tokens a CPU second of all threads: medians of turns, as the machine has more to do."""
    for counts in competitors.values():
        next(counts)
    turns: dict[str, list[float]] = {name: [] for name in competitors}
    for _ in range(TURNS):
        for name, counts in competitors.items():
            begin, end, total = time.process_time(), time.perf_counter() + SECONDS, 0
            while time.perf_counter() < end:
                total += next(counts)
            turns[name].append(total / (time.process_time() - begin))
    return {name: statistics.median(found) for name, found in turns.items()}


def encoded(tokenizer: Tokenizer, texts: list[str]) -> Iterator[int]:
    while True:
        for text in texts:
            yield len(tokenizer.encode(text))


def batches(
    config: Data, tokenizer: Tokenizer, *, packing: Packing = "concat", mask: bool = False
) -> Iterator[int]:
    sources, _ = build_sources(config, 0, with_held_out=False)
    loader = BatchLoader(
        Mixture(sources), tokenizer, vocab_size=VOCAB_SIZE, seq_len=SEQ_LEN, local_batch_size=ROWS,
        global_batch_size=ROWS, rank=0, degree=1, document_mask=mask, prefetch=2,
        packing=packing,
    )  # fmt: skip
    for batch in loader:
        yield batch.tokens.numel()


def streamed(tokenizer: Tokenizer, path: Path) -> Iterator[int]:
    """As it is often done: a stream of records, tokenized, concatenated and cut."""
    import datasets

    buffer: list[int] = []
    while True:
        stream = datasets.load_dataset("json", data_files=str(path), split="train", streaming=True)
        for record in stream:
            buffer += [tokenizer.bos_id, *tokenizer.encode(record["text"]), tokenizer.eos_id]
            while len(buffer) > SEQ_LEN:
                sequence = torch.tensor(buffer[: SEQ_LEN + 1])
                del buffer[:SEQ_LEN]
                yield len(sequence) - 1


def windows(path: Path) -> Iterator[int]:
    """Random windows of one map, with no documents, no order and nothing checked."""
    ids = np.memmap(path, np.uint16, mode="r")
    generator = np.random.default_rng(0)
    while True:
        starts = generator.integers(0, len(ids) - SEQ_LEN - 1, ROWS)
        sequences = np.stack([ids[start : start + SEQ_LEN + 1] for start in starts]).astype(
            np.int64
        )
        tokens, labels = torch.from_numpy(sequences[:, :-1].copy()), sequences[:, 1:].copy()
        yield tokens.numel() + 0 * len(labels)


if __name__ == "__main__":
    main()
