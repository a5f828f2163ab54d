"""Tensor parallel styles of the dense decoder that are not PyTorch's."""

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from models.transformer_sharding import vocabulary_to_sequence
from parallelisms.tensor_parallel import apply_tensor_parallel
from tests.lib.ranks import RankError, RankPool

DIM = 3
TOKENS = torch.tensor([[0, 3, 3, 11, 5, 6, 3, 0], [8, 8, 8, 8, 1, 2, 9, 10]])


def embedding(n_rows: int) -> nn.Embedding:
    weight = torch.arange(n_rows * DIM, dtype=torch.float64).view(n_rows, DIM)
    return nn.Embedding.from_pretrained(weight, freeze=False)


def embed_on_ranks(n_rows: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """This rank's output and gradient, and the bytes that the gradient keeps alive."""
    model = nn.Sequential(embedding(n_rows))
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    apply_tensor_parallel(model, mesh, plan={"0": vocabulary_to_sequence}, is_async=False)
    out = model(TOKENS)
    out.square().sum().backward()
    grad = model[0].weight.grad
    assert isinstance(grad, DTensor)
    assert grad.placements == (Shard(0),)
    local = grad.to_local()
    return out.detach(), local, local.untyped_storage().nbytes()


@pytest.mark.parametrize("n_rows", [12, 14])
def test_each_rank_has_the_gradient_of_its_rows_only(ranks: RankPool, n_rows: int) -> None:
    whole = embedding(n_rows)
    expected = whole(TOKENS)
    expected.square().sum().backward()
    outputs, gradients, sizes = zip(*ranks.run(embed_on_ranks, 4, n_rows), strict=True)
    assert torch.equal(torch.cat(outputs, dim=1), expected)
    assert torch.equal(torch.cat(gradients), whole.weight.grad)
    assert sum(sizes) == whole.weight.nbytes


def test_rank_without_rows_is_an_error(ranks: RankPool) -> None:
    text = "'0' of the tensor parallel plan is a Embedding: its 9 rows leave one of 4 ranks without"
    with pytest.raises(RankError, match=text):
        ranks.run(embed_on_ranks, 4, 9)
