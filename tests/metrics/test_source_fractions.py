"""Shares and epochs of a mixture's sources, over all ranks."""

from torch.distributed.device_mesh import init_device_mesh

from metrics.source_fractions import source_fractions
from tests.lib.ranks import RankPool

SOURCES = [("sun", 4), ("moon", None)]


def fractions_of_cases() -> list[dict[str, float]]:
    mesh = init_device_mesh("cpu", (2,))
    consumed = [[(1, 30), (2, 10)], [(5, 50), (0, 0)]][mesh.get_local_rank()]
    # With best_fit packing, the counts of the first sequences are 0.
    cases = [(consumed, SOURCES), ([(0, 0), (0, 0)], SOURCES), (consumed[:1], SOURCES[:1])]
    return [source_fractions(counts, sources, mesh) for counts, sources in cases]


def test_shares_count_tokens_and_epochs_count_documents(ranks: RankPool) -> None:
    shares = {"data_share/sun": 80 / 90, "data_epochs/sun": 6 / 4, "data_share/moon": 10 / 90}
    for found in ranks.run(fractions_of_cases, 2):
        assert found == [shares, {"data_epochs/sun": 0.0}, {}]
