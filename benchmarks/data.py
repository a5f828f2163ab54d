"""How fast text becomes batches, on one core.

Tokenizing beside bare tiktoken, prepared tokens beside a bare memory map, the same documents
through ``datasets`` streaming (and torchdata, if it is installed), in turns; and how long one rank
of several waits for its data while all of them take so many tokens a second.
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
from data.loader import BatchLoader
from data.mixture import Mixture
from data.sources import build_sources, open_documents
from data.tokenizer import Tokenizer, load_tokenizer
from runtime.compat import is_installed
from tools import prepare, train_tokenizer

SEQ_LEN, ROWS = 4096, 8
Counts = Iterator[int]


class Case(Section):
    documents: Count
    """How many of the built-in corpus are read."""
    vocab_size: Count
    """Size of a tokenizer that is trained on them."""
    turns: Count
    """The fastest counts, because the machine disturbed it least."""
    turn_seconds: float
    waiting_steps: Count
    waiting_tokens_per_second: Count
    """How fast a rank takes tokens while its waiting is measured."""
    limit_seconds: Count = 300


def run(case: Case) -> Iterator[Row]:
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
                found = loop.turn().note
            rate = case.waiting_tokens_per_second
            yield {"what": f"{name}, at {rate:,} tokens/s", "share_waiting": found}


def rates(folder: Path, case: Case, names: list[str], deadline: float) -> dict[str, float]:
    """Tokens per CPU second of each name, in its fastest turn."""
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
    """Read for ``turn_seconds`` in each turn; what is read ahead at its end serves the next."""
    torch.set_num_threads(1)
    counts = {**TEXT, **IDS}[name](folder)
    next(counts)
    while True:
        turns.next_step()
        end, turns.note = time.perf_counter() + case.turn_seconds, 0
        while time.perf_counter() < end:
            turns.note += next(counts)


def waiting(turns: Turns, folder: Path, name: str, case: Case) -> None:
    """Note a rank's share of time waiting for data; a step lasts as long as its tokens should."""
    torch.set_num_threads(1)
    counts = {**TEXT, **IDS}[name](folder)
    next(counts)
    turns.next_step()
    waited = total = 0.0
    for _ in range(case.waiting_steps):
        begin = time.perf_counter()
        computing = next(counts) / case.waiting_tokens_per_second
        waited += time.perf_counter() - begin
        total += computing
        time.sleep(computing)
    turns.note = waited / (waited + total)
    turns.next_step()


def write_files(folder: Path, case: Case) -> None:
    """A tokenizer, the built-in corpus as JSON lines, and its ids."""
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
    """``thread``: with the hand-over from the loader's thread, which no step here overlaps with."""
    sources, _ = build_sources(config, 0, with_held_out=False)
    loader = BatchLoader(
        Mixture(sources), the_tokenizer(folder), vocab_size=1 << 16, seq_len=SEQ_LEN,
        local_batch_size=ROWS, global_batch_size=ROWS, rank=0, degree=1, document_mask=mask,
        prefetch=2, packing=packing,
    )  # fmt: skip
    for batch in loader if thread else loader._microbatches:
        yield batch.tokens.numel()


def sequences(folder: Path) -> Iterator[torch.Tensor]:
    """Sequences as they are often made: a stream of records, tokenized, concatenated and cut."""
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
    """The same sequences in batches, by torchdata's loader, which can be resumed."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return sequences(folder)

    for batch in StatefulDataLoader(Stream(), batch_size=ROWS):
        yield batch[:, 1:].numel()


def windows(folder: Path) -> Counts:
    """Random windows of one memory map: no documents, no order, nothing checked."""
    ids = np.memmap(folder / "ids" / "shard-00000.bin", np.uint16, mode="r")
    generator = np.random.default_rng(0)
    while True:
        starts = generator.integers(0, len(ids) - SEQ_LEN - 1, ROWS)
        rows = np.stack([ids[start : start + SEQ_LEN + 1] for start in starts]).astype(np.int64)
        tokens, labels = torch.from_numpy(rows[:, :-1].copy()), rows[:, 1:].copy()
        yield tokens.numel() + 0 * len(labels)


def the_tokenizer(folder: Path) -> Tokenizer:
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
