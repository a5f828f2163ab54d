"""Lines that count after restarts and rollbacks."""

from typing import Any

from metrics.history import split_history


def training(*steps: int, **values: Any) -> list[dict[str, Any]]:
    return [{"step": step, "loss": float(step)} | values for step in steps]


def test_repeated_steps_undo_earlier_ones_and_their_validations() -> None:
    first, again = training(1, 2, 3, 4), training(3, 4, 5)
    validations = [{"step": step, "validation_loss": 1.0} for step in (0, 2, 4)]
    lines = [validations[0], *first[:2], validations[1], *first[2:], validations[2], *again]
    history = split_history(lines)
    assert history.training == [*first[:2], *again]
    assert history.other == validations[:2]
    assert history.undone == [first[2:]]


def test_repeated_validation_replaces_the_earlier_one() -> None:
    """Validations may be more frequent than lines of training."""
    layers = {"step": 16, "rms": 1.0}
    before, after = ({"step": 16, "validation_loss": loss} for loss in (1.0, 2.0))
    lines = [*training(10), layers, before, *training(20), layers, after]
    assert split_history(lines).other == [layers, after]
    assert split_history([*lines, *training(20)]).other == [layers, after]
