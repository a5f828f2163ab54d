"""Texts that every tokenizer decodes to what was encoded, and tokenizers from JSON."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from data.tokenizer import Tokenizer, load_tokenizer

RANDOM = "".join(map(chr, np.random.default_rng(0).integers(0, 0xD800, 5000)))
TEXTS = [
    "",
    "Hello, the other world's 12345 words.\r\n\n  \t end",
    "\N{WAVING HAND SIGN}\N{EMOJI MODIFIER FITZPATRICK TYPE-3} caf\u00e9 \u6f22\u5b57",
    "\0\0 a \0",
    "<|begin_of_text|><|end_of_text|> and <|reserved_special_token_0|>",
    "x" * 10_000 + " " * 10_000,
    RANDOM,
]
BYTES = [bytes([value]) for value in range(256)]


def assert_round_trips(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int64
        assert ids.max(initial=0) < tokenizer.n_vocab
        assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids.tolist()), "bos or eos in text"
        assert tokenizer.decode(ids.tolist()) == text
        assert tokenizer.byte_lengths is not None
        assert tokenizer.byte_lengths[ids].sum() == len(text.encode())
    assert tokenizer.byte_lengths[[tokenizer.bos_id, tokenizer.eos_id]].tolist() == [0, 0]
    assert tokenizer.bos_id != tokenizer.eos_id
    assert max(tokenizer.bos_id, tokenizer.eos_id) < tokenizer.n_vocab


def load_json(folder: Path, content: dict[str, Any]) -> Tokenizer:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content))
    return load_tokenizer(str(path))
