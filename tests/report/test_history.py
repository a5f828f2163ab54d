"""Curves of a report: no value lies outside of what is plotted."""

import random
from itertools import pairwise

import pytest

from report.history import (
    MAX_POINTS,
    axis_of,
    edges_of,
    interpolate,
    points_of,
    times_of,
    tokens_at,
)


@pytest.mark.parametrize("n_lines", [0, 1, 2, 7, 4000, 4001, 100_003])
def test_every_line_is_in_one_point(n_lines: int) -> None:
    edges = edges_of(n_lines)
    assert len(edges) - 1 == min(n_lines, MAX_POINTS)
    assert (edges[0], edges[-1]) == (0, n_lines)
    assert all(begin < end for begin, end in pairwise(edges))


def test_points_span_every_value() -> None:
    rng = random.Random(0)
    values = [rng.choice([None, rng.gauss(0, 1), rng.gauss(0, 1)]) for _ in range(9999)]
    values[5432] = 1e9
    edges = edges_of(len(values))
    points = points_of(values, edges)
    for i, (begin, end) in enumerate(pairwise(edges)):
        known = [value for value in values[begin:end] if value is not None]
        assert points.low[i] == min(known, default=None)
        assert points.high[i] == max(known, default=None)
        assert points.mean[i] == (pytest.approx(sum(known) / len(known)) if known else None)
    assert max(value for value in points.high if value is not None) == 1e9


def test_mean_of_large_values_is_finite() -> None:
    assert points_of([1.5e308, 1.5e308], [0, 2]).mean == [1.5e308]


def test_times_do_not_go_back() -> None:
    lines = [{}, {"time": 5.0}, {}, {"time": 3.0}, {"time": None}, {"time": 9.0}]
    assert times_of(lines) == [5.0, 5.0, 5.0, 5.0, 5.0, 9.0]
    assert times_of([{}]) is None


def test_tokens_are_interpolated_between_lines() -> None:
    lines = [{"step": 10, "tokens": 100}, {"step": 15}, {"step": 20, "tokens": 300}]
    assert tokens_at([0, 5, 10, 15, 20, 30], lines) == [0, 50, 100, 200, 300, 300]
    assert tokens_at([1], [{"step": 1}]) is None
    assert list(interpolate([0, 2], [(1, 7.0)])) == [7.0, 7.0]


def test_axis_has_the_place_of_the_last_line_of_each_point() -> None:
    lines = [{"step": n, "loss": 1.0, "tokens": 10 * n, "time": 100.0 + n} for n in range(1, 9001)]
    edges = edges_of(len(lines))
    axis = axis_of(lines, edges, lines)
    assert axis.steps == edges[1:]
    assert axis.tokens == [10 * step for step in axis.steps]
    assert axis.seconds == [100.0 + step for step in axis.steps]
