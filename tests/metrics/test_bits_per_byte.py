"""Bits per byte compared with counted bytes."""

import math

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh

from data.tokenizer import load_tokenizer
from metrics.bits_per_byte import bits_per_nat
from runtime.labels import IGNORE_INDEX
from tests.lib.ranks import RankPool

TEXT = "caf\u00e9 \u6f22 and 12345\n"


def check_rank() -> None:
    """Each rank has some of the labels; one has all padding."""
    mesh = init_device_mesh("cpu", (2,))
    tokenizer = load_tokenizer("bytes")
    # The last id is outside the vocabulary, as in token files of other tools.
    ids = [*tokenizer.encode(TEXT).tolist(), tokenizer.eos_id, tokenizer.n_vocab + 1]
    rank = mesh.get_local_rank()
    labels = (
        torch.tensor([ids[:5]]) if rank else torch.tensor([[*ids[5:], IGNORE_INDEX, IGNORE_INDEX]])
    )
    assert tokenizer.byte_lengths is not None
    factor = bits_per_nat([labels], tokenizer.byte_lengths, mesh)
    assert factor == len(ids) / len(TEXT.encode()) / math.log(2.0)
    assert bits_per_nat([torch.tensor([[IGNORE_INDEX]])], tokenizer.byte_lengths, mesh) == 0.0


def test_factor_counts_all_ranks_and_no_padding(ranks: RankPool) -> None:
    ranks.run(check_rank, 2)


def test_byte_lengths_sum_to_length_of_text() -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.byte_lengths is not None
    for text in (TEXT, TEXT * 7):
        assert tokenizer.byte_lengths[tokenizer.encode(text)].sum() == len(text.encode())
    markers = np.array([tokenizer.bos_id, tokenizer.eos_id])
    assert tokenizer.byte_lengths[markers].tolist() == [0, 0]
