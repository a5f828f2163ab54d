"""SentencePiece models: the ids of the library, of transformers, and exports with both."""

import io
import json
import random
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.tokenizer import load_tokenizer
from data.tokenizer_export import NotRepresentable, build_tokenizer_files
from data.tokenizer_json import SAMPLES, sample_texts
from tests.lib.tokenization import TEXTS

sentencepiece = pytest.importorskip("sentencepiece")

SYMBOLS = ["<sym>", "<sym>bol", "\n\n"]
FORMS: dict[str, dict[str, Any]] = {
    # Llama 2, TinyLlama and Mistral.
    "llama": {"byte_fallback": True, "remove_extra_whitespaces": False},
    "gemma": {
        "byte_fallback": True,
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "user_defined_symbols": SYMBOLS,
        "split_digits": True,
    },
    "symbols": {"byte_fallback": True, "user_defined_symbols": SYMBOLS},
    "unknown": {"byte_fallback": False},
    "unigram": {"byte_fallback": True, "model_type": "unigram"},
}


def train(folder: Path, **options: Any) -> Path:
    """Train a model on words that do not depend on any file, and write ``tokenizer.model``."""
    generator = random.Random(1)
    syllables = ["th", "e", "an", "in", "er", "o", "s", "at", "re", "<s", "12", "é", "漢", "\t"]
    words = ["".join(generator.choices(syllables, k=generator.randint(1, 4))) for _ in range(300)]
    lines = [" ".join(generator.choices(words, k=20)) for _ in range(300)]
    defaults = {"vocab_size": 460, "model_type": "bpe", "normalization_rule_name": "identity"}
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=written,
        minloglevel=2,
        hard_vocab_limit=False,
        num_threads=1,
        **defaults | options,
    )
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(written.getvalue())
    return folder


@pytest.fixture(scope="module", params=FORMS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("model") / request.param, **FORMS[request.param])


def library(folder: Path) -> Any:
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def texts(folder: Path) -> list[str]:
    processor = library(folder)
    pieces = [processor.id_to_piece(i) for i in range(len(processor))]
    symbols = ["".join(pair) for pair in product([*SYMBOLS, "", " ", "a", "<s>"], repeat=2)]
    return [*TEXTS, *SAMPLES, *symbols, *sample_texts([p.encode() for p in pieces], ["<s>"])]


def test_ids_are_those_of_the_library(model: Path) -> None:
    tokenizer, processor = load_tokenizer(str(model)), library(model)
    assert tokenizer.n_vocab == len(processor)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (processor.bos_id(), processor.eos_id())
    for text in texts(model):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int64
        assert ids.tolist() == processor.encode(text), text
        assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids.tolist()), "bos or eos in text"
        if processor.unk_id() not in ids:
            assert tokenizer.decode(ids.tolist()) == processor.decode(ids.tolist()), text
    long = " ".join(texts(model)) * 3
    assert tokenizer.encode(long).tolist() == processor.encode(long)


def test_text_survives_where_the_model_keeps_it(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(train(tmp_path, **FORMS["llama"])))
    for text in TEXTS:
        # The model itself reads this character as a blank.
        plain = text.replace("\u2581", "")
        assert tokenizer.decode(tokenizer.encode(plain).tolist()) == plain
    document = tokenizer.encode_document("a b").tolist()
    assert tokenizer.decode(document) == "<s> a b</s>"
    assert tokenizer.decode([tokenizer.n_vocab + 3, *document]) == "<s> a b</s>"
    with pytest.raises(ValueError, match="surrogates"):
        tokenizer.encode("\ud800")


def test_export_has_the_same_ids(model: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = load_tokenizer(str(model))
    found = build_tokenizer_files(str(model), tokenizer)
    assert found.files["tokenizer.model"] == (model / "tokenizer.model").read_bytes()
    for name, content in found.files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **found.ids}))
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (reference.bos_token_id, reference.eos_token_id) == (1, 2)
    for text in texts(model):
        document = tokenizer.encode_document(text).tolist()[:-1]
        assert reference(text)["input_ids"] == document, text
        assert reference(text, add_special_tokens=False)["input_ids"] == document[1:], text
    # The tokenizer.json is read first now, and gives the same ids.
    again = load_tokenizer(str(tmp_path))
    assert (again.bos_id, again.eos_id) == (1, 2)
    for text in TEXTS:
        assert again.encode(text).tolist() == tokenizer.encode(text).tolist()


