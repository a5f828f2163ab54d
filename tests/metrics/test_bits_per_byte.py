"""Bits per byte against counted bytes."""

import math

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh

from data.tokenizer import load_tokenizer
from metrics.bits_per_byte import bits_per_nat
from runtime.labels import IGNORED
from tests.ranks import RankPool

TEXT = "caf\u00e9 \u6f22 and 12345\n"


def of_a_rank() -> None:
    """Each rank has part of the text's labels, one all of the padding."""
    mesh = init_device_mesh("cpu", (2,))
    tokenizer = load_tokenizer("bytes")
    # The last is of no token, as someone else may have made it.
    ids = [*tokenizer.encode(TEXT).tolist(), tokenizer.eos_id, tokenizer.n_vocab + 1]
    rank = mesh.get_local_rank()
    mine = torch.tensor([ids[:5]]) if rank else torch.tensor([[*ids[5:], IGNORED, IGNORED]])
    assert tokenizer.byte_lengths is not None
    got = bits_per_nat([mine], tokenizer.byte_lengths, mesh)
    assert got == len(ids) / len(TEXT.encode()) / math.log(2.0)
    assert bits_per_nat([torch.tensor([[IGNORED]])], tokenizer.byte_lengths, mesh) == 0.0


def test_it_is_of_all_ranks_and_no_padding(ranks: RankPool) -> None:
    ranks.run(of_a_rank, 2)


def test_lengths_are_those_of_the_text() -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.byte_lengths is not None
    for text in (TEXT, TEXT * 7):
        assert tokenizer.byte_lengths[tokenizer.encode(text)].sum() == len(text.encode())
    markers = np.array([tokenizer.bos_id, tokenizer.eos_id])
    assert tokenizer.byte_lengths[markers].tolist() == [0, 0]
