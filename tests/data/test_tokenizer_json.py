"""A tokenizer.json on tiktoken gives the same ids as ``tokenizers``."""

import json
import random
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import tiktoken
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from data import tokenizer_json
from data.mixture import Mixture, RowState, RowStream
from data.rank_files import LLAMA3_PATTERN
from data.tokenizer import Tokenizer
from data.tokenizer_json import BYTE_OF
from runtime.log import logger
from tests.lib.corpora import source
from tests.lib.tokenization import BYTES, TEXTS, load_json

ALPHABET = sorted(BYTE_OF, key=lambda char: BYTE_OF[char])
QWEN_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")


@pytest.fixture(scope="module")
def learned() -> dict[str, Any]:
    """A trained byte-level BPE with tokens of many kinds; ids are bytes, then merges."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    # Not the text of files, because the samples below must not depend on who edits them.
    generator = random.Random(1)
    syllables = ["th", "e", "an", "in", "er", "o", "s", "at", "re", "on", "i", "st", "es", "a", "d"]
    words = ["".join(generator.choices(syllables, k=generator.randint(1, 4))) for _ in range(400)]
    texts = [" ".join(generator.choices(words, k=2000)), *tokenizer_json.SAMPLES]
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
    """Make every split of a token in two a merge, like converters from tiktoken."""
    vocab = content["model"]["vocab"]
    splits = ((token[:i], token[i:]) for token in vocab for i in range(1, len(token)))
    merges = [[left, right] for left, right in splits if left in vocab and right in vocab]
    # Add a token that no merge produces, so it only matches a whole word.
    vocab = vocab | {"zqxj": 600}
    model = with_model(content, merges=merges, vocab=vocab, ignore_merges=True)
    return with_split(model, LLAMA3_PATTERN)


def qwen_form(content: dict[str, Any]) -> dict[str, Any]:
    # The second one matches only normalized text.
    plain = added(700, "of the", special=False), added(710, "ạb", special=False, normalized=True)
    markers = [*content["added_tokens"], *plain]
    content = with_split(content, QWEN_PATTERN) | {"normalizer": {"type": "NFC"}}
    return content | {"added_tokens": markers}


def odd_ids(content: dict[str, Any]) -> dict[str, Any]:
    """Put special tokens among the merges, leave the first ids and others unassigned."""
    new = {i: 1000 + i * 3 for i in range(600)}
    markers = [added(7, "<s>"), added(1001, "</s>"), added(3001, "<unused é 1>")]
    return with_ids(content, new) | {"added_tokens": markers}


def with_bos(content: dict[str, Any]) -> dict[str, Any]:
    """Add a post-processor that prepends bos to each text, like Llama 3."""
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    number = tokenizer.token_to_id("<s>")
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", number)])
    tokenizer.post_processor = template
    return json.loads(tokenizer.to_str())


FORMS = {
    "gpt2": lambda content: content,
    "marked": with_bos,
    "strings": lambda content: with_model(
        content, merges=[" ".join(pair) for pair in content["model"]["merges"]]
    ),
    "llama3": llama3_form,
    "qwen": qwen_form,
    "odd places": odd_ids,
}


def load_logged(
    folder: Path, content: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[Tokenizer, str]:
    lines: list[str] = []
    monkeypatch.setattr(logger, "info", lambda text, *values: lines.append(text % values))
    tokenizer = load_json(folder, content)
    (line,) = (line for line in lines if "tiktoken" in line)
    return tokenizer, line


def assert_equals_tokenizers(tokenizer: Tokenizer, content: dict[str, Any], seed: int = 1) -> None:
    reference = tokenizers.Tokenizer.from_str(json.dumps(content))
    reference.encode_special_tokens = True
    generator = random.Random(seed)
    tokens = [token for token in reference.get_vocab() if len(token) > 1]
    pieces = [*"aé .\n1'\u0301\u00c5\u212b\t", "s ", *TEXTS[1:5], "of the", "zqxj", "<unused é 1>"]
    texts = [*TEXTS, "Z\u0301 >\u0338", "zqxj", "azqxj zqxj", "a\u0323b"]
    for _ in range(300):
        texts.append("".join(generator.choices(pieces, k=12)))
        chars = "".join(generator.choices(tokens, k=12))
        texts.append(bytes(BYTE_OF.get(char, 32) for char in chars).decode(errors="replace"))
        texts.append("".join(map(chr, generator.choices(range(0xD800), k=30))))
    for text in texts:
        ids = reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text).tolist() == ids, text
    for _ in range(300):
        # Mostly invalid UTF-8; includes unassigned ids.
        ids = generator.choices(range(tokenizer.n_vocab + 10), k=8)
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=False), ids
    assert tokenizer.n_vocab == max(reference.get_vocab().values()) + 1


@pytest.mark.parametrize("form", FORMS)
def test_tokenizer_json_runs_on_tiktoken(
    tmp_path: Path, learned: dict[str, Any], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = FORMS[form](learned)
    tokenizer, line = load_logged(tmp_path, content, monkeypatch)
    assert line.endswith("tokenizer.json: using tiktoken, which gives the same ids")
    assert_equals_tokenizers(tokenizer, content)
    assert tokenizer.byte_lengths is not None
    assert len(tokenizer.byte_lengths) == tokenizer.n_vocab
    ids = tokenizer.encode(TEXTS[1])
    assert tokenizer.byte_lengths[ids].sum() == len(TEXTS[1].encode()) > len(ids)


def test_too_many_blanks_for_tiktoken_are_encoded(tmp_path: Path, learned: dict[str, Any]) -> None:
    text = " " * 1_000_000 + "x"
    tokenizer = load_json(tmp_path, learned)
    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


def swapped_ids(content: dict[str, Any]) -> dict[str, Any]:
    """Swap the ids of two merges that compete for a letter."""
    merges = [pair for pair in content["model"]["merges"] if "".join(pair).isalpha()]
    first, second = next(
        (one, other) for one, other in product(merges, repeat=2) if one[1] == other[0] != one[0]
    )
    ids = [content["model"]["vocab"]["".join(pair)] for pair in (first, second)]
    return with_ids(content, dict(zip(ids, reversed(ids), strict=True)))


def without_byte(content: dict[str, Any]) -> dict[str, Any]:
    vocab = {token: i for token, i in content["model"]["vocab"].items() if token != ALPHABET[1]}
    return with_model(content, vocab=vocab)


def split_twice(content: dict[str, Any]) -> dict[str, Any]:
    content = with_split(content, LLAMA3_PATTERN)
    content["pre_tokenizer"]["pretokenizers"][1]["use_regex"] = True
    return content


def with_prefix_space(content: dict[str, Any]) -> dict[str, Any]:
    return content | {"pre_tokenizer": content["pre_tokenizer"] | {"add_prefix_space": True}}


MISMATCHES = {
    "in the order of ids": swapped_ids,
    "not all 256": without_byte,
    "do not produce 'zqxj'": lambda c: with_model(c, vocab=c["model"]["vocab"] | {"zqxj": 600}),
    "may be matched as a word": lambda c: with_model(
        c, vocab=c["model"]["vocab"] | {"<s>": 610}, ignore_merges=True
    ),
    "is not in the byte alphabet": lambda c: with_model(c, vocab=c["model"]["vocab"] | {"\n": 600}),
    "decodes as bytes": lambda c: c | {"added_tokens": [*c["added_tokens"], added(700, "éé")]},
    "the normalizer is not NFC": lambda c: c | {"normalizer": {"type": "NFKC"}},
    "not Split and ByteLevel": with_prefix_space,
    "may match differently": lambda c: with_split(c, r"\s+$|" + LLAMA3_PATTERN),
    "split twice, or not at all": split_twice,
    "the model has end_of_word_suffix": lambda c: with_model(c, end_of_word_suffix="</w>"),
    "not match the words": lambda c: with_split(c, LLAMA3_PATTERN, invert=True),
    "does not match the words": lambda c: with_split(c, LLAMA3_PATTERN, behavior="MergedWithNext"),
}


@pytest.mark.parametrize("reason", MISMATCHES)
def test_tokenizer_json_stays_on_tokenizers_if_ids_differ(
    tmp_path: Path, learned: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = MISMATCHES[reason](learned)
    tokenizer, line = load_logged(tmp_path, content, monkeypatch)
    assert "using tokenizers, not tiktoken" in line
    assert reason in line
    assert_equals_tokenizers(tokenizer, content)


def test_samples_detect_what_other_checks_miss(
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


def test_accepted_merges_give_the_same_ids(learned: dict[str, Any]) -> None:
    """Random lists of merges, good and bad, on all words of the letters a and b."""
    words = ["".join(word) for n in range(1, 9) for word in product("ab", repeat=n)]
    generator = random.Random(0)
    n_same = n_other = 0
    for _ in range(200):
        vocab = {char: i for i, char in enumerate(ALPHABET)}
        merges: list[list[str]] = []
        known = ["a", "b"]
        for _ in range(generator.randint(1, 9)):
            pair = [generator.choice(known), generator.choice(known)]
            known += [] if "".join(pair) in known else ["".join(pair)]
            vocab.setdefault("".join(pair), len(vocab))
            merges += [] if pair in merges else [pair]
        if generator.random() < 0.3:
            generator.shuffle(merges)
        ignore_merges = generator.random() < 0.5
        content = with_model(learned, vocab=vocab, merges=merges, ignore_merges=ignore_merges)
        reference = tokenizers.Tokenizer.from_str(json.dumps(content))
        try:
            encoding = tokenizer_json._build_tiktoken(json.loads(reference.to_str()), reference)
        except tokenizer_json._Mismatch:
            n_other += 1
            continue
        n_same += 1
        expected = [one.ids for one in reference.encode_batch(words, add_special_tokens=False)]
        assert [encoding.encode_ordinary(word) for word in words] == expected
    assert min(n_same, n_other) > 30


@pytest.mark.parametrize(
    "piece", [r"\p{L}", r"\p{N}", r"\s", r"\p{Lu}", r"\p{M}", r"(?i:[sdmtlvre])"]
)
def test_regex_engines_have_the_same_character_classes(piece: str) -> None:
    """Check all characters, because the engines may use different Unicode versions."""
    characters = "".join(chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000)
    ranks = {byte: rank for rank, byte in enumerate(BYTES)}
    words = tiktoken.Encoding(
        name="", pat_str=f"(?:{piece})+", mergeable_ranks=ranks, special_tokens={}
    )
    split = pre_tokenizers.Split(Regex(f"(?:{piece})+"), "removed", invert=True)
    found = "".join(word for word, _ in split.pre_tokenize_str(characters))
    assert found
    assert words.decode(words.encode_ordinary(characters)) == found


def test_dropout_is_turned_off(
    tmp_path: Path, learned: dict[str, Any], captured_log: pytest.LogCaptureFixture
) -> None:
    want = load_json(tmp_path, learned)
    content = with_model(learned, dropout=0.5)
    captured_log.clear()
    found = load_json(tmp_path, content)
    assert "dropout of merges is turned off" in captured_log.text
    for text in TEXTS:
        assert found.encode(text).tolist() == want.encode(text).tolist()


def test_changes_of_text_are_told(
    tmp_path: Path, learned: dict[str, Any], captured_log: pytest.LogCaptureFixture
) -> None:
    load_json(tmp_path, learned)
    assert "changes text" not in captured_log.text
    load_json(tmp_path, learned | {"normalizer": {"type": "Lowercase"}})
    assert "changes text: 'Hello, the other wor' is read as 'hello" in captured_log.text


WORDS = {
    "version": "1.0",
    "added_tokens": [added(1, "<s>"), added(2, "</s>")],
    "pre_tokenizer": {"type": "Whitespace"},
    # There is no token for an unknown word.
    "model": {"type": "WordLevel", "vocab": {"known": 0}, "unk_token": "[UNK]"},
}


def test_text_that_cannot_be_encoded_is_a_bad_record(tmp_path: Path) -> None:
    tokenizer = load_json(tmp_path, WORDS)
    texts = ["known", "unknown", "known known"]

    def read(*, skips_bad: bool) -> tuple[list[list[int]], RowState]:
        start = RowState((0,), (0,), bad=0, source=0, token=0)
        mixture = Mixture([source(texts, repeat=False)], skips_bad=skips_bad)
        row = RowStream(mixture, tokenizer, 0, start, n_rows=1, vocab_size=3)
        return [found[1].tolist() for found in iter(row.read, None)], row.state

    with pytest.raises(
        ValueError, match=r"data: 3 documents .* document \d of row 0 cannot be enc"
    ):
        read(skips_bad=False)
    documents, state = read(skips_bad=True)
    assert sorted(documents) == [[1, 0, 0, 2], [1, 0, 2]]
    assert (state.taken, state.bad) == ((3,), 1)


def test_panic_of_the_library_is_a_bad_record(tmp_path: Path, learned: dict[str, Any]) -> None:
    class PanicException(BaseException):
        """As pyo3's, which has no name in Python."""

    class Panics:
        """A ``tokenizers.Tokenizer``, whose own methods cannot be replaced."""

        def __init__(self, inner: tokenizers.Tokenizer) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def encode(self, text: str, **options: Any) -> Any:
            if "poison" in text:
                raise PanicException("index out of bounds")
            return self._inner.encode(text, **options)

    inner = tokenizers.Tokenizer.from_str(json.dumps(learned))
    # Not a pattern that tiktoken takes, so that texts reach the library.
    inner.normalizer = normalizers.Lowercase()
    encode, _, _ = tokenizer_json.build_codec(cast(Any, Panics(inner)), tmp_path)
    assert encode("text").tolist() == inner.encode("text").ids
    with pytest.raises(ValueError, match="cannot be encoded: index out of bounds"):
        encode("some poison")
