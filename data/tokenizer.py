"""Tokenizers: bytes, tiktoken encodings, rank files and Hugging Face tokenizer.json."""

import base64
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from io import TextIOWrapper
from pathlib import Path

import numpy as np
import tiktoken
from tokenizers import Tokenizer as HuggingFaceTokenizer

from data.markers import (
    BOS_NAMES,
    END_OF_TEXT,
    Vocabulary,
    add_markers,
    declared_bos,
    declared_eos,
    read_tokenizer_config,
)
from data.tokenizer_json import SAMPLES, build_codec, mark_special
from runtime.filesystem import open_input, read_input
from runtime.log import logger

TOKENIZER_FILE = "tokenizer.json"
KINDS = "a .tiktoken or .model file, a tokenizer.json or a folder with one"
# The published pre-tokenization pattern of Llama 3.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_RESERVED = 256
# Unassigned ids that a vocabulary may have besides as many as its tokens.
MAX_GAP = 1 << 16
# Chunk size for texts that exceed the stack of tiktoken's regex engine.
CHUNK_CHARACTERS = 1 << 16
# Pattern and special tokens of the published .tiktoken files, by number of ranks. Source:
# tiktoken_ext/openai_public.py of tiktoken 0.14.
PUBLISHED = {
    50_256: (  # gpt2, r50k_base
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
        {"<|endoftext|>": 50256},
    ),
    100_256: (  # cl100k_base
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+|"
        r" ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
        {
            "<|endoftext|>": 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
    ),
    199_998: (  # o200k_base
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        {"<|endoftext|>": 199999, "<|endofprompt|>": 200018},
    ),
}


@dataclass(frozen=True)
class Tokenizer:
    """Encodes text to token ids and back."""

    encode: Callable[[str], np.ndarray]
    """Text to ids (s,) int64; special tokens in the text are encoded as plain text."""
    decode: Callable[[list[int]], str]
    """Ids to text; unassigned ids are skipped."""
    n_vocab: int
    """Exclusive upper bound of all ids."""
    bos_id: int | None
    """First token of each document; None: documents have no such token."""
    eos_id: int
    """Last token of each document."""
    fingerprint: str
    """Equal for tokenizers that encode documents equally."""
    byte_lengths: np.ndarray | None = None
    """UTF-8 bytes of each token (n_vocab,), 0 for special tokens; None if unknown."""

    def encode_document(self, text: str) -> np.ndarray:
        """Encode a document to ids (s,) int64: bos, if there is one, the text, and eos.

        Raises ``ValueError`` for a text that the tokenizer cannot encode.
        """
        ids = self.encode(text)
        begin = 0 if self.bos_id is None else 1
        document = np.empty(begin + len(ids) + 1, np.int64)
        document[:begin], document[begin:-1], document[-1] = self.bos_id or 0, ids, self.eos_id
        return document

    def encode_prompt(self, text: str) -> list[int]:
        """Encode the beginning of a document; without any tokens, the end of the one before it."""
        begin = [] if self.bos_id is None else [self.bos_id]
        return [*begin, *self.encode(text).tolist()] or [self.eos_id]

    @property
    def document_form(self) -> str:
        """The tokens around a document's text, for messages."""
        begin = "" if self.bos_id is None else f"{self.decode([self.bos_id])} "
        return f"{begin}... {self.decode([self.eos_id])}"


def load_tokenizer(name: str, *, bos: str | None = None, eos: str | None = None) -> Tokenizer:
    """Load the tokenizer that ``data.tokenizer`` names; raise ``ValueError`` if that fails.

    ``bos`` and ``eos``: names of the tokens around a document; None: those that the tokenizer's
    files name; "": none.
    """
    path = find_tokenizer_json(name)
    if path is not None:
        return _from_tokenizer_json(path, bos, eos)
    return _from_tiktoken(load_encoding(name), bos, eos)


def find_tokenizer_json(name: str) -> Path | None:
    """Path of the tokenizer.json that ``data.tokenizer`` names; None if it names another kind.

    Raises ``ValueError`` for a folder without one.
    """
    path = Path(name)
    if name == "bytes" or name in tiktoken.list_encoding_names():
        return None
    if path.is_dir():
        if not os.path.lexists(path / TOKENIZER_FILE):
            found = sorted(file.name for file in path.iterdir())
            there = ", ".join(found[:8]) + (f", ... ({len(found)} in all)" if found[8:] else "")
            text = f"no {TOKENIZER_FILE}, only {there or 'nothing'}; name {KINDS}"
            raise ValueError(f"data.tokenizer: {path} has {text}")
        return path / TOKENIZER_FILE
    return path if path.suffix == ".json" else None


def load_encoding(name: str) -> tiktoken.Encoding:
    """Load a tokenizer that is not a tokenizer.json; raise ``ValueError`` if that fails."""
    path = Path(name)
    if name == "bytes":
        return _byte_encoding()
    if path.suffix in (".tiktoken", ".model"):
        return _rank_file_encoding(path)
    if name not in tiktoken.list_encoding_names():
        known = ", ".join(["bytes", *tiktoken.list_encoding_names()])
        raise ValueError(f"data.tokenizer: {name!r} is not one of {known}, nor {KINDS}")
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:
        raise ValueError(f"data.tokenizer: cannot download {name}: {error}") from error


def _byte_encoding() -> tiktoken.Encoding:
    """Encoding with one token per byte; needs no file and encodes any text."""
    return tiktoken.Encoding(
        name="bytes",
        # There are no merges; the pattern only bounds the length of the words in tiktoken.
        pat_str=r"(?s).{1,64}",
        mergeable_ranks={bytes([value]): value for value in range(256)},
        special_tokens={"<|begin_of_text|>": 256, "<|end_of_text|>": 257},
    )


def _rank_file_encoding(path: Path) -> tiktoken.Encoding:
    """Encoding of a base64 rank file, with its pattern and special tokens."""
    ranks = _read_ranks(path)
    pattern, special_tokens, origin = _pattern_of(path, len(ranks))
    logger.info("tokenizer: %s: %s ranks, pattern of %s", path, f"{len(ranks):,}", origin)
    return tiktoken.Encoding(
        name=path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens
    )


def _read_ranks(path: Path) -> dict[bytes, int]:
    try:
        lines = read_input(path).splitlines()
    except OSError as error:
        raise ValueError(f"data.tokenizer: {path}: {error.strerror}") from None
    ranks = {}
    for number, line in enumerate(lines, start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            where = f"{path}, line {number}"
            raise ValueError(f"data.tokenizer: {where}: not a token and its rank") from None
    # tiktoken would panic at a missing byte, and decode a duplicate rank wrongly.
    if any(bytes([value]) not in ranks for value in range(256)):
        raise ValueError(f"data.tokenizer: {path}: not all 256 single bytes have a rank")
    if sorted(ranks.values()) != list(range(len(lines))):
        raise ValueError(f"data.tokenizer: {path}: the ranks are not 0 to {len(lines) - 1}")
    return ranks


def _pattern_of(path: Path, n_ranks: int) -> tuple[str, dict[str, int], str]:
    """Pattern that splits text into words, special tokens, and the origin of both.

    A rank file contains neither. ``.model`` files are Llama 3's. ``NAME.tiktoken`` may have a
    companion ``NAME.tiktoken.json`` from tools/train_tokenizer.py: ``{"pattern": ...,
    "special_tokens": {...}}``. Without one, the number of ranks identifies the published files;
    all other files are treated as Llama 3's.
    """
    companion = path.with_name(f"{path.name}.json")
    # A link to nothing is a mistake, not the absence of a file.
    if path.suffix == ".tiktoken" and os.path.lexists(companion):
        return *_read_companion(companion, n_ranks), companion.name
    if path.suffix == ".tiktoken" and n_ranks in PUBLISHED:
        return *PUBLISHED[n_ranks], "OpenAI's published file"
    names = ["<|begin_of_text|>", "<|end_of_text|>"]
    names += [f"<|reserved_special_token_{i}|>" for i in range(LLAMA3_RESERVED - len(names))]
    return LLAMA3_PATTERN, {name: n_ranks + i for i, name in enumerate(names)}, "Llama 3"


def _read_companion(path: Path, n_ranks: int) -> tuple[str, dict[str, int]]:
    try:
        content = json.loads(read_input(path).decode())
        pattern, special_tokens = content["pattern"], content["special_tokens"]
        ids = list(special_tokens.values())
        if len(content) > 2 or not isinstance(pattern, str) or {*map(type, ids)} - {int}:
            raise TypeError
    except (AttributeError, KeyError, TypeError):
        form = '{"pattern": TEXT, "special_tokens": {NAME: ID}}'
        raise ValueError(f"data.tokenizer: {path}: not of the form {form}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"data.tokenizer: {path}: {error}") from None
    if len({*ids}) < len(ids) or any(not n_ranks <= i < 2**31 for i in ids):
        text = f"special tokens need unique ids, from {n_ranks} on"
        raise ValueError(f"data.tokenizer: {path}: {text}")
    _check_n_vocab(max([n_ranks - 1, *ids]) + 1, n_ranks + len(ids), path)
    ranks = {bytes([value]): value for value in range(256)}
    try:
        words = tiktoken.Encoding(
            "words", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
        )
        unmatched = [text for text in SAMPLES if words.decode(words.encode_ordinary(text)) != text]
    except ValueError as error:
        raise ValueError(f"data.tokenizer: {path}: the pattern: {error}") from None
    if unmatched:
        text = f"the pattern does not match all of {unmatched[0][:40]!r}"
        raise ValueError(f"data.tokenizer: {path}: {text}")
    return pattern, special_tokens


def _from_tiktoken(encoding: tiktoken.Encoding, bos: str | None, eos: str | None) -> Tokenizer:
    special = {name: encoding.encode_single_token(name) for name in encoding.special_tokens_set}
    digest = sha256(encoding._pat_str.encode())
    for token, rank in sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1]):
        digest.update(token + b"%d\n" % rank)
    digest.update(repr(sorted(special.items())).encode())
    used = {*encoding._mergeable_ranks.values(), *special.values()}

    def encode(text: str) -> np.ndarray:
        try:
            return encoding.encode_to_numpy(text, disallowed_special=()).astype(np.int64)
        except ValueError:
            # tiktoken's regex engine overflows its stack at about a million consecutive blanks.
            if len(text) <= CHUNK_CHARACTERS:
                raise
            starts = range(0, len(text), CHUNK_CHARACTERS)
            return np.concatenate([encode(text[i : i + CHUNK_CHARACTERS]) for i in starts])

    vocabulary = Vocabulary(special, special, encoding.name)
    bos_id, eos_id = vocabulary.find_bos(bos, BOS_NAMES), vocabulary.find_eos(eos)
    return Tokenizer(
        encode=encode,
        decode=lambda ids: encoding.decode([i for i in ids if i in used]),
        n_vocab=encoding.n_vocab,
        bos_id=bos_id,
        eos_id=eos_id,
        fingerprint=add_markers(digest.hexdigest(), special, bos_id, eos_id),
        byte_lengths=_byte_lengths(encoding, encoding.n_vocab),
    )


def _from_tokenizer_json(path: Path, bos: str | None, eos: str | None) -> Tokenizer:
    try:
        with TextIOWrapper(open_input(path), encoding="utf-8") as file:
            text = file.read()
        tokenizer = HuggingFaceTokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise ValueError(f"data.tokenizer: {path}: {error}") from None
    content, config = json.loads(text), read_tokenizer_config(path.parent)
    post_processor = content.get("post_processor")
    special = {t.content: i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    vocabulary = Vocabulary(special, tokenizer.get_vocab(with_added_tokens=True), str(path))
    n_vocab = max(vocabulary.tokens.values(), default=-1) + 1
    # First, because the library lists all unassigned ids wherever it writes a tokenizer.
    _check_n_vocab(n_vocab, len(vocabulary.tokens), path)
    if bos is None:
        bos = declared_bos(config, post_processor)
    # It separates documents, and begins one only where the files say so.
    bos_id = vocabulary.find_bos(bos, [name for name in BOS_NAMES if name != END_OF_TEXT])
    eos_id = vocabulary.find_eos(eos or declared_eos(config, post_processor))
    ids = {bos_id, eos_id}.difference(special.values())
    ordinary = {name: i for name, i in vocabulary.tokens.items() if i in ids}
    if ordinary:
        tokenizer = HuggingFaceTokenizer.from_str(json.dumps(mark_special(content, ordinary)))
    encode, decode, encoding = build_codec(tokenizer, path)
    for name, i in ordinary.items():
        if i in encode(name):
            text = f"{name!r} is a word of text; set data.bos and data.eos to special tokens"
            raise ValueError(f"data.tokenizer: {path}: {text}")
    return Tokenizer(
        encode=encode,
        decode=decode,
        n_vocab=n_vocab,
        bos_id=bos_id,
        eos_id=eos_id,
        fingerprint=add_markers(sha256(text.encode()).hexdigest(), special, bos_id, eos_id),
        byte_lengths=None if encoding is None else _byte_lengths(encoding, n_vocab),
    )


def _check_n_vocab(n_vocab: int, n_tokens: int, path: Path) -> None:
    """Raise ``ValueError`` if most ids have no token: a vocabulary of all ids would be allocated.

    Published tokenizers leave few ids unassigned.
    """
    if n_vocab > 2 * n_tokens + MAX_GAP:
        text = f"the largest id is {n_vocab - 1:,}, but there are only {n_tokens:,} tokens"
        raise ValueError(f"data.tokenizer: {path}: {text}")


def _byte_lengths(encoding: tiktoken.Encoding, n_vocab: int) -> np.ndarray:
    lengths = np.zeros(n_vocab, np.int64)
    for token, rank in encoding._mergeable_ranks.items():
        lengths[rank] = len(token)
    return lengths
