"""Tokenizers: bytes, tiktoken encodings, rank files, tokenizer.json and SentencePiece models."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import tiktoken
from tokenizers import Tokenizer as HuggingFaceTokenizer

from config.hub_names import TOKENIZER_FILES
from data.markers import (
    BOS_NAMES,
    END_OF_TEXT,
    Vocabulary,
    add_markers,
    check_n_vocab,
    declared_bos,
    declared_eos,
    read_tokenizer_config,
)
from data.rank_files import load_rank_file
from data.tokenizer_json import build_codec, check_reading, mark_special
from runtime.commands import install_text
from runtime.filesystem import open_input
from runtime.hub_paths import local_path

if TYPE_CHECKING:
    from data.sentence_piece import SentencePieceModel

TOKENIZER_FILE, MODEL_FILE = "tokenizer.json", "tokenizer.model"
# Of rank files and SentencePiece models.
MODEL_SUFFIXES = (".tiktoken", ".model")
KINDS = "a .tiktoken or .model file, a tokenizer.json, a folder with one, or hf:OWNER/NAME"
# Bytes of a file that tell its kind.
HEAD_BYTES, LFS_POINTER = 64, b"version https://git-lfs"
# Chunk size for texts that exceed the stack of tiktoken's regex engine.
CHUNK_CHARACTERS = 1 << 16


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
    file = find_tokenizer_file(name)
    if file is not None and file.kind == "json":
        return _from_tokenizer_json(file.path, bos, eos)
    if file is not None and file.kind == "sentencepiece":
        return _from_sentence_piece(file.path, bos, eos)
    return _from_tiktoken(load_encoding(name), bos, eos)


@dataclass(frozen=True)
class TokenizerFile:
    """A file of ``tokenizers``, a SentencePiece model, or a rank file of tiktoken."""

    path: Path
    kind: Literal["json", "sentencepiece", "ranks"]


def find_tokenizer_file(name: str) -> TokenizerFile | None:
    """Find the file that ``data.tokenizer`` names; None for bytes and for encodings of tiktoken.

    The content tells its kind. Raises ``ValueError`` for an unknown name, and for a folder without
    a tokenizer.
    """
    if name == "bytes" or name in tiktoken.list_encoding_names():
        return None
    path = Path(local_path(name, TOKENIZER_FILES, key="data.tokenizer"))
    if path.is_dir():
        path = _file_in(path)
    if path.suffix == ".json":
        return TokenizerFile(path, "json")
    if path.suffix not in MODEL_SUFFIXES and not path.exists():
        known = ", ".join(["bytes", *tiktoken.list_encoding_names()])
        hint = f"; did you mean hf:{name}?" if name.count("/") == 1 else ""
        raise ValueError(f"data.tokenizer: {name!r} is not one of {known}, nor {KINDS}{hint}")
    try:
        with open_input(path) as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise ValueError(f"data.tokenizer: {path}: {error.strerror}") from None
    if head.startswith(LFS_POINTER):
        raise ValueError(f"data.tokenizer: {path}: a pointer of Git LFS: run git lfs pull")
    if head.lstrip().startswith(b"{"):
        return TokenizerFile(path, "json")
    # The tag of a model's pieces in Protocol Buffers; no rank file begins with a line break.
    return TokenizerFile(path, "sentencepiece" if head.startswith(b"\n") else "ranks")


def _file_in(folder: Path) -> Path:
    """Path of the tokenizer in a folder: its tokenizer.json, else its only model or rank file."""
    if os.path.lexists(folder / TOKENIZER_FILE):
        return folder / TOKENIZER_FILE
    names = sorted(file.name for file in folder.iterdir())
    models = [name for name in names if Path(name).suffix in MODEL_SUFFIXES]
    if len(models) == 1 or MODEL_FILE in models:
        return folder / (MODEL_FILE if MODEL_FILE in models else models[0])
    there = ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if names[8:] else "")
    text = f"no {TOKENIZER_FILE}, only {there or 'nothing'}; name {KINDS}"
    raise ValueError(f"data.tokenizer: {folder} has {text}")


def load_encoding(name: str) -> tiktoken.Encoding:
    """Load a tokenizer that runs on tiktoken; raise ``ValueError`` if that fails."""
    file = find_tokenizer_file(name)
    if file is not None:
        return load_rank_file(file.path)
    if name == "bytes":
        return _byte_encoding()
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:
        hint = "without network, set TIKTOKEN_CACHE_DIR to a folder where it was downloaded to"
        raise ValueError(f"data.tokenizer: cannot download {name}: {error}; {hint}") from error


def _byte_encoding() -> tiktoken.Encoding:
    """Encoding with one token per byte; needs no file and encodes any text."""
    return tiktoken.Encoding(
        name="bytes",
        # There are no merges; the pattern only bounds the length of the words in tiktoken.
        pat_str=r"(?s).{1,64}",
        mergeable_ranks={bytes([value]): value for value in range(256)},
        special_tokens={"<|begin_of_text|>": 256, "<|end_of_text|>": 257},
    )


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
    check_n_vocab(n_vocab, len(vocabulary.tokens), path)
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


def load_sentence_piece(path: Path) -> "SentencePieceModel":
    """Load a SentencePiece model; raise ``ValueError`` if that fails, or without its package."""
    try:
        # Imported here, because the package is optional.
        from data.sentence_piece import load_model
    except Exception as error:  # protobuf raises its own if it is too old
        command = install_text("sentencepiece", "protobuf")
        text = f"a SentencePiece model needs packages: {command} ({error})"
        raise ValueError(f"data.tokenizer: {path}: {text}") from None
    return load_model(path)


def _from_sentence_piece(path: Path, bos: str | None, eos: str | None) -> Tokenizer:
    model = load_sentence_piece(path)
    check_n_vocab(model.n_vocab, len(model.tokens), path)
    vocabulary = Vocabulary(model.special, model.tokens, str(path))
    bos_id = vocabulary.find_bos(model.declared_bos() if bos is None else bos, ())
    eos_id = vocabulary.find_eos(eos or model.declared_eos() or None)
    words = [name for name, i in model.tokens.items() if i in (bos_id, eos_id)]
    if ordinary := [name for name in words if name not in model.special]:
        text = f"{ordinary[0]!r} is a word of text; set data.bos and data.eos to special tokens"
        raise ValueError(f"data.tokenizer: {path}: {text}")
    check_reading(model.encode, model.decode, path)
    digest = sha256(model.content + repr(sorted(model.added.items())).encode()).hexdigest()
    return Tokenizer(
        encode=model.encode,
        decode=model.decode,
        n_vocab=model.n_vocab,
        bos_id=bos_id,
        eos_id=eos_id,
        fingerprint=add_markers(digest, model.special, bos_id, eos_id),
    )


def _byte_lengths(encoding: tiktoken.Encoding, n_vocab: int) -> np.ndarray:
    lengths = np.zeros(n_vocab, np.int64)
    for token, rank in encoding._mergeable_ranks.items():
        lengths[rank] = len(token)
    return lengths
