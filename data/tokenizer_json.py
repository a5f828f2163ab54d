"""Run a Hugging Face ``tokenizer.json`` on tiktoken, which is faster, if both give the same ids."""

import json
import random
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from tokenizers import Tokenizer

from runtime.log import logger

# Syntax that both regex engines interpret alike. They may differ on "$" and "^" (lines or text),
# "." and {1,3}+ (greedy or possessive), and nested classes.
_PROPERTY = r"\\p\{[A-Z][a-z]?\}|\\[sSrnt/]"
_PLAIN_PATTERN = re.compile(
    rf"""(?: {_PROPERTY} | [A-Za-z0-9\ '/_]        # a character
    | \[\^? (?: {_PROPERTY} | [A-Za-z0-9\ '/_] )+ \]    # a class of characters
    | (?: [?*+] \+? | \{{\d+(?:,\d*)?\}} ) (?![?*+{{])   # a quantifier
    | \(\?i: [sdmtlvre'|\[\]]+ \)                     # English endings such as 'll, in any case
    | \(\?[:!] | \) | \|
    )+""",
    re.VERBOSE,
)
# Llama 3, Qwen and GPT-4 use Split(regex) before ByteLevel; ByteLevel alone has GPT-2's pattern.
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Texts on which tokenizers are known to differ.
SAMPLES = (
    "",
    "Hello, the other world's 12345 words.\r\n\n  \t end",
    " a  b   c    d\t\te \t f\n\ng\n \nh\r\ni\rj\x0bk\x0cl\x85m\u2028n\u2029o\xa0p\u3000q  ",
    "\n\n\n  \n   \r\n\r\n \t\r \n",
    "1 12 123 1234 12345678901234567890 3.14e-10 \u0661\u0662\u0663 \u00bd \u2167 \u00b2 1,000,000",
    "I'm you'll HE'D we'VE they'rE it'S don't 'tis 'LL''s 'ſ 'D'd o'clock ’s",
    "café cafe\u0301 naïve Ångström A\u030a Å ǅ ﬁ ẞß İi Σσς \u2126 \u212a",
    "\u0301start \u0300\u0301\u0302 >\u0338 \u1e9b\u0323 q\u0307\u0323 q\u0323\u0307",
    "\uac00\u11a8 \u1100\u1161\u11a8 \u0958 \u0344 \u1acf \u0897a \u0ece \U000105d2\u0307",
    "👋🏽 👩\u200d👩\u200d👧\u200d👦 🏳\ufe0f\u200d🌈 🇩🇪🇫🇷 ❤\ufe0f ☺\ufe0f 1\ufe0f\u20e3",
    "漢字かな交じり文、カタカナ。「引用」 한국어 文本 𠀀𪜶 全角１２３ＡＢＣ",
    "العربية ١٢٣ עִבְרִית हिन्दी ภาษาไทย ကမြန်မာ \u202eabc\u202c Ελληνικά Привет",
    "def f(x):\n\treturn x**2  # ok\n\n\nclass A(B):\n    def __init__(self) -> None: ...\n\n",
    "for(;;){i+=1;}//x/* y */\n#include <a.h>\r\n\\n \\t C:\\dir /usr/bin https://a.b/c?d=e&f#g",
    "\0\0 a \0\x01\x1b[0m\x7f\x80\x9f \ufeff \ufffd \ufffe \uffff \ue000 \U0010ffff",
    "soft\xadhyphen zero\u200bwidth\u200djoined \u202eright to left\u202c",
    "<|begin_of_text|><|end_of_text|> <|endoftext|></s><s> [INST] <think>x</think> <|im_start|>",
    # Letters, digits and marks of recent versions of Unicode.
    "a\u1c8a a\U00010d40 1\U00010d40 a\U0002ebf0 a\U0001e030 a\U00031350 a\U000323b0 a\U00010ed0",
    "x" * 3000 + " " * 3000 + "ab" * 2000 + "\n" * 500 + "!" * 500 + "7" * 500 + "é" * 500,
)
# One or more of each kind of character that patterns distinguish.
_KINDS = (
    "aszSTLdmrevll AZ'ſ019 \t\n\r\x0b\x85\xa0\u2028\u3000ßéΩǅʰªא漢か가\u0301\u0903\u20dd"
    "٣½Ⅷ²!\"#/_-(){}«»‿—$€+^©👋🏽\u200d\0\x1b\xad\ue000\U000e0001\u0378 \n''"
)
_MAX_RANDOM_CODE_POINT = 0x32400  # beyond it, all but a few code points are unassigned


