"""SentencePiece models (``tokenizer.model`` of Llama 2, Mistral, Gemma), run by ``sentencepiece``.

https://github.com/google/sentencepiece. A text is never cut, however long it is, because the next
token may depend on all of it.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
from google.protobuf.message import DecodeError
from sentencepiece import SentencePieceProcessor
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from data.markers import declared_special, read_tokenizer_config, token_name
from runtime.filesystem import read_input

SPACE = "\u2581"
"""Stands for a blank in pieces."""
MOST_BLANKS = 1 << 31
Kind = ModelProto.SentencePiece
ADDED_TOKENS_FILE = "added_tokens.json"
# Families of transformers whose tokenizers put bos before a text unless a file says otherwise.
FAMILIES_WITH_BOS = ("CodeLlama", "Gemma", "Llama")


@dataclass(frozen=True)
class SentencePieceModel:
    """A SentencePiece model, and the tokens that files beside it add."""

    path: Path
    content: bytes
    proto: ModelProto
    processor: SentencePieceProcessor
    config: Mapping[str, Any]
    """Contents of ``tokenizer_config.json`` beside the model."""
    added: Mapping[str, int]
    """Special tokens beyond the model's pieces."""

    @property
    def n_vocab(self) -> int:
        """Exclusive upper bound of all ids."""
        return max([len(self.proto.pieces) - 1, *self.added.values()]) + 1

    @cached_property
    def tokens(self) -> dict[str, int]:
        """Ids of all pieces and added tokens."""
        return {piece.piece: i for i, piece in enumerate(self.proto.pieces)} | dict(self.added)

    @cached_property
    def special(self) -> dict[str, int]:
        """Ids that stand for no text: control pieces, the unknown piece, and added tokens."""
        kinds = (Kind.CONTROL, Kind.UNKNOWN)
        pieces = enumerate(self.proto.pieces)
        return {p.piece: i for i, p in pieces if p.type in kinds} | dict(self.added)

    @cached_property
    def _names(self) -> dict[int, str]:
        return {i: name for name, i in self.special.items()}

    def declared_bos(self) -> str:
        """Name of the token before a document, "" for none.

        Raises ``ValueError`` if the files beside the model do not say whether there is one.
        """
        config = self.config
        bos = token_name(config, "bos_token") if "bos_token" in config else self.piece("bos")
        adds_bos, tokenizer_class = config.get("add_bos_token"), config.get("tokenizer_class")
        family = str(tokenizer_class).removesuffix("Fast").removesuffix("Tokenizer")
        if bos and adds_bos is None and tokenizer_class and family not in FAMILIES_WITH_BOS:
            text = (
                f"does a document of a {tokenizer_class} begin with {bos}? Set data.bos, or to none"
            )
            raise ValueError(f'data.tokenizer: {self.path}: {text}: ""')
        return "" if adds_bos is False else bos

    def declared_eos(self) -> str:
        """Name of the token after a document, "" for none."""
        return token_name(self.config, "eos_token") or self.piece("eos")

    def piece(self, role: Literal["bos", "eos"]) -> str:
        """Piece with a role in the model, "" if none has it."""
        i = self.processor.bos_id() if role == "bos" else self.processor.eos_id()
        return self.proto.pieces[i].piece if i >= 0 else ""

    @property
    def n_stripped(self) -> int:
        """Most blanks before the first word that are not part of the text."""
        spec = self.proto.normalizer_spec
        return MOST_BLANKS if spec.remove_extra_whitespaces else int(spec.add_dummy_prefix)

    def encode(self, text: str) -> np.ndarray:
        """Text to ids (s,) int64, those of the library. Raises ``ValueError`` for surrogates."""
        text.encode()
        return np.array(self.processor.encode(text), dtype=np.int64)

    def decode(self, ids: list[int]) -> str:
        """Ids to text. Special tokens become their names; unassigned ids are skipped."""
        names, parts = self._names, list[str]()
        for is_special, group in groupby(ids, key=lambda i: i in names):
            run = [*group]
            parts += [names[i] for i in run] if is_special else [self._text(run)]
        text = "".join(parts)
        if not ids or ids[0] in names:
            return text
        n_blanks = len(text) - len(text.lstrip(" "))
        return text[min(n_blanks, self.n_stripped) :]

    def _text(self, ids: list[int]) -> str:
        pieces = self.proto.pieces
        known = [i for i in ids if 0 <= i < len(pieces)]
        parts = []
        for is_byte, group in groupby(known, key=lambda i: pieces[i].type == Kind.BYTE):
            run = [*group]
            text = "".join(pieces[i].piece for i in run).replace(SPACE, " ")
            # The library joins bytes to characters.
            parts.append(self.processor.decode(run) if is_byte else text)
        return "".join(parts)


def load_model(path: Path) -> SentencePieceModel:
    """Load the model ``path`` with the tokens that files beside it add.

    Raises ``ValueError`` for a malformed file, and for tokens that transformers finds in texts, but
    SentencePiece does not.
    """
    config = read_tokenizer_config(path.parent)
    proto = ModelProto()
    try:
        content = read_input(path)
        proto.ParseFromString(content)
        processor = SentencePieceProcessor(model_proto=content)
        names = {piece.piece for piece in proto.pieces}
        if not names or len(names) < len(proto.pieces):
            raise ValueError("two of its pieces are equal, or it has none")
    except OSError as error:
        raise ValueError(f"data.tokenizer: {path}: {error.strerror}") from None
    except (DecodeError, RuntimeError, ValueError) as error:
        text = f"neither a rank file nor a valid SentencePiece model: {error}"
        raise ValueError(f"data.tokenizer: {path}: {text}") from None
    try:
        added = _added_tokens(path.parent, proto, config)
    except ValueError as error:
        raise ValueError(f"data.tokenizer: {path}: {error}") from None
    except (AttributeError, KeyError, TypeError):
        text = f"{ADDED_TOKENS_FILE} or added_tokens_decoder of tokenizer_config.json is malformed"
        raise ValueError(f"data.tokenizer: {path.parent}: {text}") from None
    return SentencePieceModel(path, content, proto, processor, config, added)


def _added_tokens(folder: Path, proto: ModelProto, config: Mapping[str, Any]) -> dict[str, int]:
    """Ids of added tokens beyond the pieces. Raises ``ValueError`` for one that texts may have."""
    ids: dict[str, int] = {}
    if os.path.lexists(folder / ADDED_TOKENS_FILE):
        ids |= {
            str(k): int(i) for k, i in json.loads(read_input(folder / ADDED_TOKENS_FILE)).items()
        }
    special = declared_special(config)
    for i, token in (config.get("added_tokens_decoder") or {}).items():
        ids[token["content"]] = int(i)
        special |= {token["content"]} if token["special"] else set()
    found = {}
    for name, i in ids.items():
        piece = proto.pieces[i] if 0 <= i < len(proto.pieces) else None
        if i < 0 or (piece is not None and piece.piece != name):
            raise ValueError(f"the files beside it say that id {i} is {name!r}, which it is not")
        is_symbol = piece is not None and piece.type != Kind.NORMAL
        if not is_symbol and name not in special:
            text = f"transformers finds the added token {name!r} in texts, SentencePiece does not:"
            raise ValueError(
                f"{text} use the tokenizer.json that AutoTokenizer.save_pretrained writes"
            )
        if piece is None:
            found[name] = i
    return found
