"""A Hugging Face ``tokenizer.json`` on tiktoken, which is faster, if both give the same ids."""

import json
import random
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from tokenizers import Tokenizer

from runtime.log import logger

# What a pattern may be made of: both regex engines read all of this alike. They may differ on "$"
# and "^" (lines or the text), "." and {1,3}+ (greedy or possessive), and classes in classes.
_PROPERTY = r"\\p\{[A-Z][a-z]?\}|\\[sSrnt/]"
_PLAIN_PATTERN = re.compile(
    rf"""(?: {_PROPERTY} | [A-Za-z0-9\ '/_]        # a character
    | \[\^? (?: {_PROPERTY} | [A-Za-z0-9\ '/_] )+ \]    # a class of characters
    | (?: [?*+] \+? | \{{\d+(?:,\d*)?\}} ) (?![?*+{{])   # how many, of what is before
    | \(\?i: [sdmtlvre'|\[\]]+ \)                     # English endings such as 'll, in any case
    | \(\?[:!] | \) | \|
    )+""",
    re.VERBOSE,
)
# Split(regex) is the pre-tokenizer of Llama 3, Qwen and GPT-4's likes; ByteLevel alone has GPT-2's.
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Texts that tokenizers are known to differ on.
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
# One or more of every kind of character that patterns tell apart.
_KINDS = (
    "aszSTLdmrevll AZ'ſ019 \t\n\r\x0b\x85\xa0\u2028\u3000ßéΩǅʰªא漢か가\u0301\u0903\u20dd"
    "٣½Ⅷ²!\"#/_-(){}«»‿—$€+^©👋🏽\u200d\0\x1b\xad\ue000\U000e0001\u0378 \n''"
)
_MOST_RANDOM = 0x32400  # beyond it, all but a few code points are unassigned


def build_codec(
    tokenizer: Tokenizer, path: Path
) -> tuple[Callable[[str], np.ndarray], Callable[[list[int]], str], tiktoken.Encoding | None]:
    """Encode and decode as ``tokenizer`` does, with tiktoken if that is proved to be the same; its
    encoding is the third value, else None.

    Markers in the text are text. Mutates ``tokenizer``, so that documents stay whole whatever its
    file says.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True

    def encode(text: str) -> np.ndarray:
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    content = json.loads(tokenizer.to_str())
    try:
        encoding = _as_tiktoken(content, tokenizer)
        fast_encode = _build_fast_encode(encoding, content, tokenizer, encode)
        fast_decode = _build_fast_decode(encoding)
        for text in _samples(encoding):
            ids = encode(text)
            is_same = np.array_equal(ids, fast_encode(text))
            if not is_same or decode(ids.tolist()) != fast_decode(ids.tolist()):
                raise _NotSame(f"{text[:40]!r} has other ids")
    except _NotSame as reason:
        logger.info("tokenizer: %s runs on tokenizers, not on tiktoken: %s", path, reason)
        return encode, decode, None
    logger.info("tokenizer: %s runs on tiktoken, which gives the same ids", path)
    # A new one: its regular expressions are faster in the thread that uses them first, which should
    # be the one that reads the data.
    unused = tiktoken.Encoding(
        encoding.name,
        pat_str=encoding._pat_str,
        mergeable_ranks=encoding._mergeable_ranks,
        special_tokens=encoding._special_tokens,
    )
    return _build_fast_encode(unused, content, tokenizer, encode), fast_decode, encoding


class _NotSame(Exception):
    """Why tiktoken does, or may, give other ids."""


def _as_tiktoken(content: dict[str, Any], tokenizer: Tokenizer) -> tiktoken.Encoding:
    """tiktoken with the same vocabulary and pattern; raise ``_NotSame`` if ids may still differ."""
    model, decoder = content["model"], content["decoder"] or {}
    if model["type"] != "BPE" or decoder.get("type") != "ByteLevel":
        raise _NotSame("no byte-level BPE")
    options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    if given := [name for name in options if model.get(name)]:
        raise _NotSame(f"it has {given[0]}")
    pattern = _pattern(content["pre_tokenizer"] or {})
    added = {token["content"]: token["id"] for token in content["added_tokens"]}
    ordinary = {token: i for token, i in model["vocab"].items() if token not in added}
    if model.get("ignore_merges") and len(ordinary) < len(model["vocab"]):
        raise _NotSame("an added token may be read as a word")
    try:
        ranks = {bytes(BYTE_OF[char] for char in token): i for token, i in ordinary.items()}
    except KeyError as char:
        raise _NotSame(f"{char} stands for no byte") from None
    if any(bytes([value]) not in ranks for value in range(256)):
        raise _NotSame("not all 256 single bytes are tokens")
    if len({*ranks.values(), *added.values()}) < len(ranks) + len(added):
        raise _NotSame("two tokens have the same id")
    if any(_decoded(token) != token.encode() for token in added):
        raise _NotSame("an added token reads as bytes")
    _check_merges(ordinary, model, tokenizer)
    try:
        return tiktoken.Encoding(
            name="json", pat_str=pattern, mergeable_ranks=ranks, special_tokens=added
        )
    except ValueError as error:
        raise _NotSame(f"tiktoken does not take the pattern: {error}") from None


def _pattern(pre_tokenizer: dict[str, Any]) -> str:
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    types = [part.get("type") for part in parts]
    if types not in (["ByteLevel"], ["Split", "ByteLevel"]) or parts[-1]["add_prefix_space"]:
        raise _NotSame("the pre-tokenizer is no Split and ByteLevel")
    if parts[-1]["use_regex"] != (len(parts) == 1):
        raise _NotSame("text is split twice, or not at all")
    if len(parts) == 1:
        return _GPT2_PATTERN
    pattern = parts[0]["pattern"].get("Regex", "")
    if parts[0]["behavior"] != "Isolated" or parts[0]["invert"]:
        raise _NotSame("what the pattern matches are not the words")
    if not _PLAIN_PATTERN.fullmatch(pattern):
        raise _NotSame(f"the pattern may mean something else to tiktoken: {pattern}")
    return pattern


def _check_merges(ordinary: dict[str, int], model: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Raise ``_NotSame`` unless merging by ids is merging by the list.

    tokenizers merges neighbours that are a pair of its list, in the list's order. tiktoken merges
    any neighbours that are a token together, the lowest id first, and takes words that are a token
    as they are. With the list in the order of ids, they differ only where two neighbours are a
    token together, but no pair of the list. All merges that made the two were within that token's
    bytes, so these bytes alone, merged by the list, end as the same two. There must be no such
    token. One whose bytes end as three or more is never made of two, so it is only ever a word.
    """
    try:
        results = [ordinary[left + right] for left, right in model["merges"]]
    except KeyError as result:
        raise _NotSame(f"{result} is merged, and no ordinary token") from None
    if any(first > second for first, second in pairwise(results)):
        raise _NotSame("merges are not in the order of ids")
    bpe = tokenizer.model
    bpe.ignore_merges = False
    try:
        n_parts = {token: len(bpe.tokenize(token)) for token in ordinary if len(token) > 1}
    finally:
        bpe.ignore_merges = model["ignore_merges"]
    for token, count in n_parts.items():
        if count == 2 or (count > 2 and not model["ignore_merges"]):
            raise _NotSame(f"the merges do not make {token!r}")


