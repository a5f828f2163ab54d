"""Documents begin and end as the tokenizer's files say, or as data.bos and data.eos do."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from data.tokenizer import Tokenizer, load_tokenizer
from tests.lib.tokenization import TEXTS

transformers = pytest.importorskip("transformers")

END = "<|endoftext|>"
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
QWEN = (END, "<|im_start|>", "<|im_end|>")


def template(*before: str, after: str = "") -> Any:
    return lambda ids: processors.TemplateProcessing(
        single=" ".join([*before, "$A", after]).strip(),
        special_tokens=[(name, ids[name]) for name in (*before, after) if name],
    )


def by_bytes(ids: dict[str, int]) -> Any:
    return processors.ByteLevel()


def write(folder: Path, special: tuple[str, ...], post: Any = None, **config: Any) -> Path:
    """Write a tokenizer.json with the ``special`` tokens, and ``config`` beside it, if any."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the other words"] * 9, trainer)
    if post is not None:
        tokenizer.post_processor = post({name: tokenizer.token_to_id(name) for name in special})
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def markers(tokenizer: Tokenizer, special: tuple[str, ...]) -> tuple[str, str]:
    """Names of bos ("" if there is none) and eos of an encoded document."""
    text = "the other words"
    document, ids = tokenizer.encode_document(text).tolist(), tokenizer.encode(text).tolist()
    begin = document[: -1 - len(ids)]
    assert document == [*begin, *ids, tokenizer.eos_id]
    assert begin == [i for i in [tokenizer.bos_id] if i is not None]
    assert tokenizer.encode_prompt(text) == document[:-1]
    assert tokenizer.encode_prompt("") == (begin or [tokenizer.eos_id])
    return "".join(special[i] for i in begin), special[tokenizer.eos_id]


# Special tokens, post-processor, tokenizer_config.json, and the markers of a document.
FAMILIES: dict[str, tuple[tuple[str, ...], Any, dict[str, Any], tuple[str, str]]] = {
    "gemma": (("<pad>", "<eos>", "<bos>"), template("<bos>"),
        {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True}, ("<bos>", "<eos>")),
    "llama3": (("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"),
        template("<|begin_of_text|>"),
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        ("<|begin_of_text|>", "<|eot_id|>")),
    "qwen": (QWEN, by_bytes,
        {"bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": False}, ("", "<|im_end|>")),
    "gpt2": ((END,), by_bytes, {"bos_token": END, "eos_token": END}, ("", END)),
    "smollm": (QWEN, None, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
        ("", "<|im_end|>")),
    "bert": (("[PAD]", "[CLS]", "[SEP]"), template("[CLS]", after="[SEP]"),
        {"cls_token": "[CLS]", "sep_token": "[SEP]"}, ("[CLS]", "[SEP]")),
    "own": (("[BOS]", "[EOS]"), template("[BOS]"),
        {"bos_token": "[BOS]", "eos_token": "[EOS]"}, ("[BOS]", "[EOS]")),
}  # fmt: skip


# transformers 5 no longer reads add_bos_token, and follows the post-processor.
FLAGS = {
    "deepseek": (DEEPSEEK, by_bytes, {
        "bos_token": {"content": DEEPSEEK[0], "__type": "AddedToken"},
        "eos_token": {"content": DEEPSEEK[1], "__type": "AddedToken"},
        "add_bos_token": True, "add_eos_token": False}, DEEPSEEK),
    "off": (("<s>", "</s>"), template("<s>"),
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}, ("", "</s>")),
}  # fmt: skip


@pytest.mark.parametrize("family", [*FAMILIES, *FLAGS])
def test_documents_have_the_markers_of_the_files(tmp_path: Path, family: str) -> None:
    special, post, config, want = (FAMILIES | FLAGS)[family]
    write(tmp_path, special, post, **config)
    assert markers(load_tokenizer(str(tmp_path)), special) == want


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_begin_as_in_transformers(tmp_path: Path, family: str) -> None:
    special, post, config, _ = FAMILIES[family]
    write(tmp_path, special, post, tokenizer_class="PreTrainedTokenizerFast", **config)
    tokenizer = load_tokenizer(str(tmp_path))
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS[1:4]:
        ids = reference(text)["input_ids"]
        assert tokenizer.encode_document(text)[: len(ids)].tolist() == ids


FILES: dict[str, tuple[tuple[str, ...], Any, tuple[str, str]]] = {
    "names alone": (("<bos>", "<eos>"), None, ("<bos>", "<eos>")),
    "DeepSeek's": (DEEPSEEK, None, DEEPSEEK),
    "BERT's": (("[CLS]", "[SEP]"), None, ("[CLS]", "[SEP]")),
    "GPT-2's": ((END,), None, ("", END)),
    "Qwen's": (QWEN, by_bytes, ("", END)),
    "template": (("<a>", "</s>"), template("<a>"), ("<a>", "</s>")),
    "both ends": (("<a>", "<b>", "</s>"), template("<a>", after="<b>"), ("<a>", "<b>")),
    "only an end": (("<s>", "<b>"), template(after="<b>"), ("", "<b>")),
    "Roberta": (("<s>", "</s>"), lambda ids: processors.RobertaProcessing(("</s>", 1), ("<s>", 0)),
        ("<s>", "</s>")),
    "Bert": (("[CLS]", "[SEP]"), lambda ids: processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0)),
        ("[CLS]", "[SEP]")),
    "sequence": (("<a>", "</s>"),
        lambda ids: processors.Sequence([by_bytes(ids), template("<a>")(ids)]), ("<a>", "</s>")),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_without_a_config_the_post_processor_decides(tmp_path: Path, kind: str) -> None:
    special, post, want = FILES[kind]
    folder = write(tmp_path, special, post)
    assert markers(load_tokenizer(str(folder / "tokenizer.json")), special) == want