def test_ids_equal_those_of_a_tokenizer_json_of_transformers(tmp_path: Path) -> None:
    """A Llama folder has both files."""
    transformers = pytest.importorskip("transformers")
    folder = train(tmp_path / "from", **FORMS["llama"])
    transformers.LlamaTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "to")
    one, other = (
        load_tokenizer(str(folder)),
        load_tokenizer(str(tmp_path / "to" / "tokenizer.json")),
    )
    for text in [*TEXTS[1:], *SAMPLES[1:]]:
        # transformers itself reads other ids where a text begins with a blank.
        if not text.startswith((" ", "\u2581")):
            assert one.encode(text).tolist() == other.encode(text).tolist(), text


@pytest.mark.parametrize(
    "options",
    [
        {"normalization_rule_name": "nmt_nfkc"},
        {"model_type": "char"},
        {"treat_whitespace_as_suffix": True},
        {"model_type": "unigram", "user_defined_symbols": ["\n\n"]},
    ],
    ids=str,
)
def test_what_tokenizers_cannot_follow_is_not_exported(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    name = str(train(tmp_path, byte_fallback=True, **options))
    with pytest.raises(NotRepresentable, match=rf"^{name}/tokenizer\.model: "):
        build_tokenizer_files(name, load_tokenizer(name))


CONFIGS: dict[str, tuple[dict[str, Any], int | None, int]] = {
    "no config": ({}, 1, 2),
    "Llama without a flag": ({"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>"}, 1, 2),
    "no bos": ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, None, 2),
    "bos is null": ({"tokenizer_class": "XTokenizer", "bos_token": None}, None, 2),
    "flag of another class": ({"tokenizer_class": "XTokenizer", "add_bos_token": True}, 1, 2),
    "another eos": ({"eos_token": {"content": "<end>", "special": True}}, 1, 3),
    "added eos": (
        {
            "eos_token": "<|end|>",
            "added_tokens_decoder": {"470": {"content": "<|end|>", "special": True}},
        },
        1,
        470,
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_markers_are_those_of_the_files(tmp_path: Path, case: str) -> None:
    config, bos_id, eos_id = CONFIGS[case]
    folder = train(tmp_path, control_symbols=["<end>"], **FORMS["llama"])
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (bos_id, eos_id)
    assert tokenizer.n_vocab == max(len(library(folder)), eos_id + 1)
    other = load_tokenizer(str(folder), bos="<end>", eos="</s>")
    assert (other.bos_id, other.eos_id) == (3, 2)
    assert other.fingerprint != tokenizer.fingerprint


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "X"}, r"begin with <s>\? Set data\.bos"),
        ("tokenizer_config.json", {"eos_token": "th"}, "'th' is a word of text"),
        ("tokenizer_config.json", {"eos_token": "<x>"}, "'<x>' is not a token"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"500": "x"}}, "is malformed"),
        ("added_tokens.json", {"<|word|>": 500}, "'<\\|word\\|>' in texts, SentencePiece does not"),
        ("added_tokens.json", {"<|word|>": 1}, "id 1 is '<\\|word\\|>', which it is not"),
        ("added_tokens.json", ["x"], "is malformed"),
        ("added_tokens.json", {"x": 10**9}, "in texts"),
    ],
)
def test_files_beside_it_that_contradict_are_named(
    tmp_path: Path, file: str, content: Any, text: str
) -> None:
    folder = train(tmp_path, **FORMS["llama"])
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"^data\.(tokenizer|eos): .*{text}"):
        load_tokenizer(str(folder))


def test_content_not_the_name_tells_the_kind(tmp_path: Path) -> None:
    folder = train(tmp_path, **FORMS["llama"])
    want = load_tokenizer(str(folder)).fingerprint
    for name in ("own.tiktoken", "tokenizer.model.v1", "llama"):
        (folder / name).write_bytes((folder / "tokenizer.model").read_bytes())
        assert load_tokenizer(str(folder / name)).fingerprint == want


@pytest.mark.parametrize("part", [0.5, 0.99, 0.001])
def test_damaged_model_is_named(tmp_path: Path, part: float) -> None:
    path = train(tmp_path, **FORMS["llama"]) / "tokenizer.model"
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])
    with pytest.raises(ValueError, match=r"tokenizer\.model: neither a rank file nor a valid"):
        load_tokenizer(str(path))


def test_package_is_named_if_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = train(tmp_path, **FORMS["llama"]) / "tokenizer.model"
    monkeypatch.delitem(sys.modules, "data.sentence_piece", raising=False)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ValueError, match=rf"{path}: .*: \S+ -m pip install sentencepiece"):
        load_tokenizer(str(path))
