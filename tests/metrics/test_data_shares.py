"""Shares and epochs of a mixture's sources, of all ranks together."""

from torch.distributed.device_mesh import init_device_mesh

from metrics.data_shares import data_shares
from tests.ranks import RankPool

SOURCES = [("sun", 4), ("moon", None)]


def of_a_rank() -> list[dict[str, float]]:
    mesh = init_device_mesh("cpu", (2,))
    consumed = [[(1, 30), (2, 10)], [(5, 50), (0, 0)]][mesh.get_local_rank()]
    # With best_fit, nothing is behind the first sequences.
    cases = [(consumed, SOURCES), ([(0, 0), (0, 0)], SOURCES), (consumed[:1], SOURCES[:1])]
    return [data_shares(counts, sources, mesh) for counts, sources in cases]


def test_shares_are_of_tokens_and_epochs_of_documents(ranks: RankPool) -> None:
    shares = {"data_share/sun": 80 / 90, "data_epochs/sun": 6 / 4, "data_share/moon": 10 / 90}
    for found in ranks.run(of_a_rank, 2):
        assert found == [shares, dict.fromkeys(shares, 0.0), {}]
