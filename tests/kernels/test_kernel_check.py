"""Ranks agree on their kernels: one that fails on a rank is used on none."""

from collections.abc import Collection

import pytest
import torch.distributed as dist

from kernels.kernel_check import problem_on_any_rank
from tests.lib.ranks import RankPool


def problem_if_fails_on(failing: Collection[int]) -> str:
    def check() -> None:
        if dist.get_rank() in failing:
            raise RuntimeError("no kernel")

    return problem_on_any_rank(check)


@pytest.mark.parametrize(
    ("failing", "problem"), [((), ""), ((1,), "rank 1: no kernel"), ((0, 1), "no kernel")]
)
def test_all_ranks_have_the_problem_of_one(
    ranks: RankPool, failing: Collection[int], problem: str
) -> None:
    assert ranks.run(problem_if_fails_on, 2, failing) == [problem, problem]


def test_error_without_a_text_is_named() -> None:
    def check() -> None:
        raise NotImplementedError

    assert problem_on_any_rank(check) == "NotImplementedError"
