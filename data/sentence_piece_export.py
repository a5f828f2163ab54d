"""The ``tokenizer.json`` with which ``tokenizers`` gives the ids of a SentencePiece model.

What ``tokenizers`` cannot follow raises ``ValueError``. The caller compares the ids all the same.
"""

import base64
import re
from collections.abc import Iterator
from typing import Any

from tokenizers import models

from data.sentence_piece import SPACE, Kind, SentencePieceModel

UNIGRAM, BPE = 1, 2


def tokenizer_json(
    model: SentencePieceModel, post_processor: dict[str, Any] | None
) -> dict[str, Any]:
    """Contents of a tokenizer.json, without its added tokens.

    Raises ``ValueError`` for a model that ``tokenizers`` cannot express.
    """
    trainer = model.proto.trainer_spec
    if trainer.model_type not in (UNIGRAM, BPE):
        raise ValueError("its model is neither BPE nor Unigram")
    if trainer.treat_whitespace_as_suffix or not model.proto.normalizer_spec.escape_whitespaces:
        raise ValueError("it marks blanks in an unusual way")
    if any(piece.type == Kind.UNUSED for piece in model.proto.pieces):
        raise ValueError("it has unused pieces")
    symbols = [piece.piece for piece in model.proto.pieces if piece.type == Kind.USER_DEFINED]
    is_bpe = trainer.model_type == BPE
    # Symbols are isolated before merging. A whole word that is a token, such as <s>, would be one.
    isolated = [re.escape(text) for text in sorted(symbols, key=len, reverse=True)]
    if isolated or not is_bpe:
        isolated += _boundaries(model)
    split = {"type": "Split", "pattern": {"Regex": "|".join(isolated)}, "behavior": "Isolated"}
    unknown = model.proto.pieces[model.processor.unk_id()].piece
    parts: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": model.n_stripped, "stop": 0},
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": [*_normalizers(model)]},
        "pre_tokenizer": split | {"invert": False} if isolated else None,
        "post_processor": post_processor,
        "decoder": {"type": "Sequence", "decoders": parts},
        "model": _bpe(model, unknown, has_symbols=bool(symbols)) if is_bpe else _unigram(model),
    }


def _normalizers(model: SentencePieceModel) -> Iterator[dict[str, Any]]:
    spec = model.proto.normalizer_spec
    if spec.precompiled_charsmap:
        charsmap = base64.b64encode(spec.precompiled_charsmap).decode()
        yield {"type": "Precompiled", "precompiled_charsmap": charsmap}
    if spec.remove_extra_whitespaces:
        yield {"type": "Replace", "pattern": {"Regex": r"\A +"}, "content": ""}
        yield {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    if spec.add_dummy_prefix:
        yield {"type": "Prepend", "prepend": SPACE}
    yield {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    if spec.remove_extra_whitespaces:
        # In texts, too, the character that stands for a blank.
        yield {"type": "Replace", "pattern": {"Regex": rf"{SPACE}+\z"}, "content": ""}


def _unigram(model: SentencePieceModel) -> dict[str, Any]:
    return {
        "type": "Unigram",
        "unk_id": model.processor.unk_id(),
        "vocab": [[piece.piece, piece.score] for piece in model.proto.pieces],
        "byte_fallback": model.proto.trainer_spec.byte_fallback,
    }


def _bpe(model: SentencePieceModel, unknown: str, *, has_symbols: bool) -> dict[str, Any]:
    merges = [*_merges(model)]
    if has_symbols:
        _check_merges(model, merges)
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.proto.trainer_spec.byte_fallback,
        # A symbol is a word of its own, and no merges lead to it.
        "ignore_merges": has_symbols,
        "vocab": {piece.piece: i for i, piece in enumerate(model.proto.pieces)},
        "merges": merges,
    }


def _merges(model: SentencePieceModel) -> Iterator[tuple[str, str]]:
    """All pairs of pieces that make a piece, in the order in which SentencePiece merges them."""
    pieces = [piece for piece in model.proto.pieces if piece.type == Kind.NORMAL]
    known = {piece.piece for piece in pieces}
    for piece in sorted(pieces, key=lambda piece: -piece.score):
        text = piece.piece
        for i in range(1, len(text)):
            if text[:i] in known and text[i:] in known:
                yield text[:i], text[i:]


def _check_merges(model: SentencePieceModel, merges: list[tuple[str, str]]) -> None:
    """Raise ``ValueError`` unless the merges of every piece's text end with that piece."""
    pieces = [piece.piece for piece in model.proto.pieces if piece.type == Kind.NORMAL]
    bpe = models.BPE({text: i for i, text in enumerate(pieces)}, merges)
    if wrong := [text for text in pieces if len(bpe.tokenize(text)) != 1]:
        raise ValueError(f"its merges do not lead to the piece {wrong[0]!r}")


def _boundaries(model: SentencePieceModel) -> Iterator[str]:
    """Patterns of places within the names of special and byte pieces, where a text may be split.

    The names are plain text for SentencePiece. No piece has both characters around such a place,
    so nothing merges over it. Raises ``ValueError`` for a name without one.
    """
    kinds = (Kind.NORMAL, Kind.USER_DEFINED)
    pieces = [piece.piece for piece in model.proto.pieces if piece.type in kinds]
    pairs = {text[i : i + 2] for text in pieces for i in range(len(text) - 1)}
    for piece in model.proto.pieces:
        name = piece.piece
        if piece.type in kinds:
            continue
        free = (i for i in range(1, len(name)) if name[i - 1 : i + 1] not in pairs)
        place = next(free, None)
        if place is None:
            raise ValueError(f"texts with {name!r} may be merged in two ways")
        yield f"(?<={re.escape(name[:place])})(?={re.escape(name[place:])})"


def texts_with_symbols(model: SentencePieceModel) -> list[str]:
    """Texts with user-defined symbols, alone, in a row and within words."""
    pieces = [piece.piece for piece in model.proto.pieces if piece.type == Kind.USER_DEFINED]
    symbols = [text.replace(SPACE, " ") for text in pieces]
    forms = ("{0}", "{0}{0}", "a{0}b", " {0}", "{0} x", "x {0}", "\n{0}\n", "<s>{0}<unk>{0}<0x0A>")
    cut = [text for symbol in symbols for text in (symbol[:-1], symbol[1:])]
    row = "".join(symbols)
    return [*(form.format(text) for text in symbols for form in forms), *cut, row, row[::-1]]