def build_codec(
    tokenizer: Tokenizer, path: Path
) -> tuple[Callable[[str], np.ndarray], Callable[[list[int]], str], tiktoken.Encoding | None]:
    """Build encode and decode of ``tokenizer``; on tiktoken if it provably gives the same ids.

    Returns (encode, decode, the tiktoken encoding or None). Special tokens in the text are encoded
    as plain text; ``encode`` raises ``ValueError`` for a text that it cannot encode. Mutates
    ``tokenizer``: turns off truncation, padding and dropout, whatever its file says.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    if getattr(tokenizer.model, "dropout", None):
        # It would give other ids at each reading.
        logger.info("tokenizer: %s: dropout of merges is turned off", path)
        tokenizer.model.dropout = None

    def encode(text: str) -> np.ndarray:
        try:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
        except BaseException as error:  # bare Exceptions, and PanicException, which is none
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise ValueError(f"cannot be encoded: {error}") from None
            raise
        return np.array(ids, dtype=np.int64)

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    check_reading(encode, decode, path)
    content = json.loads(tokenizer.to_str())
    try:
        encoding = _build_tiktoken(content, tokenizer)
        fast_encode = _build_fast_encode(encoding, content, tokenizer, encode)
        fast_decode = _build_fast_decode(encoding)
        for text in sample_texts(encoding._mergeable_ranks, encoding.special_tokens_set):
            ids = encode(text)
            is_same = np.array_equal(ids, fast_encode(text))
            if not is_same or decode(ids.tolist()) != fast_decode(ids.tolist()):
                raise _Mismatch(f"{text[:40]!r} has other ids")
    except _Mismatch as reason:
        logger.info("tokenizer: %s: using tokenizers, not tiktoken: %s", path, reason)
        return encode, decode, None
    logger.info("tokenizer: %s: using tiktoken, which gives the same ids", path)
    # A fresh encoding, because regexes are fastest in the thread that uses them first, which should
    # be the data loader's.
    unused = tiktoken.Encoding(
        encoding.name,
        pat_str=encoding._pat_str,
        mergeable_ranks=encoding._mergeable_ranks,
        special_tokens=encoding._special_tokens,
    )
    return _build_fast_encode(unused, content, tokenizer, encode), fast_decode, encoding


def check_reading(
    encode: Callable[[str], np.ndarray], decode: Callable[[list[int]], str], path: Path
) -> None:
    """Log the first text that the tokenizer changes. Raises ``ValueError`` if its ids vary."""
    is_logged = False
    for text in SAMPLES:
        try:
            ids = encode(text)
        except ValueError:  # an error of the record, if it occurs in one
            continue
        if not all(np.array_equal(ids, encode(text)) for _ in range(3)):
            text = f"{text[:40]!r} gets other ids at each reading"
            raise ValueError(f"data.tokenizer: {path}: {text}")
        read = decode(ids.tolist())
        if read != text and not is_logged:
            is_logged = True
            log = "tokenizer: %s: changes text: %r is read as %r"
            at = next((i for i, (a, b) in enumerate(zip(text, read, strict=False)) if a != b), 0)
            logger.info(log, path, text[at : at + 20], read[at : at + 20])


def mark_special(content: dict[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    """Contents of a tokenizer.json in which the tokens ``ids``, by name, are special."""
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    marked = [
        {"id": i, "content": name, **dict.fromkeys(flags, False), "special": True}
        for name, i in ids.items()
    ]
    others = [token for token in content.get("added_tokens", ()) if token["content"] not in ids]
    # tokenizers expects them in the order of their ids.
    return content | {"added_tokens": sorted([*others, *marked], key=lambda token: token["id"])}


class _Mismatch(Exception):
    """Raised if tiktoken gives, or may give, other ids."""


def _build_tiktoken(content: dict[str, Any], tokenizer: Tokenizer) -> tiktoken.Encoding:
    """Build a tiktoken encoding of the same vocabulary; raise ``_Mismatch`` if ids may differ."""
    model, decoder = content["model"], content["decoder"] or {}
    if model["type"] != "BPE" or decoder.get("type") != "ByteLevel":
        raise _Mismatch("not a byte-level BPE")
    options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    if given := [name for name in options if model.get(name)]:
        raise _Mismatch(f"the model has {given[0]}")
    pattern = _pattern(content["pre_tokenizer"] or {})
    added = {token["content"]: token["id"] for token in content["added_tokens"]}
    ordinary = {token: i for token, i in model["vocab"].items() if token not in added}
    if model.get("ignore_merges") and len(ordinary) < len(model["vocab"]):
        raise _Mismatch("an added token may be matched as a word")
    try:
        ranks = {bytes(BYTE_OF[char] for char in token): i for token, i in ordinary.items()}
    except KeyError as char:
        raise _Mismatch(f"{char} is not in the byte alphabet") from None
    if any(bytes([value]) not in ranks for value in range(256)):
        raise _Mismatch("not all 256 single bytes are tokens")
    if len({*ranks.values(), *added.values()}) < len(ranks) + len(added):
        raise _Mismatch("two tokens have the same id")
    if any(_decoded(token) != token.encode() for token in added):
        raise _Mismatch("an added token decodes as bytes")
    _check_merges(ordinary, model, tokenizer)
    try:
        return tiktoken.Encoding(
            name="json", pat_str=pattern, mergeable_ranks=ranks, special_tokens=added
        )
    except ValueError as error:
        raise _Mismatch(f"tiktoken rejects the pattern: {error}") from None


def _pattern(pre_tokenizer: dict[str, Any]) -> str:
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    types = [part.get("type") for part in parts]
    if types not in (["ByteLevel"], ["Split", "ByteLevel"]) or parts[-1]["add_prefix_space"]:
        raise _Mismatch("the pre-tokenizer is not Split and ByteLevel")
    if parts[-1]["use_regex"] != (len(parts) == 1):
        raise _Mismatch("text is split twice, or not at all")
    if len(parts) == 1:
        return _GPT2_PATTERN
    pattern = parts[0]["pattern"].get("Regex", "")
    if parts[0]["behavior"] != "Isolated" or parts[0]["invert"]:
        raise _Mismatch("the pattern does not match the words themselves")
    if not _PLAIN_PATTERN.fullmatch(pattern):
        raise _Mismatch(f"the pattern may match differently in tiktoken: {pattern}")
    return pattern


def _check_merges(ordinary: dict[str, int], model: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Raise ``_Mismatch`` unless merging by ids equals merging by the list.

    tokenizers merges neighbours that are a pair of its list, in the list's order. tiktoken merges
    any neighbours that together are a token, lowest id first, and does not split words that are a
    token. If the list is in the order of ids, they differ only where two neighbours together are a
    token but not a pair of the list. All merges that made these two were within that token's bytes,
    so merging its bytes alone by the list also ends with these two. No token may end like that.
    Tokens that end as three or more are never merged from two, so they only match whole words.
    """
    try:
        results = [ordinary[left + right] for left, right in model["merges"]]
    except KeyError as result:
        raise _Mismatch(f"{result} is a merge result, but not an ordinary token") from None
    if any(first > second for first, second in pairwise(results)):
        raise _Mismatch("merges are not in the order of ids")
    bpe = tokenizer.model
    bpe.ignore_merges = False
    try:
        n_parts = {token: len(bpe.tokenize(token)) for token in ordinary if len(token) > 1}
    finally:
        bpe.ignore_merges = model["ignore_merges"]
    for token, count in n_parts.items():
        if count == 2 or (count > 2 and not model["ignore_merges"]):
            raise _Mismatch(f"the merges do not produce {token!r}")


