"""The pool of ranks that tests share: a call finds the settings that the one before it found."""

import torch

from tests.lib.ranks import RankPool


def settings() -> tuple[str, bool, torch.dtype, int]:
    return (
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
    )


def change_settings() -> tuple[str, bool, torch.dtype, int]:
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    return settings()


def test_call_leaves_no_setting_to_the_next(ranks: RankPool) -> None:
    before = ranks.run(settings, 2)
    assert ranks.run(change_settings, 2) == [("medium", True, torch.float64, 2)] * 2
    assert ranks.run(settings, 2) == before
