import base64
import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
import tiktoken_ext.openai_public
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from data import tokenizer_json
from data.tokenizer import LLAMA3_PATTERN, PUBLISHED, Tokenizer, load_tokenizer
from data.tokenizer_json import BYTE_OF
from runtime.log import logger

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
MERGES = [b"th", b"he", b"the", b" the", b"12", b"123", b"1234"]


def assert_says_what_it_read(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int64
        assert ids.max(initial=0) < tokenizer.n_vocab
        assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids.tolist()), "markers are text"
        assert tokenizer.decode(ids.tolist()) == text
    assert tokenizer.bos_id != tokenizer.eos_id
    assert max(tokenizer.bos_id, tokenizer.eos_id) < tokenizer.n_vocab


def test_bytes_are_the_tokens() -> None:
    tokenizer = load_tokenizer("bytes")
    assert_says_what_it_read(tokenizer)
    for text in TEXTS:
        assert tokenizer.encode(text).tolist() == list(text.encode())
    assert (tokenizer.n_vocab, tokenizer.bos_id, tokenizer.eos_id) == (258, 256, 257)


def rank_lines(tokens: list[bytes]) -> list[bytes]:
    return [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]


def write_ranks(path: Path, tokens: list[bytes]) -> str:
    path.write_bytes(b"\n".join(rank_lines(tokens)) + b"\n")
    return str(path)


BYTES = [bytes([value]) for value in range(256)]


@pytest.mark.parametrize("suffix", [".model", ".tiktoken"])
def test_rank_file_is_llama3s(tmp_path: Path, suffix: str) -> None:
    tokens = BYTES + MERGES
    tokenizer = load_tokenizer(write_ranks(tmp_path / f"tokenizer{suffix}", tokens))
    assert_says_what_it_read(tokenizer)
    # As published: 256 special tokens after the ranks, these two first.
    assert tokenizer.n_vocab == len(tokens) + 256
    assert (tokenizer.bos_id, tokenizer.eos_id) == (len(tokens), len(tokens) + 1)
    # Words keep the blank before them, and numbers are split into three digits at most.
    words = [tokens[i] for i in tokenizer.encode("the other 1234")]
    assert words == [b"the", b" ", b"o", b"the", b"r", b" ", b"123", b"4"]
    assert tokens[tokenizer.encode("on the")[-1]] == b" the"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*rank_lines(BYTES), b"!! 256"], "line 257: not a token and its rank"),
        ([b"YQ== x", *rank_lines(BYTES)], "line 1: not a token and its rank"),
        ([b"\x0a\x0e\x0a\x05<unk>", *rank_lines(BYTES)], "line 1: not a token and its rank"),
        (rank_lines(BYTES)[:-1], "not all 256 single bytes"),
        ([], "not all 256 single bytes"),
        ([*rank_lines(BYTES), b"dGg= 255"], "ranks are not 0 to 256"),
        ([*rank_lines(BYTES), b"dGg= 300"], "ranks are not 0 to 256"),
        ([*rank_lines(BYTES), b"YQ== 256"], "ranks are not 0 to 256"),
    ],
)
def test_malformed_rank_file_is_named(tmp_path: Path, lines: list[bytes], message: str) -> None:
    path = tmp_path / "broken.model"
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match=rf"data\.tokenizer: .*broken\.model.*{message}"):
        load_tokenizer(str(path))


GPT2, CL100K, O200K = PUBLISHED


@pytest.mark.parametrize(("n_ranks", "name"), [(GPT2, "gpt2"), (CL100K, "cl100k_base")])
def test_published_rank_file_is_known_by_its_length(
    tmp_path: Path, n_ranks: int, name: str
) -> None:
    pairs = [bytes(pair) for pair in product(range(256), repeat=2)]
    longer = [b"%08d" % i for i in range(n_ranks)]
    path = write_ranks(tmp_path / f"{name}.tiktoken", [*BYTES, *pairs, *longer][:n_ranks])
    tokenizer = load_tokenizer(path)
    pattern, special = PUBLISHED[n_ranks]
    end = special["<|endoftext|>"]
    assert (tokenizer.bos_id, tokenizer.eos_id) == (end, end)
    assert tokenizer.n_vocab == max(special.values()) + 1
    text = "don't 1234"
    words = tiktoken.Encoding(
        name="", pat_str=pattern, mergeable_ranks=load_ranks(path), special_tokens={}
    )
    assert tokenizer.encode(text).tolist() == words.encode_ordinary(text)


