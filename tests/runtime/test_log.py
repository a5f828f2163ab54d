import pytest

from runtime.log import duration, plain_number


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0:00:00"),
        (59.6, "0:01:00"),
        (3723.0, "1:02:03"),
        (360_000.0, "100:00:00"),
        (-5.0, "0:00:00"),
    ],
)
def test_duration_format(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "digits", "text"),
    [(0.1234, 2, "0.12"), (1.25e-3, 3, "0.00125"), (1.06e-5, 3, "0.0000106"), (0.0, 3, "0"),
     (25.44, 3, "25.4"), (99.7, 2, "100"), (155_881.2, 3, "155,881")],
)  # fmt: skip
def test_plain_number_has_no_exponent(number: float, digits: int, text: str) -> None:
    assert plain_number(number, digits) == text
