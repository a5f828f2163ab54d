"""Show the documents of a step: ``shardloom show-batch CONFIG STEP [--row ROW] [--chars N]``

CONFIG is config.toml in the run's folder. Reads the run's data again, from its newest checkpoint
before STEP, in one process. For each row of the global batch: its documents, where they come from,
and how their part in this step begins. Relative paths count from the folder that the run began in.
"""

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from checkpoint.checkpoint_dir import STATE_FILE, read_state
from checkpoint.manifest import read_manifest, verify_files
from config import ConfigError, JobConfig, load_config
from data.batch_size import batch_size_of
from data.loader import LoaderConfig, Microbatch, MicrobatchLoader
from data.mixture import Mixture, RowStream
from data.packing import RowSpan
from data.tokenizer import Tokenizer, load_tokenizer
from metrics.history import ROLLED_BACK
from metrics.metrics_file import read_metrics
from run_spec import build_data
from runtime import exit_codes
from runtime.labels import IGNORE_INDEX
from runtime.log import say
from runtime.provenance import FOLDER, attempt_numbers, read_attempt, read_content
from runtime.run_folder import list_checkpoints, step_of
from tools.cli import Parser, path_argument, reporting_errors, whole_number

DEFAULT_CHARACTERS = 100


class Part(NamedTuple):
    """Part of a document in a sequence."""

    origin: str
    """Source and file; "" if unknown."""
    ids: np.ndarray


@reporting_errors
def main(arguments: list[str]) -> int:
    parser = Parser("shardloom show-batch", description=__doc__)
    add = parser.add_argument
    add("config", type=path_argument, metavar="CONFIG", help="config.toml in the run's folder")
    add("step", type=whole_number(1), metavar="STEP")
    add("--row", type=whole_number(0), help="only this row of the global batch")
    add(
        "--chars",
        type=whole_number(1),
        metavar="N",
        default=DEFAULT_CHARACTERS,
        help="characters to show of each document; default %(default)s",
    )
    options = parser.parse_args(arguments)
    run = DataOfRun(options.config)
    rows = run.read(options.step)
    if options.row is not None and options.row not in rows:
        rows_text = ", ".join(map(str, rows))
        raise ValueError(f"--row {options.row}: not one of step {options.step}: {rows_text}")
    for row, batch in rows.items():
        if options.row in (None, row):
            show(run, row, batch, options.chars)
    return exit_codes.DONE


