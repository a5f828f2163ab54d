"""Object collectives that propagate exceptions: if one rank fails, all raise instead of hanging."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from config import ConfigError

T = TypeVar("T")


class RankFailure(RuntimeError):
    """Failure on some ranks, raised on all ranks; the message names the ranks."""


def run_on_rank0(function: Callable[[], T]) -> T:
    """Call ``function`` on rank 0 and return its result on all ranks. Collective.

    Raises ``RankFailure`` on all ranks if it raises.
    """
    result, text, cause = _try(function) if dist.get_rank() == 0 else (None, "", None)
    message: list[Any] = [(result, text)]
    dist.broadcast_object_list(message)
    result, text = message[0]
    if text:
        raise RankFailure(f"rank 0: {text}") from cause
    return cast(T, result)


def gather_to_rank0(function: Callable[[], T]) -> list[T]:
    """Call ``function`` on all ranks; return the results on rank 0, [] elsewhere. Collective.

    Raises ``RankFailure`` on all ranks if it raises on any.
    """
    is_rank0 = dist.get_rank() == 0
    result, text, cause = _try(function)
    gathered: list[Any] = [None] * dist.get_world_size() if is_rank0 else []
    dist.gather_object((result, text), gathered if is_rank0 else None)
    failures = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(gathered) if text]
    message: list[Any] = ["; ".join(failures)]
    dist.broadcast_object_list(message)
    if message[0]:
        raise RankFailure(message[0]) from cause
    return [result for result, _ in gathered]


def all_gather_object(value: T) -> list[T]:
    """Gather ``value`` of every rank on all ranks, in rank order. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def raise_on_all_ranks(error: Exception | None, *, is_mistake: bool) -> None:
    """Raise on all ranks if ``error`` is not None on any. Collective.

    Raises ``ConfigError`` if ``is_mistake`` (of the user), else ``RankFailure``, after which a
    restart may help.
    """

    def raise_error() -> None:
        if error is not None:
            raise error

    try:
        gather_to_rank0(raise_error)
    except RankFailure as failure:
        if is_mistake:
            raise ConfigError([str(failure)]) from error
        raise


def _try(function: Callable[[], T]) -> tuple[T | None, str, Exception | None]:
    """Return the result, the error's text, and the error."""
    try:
        return function(), "", None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}", error
