"""AutoTokenizer gives the ids of a run's tokenizer, whatever its kind."""

import base64
import json
import shutil
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from data import tokenizer_export
from data.rank_files import PUBLISHED
from data.tokenizer import Tokenizer, load_tokenizer
from data.tokenizer_export import NotRepresentable, TokenizerFiles, build_tokenizer_files
from data.tokenizer_json import SAMPLES
from tests.lib.tokenization import BYTES, TEXTS
from tools import train_tokenizer

transformers = pytest.importorskip("transformers")

TEXT = "don't 1234567  the café's\r\n\n x\t<|endoftext|><s> "
SPECIAL = {"<s>": 5_007, "</s>": 5_003}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "tokenizer"
    source = ["--data.source=files", f"--data.path={Path(__file__).parent}/*.py"]
    assert train_tokenizer.main([str(folder), "--vocab_size=1500", *source]) == 0
    return folder


def write_ranks(path: Path, trained: Path, count: int | None = None) -> str:
    """Write the trained ranks, and tokens that no merge produces up to ``count``."""
    tokens = [base64.b64decode(line.split()[0]) for line in (trained / "tokenizer.tiktoken").open()]
    known = {*tokens}
    words = (b"%06d" % i for i in range(count or 0))
    tokens += [word for word in words if word not in known][: max(0, (count or 0) - len(tokens))]
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    path.write_bytes(b"".join(lines))
    return str(path)


def write(folder: Path, found: TokenizerFiles, model_type: str = "llama") -> Path:
    folder.mkdir()
    for name, content in found.files.items():
        (folder / name).write_bytes(content)
    # AutoTokenizer reads it.
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **found.ids}))
    return folder


def assert_equals_transformers(tokenizer: Tokenizer, folder: Path) -> None:
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    assert reference.bos_token_id == tokenizer.bos_id
    assert reference.eos_token_id == tokenizer.eos_id
    assert len(reference) == tokenizer.n_vocab
    for text in [TEXT, *TEXTS, *SAMPLES, Path(__file__).read_text()]:
        ids = tokenizer.encode(text).tolist()
        assert reference(text, add_special_tokens=False)["input_ids"] == ids, text
        assert reference(text)["input_ids"] == tokenizer.encode_document(text)[:-1].tolist()
        assert reference.decode(ids) == tokenizer.decode(ids) == text
    again = load_tokenizer(str(folder))
    assert (again.bos_id, again.eos_id) == (tokenizer.bos_id, tokenizer.eos_id)


KINDS: dict[str, Any] = {
    "bytes": lambda folder, trained: "bytes",
    "tokenizer.json": lambda folder, trained: str(trained),
    "own .tiktoken": lambda folder, trained: str(trained / "tokenizer.tiktoken"),
    "own .model": lambda folder, trained: companion(folder, trained, r"\S+|\s+", "own.model"),
    "gaps": lambda folder, trained: companion(folder, trained, r"\S+|\s+"),
    "possessive": lambda folder, trained: companion(folder, trained, r"\d{1,2}+|[^\d]{3,}+|\D"),
    "end of text": lambda folder, trained: companion(folder, trained, r"(?s)\s+$|.{1,9}"),
    "GPT-2": lambda folder, trained: write_ranks(folder / "p.tiktoken", trained, min(PUBLISHED)),
    **{
        f"pattern of {n}": lambda folder, trained, n=n: companion(
            folder, trained, PUBLISHED[n].pattern
        )
        for n in PUBLISHED
    },
}


def companion(folder: Path, trained: Path, pattern: str, name: str = "own.tiktoken") -> str:
    content = {"pattern": pattern, "special_tokens": SPECIAL}
    (folder / f"{name}.json").write_text(json.dumps(content))
    return write_ranks(folder / name, trained, 5_000)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_encodes_like_the_run(tmp_path: Path, trained: Path, kind: str) -> None:
    name = KINDS[kind](tmp_path, trained)
    tokenizer = load_tokenizer(name)
    found = build_tokenizer_files(name, tokenizer)
    assert_equals_transformers(tokenizer, write(tmp_path / "to", found))


