"""Markers: the special tokens that begin and end a document, and the files that name them.

A name is None where a file does not say, and "" where it says that there is no such token.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.filesystem import read_input
from runtime.printable import reason_of

TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE = "tokenizer_config.json", "special_tokens_map.json"
# GPT's separator of documents.
END_OF_TEXT = "<|endoftext|>"
# The only names that were found before the files were read; ``add_markers`` compares with them.
FORMER_BOS_NAMES = ("<|begin_of_text|>", "<s>", END_OF_TEXT)
FORMER_EOS_NAMES = ("<|end_of_text|>", "</s>", END_OF_TEXT)
BOS_NAMES = (*FORMER_BOS_NAMES, "<bos>", "<｜begin▁of▁sentence｜>", "[BOS]", "[CLS]")
EOS_NAMES = (*FORMER_EOS_NAMES, "<eos>", "<｜end▁of▁sentence｜>", "[EOS]", "[SEP]")
ROLES = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")
MAX_LISTED = 12
# Unassigned ids that a vocabulary may have besides as many as its tokens.
MAX_GAP = 1 << 16


@dataclass(frozen=True)
class Vocabulary:
    """The tokens among which markers are found."""

    special: Mapping[str, int]
    """Ids of special tokens, which no text is encoded to."""
    tokens: Mapping[str, int]
    """Ids of all tokens that may be named as markers."""
    where: str
    """Name of the tokenizer, for messages."""

    def find_bos(self, wanted: str | None, known: Sequence[str]) -> int | None:
        """Id of the token ``wanted``, else of the first special one of ``known``; None if none.

        Raises ``ValueError`` that lists the special tokens if ``wanted`` is unknown.
        """
        return self._find("bos", wanted, known)

    def find_eos(self, wanted: str | None) -> int:
        """Like ``find_bos``, but raise ``ValueError`` if there is none."""
        eos_id = self._find("eos", wanted, EOS_NAMES)
        if eos_id is None:
            text = f"{self.where} has none of the special tokens {', '.join(EOS_NAMES)}"
            raise ValueError(f"data.tokenizer: {text}: set data.eos; {self._listed()}")
        return eos_id

    def _find(self, key: str, wanted: str | None, known: Sequence[str]) -> int | None:
        if wanted is None:
            return next((self.special[name] for name in known if name in self.special), None)
        if wanted and wanted not in self.tokens:
            text = f"{wanted!r} is not a token of {self.where}"
            raise ValueError(f"data.{key}: {text}; {self._listed()}")
        return self.tokens[wanted] if wanted else None

    def _listed(self) -> str:
        names = sorted(self.special, key=lambda name: self.special[name])
        more = f", ... ({len(names)} in all)" if len(names) > MAX_LISTED else ""
        return f"its special tokens: {', '.join(names[:MAX_LISTED]) or '(none)'}{more}"


def check_n_vocab(n_vocab: int, n_tokens: int, path: Path) -> None:
    """Raise ``ValueError`` if most ids have no token: a vocabulary of all ids would be allocated.

    Published tokenizers leave few ids unassigned.
    """
    if n_vocab > 2 * n_tokens + MAX_GAP:
        text = f"the largest id is {n_vocab - 1:,}, but there are only {n_tokens:,} tokens"
        raise ValueError(f"data.tokenizer: {path}: {text}")


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Contents of ``tokenizer_config.json``; its names may be in ``special_tokens_map.json`` only.

    Empty if there are no such files. Raises ``ValueError`` for malformed ones.
    """
    contents: dict[str, Any] = {}
    for name in (SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE):
        path = folder / name
        # A link to nothing is a mistake, not the absence of a file.
        if not os.path.lexists(path):
            continue
        try:
            content = json.loads(read_input(path).decode())
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"data.tokenizer: {path}: {reason_of(error)}") from None
        if not isinstance(content, dict):
            raise ValueError(f"data.tokenizer: {path}: not a JSON object")
        contents |= content
    return contents


def declared_bos(config: Mapping[str, Any], post_processor: Mapping[str, Any] | None) -> str | None:
    """Name of the token that transformers puts before a text.

    Where ``add_bos_token`` of ``tokenizer_config.json`` does not decide that, the post-processor of
    ``tokenizer.json`` does. Raises ``ValueError`` if it puts several tokens there.
    """
    adds_bos = config.get("add_bos_token")
    if adds_bos is False:
        return ""
    before, _ = _added_names(post_processor or {})
    if adds_bos:
        return token_name(config, "bos_token") or _single(before, "bos") or None
    if post_processor is None and "bos_token" not in config:
        return None
    return _single(before, "bos")


def declared_eos(config: Mapping[str, Any], post_processor: Mapping[str, Any] | None) -> str | None:
    """Name of eos in ``tokenizer_config.json``, else the token that follows a text.

    Raises ``ValueError`` if the post-processor puts several tokens there.
    """
    _, after = _added_names(post_processor or {})
    return token_name(config, "eos_token") or _single(after, "eos") or None


def add_markers(
    fingerprint: str, special: Mapping[str, int], bos_id: int | None, eos_id: int
) -> str:
    """Fingerprint of a tokenizer with its markers, given that of its encoding alone.

    The two are equal for the markers that were found before the files were read. Checkpoints and
    token files from before then still belong to their tokenizer, if that has the same markers.
    """
    former = (FORMER_BOS_NAMES, FORMER_EOS_NAMES)
    firsts = [next((special[n] for n in names if n in special), None) for names in former]
    if firsts == [bos_id, eos_id]:
        return fingerprint
    return hashlib.sha256(f"{fingerprint} {bos_id} {eos_id}".encode()).hexdigest()


def token_name(config: Mapping[str, Any], key: str) -> str:
    """Content of a token of ``tokenizer_config.json``; "" if it is null or absent.

    Raises ``ValueError`` for other values than a string or an object with ``content``.
    """
    value = config.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise ValueError(f"data.tokenizer: {TOKENIZER_CONFIG_FILE}: {key}: {value!r} is no token")
    return value or ""


def declared_special(config: Mapping[str, Any]) -> set[str]:
    """Names of the tokens to which ``tokenizer_config.json`` gives a role, such as padding."""
    named = {token_name(config, f"{role}_token") for role in ROLES}
    more = config.get("additional_special_tokens") or []
    return named | {token_name({"token": token}, "token") for token in more}


def _single(names: Sequence[str], key: str) -> str:
    if len(names) > 1:
        text = f"adds {' '.join(names)} to a text, but a document has one {key}: set data.{key}"
        raise ValueError(f"data.tokenizer: the post-processor {text}")
    return names[0] if names else ""


def _added_names(post_processor: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Tokens that a post-processor puts before and after a single text."""
    match post_processor.get("type"):
        case "Sequence":
            before: list[str] = []
            after: list[str] = []
            for part in post_processor["processors"]:
                outer_before, outer_after = _added_names(part)
                before, after = outer_before + before, after + outer_after
            return before, after
        case "BertProcessing" | "RobertaProcessing":
            return [post_processor["cls"][0]], [post_processor["sep"][0]]
        case "TemplateProcessing":
            return _template_names(post_processor)
    return [], []


def _template_names(template: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    before: list[str] = []
    after: list[str] = []
    names = before
    for part in template["single"]:
        if "SpecialToken" in part:
            names += template["special_tokens"][part["SpecialToken"]["id"]]["tokens"]
        else:
            names = after
    return before, after