def _build_fast_encode(
    encoding: tiktoken.Encoding,
    content: dict[str, Any],
    tokenizer: Tokenizer,
    encode: Callable[[str], np.ndarray],
) -> Callable[[str], np.ndarray]:
    """Build an encode on tiktoken; falls back to ``encode`` for the few texts it cannot encode."""
    normalize: Callable[[str], str] = str
    if content["normalizer"] is not None:
        if content["normalizer"]["type"] != "NFC":
            raise _Mismatch("the normalizer is not NFC")
        # Not unicodedata, because its Unicode version may be another.
        normalize = tokenizer.normalizer.normalize_str
    # Added tokens are matched before text is split into words, by their names or normalized ones.
    names = [token["content"] for token in content["added_tokens"] if not token["special"]]
    added_tokens = [*dict.fromkeys([*names, *map(normalize, names)])]

    def fast_encode(text: str) -> np.ndarray:
        normal = text if text.isascii() else normalize(text)
        if any(token in text or token in normal for token in added_tokens):
            return encode(text)
        try:
            return encoding.encode_to_numpy(normal, disallowed_special=()).astype(np.int64)
        except ValueError:  # the regex engine overflows its stack at very many blanks
            return encode(text)

    return fast_encode


def _build_fast_decode(encoding: tiktoken.Encoding) -> Callable[[list[int]], str]:
    used = {*encoding._mergeable_ranks.values(), *encoding._special_tokens.values()}
    return lambda ids: encoding.decode([i for i in ids if i in used])


def sample_texts(tokens: Iterable[bytes], special: Iterable[str]) -> list[str]:
    """Test texts: difficult ones, special tokens as text, and random ones with a fixed seed."""
    generator = random.Random(0)
    tokens, special = sorted(tokens), [*special]
    characters = [chr(i) for i in range(_MAX_RANDOM_CODE_POINT) if not 0xD800 <= i < 0xE000]
    texts = [*SAMPLES, " ".join(special), "".join(special)]
    for _ in range(200):
        texts.append("".join(generator.choices(_KINDS, k=60)))
        texts.append("".join(generator.choices(characters, k=20)))
        texts.append(b"".join(generator.choices(tokens, k=30)).decode(errors="replace"))
        texts.append(bytes(generator.choices(range(128), k=40)).decode())
    return texts


def _decoded(token: str) -> bytes:
    """Decode like ByteLevel: characters of its alphabet are bytes, even in special tokens."""
    if all(char in BYTE_OF for char in token):
        return bytes(BYTE_OF[char] for char in token)
    return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Map the characters of GPT-2's vocabulary to the bytes that they encode.

    https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [value for value in range(256) if value not in printable]
    of_byte = {value: chr(value) for value in printable}
    of_byte |= {value: chr(256 + i) for i, value in enumerate(others)}
    return {char: value for value, char in of_byte.items()}


BYTE_OF = _byte_alphabet()
"""Byte of each character of the ByteLevel alphabet."""
