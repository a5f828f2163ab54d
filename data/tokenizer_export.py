"""Files with which transformers' ``AutoTokenizer`` gives the ids of a run's tokenizer.

Every kind becomes a ``tokenizer.json``: merges follow from ranks, and patterns are translated for
the regex engine of ``tokenizers``. The result is compared with the tokenizer on many texts.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import tiktoken
from tokenizers import Tokenizer as HuggingFaceTokenizer

from data.markers import (
    SPECIAL_TOKENS_FILE,
    TOKENIZER_CONFIG_FILE,
    declared_bos,
    read_tokenizer_config,
    token_name,
)
from data.tokenizer import (
    MODEL_FILE,
    TOKENIZER_FILE,
    Tokenizer,
    find_tokenizer_file,
    load_encoding,
    load_sentence_piece,
)
from data.tokenizer_json import BYTE_OF, mark_special, sample_texts

GENERATION_FILE = "generation_config.json"
CHAT_FILES = ("chat_template.jinja", "chat_template.json")
# Other files of a Hugging Face folder that belong to its tokenizer.
COMPANION_FILES = (
    TOKENIZER_CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    GENERATION_FILE,
    "added_tokens.json",
    *CHAT_FILES,
    "merges.txt",
    MODEL_FILE,
    "vocab.json",
)
# Classes of transformers that follow tokenizer.json. Those of a model, as Qwen2Tokenizer, take only
# its vocabulary and merges, and have a pattern of their own; without a class, config.json's
# model_type chooses one of them.
FILE_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
# What the files of a SentencePiece model keep of its tokenizer_config.json.
KEPT_KEYS = ("chat_template", "model_max_length", "pad_token", "unk_token")
# More free ids than this are not worth their names.
MAX_UNASSIGNED = 1000
CHAR_OF = {value: char for char, value in BYTE_OF.items()}
# An atom of a regex, and a count behind it that is possessive.
_ATOM = re.compile(
    r"(?P<atom>\\[pP]\{[^}]*\}|\\.|\[(?:\\.|[^\]\\])*\]|[^\\])(?P<count>\{\d+(?:,\d*)?\}\+)?", re.S
)


class NotRepresentable(ValueError):
    """Raised for a tokenizer that a tokenizer.json cannot express."""


@dataclass(frozen=True)
class TokenizerFiles:
    """Files of a tokenizer in a Hugging Face folder."""

    files: Mapping[str, bytes]
    ids: Mapping[str, Any]
    """Keys of ``config.json``: bos_token_id, eos_token_id, and pad_token_id if there is one."""


def build_tokenizer_files(name: str, tokenizer: Tokenizer) -> TokenizerFiles:
    """Build the files for ``tokenizer``, which was loaded from ``name``.

    What is beside a tokenizer.json is kept, but gets the markers of ``tokenizer``. Raises
    ``NotRepresentable`` for ranks with a pattern that ``tokenizers`` interprets otherwise, and
    ``ValueError`` if the files of a tokenizer.json do not give the ids of ``tokenizer``.
    """
    file = find_tokenizer_file(name)
    if file is not None and file.kind == "json":
        found = _from_folder(file.path, tokenizer)
        _check(found, tokenizer, str(file.path), tokens=[bytes([value]) for value in range(256)])
        return found
    try:
        if file is not None and file.kind == "sentencepiece":
            return _from_sentence_piece(file.path, tokenizer)
        encoding = load_encoding(name)
        found = _from_ranks(encoding, tokenizer)
        _check(found, tokenizer, name, tokens=[*encoding._mergeable_ranks])
    except ValueError as error:
        raise NotRepresentable(str(error)) from None
    return found


def _from_ranks(encoding: tiktoken.Encoding, tokenizer: Tokenizer) -> TokenizerFiles:
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    by_bytes["use_regex"] = False
    split = {
        "type": "Split",
        "pattern": {"Regex": translate_pattern(encoding._pat_str)},
        "behavior": "Isolated",
        "invert": False,
    }
    merges = [[_chars(left), _chars(right)] for left, right in merges_of(encoding)]
    bos = None if tokenizer.bos_id is None else encoding.decode([tokenizer.bos_id])
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        # Without merges, words do not matter.
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, by_bytes]}
        if merges
        else by_bytes,
        "post_processor": _template(bos, tokenizer.bos_id),
        "decoder": by_bytes,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            # Like tiktoken, which does not merge within a word that is a token.
            "ignore_merges": True,
            "vocab": {_chars(token): rank for token, rank in encoding._mergeable_ranks.items()},
            "merges": merges,
        },
    }
    content = mark_special(content, _without_gaps(encoding))
    config = _own_config(bos, encoding.decode([tokenizer.eos_id]))
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    files = {
        TOKENIZER_FILE: _encoded(content),
        TOKENIZER_CONFIG_FILE: _encoded(config),
        GENERATION_FILE: _encoded({key: i for key, i in ids.items() if i is not None}),
    }
    return TokenizerFiles(files, ids)


def _from_sentence_piece(path: Path, tokenizer: Tokenizer) -> TokenizerFiles:
    """Files with the ids of a SentencePiece model, and what is beside it."""
    # Imported here, because sentencepiece is optional.
    from data.sentence_piece_export import texts_with_symbols, tokenizer_json

    model = load_sentence_piece(path)
    names = {i: name for name, i in model.tokens.items()}
    bos = None if tokenizer.bos_id is None else names[tokenizer.bos_id]
    try:
        content = tokenizer_json(model, _template(bos, tokenizer.bos_id))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    kept = {key: model.config[key] for key in KEPT_KEYS if key in model.config}
    files = {
        TOKENIZER_FILE: _encoded(mark_special(content, model.special)),
        TOKENIZER_CONFIG_FILE: _encoded(kept | _own_config(bos, names[tokenizer.eos_id])),
        MODEL_FILE: model.content,
    }
    beside = (path.parent / name for name in (GENERATION_FILE, *CHAT_FILES))
    files |= {file.name: file.read_bytes() for file in beside if file.is_file()}
    found = _with_ids(path.parent, files, tokenizer, begins=bos is not None)
    tokens = [name.encode() for name in model.tokens]
    _check(found, tokenizer, str(path), tokens=tokens, texts=texts_with_symbols(model))
    return found


def _without_gaps(encoding: tiktoken.Encoding) -> dict[str, int]:
    """Special tokens, with names for unassigned ids: ``tokenizers`` numbers them consecutively."""
    special = encoding._special_tokens
    ids, assigned = range(len(encoding._mergeable_ranks), encoding.n_vocab), {*special.values()}
    free = islice((i for i in ids if i not in assigned), MAX_UNASSIGNED)
    return special | {f"<|unassigned_{i}|>": i for i in free}


def _from_folder(path: Path, tokenizer: Tokenizer) -> TokenizerFiles:
    """The tokenizer.json and what is beside it, changed where the run has other markers."""
    files = {TOKENIZER_FILE: path.read_bytes()}
    beside = (path.parent / name for name in COMPANION_FILES)
    files |= {file.name: file.read_bytes() for file in beside if file.is_file()}
    content, config = json.loads(files[TOKENIZER_FILE]), read_tokenizer_config(path.parent)
    has_dropout = bool(content["model"].get("dropout"))
    loaded = HuggingFaceTokenizer.from_str(files[TOKENIZER_FILE].decode())
    name_of = {i: name for name, i in loaded.get_vocab(with_added_tokens=True).items()}
    bos = None if tokenizer.bos_id is None else name_of[tokenizer.bos_id]
    eos = name_of[tokenizer.eos_id]

    begins, put = bos is not None, _put_before(content)
    puts_bos = put == (bos or "")
    own = _decoded(files, TOKENIZER_CONFIG_FILE) if TOKENIZER_CONFIG_FILE in files else {}
    markers = {"eos_token": eos} | ({"bos_token": bos} if bos is not None else {})
    changes: dict[str, Any] = {k: name for k, name in markers.items() if token_name(own, k) != name}
    # Some versions of transformers follow this key, others the post-processor.
    if config.get("add_bos_token", begins if puts_bos else None) is not begins:
        changes["add_bos_token"] = begins
    if own.get("tokenizer_class") not in FILE_CLASSES:
        changes["tokenizer_class"] = FILE_CLASSES[0]
    special = {token["content"] for token in content.get("added_tokens", ()) if token["special"]}
    ids = {tokenizer.bos_id, tokenizer.eos_id}
    ordinary = {name_of[i]: i for i in ids if i is not None and name_of[i] not in special}
    if ordinary or not puts_bos or has_dropout:
        content = mark_special(content, ordinary)
        if has_dropout:
            # The run had none, because ids would vary.
            content["model"]["dropout"] = None
        if not puts_bos:
            content["post_processor"] = _template(bos, tokenizer.bos_id)
        files[TOKENIZER_FILE] = _encoded(content)
    if TOKENIZER_CONFIG_FILE not in files:
        files[TOKENIZER_CONFIG_FILE] = _encoded(_own_config(bos, eos))
    elif changes:
        files[TOKENIZER_CONFIG_FILE] = _encoded(own | changes)
    if SPECIAL_TOKENS_FILE in files:
        names = _decoded(files, SPECIAL_TOKENS_FILE)
        wrong = {k: n for k, n in markers.items() if k in names and token_name(names, k) != n}
        if wrong:
            files[SPECIAL_TOKENS_FILE] = _encoded(names | wrong)
    return _with_ids(path.parent, files, tokenizer, begins=put != "")


def _put_before(content: Mapping[str, Any]) -> str | None:
    """Name of the token that the post-processor puts before a text, "" if none, None if several."""
    with suppress(ValueError):
        return declared_bos({"bos_token": None}, content.get("post_processor"))
    return None


def _with_ids(
    folder: Path, files: dict[str, bytes], tokenizer: Tokenizer, *, begins: bool
) -> TokenizerFiles:
    """Add the ids of ``folder``; those of ``tokenizer`` replace ids that contradict it.

    ``begins``: the folder's tokenizer puts a token before a text.
    """

    def ids_of(saved: Mapping[str, Any]) -> dict[str, Any]:
        # A model with several ends names all; one without a begin may name an id for it.
        bos_id, eos_id = saved.get("bos_token_id"), saved.get("eos_token_id")
        if tokenizer.bos_id is not None or begins:
            bos_id = tokenizer.bos_id
        if tokenizer.eos_id not in (eos_id if isinstance(eos_id, list) else [eos_id]):
            eos_id = tokenizer.eos_id
        pad = {key: saved[key] for key in ("pad_token_id",) if key in saved}
        return {"bos_token_id": bos_id, "eos_token_id": eos_id, **pad}

    path = folder / "config.json"
    saved = _decoded({path.name: path.read_bytes()}, path.name) if path.is_file() else {}
    ids = ids_of(saved)
    if GENERATION_FILE not in files:
        generation = {key: i for key, i in ids.items() if i is not None}
        return TokenizerFiles({**files, GENERATION_FILE: _encoded(generation)}, ids)
    generation = _decoded(files, GENERATION_FILE)
    right = ids_of(generation)
    if wrong := {key for key in right if key in generation and right[key] != generation[key]}:
        changed = generation | {key: right[key] for key in wrong}
        files = {**files, GENERATION_FILE: _encoded(changed)}
    return TokenizerFiles(files, ids)


def _own_config(bos: str | None, eos: str) -> dict[str, Any]:
    """tokenizer_config.json of a tokenizer that has none."""
    return {
        "tokenizer_class": FILE_CLASSES[0],
        "bos_token": bos,
        "eos_token": eos,
        "add_bos_token": bos is not None,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        # Special tokens in the text are plain text, as in the run's documents.
        "split_special_tokens": True,
    }


def _template(bos: str | None, bos_id: int | None) -> dict[str, Any] | None:
    """Post-processor that puts bos before each text."""
    if bos is None:
        return None
    single, other = (
        [{"SpecialToken": {"id": bos, "type_id": i}}, {"Sequence": {"id": name, "type_id": i}}]
        for i, name in enumerate("AB")
    )
    special = {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}}
    template = {"single": single, "pair": [*single, *other], "special_tokens": special}
    return {"type": "TemplateProcessing", **template}


def _check(
    found: TokenizerFiles,
    tokenizer: Tokenizer,
    name: str,
    *,
    tokens: Iterable[bytes],
    texts: Iterable[str] = (),
) -> None:
    """Raise ``ValueError`` unless ``found`` encodes texts and begins documents as ``tokenizer``.

    ``texts``: of this tokenizer, besides the texts for all.
    """
    try:
        written = HuggingFaceTokenizer.from_str(found.files[TOKENIZER_FILE].decode())
    except Exception as error:  # the library raises bare Exception, for example for a pattern
        raise ValueError(f"{name}: {error}") from None
    written.no_truncation()
    written.no_padding()
    written.encode_special_tokens = True
    n_vocab = max(written.get_vocab(with_added_tokens=True).values()) + 1
    if n_vocab != tokenizer.n_vocab:
        raise ValueError(f"{name}: {n_vocab} tokens in transformers, not {tokenizer.n_vocab}")
    special = [token.content for token in written.get_added_tokens_decoder().values()]
    for text in [*texts, *sample_texts(tokens, special)]:
        document = tokenizer.encode_document(text).tolist()[:-1]
        ids = document if tokenizer.bos_id is None else document[1:]
        if written.encode(text, add_special_tokens=False).ids != ids:
            raise ValueError(f"{name}: {text[:40]!r} has other ids in transformers")
        if written.encode(text).ids[: len(document)] != document:
            raise ValueError(f"{name}: {text[:40]!r} begins otherwise in transformers")
        if written.decode(ids, skip_special_tokens=False) != tokenizer.decode(ids):
            raise ValueError(f"{name}: {text[:40]!r} is decoded otherwise in transformers")


def translate_pattern(pattern: str) -> str:
    """Translate a pattern of tiktoken, for Rust's fancy-regex, for Oniguruma in ``tokenizers``."""

    def translated(match: re.Match[str]) -> str:
        atom, count = match["atom"], match["count"] or ""
        if count and atom != ")":
            # In Oniguruma, the + after a count repeats it.
            return f"(?>{atom}{count[:-1]})"
        # There, ^ and $ match at every line.
        return {"^": r"\A", "$": r"\z"}.get(atom, atom) + count

    return _ATOM.sub(translated, pattern).replace("(?s)", "(?m)").replace("(?s:", "(?m:")


def merges_of(encoding: tiktoken.Encoding) -> Iterator[tuple[bytes, bytes]]:
    """Yield the merges of ``encoding``, in order: the last two parts of each token.

    Tokens whose bytes do not merge to two parts only match whole words.
    """
    ranks = encoding._mergeable_ranks
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [bytes([value]) for value in token]
        while len(parts) > 2:
            pairs = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
            lowest = min(pairs)
            if lowest >= rank:
                break
            at = pairs.index(lowest)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]


def _chars(token: bytes) -> str:
    return "".join(CHAR_OF[value] for value in token)


def _encoded(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _decoded(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        content = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{name}: not a JSON object")
    return content
