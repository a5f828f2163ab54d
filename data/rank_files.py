"""Rank files: a line per token, base64 and its rank, for tiktoken. They have no pattern.

The pattern that splits text into words is that of the published file with as many ranks, or stands
in a companion ``FILE.json``, which tools/train_tokenizer.py writes. Other files are rejected.
"""

import base64
import json
import os
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import tiktoken

from data.markers import check_n_vocab
from data.tokenizer_json import SAMPLES
from runtime.filesystem import read_input
from runtime.log import logger
from runtime.printable import reason_of

COMPANION_FORM = '{"pattern": TEXT, "special_tokens": {NAME: ID}}'
# The published pre-tokenization pattern of Llama 3.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_RANKS, LLAMA3_RESERVED = 128_000, 256
LLAMA3_NAMES = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(LLAMA3_RESERVED - 2)),
)


class Published(NamedTuple):
    """Facts of a published rank file that are not in it."""

    pattern: str
    special_tokens: dict[str, int]
    origin: str
    sha256: str


# Published rank files by their number of ranks. Sources: tiktoken_ext/openai_public.py of tiktoken
# 0.14, and llama3/tokenizer.py of Meta's llama-models.
PUBLISHED = {
    50_256: Published(
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
        {"<|endoftext|>": 50256},
        "GPT-2",
        "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
    ),
    100_256: Published(
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+|"
        r" ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
        {
            "<|endoftext|>": 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
        "cl100k_base",
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    ),
    199_998: Published(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        {"<|endoftext|>": 199999, "<|endofprompt|>": 200018},
        "o200k_base",
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    ),
    LLAMA3_RANKS: Published(
        LLAMA3_PATTERN,
        {name: LLAMA3_RANKS + i for i, name in enumerate(LLAMA3_NAMES)},
        "Llama 3",
        "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55",
    ),
}


def load_rank_file(path: Path) -> tiktoken.Encoding:
    """Load a rank file with its pattern and special tokens.

    Raises ``ValueError`` for a malformed file, and for one whose pattern is unknown.
    """
    content = _read(path)
    ranks = _parse_ranks(path, content)
    companion = companion_of(path)
    # A link to nothing is a mistake, not the absence of a file.
    if os.path.lexists(companion):
        pattern, special_tokens = _read_companion(companion, len(ranks))
        origin = companion.name
    else:
        pattern, special_tokens, origin = _published(path, content, len(ranks))
    logger.info("tokenizer: %s: %s ranks, pattern of %s", path, f"{len(ranks):,}", origin)
    return tiktoken.Encoding(
        name=path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens
    )


def companion_of(path: Path) -> Path:
    """Path of the file with the pattern and special tokens of a rank file."""
    return path.with_name(f"{path.name}.json")


def _read(path: Path) -> bytes:
    try:
        return read_input(path)
    except OSError as error:
        raise ValueError(f"data.tokenizer: {path}: {error.strerror}") from None


def _parse_ranks(path: Path, content: bytes) -> dict[bytes, int]:
    lines, ranks = content.splitlines(), dict[bytes, int]()
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


def _published(path: Path, content: bytes, n_ranks: int) -> tuple[str, dict[str, int], str]:
    """Pattern and special tokens of the published file with as many ranks, and its name."""
    found = PUBLISHED.get(n_ranks)
    if found is None:
        known = ", ".join(f"{file.origin} {n:,}" for n, file in PUBLISHED.items())
        raise ValueError(
            f"data.tokenizer: {path}: {n_ranks:,} ranks, as many as no known file ({known})."
            " Rank files lack the pattern that splits text into words: use the model's"
            f" tokenizer.json, or write {companion_of(path)}: {COMPANION_FORM}"
        )
    if sha256(content).hexdigest() != found.sha256:
        text = "tokenizer: %s is not the published file of %s, but has as many ranks: taking its"
        text += " pattern and special tokens; write others to %s"
        logger.warning(text, path, found.origin, companion_of(path).name)
    return found.pattern, found.special_tokens, found.origin


def _read_companion(path: Path, n_ranks: int) -> tuple[str, dict[str, int]]:
    try:
        content = json.loads(read_input(path).decode())
        pattern, special_tokens = content["pattern"], content["special_tokens"]
        ids = list(special_tokens.values())
        if len(content) > 2 or not isinstance(pattern, str) or {*map(type, ids)} - {int}:
            raise TypeError
    except (AttributeError, KeyError, TypeError):
        raise ValueError(f"data.tokenizer: {path}: not of the form {COMPANION_FORM}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"data.tokenizer: {path}: {reason_of(error)}") from None
    if len({*ids}) < len(ids) or any(not n_ranks <= i < 2**31 for i in ids):
        text = f"special tokens need unique ids, from {n_ranks} on"
        raise ValueError(f"data.tokenizer: {path}: {text}")
    check_n_vocab(max([n_ranks - 1, *ids]) + 1, n_ranks + len(ids), path)
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
