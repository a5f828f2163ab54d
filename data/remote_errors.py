"""Requests to servers of remote files, repeated while they fail, and what their errors mean."""

import errno
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from runtime.log import logger

T = TypeVar("T")

# Seconds that requests are repeated without any success, with these seconds between them.
RETRY_SECONDS, FIRST_DELAY, MAX_DELAY = 60.0, 0.1, 8.0
# HTTP: too early, a timeout, too many requests.
TRANSIENT = (408, 425, 429)
# Errors of the user in libraries of AWS, by name because they may not be installed.
MISTAKES = {"ParamValidationError", "ProfileNotFound", "NoRegionError", "ConfigParseError"}
CREDENTIALS = {"NoCredentialsError", "CredentialRetrievalError", "PartialCredentialsError"}
CREDENTIALS |= {"SSOError", "DefaultCredentialsError", "RefreshError", "CredentialUnavailableError"}
CREDENTIALS_HINT = "set the provider's variables, such as AWS_ACCESS_KEY_ID, or write its files"


class StorageError(OSError):
    """A file cannot be read, or no longer.

    ``is_final``: at once, without another request. ``is_mistake``: nor after a restart.
    """

    def __init__(self, text: str, *, is_final: bool = False, is_mistake: bool = False) -> None:
        super().__init__(errno.EIO, masked(text))
        self.is_final, self.is_mistake = is_final or is_mistake, is_mistake

    def __str__(self) -> str:
        return str(self.strerror)


def repeated(url: str, request: Callable[[], T]) -> T:
    """Return the result of ``request``; repeat it after errors that may pass.

    Raises ``FileNotFoundError``, and ``StorageError`` for anything else. Both name the URL.
    """
    first_failure, delay = 0.0, FIRST_DELAY
    while True:
        try:
            return request()
        except StorageError as error:
            if error.is_final:
                raise
            reason = str(error)
        # Each file system has errors of its own, and of its libraries.
        except Exception as error:
            _raise_final(url, error)
            reason = f"{masked(url)}: {_reason(error)}"
        now = time.monotonic()
        first_failure = first_failure or now
        if now + delay - first_failure > RETRY_SECONDS:
            text = f"data: {reason}; repeated for {now - first_failure:.0f} s"
            raise StorageError(text, is_final=True)
        logger.warning("data: %s; trying again in %.1f s", reason, delay)
        time.sleep(delay)
        delay = min(2 * delay, MAX_DELAY)


def _raise_final(url: str, error: Exception) -> None:
    """Raise what ``error`` means, unless the request may succeed when it is repeated."""
    cause, reason = _cause(error), f"data.path: {masked(url)}: {_reason(error)}"
    status, names = getattr(cause, "status", None), {base.__name__ for base in type(cause).__mro__}
    if status == 404 or isinstance(cause, FileNotFoundError):
        raise FileNotFoundError(errno.ENOENT, "no such file", masked(url)) from None
    if names & CREDENTIALS:
        raise StorageError(f"{reason}; {CREDENTIALS_HINT}", is_mistake=True) from None
    is_refused = isinstance(status, int) and 400 <= status < 500 and status not in TRANSIENT
    is_mistake = isinstance(cause, PermissionError | ValueError | TypeError)
    if is_refused or is_mistake or names & MISTAKES:
        raise StorageError(reason, is_mistake=True) from None
    # A range that is no longer in the file, for example.
    if isinstance(cause, OSError) and cause.errno == errno.EINVAL:
        raise StorageError(reason, is_final=True) from None


@contextmanager
def mistakes_as_value_errors() -> Iterator[None]:
    """Raise ``ValueError`` for a ``StorageError`` that a restart cannot help: the user must."""
    try:
        yield
    except StorageError as error:
        if not error.is_mistake:
            raise
        raise ValueError(str(error)) from None


def _reason(error: Exception) -> str:
    """Text of an error of the network or a library, after its name if it is not plain."""
    cause = _cause(error)
    name = "" if isinstance(cause, OSError) and str(cause) else f"{type(cause).__name__}: "
    return masked(f"{name}{cause}".removesuffix(": "))


def _cause(error: Exception) -> BaseException:
    """Error of the web client that fsspec reports as a missing file; else ``error`` itself."""
    cause = error.__cause__
    hides = isinstance(error, FileNotFoundError) and type(cause).__module__.startswith("aiohttp")
    return cause if hides and cause is not None else error


def masked(text: str) -> str:
    """Hide passwords and queries of URLs in ``text``: a redirection may lead to a signed one."""
    text = re.sub(r"(://[^/\s'\"@:]*):[^/\s'\"@]*@", r"\1:***@", text)
    return re.sub(r"(https?://[^\s'\"?]+)\?[^\s'\"]+", r"\1?***", text)
