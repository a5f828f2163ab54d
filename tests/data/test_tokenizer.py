import base64
import json
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tiktoken_ext.openai_public
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from data.rank_files import LLAMA3_PATTERN, LLAMA3_RANKS, PUBLISHED
from data.tokenizer import load_tokenizer
from tests.lib.tokenization import BYTES, TEXTS, assert_round_trips, load_json

MERGES = [b"th", b"he", b"the", b" the", b"12", b"123", b"1234"]


def test_bytes_tokenizer_encodes_bytes() -> None:
    tokenizer = load_tokenizer("bytes")
    assert_round_trips(tokenizer)
    for text in TEXTS:
        assert tokenizer.encode(text).tolist() == list(text.encode())
    assert (tokenizer.n_vocab, tokenizer.bos_id, tokenizer.eos_id) == (258, 256, 257)


def rank_lines(tokens: list[bytes]) -> list[bytes]:
    return [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]


def write_ranks(path: Path, tokens: list[bytes]) -> str:
    path.write_bytes(b"\n".join(rank_lines(tokens)) + b"\n")
    return str(path)


def write_own(path: Path, tokens: list[bytes], pattern: str = LLAMA3_PATTERN) -> str:
    """Write a rank file with its companion."""
    special = {"<s>": len(tokens), "</s>": len(tokens) + 1}
    content = {"pattern": pattern, "special_tokens": special}
    path.with_name(f"{path.name}.json").write_text(json.dumps(content))
    return write_ranks(path, tokens)


def padded(tokens: list[bytes], count: int) -> list[bytes]:
    """``tokens``, and as many more as make ``count``."""
    return [*tokens, *(b"%08d" % i for i in range(count - len(tokens)))]


@pytest.mark.parametrize("suffix", [".model", ".tiktoken", ""])
def test_file_with_as_many_ranks_as_llama3_is_treated_as_such(
    tmp_path: Path, suffix: str, captured_log: pytest.LogCaptureFixture
) -> None:
    tokens = padded(BYTES + MERGES, LLAMA3_RANKS)
    tokenizer = load_tokenizer(write_ranks(tmp_path / f"tokenizer{suffix}", tokens))
    assert "is not the published file of Llama 3, but has as many ranks" in captured_log.text
    assert_round_trips(tokenizer)
    # As published: 256 special tokens follow the ranks, bos and eos first.
    assert tokenizer.n_vocab == len(tokens) + 256
    assert (tokenizer.bos_id, tokenizer.eos_id) == (len(tokens), len(tokens) + 1)
    # Words include the blank before them; numbers are split into at most three digits.
    words = [tokens[i] for i in tokenizer.encode("the other 1234")]
    assert words == [b"the", b" ", b"o", b"the", b"r", b" ", b"123", b"4"]
    assert tokens[tokenizer.encode("on the")[-1]] == b" the"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*rank_lines(BYTES), b"!! 256"], "line 257: not a token and its rank"),
        ([b"YQ== x", *rank_lines(BYTES)], "line 1: not a token and its rank"),
        ([b"\x0a\x0e\x0a\x05<unk>", *rank_lines(BYTES)], "neither a rank file nor|needs a package"),
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


GPT2, CL100K, O200K, _ = PUBLISHED


@pytest.mark.parametrize(("n_ranks", "name"), [(GPT2, "gpt2"), (CL100K, "cl100k_base")])
def test_published_rank_file_is_recognized_by_its_length(
    tmp_path: Path, n_ranks: int, name: str
) -> None:
    pairs = [bytes(pair) for pair in product(range(256), repeat=2)]
    path = write_ranks(tmp_path / f"{name}.model", padded([*BYTES, *pairs][:n_ranks], n_ranks))
    tokenizer = load_tokenizer(path)
    pattern, special, *_ = PUBLISHED[n_ranks]
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


def test_published_patterns_equal_tiktokens(monkeypatch: pytest.MonkeyPatch) -> None:
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
            arguments = function()
            assert PUBLISHED[n_ranks][:2] == (arguments["pat_str"], arguments["special_tokens"])
            assert n_ranks == min(arguments["special_tokens"].values()) - (n_ranks != GPT2)


@pytest.mark.parametrize("count", [151_643, 163_584, LLAMA3_RANKS - 1, 263])
@pytest.mark.parametrize("name", ["qwen.tiktoken", "tiktoken.model"])
def test_foreign_rank_file_is_not_taken_for_another(tmp_path: Path, count: int, name: str) -> None:
    """Those of Qwen 1 and Kimi K2 have as many ranks; a truncated file has one less."""
    path = write_ranks(tmp_path / name, padded(BYTES + MERGES, count))
    text = rf"^data\.tokenizer: {path}: {count:,} ranks, .* Llama 3 128,000.*tokenizer\.json"
    with pytest.raises(ValueError, match=rf"{text}, or write {path}\.json"):
        load_tokenizer(path)


@pytest.mark.parametrize("name", ["t.model", "t.tiktoken"])
def test_companion_of_a_foreign_rank_file_is_read(tmp_path: Path, name: str) -> None:
    tokenizer = load_tokenizer(write_own(tmp_path / name, BYTES + MERGES))
    assert_round_trips(tokenizer)
    assert tokenizer.n_vocab == len(BYTES + MERGES) + 2
    again = load_tokenizer(str(tmp_path))
    assert again.fingerprint == tokenizer.fingerprint