class DataOfRun:
    """Data of a run, as the ``config.toml`` in its folder says. May import code of the user's."""

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            raise ValueError(f"{path}: is a folder; give {path / 'config.toml'}")
        self.folder: Path = path.parent
        self.config: JobConfig = load_config(path, [])
        data = self.config.data
        self.tokenizer: Tokenizer = load_tokenizer(data.tokenizer, bos=data.bos, eos=data.eos)
        self.mixture: Mixture = build_data(self.config, self.tokenizer)[0]
        vocab_size, n_rows = self.config.model.vocab_size, self.config.training.global_batch_size
        if not vocab_size or not n_rows:
            text = "model.vocab_size or training.global_batch_size is missing; give config.toml"
            raise ValueError(f"{path}: {text} of the run's folder")
        self.vocab_size: int = vocab_size
        self.n_rows: int = n_rows

    def read(self, step: int) -> dict[int, Microbatch]:
        """Return the rows of ``step``, each as a microbatch of one sequence."""
        loader = MicrobatchLoader(
            self.mixture,
            self.tokenizer,
            LoaderConfig(
                vocab_size=self.vocab_size,
                seq_len=self.config.training.seq_len,
                microbatch_size=1,
                global_batch_size=self.n_rows,
                dp_rank=0,
                dp_degree=1,
                document_mask=True,
                prefetch=0,
                packing=self.config.data.packing,
            ),
        )
        first = self._resume(loader, step)
        self._check_batches(first, step)
        ramp = [(p.steps, p.global_batch_size) for p in self.config.training.batch_size_ramp]
        batches: list[Microbatch] = []
        for each in range(first + 1, step + 1):
            batches = list(islice(loader, batch_size_of(each, ramp, self.n_rows)))
        loader.close()
        return {batch.spans[0].row: batch for batch in batches}

    def _resume(self, loader: MicrobatchLoader, step: int) -> int:
        """Load the newest position before ``step``; return its step, 0 without a checkpoint."""
        saved = [c for c in list_checkpoints(self.folder / "checkpoints") if step_of(c) < step]
        first = 0
        if saved:
            first = step_of(saved[0])
            files = read_manifest(saved[0])["files"]
            if problems := verify_files(saved[0], files, [STATE_FILE]):
                raise ValueError(problems[0])
            state = read_state(saved[0])
            try:
                loader.load_state_dict(state["data"])
            except ConfigError:
                raise
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise ValueError(f"{saved[0] / STATE_FILE}: {error!r}") from None
        say(f"step {step}, read on from {f'step {first}' if first else 'the beginning'}")
        for line in read_metrics(self.folder / "metrics.jsonl")[0]:
            # Checkpoints after it know what it skipped.
            if ROLLED_BACK in line and first <= line["step"] < step:
                spike, back = int(line[ROLLED_BACK]), int(line["step"])
                text = f"after a rollback from step {spike} to {back}, steps read later data"
                say(f"{text}: step {back + 1} what is shown here for step {spike + 1}")
        return first

    def _check_batches(self, first: int, step: int) -> None:
        """Raise ``ValueError`` if the steps after ``first`` had batches of other shapes."""
        folder, training = self.folder / FOLDER, self.config.training
        ramp = [phase.model_dump() for phase in training.batch_size_ramp]
        own = {"seq_len": training.seq_len, "batch_size_ramp": ramp}
        end = step
        for number in reversed(attempt_numbers(folder)):
            try:
                attempt = read_attempt(folder, number)
                before = read_content(folder, attempt.config).get("training", {})
            except (OSError, ValueError):  # What is damaged cannot be compared.
                continue
            begin = attempt.resumed_from or 0
            if begin < end and first < end:
                for key in own:
                    if before.get(key, own[key]) != own[key]:
                        text = f"was {before[key]} when step {end} was trained"
                        copy = f"a copy of config.toml in {self.folder} that says so"
                        raise ValueError(f"training.{key}: {text}; give {copy}")
            end = min(begin, end)

    def parts(self, batch: Microbatch) -> Iterator[Part]:
        """Parts of documents in a microbatch of one sequence."""
        if self.config.data.packing == "concat":
            return self._concatenated(batch.spans[0])
        return _packed(batch)

    def _concatenated(self, span: RowSpan) -> Iterator[Part]:
        stream = RowStream(
            self.mixture,
            self.tokenizer,
            span.row,
            span.start,
            n_rows=self.n_rows,
            vocab_size=self.vocab_size,
        )
        token, left = span.start.token, self.config.training.seq_len
        while left and (found := stream.read()):
            state, ids = found
            source, number = self.mixture.sources[state.source], state.taken[state.source]
            label = self.config.data.mixture[state.source].label
            place = source.place(span.row, self.n_rows, number) or f"document {number} of the row"
            begin = f", from token {token}" if token else ""
            part = ids[token : token + left]
            token, left = 0, left - len(part)
            if len(part):
                yield Part(f"{label}, {place}{begin}", part)


def _packed(batch: Microbatch) -> Iterator[Part]:
    """With best_fit, which packs a window of documents, their files are not known."""
    assert batch.document_ids is not None
    begins = np.flatnonzero(np.diff(batch.document_ids[0].numpy())) + 1
    both = (np.split(ids[0].numpy(), begins) for ids in (batch.tokens, batch.labels))
    for part, labels in zip(*both, strict=True):
        # Only padding is a document without labels.
        if labels[0] != IGNORE_INDEX:
            yield Part("", part)


def show(run: DataOfRun, row: int, batch: Microbatch, n_characters: int) -> None:
    """Print a row of the batch and its documents."""
    tokens = batch.tokens[0]
    n_free = int((batch.labels[0] == IGNORE_INDEX).sum())
    counts = [f"{len(tokens):,} tokens", f"{len(tokens.unique()):,} different ones"]
    say(f"row {row}: {', '.join(counts + [f'{n_free:,} without a label'] * (n_free > 0))}")
    for part in run.parts(batch):
        # A character has up to four tokens.
        text = run.tokenizer.decode(part.ids[: 4 * n_characters + 1].tolist())[:n_characters]
        origin = f"{part.origin}, " if part.origin else ""
        say(f"  {origin}{len(part.ids):,} tokens: {text}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
