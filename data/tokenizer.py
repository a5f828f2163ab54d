"""Text to token ids and back: four kinds of tokenizer behind one small class."""

import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
from tokenizers import Tokenizer as HuggingFaceTokenizer

BOS_NAMES = ("<|begin_of_text|>", "<s>", "<|endoftext|>")
EOS_NAMES = ("<|end_of_text|>", "</s>", "<|endoftext|>")
# Llama 3's split of text into words, as its tokenizer was published.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_RESERVED = 256


@dataclass(frozen=True)
class Tokenizer:
    encode: Callable[[str], np.ndarray]
    """Text to int64 ids; markers in the text are text."""
    decode: Callable[[list[int]], str]
    """Ids to text; an id that no token has says nothing."""
    n_vocab: int
    """All ids are below it."""
    bos_id: int
    eos_id: int
    fingerprint: str
    """Equal for tokenizers that give equal ids."""


def load_tokenizer(name: str) -> Tokenizer:
    """Build what ``data.tokenizer`` names; raise ``ValueError`` that says what was tried."""
    path = Path(name)
    if name == "bytes":
        return _from_tiktoken(_byte_encoding())
    if path.suffix == ".json":
        return _from_tokenizer_json(path)
    if path.suffix in (".tiktoken", ".model"):
        return _from_tiktoken(_rank_file_encoding(path))
    if name not in tiktoken.list_encoding_names():
        known = ", ".join(["bytes", *tiktoken.list_encoding_names()])
        raise ValueError(
            f"data.tokenizer: {name!r} is not one of {known}, nor a .tiktoken, .model or .json file"
        )
    try:
        return _from_tiktoken(tiktoken.get_encoding(name))
    except OSError as error:
        raise ValueError(
            f"data.tokenizer: {name} is downloaded on first use, and that failed: {error}"
        ) from error


def _byte_encoding() -> tiktoken.Encoding:
    """A token per byte: no training, no file, any text."""
    return tiktoken.Encoding(
        name="bytes",
        # Nothing merges; this only bounds the pieces that tiktoken works on.
        pat_str=r"(?s).{1,64}",
        mergeable_ranks={bytes([value]): value for value in range(256)},
        special_tokens={"<|begin_of_text|>": 256, "<|end_of_text|>": 257},
    )


def _rank_file_encoding(path: Path) -> tiktoken.Encoding:
    """Llama 3's tokenizer.model, or another base64 rank file split the same way."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"data.tokenizer: {error}") from None
    ranks = {}
    for number, line in enumerate(lines, start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            where = f"{path}, line {number}"
            raise ValueError(f"data.tokenizer: {where}: not a token and its rank") from None
    # tiktoken would panic at the first byte that is missing, and mistake a doubled rank.
    if any(bytes([value]) not in ranks for value in range(256)):
        raise ValueError(f"data.tokenizer: {path}: not all 256 single bytes have a rank")
    if sorted(ranks.values()) != list(range(len(lines))):
        raise ValueError(f"data.tokenizer: {path}: the ranks are not 0 to {len(lines) - 1}")
    names = ["<|begin_of_text|>", "<|end_of_text|>"]
    names += [f"<|reserved_special_token_{i}|>" for i in range(LLAMA3_RESERVED - len(names))]
    special_tokens = {name: len(ranks) + i for i, name in enumerate(names)}
    return tiktoken.Encoding(
        name=path.name, pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special_tokens
    )


def _from_tiktoken(encoding: tiktoken.Encoding) -> Tokenizer:
    special = {name: encoding.encode_single_token(name) for name in encoding.special_tokens_set}
    digest = hashlib.sha256(encoding._pat_str.encode())
    for token, rank in sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1]):
        digest.update(token + b"%d\n" % rank)
    digest.update(repr(sorted(special.items())).encode())
    used = {*encoding._mergeable_ranks.values(), *special.values()}
    return Tokenizer(
        encode=lambda text: encoding.encode_to_numpy(text, disallowed_special=()).astype(np.int64),
        decode=lambda ids: encoding.decode([i for i in ids if i in used]),
        n_vocab=encoding.n_vocab,
        bos_id=_marker(special, BOS_NAMES, encoding.name),
        eos_id=_marker(special, EOS_NAMES, encoding.name),
        fingerprint=digest.hexdigest(),
    )


def _from_tokenizer_json(path: Path) -> Tokenizer:
    try:
        text = path.read_text(encoding="utf-8")
        tokenizer = HuggingFaceTokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise ValueError(f"data.tokenizer: {path}: {error}") from None
    # Documents are whole, and markers in them are text, whatever the file says.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    special = {t.content: i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    return Tokenizer(
        encode=lambda t: np.array(
            tokenizer.encode(t, add_special_tokens=False).ids, dtype=np.int64
        ),
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        n_vocab=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        bos_id=_marker(special, BOS_NAMES, str(path)),
        eos_id=_marker(special, EOS_NAMES, str(path)),
        fingerprint=hashlib.sha256(text.encode()).hexdigest(),
    )


def _marker(special: dict[str, int], names: tuple[str, ...], where: str) -> int:
    for name in names:
        if name in special:
            return special[name]
    raise ValueError(f"data.tokenizer: {where} has none of the special tokens {', '.join(names)}")