def test_content_tells_the_kind(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_text('{"model": 3}')
    with pytest.raises(ValueError, match=r"tokenizer\.model: .*"):
        load_tokenizer(str(path))
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(
        ValueError, match=r"tokenizer\.model: a pointer of Git LFS: run git lfs pull"
    ):
        load_tokenizer(str(path))


COMPANION = {"pattern": r"[\s\S]", "special_tokens": {"<s>": 270, "</s>": 263}}


def write_companion(folder: Path, content: str) -> str:
    (folder / "own.tiktoken.json").write_text(content)
    return write_ranks(folder / "own.tiktoken", BYTES + MERGES)


def test_companion_file_sets_pattern_and_special_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_companion(tmp_path, json.dumps(COMPANION)))
    assert_round_trips(tokenizer)
    # Each character is a word, so nothing merges.
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
        (json.dumps(COMPANION | {"special_tokens": {"<s>": 262}}), "unique ids, from 263"),
        (json.dumps(COMPANION | {"special_tokens": {"a": 270, "b": 270}}), "unique ids"),
        (json.dumps(COMPANION | {"pattern": "("}), "the pattern: "),
        (json.dumps(COMPANION | {"pattern": r"\w+|\s+"}), 'does not match all of "Hello, the'),
    ],
)
def test_malformed_companion_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = write_companion(tmp_path, content)
    with pytest.raises(ValueError, match=rf"data\.tokenizer: .*own\.tiktoken\.json.*{message}"):
        load_tokenizer(path)


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """A trained byte-level BPE, as JSON from ``tokenizers``."""
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


def test_tokenizer_json_round_trips(tmp_path: Path, trained: dict[str, Any]) -> None:
    tokenizer = load_json(tmp_path, trained)
    assert_round_trips(tokenizer)
    assert len(tokenizer.encode("the other words")) < 8, "nothing was merged"
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)


def test_tokenizer_json_never_truncates_or_pads(tmp_path: Path, trained: dict[str, Any]) -> None:
    limits = tokenizers.Tokenizer.from_str(json.dumps(trained))
    limits.enable_truncation(max_length=4)
    limits.enable_padding(length=4)
    assert_round_trips(load_json(tmp_path, json.loads(limits.to_str())))


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
def test_missing_tokenizer_is_named(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name) if "." in name else name
    with pytest.raises(ValueError, match=rf"data\.tokenizer: .*{name}"):
        load_tokenizer(path)


def test_million_blanks_can_be_encoded(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_own(tmp_path / "a.model", BYTES + MERGES))
    for text in (" " * 1_200_000 + "a", "a \t" * 3 + " \t" * 600_000):
        assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


def test_failed_download_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(name: str) -> tiktoken.Encoding:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    with pytest.raises(
        ValueError, match=r"cannot download cl100k_base: .*no route.*TIKTOKEN_CACHE_DIR"
    ):
        load_tokenizer("cl100k_base")


def test_unassigned_ids_decode_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """cl100k_base has unassigned ids, which a model may sample."""
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


def test_fingerprint_changes_with_the_merges(tmp_path: Path, trained: dict[str, Any]) -> None:
    swapped = [*MERGES[:2], MERGES[3], MERGES[2], *MERGES[4:]]
    ranks = [
        load_tokenizer(write_own(tmp_path / f"{i}.model", BYTES + merges)).fingerprint
        for i, merges in enumerate([MERGES, swapped, MERGES])
    ]
    merges = trained["model"]["merges"]
    edited = trained | {"model": trained["model"] | {"merges": [merges[1], merges[0], *merges[2:]]}}
    jsons = [load_json(tmp_path, content).fingerprint for content in (trained, edited, trained)]
    for first, other, again in (ranks, jsons):
        assert first == again
        assert first != other
    assert len({*ranks, *jsons, load_tokenizer("bytes").fingerprint}) == 5


def test_fingerprint_changes_with_the_companion_file(tmp_path: Path) -> None:
    changes = [{}, {"pattern": r"\S+|\s+"}, {"special_tokens": {"<s>": 271, "</s>": 263}}]
    contents = [json.dumps(COMPANION | change) for change in changes]
    found = {load_tokenizer(write_companion(tmp_path, content)).fingerprint for content in contents}
    assert len(found) == 3


def test_first_known_bos_and_eos_are_used(tmp_path: Path) -> None:
    names = ["<|endoftext|>", "<s>", "</s>", "<|begin_of_text|>", "<|end_of_text|>"]
    special = {name: 270 + i for i, name in enumerate(names)}
    content = json.dumps(COMPANION | {"special_tokens": special})
    tokenizer = load_tokenizer(write_companion(tmp_path, content))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (273, 274)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "t.tiktoken.json"])
@pytest.mark.parametrize("target", ["", "nothing", "/dev/zero"], ids=["pipe", "nothing", "device"])
def test_what_is_no_file_is_named(tmp_path: Path, name: str, target: str) -> None:
    """It does not hang, and is not taken for absent."""
    tokenizers.Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    write_ranks(tmp_path / "t.tiktoken", BYTES)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    if target:
        path.symlink_to(target)
    else:
        os.mkfifo(path)
    with pytest.raises(ValueError, match=f"data.tokenizer: .*{name}"):
        load_tokenizer(str(tmp_path / "t.tiktoken" if "tiktoken" in name else tmp_path))
