"""Lines that count after restarts and rollbacks."""

from typing import Any

from metrics.history import ROLLED_BACK, split_history


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


def test_rollback_undoes_steps_before_they_are_repeated() -> None:
    """Those after the checkpoint of step 2; a validation after step 2 stays."""
    validations = [{"step": step, "validation_loss": 1.0} for step in (2, 3)]
    first, rollback = training(1, 2, 3, 4), {"step": 2, ROLLED_BACK: 4}
    lines = [*first[:2], validations[0], first[2], validations[1], first[3], rollback]
    history = split_history(lines)
    assert history.training == first[:2]
    assert history.other == validations[:1]
    assert history.undone == [first[2:]]
    again = training(3, 4)
    assert split_history([*lines, *again]).training == [*first[:2], *again]