def _build_fast_encode(
    encoding: tiktoken.Encoding,
    content: dict[str, Any],
    tokenizer: Tokenizer,
    encode: Callable[[str], np.ndarray],
) -> Callable[[str], np.ndarray]:
    """Encode with tiktoken; ``encode`` serves the few texts that tiktoken cannot take."""
    normalize: Callable[[str], str] = str
    if content["normalizer"] is not None:
        if content["normalizer"]["type"] != "NFC":
            raise _NotSame("it normalizes other than by NFC")
        # Not Python's own, whose version of Unicode may be another.
        normalize = tokenizer.normalizer.normalize_str
    # These are found in text before it is split into words.
    cut_out = [token["content"] for token in content["added_tokens"] if not token["special"]]

    def fast_encode(text: str) -> np.ndarray:
        normal = text if text.isascii() else normalize(text)
        if any(token in text or token in normal for token in cut_out):
            return encode(text)
        try:
            return encoding.encode_to_numpy(normal, disallowed_special=()).astype(np.int64)
        except ValueError:  # its regex engine runs out of stack at very many blanks in a row
            return encode(text)

    return fast_encode


def _build_fast_decode(encoding: tiktoken.Encoding) -> Callable[[list[int]], str]:
    used = {*encoding._mergeable_ranks.values(), *encoding._special_tokens.values()}
    return lambda ids: encoding.decode([i for i in ids if i in used])


def _samples(encoding: tiktoken.Encoding) -> list[str]:
    """Hard texts, the special tokens as text, and random ones, the same every time."""
    draw = random.Random(0)
    tokens = sorted(encoding._mergeable_ranks)
    characters = [chr(i) for i in range(_MOST_RANDOM) if not 0xD800 <= i < 0xE000]
    texts = [*SAMPLES, " ".join(encoding.special_tokens_set), "".join(encoding.special_tokens_set)]
    for _ in range(200):
        texts.append("".join(draw.choices(_KINDS, k=60)))
        texts.append("".join(draw.choices(characters, k=20)))
        texts.append(b"".join(draw.choices(tokens, k=30)).decode(errors="replace"))
        texts.append(bytes(draw.choices(range(128), k=40)).decode())
    return texts


def _decoded(token: str) -> bytes:
    """As the ByteLevel decoder does: characters of its alphabet are bytes, even in a marker."""
    if all(char in BYTE_OF for char in token):
        return bytes(BYTE_OF[char] for char in token)
    return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in GPT-2's vocabulary, as published.

    https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [value for value in range(256) if value not in printable]
    of_byte = {value: chr(value) for value in printable}
    of_byte |= {value: chr(256 + i) for i, value in enumerate(others)}
    return {char: value for value, char in of_byte.items()}


BYTE_OF = _byte_alphabet()
"""The byte that each character of the alphabet stands for."""
