"""Acts whose success or failure every rank learns, so that none waits for one that failed."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from config import ConfigError

T = TypeVar("T")


class RankFailure(RuntimeError):
    """What failed, on which ranks; raised on all of them."""


def on_first(act: Callable[[], T]) -> T:
    """Let rank 0 act, and return its result on every rank. A collective."""
    result, text, cause = _attempt(act) if dist.get_rank() == 0 else (None, "", None)
    told: list[Any] = [(result, text)]
    dist.broadcast_object_list(told)
    result, text = told[0]
    if text:
        raise RankFailure(f"rank 0: {text}") from cause
    return cast(T, result)


def gather(act: Callable[[], T]) -> list[T]:
    """Let every rank act; return all results on rank 0, and no results elsewhere. A collective."""
    is_first = dist.get_rank() == 0
    result, text, cause = _attempt(act)
    answers: list[Any] = [None] * dist.get_world_size() if is_first else []
    dist.gather_object((result, text), answers if is_first else None)
    failures = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text]
    told: list[Any] = ["; ".join(failures)]
    dist.broadcast_object_list(told)
    if told[0]:
        raise RankFailure(told[0]) from cause
    return [answer for answer, _ in answers]


def everywhere(value: T) -> list[T]:
    """Every rank's value, by rank. A collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def raise_everywhere(error: Exception | None, *, is_mistake: bool) -> None:
    """Raise on every rank what is wrong on some; ``error`` is None on ranks where nothing is.

    ``ConfigError`` if that is the user's mistake, else ``RankFailure``, after which a restart may
    help. A collective.
    """

    def complain() -> None:
        if error is not None:
            raise error

    try:
        gather(complain)
    except RankFailure as failure:
        if is_mistake:
            raise ConfigError([str(failure)]) from error
        raise


def _attempt(act: Callable[[], T]) -> tuple[T | None, str, Exception | None]:
    try:
        return act(), "", None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}", error
