"""A checkpoint's tokenizer is the one that it was trained with, and begins documents as it did."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from data.tokenizer import load_tokenizer
from saved_model import find_checkpoint, saved_tokenizer

END = "<|endoftext|>"


@pytest.fixture
def gpt2(tmp_path: Path) -> str:
    """A folder with a tokenizer whose only special token is an end."""
    vocabulary = {char: i for i, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


def manifest(name: str, began: str | None, **keys: Any) -> dict[str, Any]:
    """Manifest of a run whose documents began with ``began``."""
    fingerprint = load_tokenizer(name, bos=began).fingerprint
    return {
        "config": {"data": {"tokenizer": name, **keys}},
        "fingerprints": {"tokenizer": fingerprint},
    }


def test_markers_of_the_run_are_used(gpt2: str) -> None:
    for bos, bos_id in ((None, None), (END, 256)):
        found = saved_tokenizer(Path("c"), manifest(gpt2, bos, bos=bos, eos=None), None)
        assert found is not None
        assert (found[0], found[1].bos_id, found[1].eos_id) == (gpt2, bos_id, 256)
    with pytest.raises(ValueError, match="is not the tokenizer that the model was trained with"):
        saved_tokenizer(Path("c"), manifest(gpt2, END, bos=None, eos=None), None)


def test_older_checkpoint_keeps_its_markers(gpt2: str) -> None:
    """Documents used to begin with an end if there was no other name, and no key said so."""
    found = saved_tokenizer(Path("c"), manifest(gpt2, END), gpt2)
    assert found is not None
    assert found[1].encode_document("a")[0] == 256
    other = manifest("bytes", None)
    with pytest.raises(ValueError, match=r"argument --tokenizer: .* is not the tokenizer that"):
        saved_tokenizer(Path("c"), other, gpt2)


def test_folder_of_hugging_face_is_told_from_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in (str(tmp_path), "hf:meta-llama/Llama-3.1-8B"):
        with pytest.raises(ValueError, match=f"of Hugging Face; .* convert import {name} CHECKPO"):
            find_checkpoint(Path(name))