def test_names_may_be_in_the_map_of_special_tokens(tmp_path: Path) -> None:
    special = ("<a>", "<b>", "</s>")
    write(tmp_path, special, template("<a>"), tokenizer_class="PreTrainedTokenizerFast")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<b>"}))
    assert markers(load_tokenizer(str(tmp_path)), special) == ("<a>", "<b>")


def test_keys_replace_what_the_files_name(tmp_path: Path) -> None:
    special, post, config, _ = FAMILIES["qwen"]
    name = str(write(tmp_path, special, post, **config))
    tokenizer = load_tokenizer(name, bos="<|im_start|>", eos=END)
    assert markers(tokenizer, special) == ("<|im_start|>", END)
    assert markers(load_tokenizer("bytes", bos=""), (*[""] * 257, "end")) == ("", "end")
    special = ("<a>", "<b>", "<eos>")
    name = str(write(tmp_path / "two", special, template("<a>", "<b>")))
    with pytest.raises(ValueError, match=r"adds <a> <b> to a text.*set data\.bos"):
        load_tokenizer(name)
    assert markers(load_tokenizer(name, bos="<b>"), special) == ("<b>", "<eos>")


def test_unknown_markers_are_named_with_those_there_are(tmp_path: Path) -> None:
    name = str(write(tmp_path, ("<a>", "<b>")))
    path = f"{tmp_path}/tokenizer.json"
    with pytest.raises(ValueError, match=rf"{path} has none of .*set data\.eos.*tokens: <a>, <b>"):
        load_tokenizer(name)
    with pytest.raises(
        ValueError, match=rf"^data\.bos: '<c>' is not a token of {path}; .*<a>, <b>"
    ):
        load_tokenizer(name, bos="<c>", eos="<b>")
    with pytest.raises(ValueError, match=r"^data\.eos: '' is not|'the' is a word of text"):
        load_tokenizer(name, eos="the")
    with pytest.raises(ValueError, match=r"^data\.eos: '<c>' is not a token of bytes"):
        load_tokenizer("bytes", eos="<c>")
    many = str(write(tmp_path / "many", tuple(f"<{i}>" for i in range(30))))
    with pytest.raises(ValueError, match=r"<0>, <1>, .*, <11>, \.\.\. \(30 in all\)$"):
        load_tokenizer(many)


@pytest.mark.parametrize("content", ["{", "[]", '{"eos_token": 3}'])
def test_malformed_tokenizer_config_is_named(tmp_path: Path, content: str) -> None:
    name = str(write(tmp_path, ("<s>", "</s>")))
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"^data\.tokenizer: .*tokenizer_config\.json"):
        load_tokenizer(name)


def test_marker_that_is_not_special_is_not_read_from_text(tmp_path: Path) -> None:
    name = str(write(tmp_path, ("<s>", "</s>")))
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"][1]["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert 1 in load_tokenizer(name, eos="<s>").encode("a</s>b")
    tokenizer = load_tokenizer(name, eos="</s>")
    assert tokenizer.eos_id == 1
    assert 1 not in tokenizer.encode("a</s>b")


def test_fingerprint_tells_other_markers_apart(tmp_path: Path) -> None:
    """The markers that were always found keep the fingerprint of what was written with them."""
    name = str(write(tmp_path, ("<s>", "</s>", END)))
    found = {
        load_tokenizer(name, bos=bos, eos=eos).fingerprint
        for bos in (None, "", "</s>", END)
        for eos in (None, "<s>")
    }
    assert len(found) == 8
    former = sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()
    assert load_tokenizer(name).fingerprint == former
    # Documents of Qwen and GPT-2 began with their end; data.bos reads token files from then.
    name = str(write(tmp_path / "gpt2", (END,)))
    former = sha256((tmp_path / "gpt2" / "tokenizer.json").read_bytes()).hexdigest()
    assert load_tokenizer(name).fingerprint != former
    assert load_tokenizer(name, bos=END).fingerprint == former
    ranks = {load_tokenizer("bytes", bos=bos).fingerprint for bos in (None, "")}
    assert len(ranks) == 2
    assert load_tokenizer("bytes", bos="<|begin_of_text|>").fingerprint in ranks


def test_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").touch()
    text = (
        rf"^data\.tokenizer: {tmp_path} has no tokenizer\.json, only vocab\.txt; name a \.tiktoken"
    )
    with pytest.raises(ValueError, match=text):
        load_tokenizer(str(tmp_path))


def test_folder_is_its_tokenizer_json(tmp_path: Path) -> None:
    folder = write(tmp_path / "words.model", ("<s>", "</s>"))
    whole, file = (load_tokenizer(str(p)) for p in (folder, folder / "tokenizer.json"))
    assert whole.fingerprint == file.fingerprint
    assert np.array_equal(whole.encode("the words"), file.encode("the words"))