def load_ranks(path: str) -> dict[bytes, int]:
    lines = (line.split() for line in Path(path).read_bytes().splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def test_published_patterns_are_tiktokens(monkeypatch: pytest.MonkeyPatch) -> None:
    public = tiktoken_ext.openai_public
    for download in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(public, download, lambda *_, **__: {})
    sources = {
        GPT2: [public.gpt2, public.r50k_base],
        CL100K: [public.cl100k_base],
        O200K: [public.o200k_base],
    }
    for n_ranks, functions in sources.items():
        for function in functions:
            facts = function()
            assert PUBLISHED[n_ranks] == (facts["pat_str"], facts["special_tokens"])
            assert n_ranks == min(facts["special_tokens"].values()) - (n_ranks != GPT2)


COMPANION = {"pattern": r"[\s\S]", "special_tokens": {"<s>": 270, "</s>": 263}}


def write_companion(folder: Path, content: str) -> str:
    (folder / "own.tiktoken.json").write_text(content)
    return write_ranks(folder / "own.tiktoken", BYTES + MERGES)


def test_a_file_beside_the_ranks_says_the_pattern(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_companion(tmp_path, json.dumps(COMPANION)))
    assert_says_what_it_read(tokenizer)
    # No two characters are a word, so nothing merges.
    assert tokenizer.encode("the 123").tolist() == list(b"the 123")
    assert (tokenizer.n_vocab, tokenizer.bos_id, tokenizer.eos_id) == (271, 270, 263)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "Expecting property name"),
        ("[]", "not of the form"),
        ("[" * 100_000, "recursion"),
        (json.dumps({"pattern": "."}), "not of the form"),
        (json.dumps(COMPANION | {"patern": "."}), "not of the form"),
        (json.dumps(COMPANION | {"pattern": None}), "not of the form"),
        (json.dumps(COMPANION | {"special_tokens": ["<s>"]}), "not of the form"),
        (json.dumps(COMPANION | {"special_tokens": {"<s>": True}}), "not of the form"),
        (json.dumps(COMPANION | {"special_tokens": {"<s>": 262}}), "ids of their own, from 263"),
        (json.dumps(COMPANION | {"special_tokens": {"a": 270, "b": 270}}), "ids of their own"),
        (json.dumps(COMPANION | {"pattern": "("}), "the pattern: "),
        (json.dumps(COMPANION | {"pattern": r"\w+|\s+"}), 'does not match all of "Hello, the'),
    ],
)
def test_malformed_file_beside_the_ranks_is_named(
    tmp_path: Path, content: str, message: str
) -> None:
    path = write_companion(tmp_path, content)
    with pytest.raises(ValueError, match=rf"data\.tokenizer: .*own\.tiktoken\.json.*{message}"):
        load_tokenizer(path)


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """A byte-level BPE as ``tokenizers`` writes it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the other words of the world"] * 10, trainer)
    return json.loads(tokenizer.to_str())


def load_json(folder: Path, content: dict[str, Any]) -> Tokenizer:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content))
    return load_tokenizer(str(path))


def test_tokenizer_json(tmp_path: Path, trained: dict[str, Any]) -> None:
    tokenizer = load_json(tmp_path, trained)
    assert_says_what_it_read(tokenizer)
    assert len(tokenizer.encode("the other words")) < 8, "nothing was merged"
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)


def test_tokenizer_json_cuts_and_pads_no_document(tmp_path: Path, trained: dict[str, Any]) -> None:
    limits = tokenizers.Tokenizer.from_str(json.dumps(trained))
    limits.enable_truncation(max_length=4)
    limits.enable_padding(length=4)
    assert_says_what_it_read(load_json(tmp_path, json.loads(limits.to_str())))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "broken.json"),
        ('{"model": {"type": "unheard of"}}', "broken.json"),
        (
            '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}',
            "broken.json has none of the",
        ),
    ],
)
def test_malformed_tokenizer_json_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"data\.tokenizer: .*{message}"):
        load_tokenizer(str(path))


@pytest.mark.parametrize("name", ["missing.model", "missing.json", "unknown"])
def test_what_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name) if "." in name else name
    with pytest.raises(ValueError, match=rf"data\.tokenizer: .*{name}"):
        load_tokenizer(path)


def test_failed_download_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(name: str) -> tiktoken.Encoding:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    with pytest.raises(ValueError, match=r"cl100k_base is downloaded on first use, .*no route"):
        load_tokenizer("cl100k_base")


def test_ids_of_no_token_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in cl100k_base, where a model may draw one."""
    encoding = tiktoken.Encoding(
        name="gap",
        pat_str=".",
        mergeable_ranks={byte: rank for rank, byte in enumerate(BYTES)},
        special_tokens={"<|endoftext|>": 300},
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    tokenizer = load_tokenizer("cl100k_base")
    assert (tokenizer.n_vocab, tokenizer.bos_id, tokenizer.eos_id) == (301, 300, 300)
    assert tokenizer.decode([*b"a", 280, *b"b"]) == "ab"


def test_fingerprints_tell_a_merge(tmp_path: Path, trained: dict[str, Any]) -> None:
    swapped = [*MERGES[:2], MERGES[3], MERGES[2], *MERGES[4:]]
    ranks = [
        load_tokenizer(write_ranks(tmp_path / f"{i}.model", BYTES + merges)).fingerprint
        for i, merges in enumerate([MERGES, swapped, MERGES])
    ]
    merges = trained["model"]["merges"]
    edited = trained | {"model": trained["model"] | {"merges": [merges[1], merges[0], *merges[2:]]}}
    jsons = [load_json(tmp_path, content).fingerprint for content in (trained, edited, trained)]
    for first, other, again in (ranks, jsons):
        assert first == again
        assert first != other
    assert len({*ranks, *jsons, load_tokenizer("bytes").fingerprint}) == 5


# From here on: a tokenizer.json on tiktoken gives what ``tokenizers`` gives.
ALPHABET = sorted(BYTE_OF, key=lambda char: BYTE_OF[char])
QWEN_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")


@pytest.fixture(scope="module")
def learned() -> dict[str, Any]:
    """A byte-level BPE of enough text to have tokens of many kinds, as ids of bytes and merges."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    texts = [Path(__file__).read_text(), *tokenizer_json.SAMPLES]
    tokenizer.train_from_iterator(texts * 2, trainer)
    content = json.loads(tokenizer.to_str())
    merges = content["model"]["merges"]
    tokens = [*ALPHABET, *("".join(pair) for pair in merges)]
    content["model"]["vocab"] = {token: i for i, token in enumerate(tokens)}
    content["added_tokens"] = [added(610, "<s>"), added(650, "</s>")]
    return content


def added(number: int, content: str, **changes: Any) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": content, **flags, "special": True, **changes}


def with_model(content: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return content | {"model": content["model"] | changes}


def with_split(content: dict[str, Any], pattern: str, **changes: Any) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    parts = [split | {"invert": False} | changes, by_bytes | {"use_regex": False}]
    return content | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": parts}}


def with_ids(content: dict[str, Any], new: dict[int, int]) -> dict[str, Any]:
    vocabulary = content["model"]["vocab"]
    return with_model(content, vocab={token: new.get(i, i) for token, i in vocabulary.items()})


def llama3_form(content: dict[str, Any]) -> dict[str, Any]:
    """Every way to cut a token in two is a merge, as converters from tiktoken write it."""
    vocab = content["model"]["vocab"]
    cuts = ((token[:i], token[i:]) for token in vocab for i in range(1, len(token)))
    merges = [[left, right] for left, right in cuts if left in vocab and right in vocab]
    # And a token that no two others make, which is only found as a word.
    vocab = vocab | {"zqxj": 600}
    model = with_model(content, merges=merges, vocab=vocab, ignore_merges=True)
    return with_split(model, LLAMA3_PATTERN)


def qwen_form(content: dict[str, Any]) -> dict[str, Any]:
    markers = [*content["added_tokens"], added(700, "of the", special=False)]
    content = with_split(content, QWEN_PATTERN) | {"normalizer": {"type": "NFC"}}
    return content | {"added_tokens": markers}


def odd_places(content: dict[str, Any]) -> dict[str, Any]:
    """Markers among the bytes and merges, the first ids unused, and holes."""
    new = {i: 1000 + i * 3 for i in range(600)}
    markers = [added(7, "<s>"), added(1001, "</s>"), added(3001, "<unused é 1>")]
    return with_ids(content, new) | {"added_tokens": markers}


FORMS = {
    "gpt2": lambda content: content,
    "strings": lambda content: with_model(
        content, merges=[" ".join(pair) for pair in content["model"]["merges"]]
    ),
    "llama3": llama3_form,
    "qwen": qwen_form,
    "odd places": odd_places,
}


def load_logged(
    folder: Path, content: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[Tokenizer, str]:
    lines: list[str] = []
    monkeypatch.setattr(logger, "info", lambda text, *values: lines.append(text % values))
    tokenizer = load_json(folder, content)
    (line,) = lines
    return tokenizer, line


def assert_equals_tokenizers(tokenizer: Tokenizer, content: dict[str, Any], seed: int = 1) -> None:
    truth = tokenizers.Tokenizer.from_str(json.dumps(content))
    truth.encode_special_tokens = True
    draw = random.Random(seed)
    tokens = [token for token in truth.get_vocab() if len(token) > 1]
    pieces = [*"aé .\n1'\u0301\u00c5\u212b\t", "s ", *TEXTS[1:5], "of the", "zqxj", "<unused é 1>"]
    texts = [*TEXTS, " " * 300_000 + "x", "Z\u0301 >\u0338", "zqxj", "azqxj zqxj"]
    for _ in range(300):
        texts.append("".join(draw.choices(pieces, k=12)))
        chars = "".join(draw.choices(tokens, k=12))
        texts.append(bytes(BYTE_OF.get(char, 32) for char in chars).decode(errors="replace"))
        texts.append("".join(map(chr, draw.choices(range(0xD800), k=30))))
    for text in texts:
        ids = truth.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text).tolist() == ids, text
    for _ in range(300):
        # Mostly not UTF-8, and ids of no token among them.
        ids = draw.choices(range(tokenizer.n_vocab + 10), k=8)
        assert tokenizer.decode(ids) == truth.decode(ids, skip_special_tokens=False), ids
    assert tokenizer.n_vocab == max(truth.get_vocab().values()) + 1


@pytest.mark.parametrize("form", FORMS)
def test_tokenizer_json_on_tiktoken(
    tmp_path: Path, learned: dict[str, Any], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = FORMS[form](learned)
    tokenizer, line = load_logged(tmp_path, content, monkeypatch)
    assert line.endswith("tokenizer.json runs on tiktoken, which gives the same ids")
    assert_equals_tokenizers(tokenizer, content)


def swapped_ids(content: dict[str, Any]) -> dict[str, Any]:
    """Of two merges that want the same letter."""
    merges = [pair for pair in content["model"]["merges"] if "".join(pair).isalpha()]
    first, second = next(
        (one, other) for one, other in product(merges, repeat=2) if one[1] == other[0] != one[0]
    )
    ids = [content["model"]["vocab"]["".join(pair)] for pair in (first, second)]
    return with_ids(content, dict(zip(ids, reversed(ids), strict=True)))


def without_byte(content: dict[str, Any]) -> dict[str, Any]:
    vocab = {token: i for token, i in content["model"]["vocab"].items() if token != ALPHABET[1]}
    return with_model(content, vocab=vocab)


def with_prefix_space(content: dict[str, Any]) -> dict[str, Any]:
    return content | {"pre_tokenizer": content["pre_tokenizer"] | {"add_prefix_space": True}}


NOT_SAME = {
    "in the order of ids": swapped_ids,
    "not all 256": without_byte,
    "do not make 'zqxj'": lambda c: with_model(c, vocab=c["model"]["vocab"] | {"zqxj": 600}),
    "may be read as a word": lambda c: with_model(
        c, vocab=c["model"]["vocab"] | {"<s>": 610}, ignore_merges=True
    ),
    "stands for no byte": lambda c: with_model(c, vocab=c["model"]["vocab"] | {"\n": 600}),
    "reads as bytes": lambda c: c | {"added_tokens": [*c["added_tokens"], added(700, "éé")]},
    "other than by NFC": lambda c: c | {"normalizer": {"type": "NFKC"}},
    "no Split and ByteLevel": with_prefix_space,
    "may mean something else": lambda c: with_split(c, r"\s+$|" + LLAMA3_PATTERN),
    "are not the words": lambda c: with_split(c, LLAMA3_PATTERN, behavior="MergedWithNext"),
}


@pytest.mark.parametrize("reason", NOT_SAME)
def test_tokenizer_json_that_is_not_for_tiktoken(
    tmp_path: Path, learned: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = NOT_SAME[reason](learned)
    tokenizer, line = load_logged(tmp_path, content, monkeypatch)
    assert "runs on tokenizers, not on tiktoken" in line
    assert reason in line
    assert_equals_tokenizers(tokenizer, content)


def test_samples_see_what_the_other_checks_do_not(
    tmp_path: Path, learned: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_json, "_PLAIN_PATTERN", tokenizer_json.re.compile(".*"))
    monkeypatch.setattr(tokenizer_json, "_check_merges", lambda *_: None)
    patterns = [
        LLAMA3_PATTERN.replace("{1,3}", "{1,3}+"),
        r"\s+$|" + LLAMA3_PATTERN,
        LLAMA3_PATTERN.removesuffix(r"|\s+"),
    ]
    contents = [with_split(learned, pattern) for pattern in patterns]
    for content in (*contents, swapped_ids(learned)):
        _, line = load_logged(tmp_path, content, monkeypatch)
        assert line.endswith("has other ids")


def test_merges_said_to_be_the_same_are(learned: dict[str, Any]) -> None:
    """Random lists of merges, good and bad, on every word of two letters."""
    words = ["".join(word) for n in range(1, 9) for word in product("ab", repeat=n)]
    draw = random.Random(0)
    n_same = n_other = 0
    for _ in range(200):
        vocab = {char: i for i, char in enumerate(ALPHABET)}
        merges: list[list[str]] = []
        known = ["a", "b"]
        for _ in range(draw.randint(1, 9)):
            pair = [draw.choice(known), draw.choice(known)]
            known += [] if "".join(pair) in known else ["".join(pair)]
            vocab.setdefault("".join(pair), len(vocab))
            merges += [] if pair in merges else [pair]
        if draw.random() < 0.3:
            draw.shuffle(merges)
        ignore_merges = draw.random() < 0.5
        content = with_model(learned, vocab=vocab, merges=merges, ignore_merges=ignore_merges)
        truth = tokenizers.Tokenizer.from_str(json.dumps(content))
        try:
            encoding = tokenizer_json._as_tiktoken(json.loads(truth.to_str()), truth)
        except tokenizer_json._NotSame:
            n_other += 1
            continue
        n_same += 1
        expected = [one.ids for one in truth.encode_batch(words, add_special_tokens=False)]
        assert [encoding.encode_ordinary(word) for word in words] == expected
    assert min(n_same, n_other) > 30


@pytest.mark.parametrize(
    "piece", [r"\p{L}", r"\p{N}", r"\s", r"\p{Lu}", r"\p{M}", r"(?i:[sdmtlvre])"]
)
def test_both_regex_engines_have_the_same_classes(piece: str) -> None:
    """Of all characters: the two could be built with other versions of Unicode."""
    characters = "".join(chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000)
    ranks = {byte: rank for rank, byte in enumerate(BYTES)}
    words = tiktoken.Encoding(
        name="", pat_str=f"(?:{piece})+", mergeable_ranks=ranks, special_tokens={}
    )
    split = pre_tokenizers.Split(Regex(f"(?:{piece})+"), "removed", invert=True)
    found = "".join(word for word, _ in split.pre_tokenize_str(characters))
    assert found
    assert words.decode(words.encode_ordinary(characters)) == found
