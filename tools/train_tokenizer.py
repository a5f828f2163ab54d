"""Train a byte-level BPE: ``shardloom train-tokenizer FOLDER --vocab_size N [...]``

Reads the training documents of a run with the same ``--config`` and ``--data.*``, in their order.
Writes the tokenizer in two formats: a Hugging Face tokenizer.json, and tokenizer.tiktoken with its
pattern and special tokens in tokenizer.tiktoken.json. The same text gives identical files.
"""

import base64
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)

from config import load_config
from config.job_config import Data
from config.paths import literal_path
from data.rank_files import LLAMA3_PATTERN
from data.sources import Reserved, build_sources
from data.tokenizer import load_tokenizer
from data.tokenizer_json import BYTE_OF
from data.validation_sources import reserved_files
from runtime import exit_codes
from runtime.commands import command_text
from runtime.log import say
from tools.cli import Parser, path_argument, reporting_errors, run_name, split_overrides

SPECIAL_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>")
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
MAX_BYTES = 100_000_000
# A pair that occurs only once says nothing about other text.
MIN_FREQUENCY = 2
MEASURED_BYTES = 1_000_000
FILES = ("tokenizer.json", "tokenizer.tiktoken", "tokenizer.tiktoken.json")


@reporting_errors
def main(arguments: list[str]) -> int:
    parser = Parser(
        "shardloom train-tokenizer",
        usage="%(prog)s FOLDER --vocab_size N [--config FILE] [--max_bytes N] [--data.KEY VALUE]",
        description=__doc__,
    )
    add = parser.add_argument
    add("folder", type=path_argument, help="output folder; existing files are not overwritten")
    add("--vocab_size", type=int, required=True, metavar="N", help="tokens incl. special tokens")
    add("--config", type=Path, default=Path(os.devnull), metavar="FILE", help="TOML file of a run")
    add("--max_bytes", type=int, default=MAX_BYTES, metavar="N", help=f"default {MAX_BYTES:,}")
    own, overrides = split_overrides(arguments)
    options = parser.parse_args(own)
    config = load_config(options.config, overrides)
    train(
        config.data,
        options.folder,
        reserved=reserved_files(config.validation.sources, config.data),
        seed=config.debug.seed,
        vocab_size=options.vocab_size,
        max_bytes=options.max_bytes,
    )
    tokenizer = literal_path(str(options.folder / FILES[0]))
    is_given = str(options.config) != os.devnull
    command = ["train", *([options.config] if is_given else run_name(options.folder)), *overrides]
    say(f"next: {command_text(*command, '--data.tokenizer', tokenizer)}")
    return exit_codes.DONE


def train(
    data: Data, folder: Path, *, reserved: Reserved, seed: int, vocab_size: int, max_bytes: int
) -> None:
    """Train on at most ``max_bytes`` of text and write ``FILES`` into ``folder``.

    ``reserved``: files that must not be trained on. Raises ``ValueError`` for bad arguments or
    data, ``OSError`` if reading or writing fails.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        text = f"{vocab_size} is less than the {MIN_VOCAB_SIZE} of all bytes and the special tokens"
        raise ValueError(f"argument --vocab_size: {text}")
    if max_bytes < 1:
        raise ValueError(f"argument --max_bytes: {max_bytes} is less than 1")
    for name in FILES:
        if (folder / name).exists():
            raise ValueError(f"argument folder: {folder / name} already exists")
    begin = time.perf_counter()
    texts = list(_texts(data, seed, max_bytes, reserved=reserved))
    n_bytes = sum(len(text.encode()) for text in texts)
    if n_bytes == 0:
        raise ValueError("data: no text to train on")
    merges = _train_merges(texts, vocab_size - len(SPECIAL_TOKENS))
    n_tokens = MIN_VOCAB_SIZE + len(merges)
    if n_tokens < vocab_size:
        found = f"the {n_bytes:,} bytes of text give only {n_tokens:,} tokens"
        raise ValueError(f"argument --vocab_size: {found}, not {vocab_size:,}")
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder, merges)
    say(f"{n_bytes:,} bytes of text, {time.perf_counter() - begin:.1f} s")
    _check_and_measure(folder, texts)


def _texts(
    data: Data, seed: int, max_bytes: int, *, reserved: Reserved | None = None
) -> Iterator[str]:
    """Yield at most one epoch of each source's training documents; bytes are divided by weight."""
    once = [source.model_copy(update={"repeat": False}) for source in data.mixture]
    # The tokenizer must not see held-out documents either.
    sources, _ = build_sources(
        data.model_copy(update={"sources": once}), seed, with_held_out=False, reserved=reserved
    )
    weights = [source.weight for source in data.mixture]
    for source, weight in zip(sources, weights, strict=True):
        left = int(max_bytes * weight / sum(weights))
        for document in source.documents(0, 1, 0):
            if left == 0:
                break
            if isinstance(document, np.ndarray):
                raise ValueError("data: the documents are token ids, but training needs text")
            if document is None:
                continue
            content = document.encode()[:left]
            left -= len(content)
            yield content.decode(errors="ignore")


def _train_merges(texts: list[str], n_tokens: int) -> list[tuple[str, str]]:
    """Pairs to merge, in order, in the ByteLevel alphabet; fewer if the text has too few."""
    tokenizer = _build(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=n_tokens,
        min_frequency=MIN_FREQUENCY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return [(left, right) for left, right in json.loads(tokenizer.to_str())["model"]["merges"]]


def _build(model: models.BPE) -> Tokenizer:
    """Build a tokenizer with the pre-tokenization of Llama 3."""
    tokenizer = Tokenizer(model)
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _write(folder: Path, merges: list[tuple[str, str]]) -> None:
    """Write ``FILES``. Ids as in Llama 3: bytes, then merges in order, then special tokens."""
    tokens = [*sorted(BYTE_OF, key=lambda char: BYTE_OF[char]), *map("".join, merges)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = _build(models.BPE(vocabulary, merges))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL_TOKENS])
    special = {name: len(tokens) + i for i, name in enumerate(SPECIAL_TOKENS)}
    # In transformers, prompts then start with bos, like documents in training.
    begin = (SPECIAL_TOKENS[0], special[SPECIAL_TOKENS[0]])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin[0]} $A", pair=f"{begin[0]} $A $B", special_tokens=[begin]
    )
    companion = {"pattern": LLAMA3_PATTERN, "special_tokens": special}
    ranks = [
        base64.b64encode(bytes(BYTE_OF[char] for char in token)).decode() + f" {i}\n"
        for i, token in enumerate(tokens)
    ]
    contents = (tokenizer.to_str(pretty=True), "".join(ranks), json.dumps(companion, indent=2))
    for name, content in zip(FILES, contents, strict=True):
        with (folder / name).open("x", encoding="utf-8", newline="\n") as file:
            file.write(content)


def _check_and_measure(folder: Path, texts: list[str]) -> None:
    """Load both formats, assert that they encode equally, and print bytes per token."""
    first, second = (load_tokenizer(str(folder / name)) for name in FILES[:2])
    n_bytes = n_tokens = 0
    for text in texts:
        ids = first.encode(text)
        assert np.array_equal(ids, second.encode(text)), "the two formats differ"
        n_bytes, n_tokens = n_bytes + len(text.encode()), n_tokens + len(ids)
        if n_bytes > MEASURED_BYTES:
            break
    say(f"{folder}: {first.n_vocab:,} tokens, {n_bytes / n_tokens:.2f} bytes per token")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