def test_encoding_of_tiktoken_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {byte: rank for rank, byte in enumerate([*BYTES, b"th", b"he", b"the"])}
    encoding = tiktoken.Encoding(
        name="cl100k_base",
        pat_str=PUBLISHED[100_256].pattern,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": 300},
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    tokenizer = load_tokenizer("cl100k_base")
    found = build_tokenizer_files("cl100k_base", tokenizer)
    assert_equals_transformers(tokenizer, write(tmp_path / "to", found))


@pytest.mark.parametrize("bos", ["", "<|end_of_text|>"])
def test_markers_of_the_run_are_written(tmp_path: Path, trained: Path, bos: str) -> None:
    for number, name in enumerate(("bytes", str(trained))):
        tokenizer = load_tokenizer(name, bos=bos)
        folder = write(tmp_path / str(number), build_tokenizer_files(name, tokenizer))
        assert_equals_transformers(tokenizer, folder)
        generation = json.loads((folder / "generation_config.json").read_text())
        want = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        assert generation == {key: i for key, i in want.items() if i is not None}


def test_pattern_that_matches_otherwise_is_not_written(tmp_path: Path, trained: Path) -> None:
    # In tokenizers, the count of a group is repeated.
    name = companion(tmp_path, trained, r"(?:\d){1,3}+|\D|\d")
    with pytest.raises(NotRepresentable, match=r"own\.tiktoken: .* has other ids in transformers"):
        build_tokenizer_files(name, load_tokenizer(name))


def test_check_sees_wrong_merges(
    tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = str(trained / "tokenizer.tiktoken")
    merges = [*tokenizer_export.merges_of(tiktoken_of(name))]
    for wrong in (merges[:-200], [*merges[50:], *merges[:50]]):
        monkeypatch.setattr(tokenizer_export, "merges_of", lambda encoding, wrong=wrong: wrong)
        with pytest.raises(NotRepresentable, match="has other ids"):
            build_tokenizer_files(name, load_tokenizer(name))


def tiktoken_of(name: str) -> tiktoken.Encoding:
    return tokenizer_export.load_encoding(name)


def test_merges_follow_from_ranks() -> None:
    """On all words of two letters, tokenizers merges like tiktoken."""
    ranks = [*BYTES, b"ab", b"ba", b"aba", b"bab", b"abab", b"aaa", b"bb", b"bba"]
    encoding = tiktoken.Encoding(
        name="ab",
        pat_str=r"[\s\S]+",
        mergeable_ranks={token: rank for rank, token in enumerate(ranks)},
        special_tokens={},
    )
    merges = [*tokenizer_export.merges_of(encoding)]
    assert len(merges) == 7, "aaa is not two tokens"
    chars = tokenizer_export._chars
    vocabulary = {chars(token): rank for rank, token in enumerate(ranks)}
    pairs = [(chars(left), chars(right)) for left, right in merges]
    model = models.BPE(vocabulary, pairs, ignore_merges=True)
    for n in range(1, 10):
        for word in map("".join, product("ab", repeat=n)):
            ids = [token.id for token in model.tokenize(word)]
            assert ids == encoding.encode_ordinary(word), word


CHAT = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
QWEN_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "add_bos_token": False,
    "chat_template": CHAT,
    "model_max_length": 99,
}
SPECIAL_OF_QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN_FILES = {
    "special_tokens_map.json": {"eos_token": {"content": "<|im_end|>", "lstrip": False}},
    "generation_config.json": {"eos_token_id": [2, 0], "temperature": 0.6, "pad_token_id": 0},
    "config.json": {"model_type": "qwen3", "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0},
}


def qwen(folder: Path, **config: Any) -> str:
    special = SPECIAL_OF_QWEN
    vocabulary = {
        token: i for i, token in enumerate([*special, *pre_tokenizers.ByteLevel.alphabet()])
    }
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(["<think>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT)
    for name, content in (QWEN_FILES | {"tokenizer_config.json": QWEN_CONFIG | config}).items():
        (folder / name).write_text(json.dumps(content))
    return str(folder)


def test_folder_is_kept_byte_for_byte(tmp_path: Path) -> None:
    source = Path(qwen(tmp_path / "from"))
    (source / "notes.txt").write_text("not of the tokenizer")
    found = build_tokenizer_files(str(source), load_tokenizer(str(source)))
    assert found.ids == {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
    names = {path.name for path in source.iterdir()} - {"notes.txt", "config.json"}
    assert {name: (source / name).read_bytes() for name in names} == found.files
    before, after = (
        transformers.AutoTokenizer.from_pretrained(folder)
        for folder in (source, write(tmp_path / "to", found))
    )
    chat = [{"role": "user", "content": "the <think> end"}]
    assert after.apply_chat_template(chat) == before.apply_chat_template(chat)
    assert (after.bos_token, after.eos_token, after.model_max_length) == (None, "<|im_end|>", 99)


def read(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    return json.loads(files[name])


def test_folder_gets_the_markers_of_the_run(tmp_path: Path) -> None:
    name = qwen(tmp_path / "from")
    tokenizer = load_tokenizer(name, bos="<|im_start|>", eos="<|endoftext|>")
    found = build_tokenizer_files(name, tokenizer)
    reference = transformers.AutoTokenizer.from_pretrained(write(tmp_path / "to", found))
    document = tokenizer.encode_document("the end").tolist()
    assert reference("the end")["input_ids"] == document[:-1]
    assert reference("the end", add_special_tokens=False)["input_ids"] == document[1:-1]
    assert (reference.bos_token_id, reference.eos_token_id) == (1, 0) == (document[0], document[-1])
    assert found.ids == {"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}
    # 0 is one of its ends.
    assert read(found.files, "generation_config.json") == QWEN_FILES["generation_config.json"]
    names = {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>", "add_bos_token": True}
    assert read(found.files, "tokenizer_config.json") == QWEN_CONFIG | names
    assert read(found.files, "special_tokens_map.json") == {"eos_token": "<|endoftext|>"}
    assert load_tokenizer(str(tmp_path / "to")).bos_id == 1


def test_flag_without_post_processor_is_written_for_transformers(tmp_path: Path) -> None:
    """DeepSeek's tokenizer.json leaves it to add_bos_token, which transformers 5 ignores."""
    name = qwen(tmp_path / "from", bos_token="<|im_start|>", add_bos_token=True)
    tokenizer = load_tokenizer(name)
    found = build_tokenizer_files(name, tokenizer)
    reference = transformers.AutoTokenizer.from_pretrained(write(tmp_path / "to", found))
    assert reference("a")["input_ids"] == tokenizer.encode_document("a")[:-1].tolist()
    assert found.files["tokenizer_config.json"] == Path(name, "tokenizer_config.json").read_bytes()


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("name", [None, "GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizer"])
def test_class_of_a_model_does_not_replace_the_pattern(
    tmp_path: Path, trained: Path, name: str | None, model_type: str
) -> None:
    """A class that transformers chooses takes only the vocabulary and the merges of the file."""
    source = tmp_path / "from"
    shutil.copytree(trained, source)
    config = {"tokenizer_class": name, "split_special_tokens": True}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(source))
    found = build_tokenizer_files(str(source), tokenizer)
    assert_equals_transformers(tokenizer, write(tmp_path / "to", found, model_type))


NAMES = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
DECODER = {str(i): {"content": name, "special": True} for i, name in enumerate(SPECIAL_OF_QWEN)}


@pytest.mark.parametrize(
    ("config", "names"),
    [
        # With this key, transformers does not read the map; without, the map precedes the config.
        ({"added_tokens_decoder": DECODER, "add_bos_token": True}, NAMES),
        ({"added_tokens_decoder": DECODER}, {"eos_token": "<|im_end|>"}),
        ({"eos_token": "<|endoftext|>"}, {"eos_token": "<|im_end|>"}),
    ],
)
def test_markers_are_those_of_the_run_in_each_file(
    tmp_path: Path, config: dict[str, Any], names: dict[str, str]
) -> None:
    source = Path(qwen(tmp_path / "from"))
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    (source / "special_tokens_map.json").write_text(json.dumps(names))
    tokenizer = load_tokenizer(str(source))
    folder = write(tmp_path / "to", build_tokenizer_files(str(source), tokenizer))
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    assert (reference.bos_token_id, reference.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert reference("the end")["input_ids"] == tokenizer.encode_document("the end")[:-1].tolist()


def test_dropout_is_not_exported(tmp_path: Path) -> None:
    name = qwen(tmp_path / "from")
    path = tmp_path / "from" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["dropout"] = 0.5
    path.write_text(json.dumps(content))
    found = build_tokenizer_files(name, load_tokenizer(name))
    assert read(found.files, "tokenizer.json")["model"]["dropout"] is None
