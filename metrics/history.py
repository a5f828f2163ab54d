"""Lines of metrics.jsonl that count: those that no restart and no rollback undid."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Line = dict[str, Any]
# Key of a line that a rollback within a run writes: lines before it, of later steps, are undone.
ROLLED_BACK = "rolled_back_from"


@dataclass
class History:
    """Lines of a run by whether their steps still count."""

    training: list[Line] = field(default_factory=list)
    """Lines with a loss, steps ascending."""
    other: list[Line] = field(default_factory=list)
    """Lines of validations, steps not descending."""
    undone: list[list[Line]] = field(default_factory=list)
    """Lines with a loss that a restart or a rollback undid, by the event that undid them."""


def split_history(lines: Iterable[Line]) -> History:
    """Sort lines, in the order of the file, by whether their steps count."""
    history = History()
    for line in lines:
        undone = []
        while history.training and _place(history.training[-1]) >= _first_undone(line):
            undone.append(history.training.pop())
        if undone:
            history.undone.append(undone[::-1])
        while history.other and _place(history.other[-1]) >= _first_undone(line):
            history.other.pop()
        if ROLLED_BACK not in line:
            (history.training if "loss" in line else history.other).append(line)
    return history


def _first_undone(line: Line) -> tuple[int, int]:
    """First place that counts no more: of a rollback, that of the step after its checkpoint."""
    return (line["step"] + 1, 0) if ROLLED_BACK in line else _place(line)


def _place(line: Line) -> tuple[int, int]:
    """Place in the file: of a step, its loss is first, and its validation last."""
    return line["step"], 0 if "loss" in line else 2 if "validation_loss" in line else 1
