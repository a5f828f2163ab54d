"""Object collectives that propagate exceptions: if one rank fails, all raise instead of hanging."""

import hashlib
import json
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from config import ConfigError

T = TypeVar("T")
ABSENT = "absent"
# More lines would hide the first ones.
MAX_DIFFERENCES = 20
# Between meetings of ranks in ``call_beyond_timeout``: much less than any timeout.
MEET_SECONDS = 10.0


class RankFailure(RuntimeError):
    """Failure on some ranks, raised on all ranks; the message names the ranks."""


def run_on_rank0(function: Callable[[], T]) -> T:
    """Call ``function`` on rank 0 and return its result on all ranks. Collective.

    If it raises, all ranks do: ``ConfigError``, a mistake of the user's, else ``RankFailure``.
    """
    result, text, cause = _try(function) if dist.get_rank() == 0 else (None, "", None)
    mistakes = cause.messages if isinstance(cause, ConfigError) else []
    message: list[Any] = [(result, text, mistakes)]
    dist.broadcast_object_list(message)
    result, text, mistakes = message[0]
    if mistakes:
        # Ranks that still connect to each other would fail if one of them had gone.
        dist.barrier()
        raise ConfigError(mistakes) from cause
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


def call_beyond_timeout(function: Callable[[], T]) -> T:
    """Return ``function()`` once all ranks have called theirs. Collective.

    On some ranks it may take longer than the timeout of collectives. Its error is raised on that
    rank only.
    """
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(function)
        is_pending = torch.ones(1)
        while is_pending.item():
            wait([result], MEET_SECONDS)
            is_pending.fill_(not result.done())
            dist.all_reduce(is_pending)
    return result.result()


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


def raise_if_unequal(facts: Mapping[str, str], mistake: str = "") -> None:
    """Raise ``ConfigError`` on all ranks if ``facts`` differ between ranks. Collective.

    The error lists each fact that differs, its values, and the ranks and hosts that have them. If
    any rank has a ``mistake`` of the user, the error lists the mistakes instead.
    """
    digest = hashlib.sha256(json.dumps(sorted(facts.items())).encode()).hexdigest()
    summaries = all_gather_object((mistake, digest, socket.gethostname()))
    mistakes, digests, hosts = (list(column) for column in zip(*summaries, strict=True))
    if any(mistakes):
        messages = _by_value(mistakes, hosts)
        messages.pop("", None)
        is_on_all_ranks = len(set(mistakes)) == 1
        errors = [mistake] if is_on_all_ranks else [f"{who}: {m}" for m, who in messages.items()]
    elif len(set(digests)) > 1:
        # Ranks with equal facts need not send them all.
        is_first = digests.index(digest) == dist.get_rank()
        sent = all_gather_object(dict(facts) if is_first else {})
        errors = _differences([sent[digests.index(digest)] for digest in digests], hosts)
    else:
        return
    # Ranks that still connect to each other would fail if one of them had gone.
    dist.barrier()
    raise ConfigError(errors)


def _differences(facts: list[dict[str, str]], hosts: list[str]) -> list[str]:
    """One text for each of the ``facts`` (by rank) that differs."""
    found = []
    for key in dict.fromkeys(key for one in facts for key in one):
        ranks_of = _by_value([one.get(key, ABSENT) for one in facts], hosts)
        if len(ranks_of) > 1:
            values = ", ".join(f"{value} on {who}" for value, who in ranks_of.items())
            found.append(f"{key} must be equal on all ranks: {values}")
    n_more = len(found) - MAX_DIFFERENCES
    return found[:MAX_DIFFERENCES] + ([f"and {n_more} more"] if n_more > 0 else [])


def _by_value(values: list[str], hosts: list[str]) -> dict[str, str]:
    """Describe the ranks that have each value: the first of them, its host, and their number."""
    ranks_of = defaultdict(list)
    for rank, value in enumerate(values):
        ranks_of[value].append(rank)
    return {
        value: f"rank {ranks[0]} ({hosts[ranks[0]]})"
        + (f" and {len(ranks) - 1} more" if len(ranks) > 1 else "")
        for value, ranks in ranks_of.items()
    }


def _try(function: Callable[[], T]) -> tuple[T | None, str, Exception | None]:
    """Return the result, the error's text, and the error."""
    try:
        return function(), "", None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}", error
