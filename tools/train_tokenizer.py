"""Train a byte-level BPE: ``python -m tools.train_tokenizer FOLDER --vocab_size N [...]``

Reads the training documents that a run with the same ``--config`` and ``--data.*`` would, in its
order, and writes one tokenizer in two formats: tokenizer.json, as Hugging Face has it, and
tokenizer.tiktoken with tokenizer.tiktoken.json, its pattern and special tokens. The same text gives
the same bytes.
"""

import base64
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from shlex import join, quote

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
from data.sources import build_sources
from data.tokenizer import LLAMA3_PATTERN, load_tokenizer
from data.tokenizer_json import BYTE_OF
from runtime import exit_codes
from tools.arguments import Parser, split_overrides, telling_mistakes

SPECIAL_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>")
SMALLEST = 256 + len(SPECIAL_TOKENS)
MAX_BYTES = 100_000_000
# A pair that is seen only once says nothing about other text.
MIN_FREQUENCY = 2
MEASURED_BYTES = 1_000_000
FILES = ("tokenizer.json", "tokenizer.tiktoken", "tokenizer.tiktoken.json")


@telling_mistakes
def main(arguments: list[str]) -> int:
    parser = Parser(
        "python -m tools.train_tokenizer",
        usage="%(prog)s FOLDER --vocab_size N [--config FILE] [--max_bytes N] [--data.KEY VALUE]",
        description=__doc__,
    )
    add = parser.add_argument
    add("folder", type=Path, help="where the files are written; what is there stays as it is")
    add("--vocab_size", type=int, required=True, metavar="N", help="tokens, the special ones too")
    add("--config", type=Path, default=Path(os.devnull), metavar="FILE", help="a run's TOML file")
    add("--max_bytes", type=int, default=MAX_BYTES, metavar="N", help=f"of text; {MAX_BYTES:,}")
    own, overrides = split_overrides(arguments)
    options = parser.parse_args(own)
    config = load_config(options.config, overrides)
    train(
        config.data,
        options.folder,
        seed=config.debug.seed,
        vocab_size=options.vocab_size,
        max_bytes=options.max_bytes,
    )
    command = ["./run_train.sh", *overrides, "--data.tokenizer", str(options.folder / FILES[0])]
    file = "" if str(options.config) == os.devnull else f"CONFIG_FILE={quote(str(options.config))} "
    print(f"next: {file}{join(command)}")
    return exit_codes.DONE


def train(data: Data, folder: Path, *, seed: int, vocab_size: int, max_bytes: int) -> None:
    """Write ``FILES`` into ``folder``; raise ``ValueError`` or ``OSError`` that says why not."""
    if vocab_size < SMALLEST:
        text = f"{vocab_size} is less than the {SMALLEST} of all bytes and the special tokens"
        raise ValueError(f"argument --vocab_size: {text}")
    if max_bytes < 1:
        raise ValueError(f"argument --max_bytes: {max_bytes} is less than 1")
    for name in FILES:
        if (folder / name).exists():
            raise ValueError(f"argument folder: {folder / name} is there already")
    begin = time.perf_counter()
    texts = list(_texts(data, seed, max_bytes))
    n_bytes = sum(len(text.encode()) for text in texts)
    if n_bytes == 0:
        raise ValueError("data: there is no text to train on")
    merges = _train_merges(texts, vocab_size - len(SPECIAL_TOKENS))
    n_tokens = SMALLEST + len(merges)
    if n_tokens < vocab_size:
        found = f"the {n_bytes:,} bytes of text have {n_tokens:,} tokens"
        raise ValueError(f"argument --vocab_size: {found}, not {vocab_size:,}")
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder, merges)
    print(f"{n_bytes:,} bytes of text, {time.perf_counter() - begin:.1f} s")
    _check_and_measure(folder, texts)


def _texts(data: Data, seed: int, max_bytes: int) -> Iterator[str]:
    """Training documents, at most one epoch of each source, their bytes shared out by weight."""
    once = [source.model_copy(update={"repeat": False}) for source in data.mixture]
    # The held-out documents are not for the tokenizer either.
    sources, _ = build_sources(data.model_copy(update={"sources": once}), seed, with_held_out=False)
    weights = [source.weight for source in data.mixture]
    for source, weight in zip(sources, weights, strict=True):
        left = int(max_bytes * weight / sum(weights))
        for document in source.documents(0, 1, 0):
            if left == 0:
                break
            if isinstance(document, np.ndarray):
                raise ValueError("data: the documents are ids already, and training needs text")
            if document is None:
                continue
            content = document.encode()[:left]
            left -= len(content)
            yield content.decode(errors="ignore")


def _train_merges(texts: list[str], n_tokens: int) -> list[tuple[str, str]]:
    """The pairs to merge, in order, in the alphabet that stands for bytes; fewer if text ends."""
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
    """A tokenizer that splits text as Llama 3's does."""
    tokenizer = Tokenizer(model)
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _write(folder: Path, merges: list[tuple[str, str]]) -> None:
    """Write ``FILES``. Ids are as Llama 3's: bytes, then merges in order, then special tokens."""
    tokens = [*sorted(BYTE_OF, key=lambda char: BYTE_OF[char]), *map("".join, merges)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = _build(models.BPE(vocabulary, merges))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL_TOKENS])
    special = {name: len(tokens) + i for i, name in enumerate(SPECIAL_TOKENS)}
    # Has prompts begin in transformers as documents do in training.
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
    """Read both formats as a run would, check that they agree, and print bytes per token."""
    first, second = (load_tokenizer(str(folder / name)) for name in FILES[:2])
    n_bytes = n_tokens = 0
    for text in texts:
        ids = first.encode(text)
        assert np.array_equal(ids, second.encode(text)), "the two formats differ"
        n_bytes, n_tokens = n_bytes + len(text.encode()), n_tokens + len(ids)
        if n_bytes > MEASURED_BYTES:
            break
    print(f"{folder}: {first.n_vocab:,} tokens, {n_bytes / n_tokens:.2f} bytes of text each")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
