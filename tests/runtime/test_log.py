import pytest

from runtime.log import duration


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
