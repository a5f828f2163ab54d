"""Documents of a class outside of this repository, which a configuration names."""

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from config.job_config import DocumentSource
from data.files import FINGERPRINT_SAMPLES, evenly_spaced, record_hashes
from runtime.log import logger
from runtime.outside import Signature, describe_error, import_attribute

METHODS = ("__len__", "__getitem__", "fingerprint")


class OutsideDocuments:
    """Documents by index of ``module:attribute``, called with the arguments of the configuration.

    The object needs ``__len__() -> int``, ``__getitem__(index) -> str | list[int]`` and
    ``fingerprint() -> str``. Token ids are used as they are, with begin and end. A ``ValueError``
    of ``__getitem__``, and what is neither text nor ids, is a bad record; an ``OSError`` is a read
    that failed; any other error is a mistake, which ends the run also where bad records are
    skipped. One thread at a time calls it.
    """

    groups = None
    paths: Sequence[Path] = ()

    def __init__(self, config: DocumentSource, *, skips_bad: bool) -> None:
        """Raises ``ValueError`` by key if the class cannot be used."""
        self._name, self._skips_bad, self._lock = config.type, skips_bad, threading.Lock()
        self._key = f"data.source: {self._name!r}"
        self._documents = self._build(config)
        self._length = self._call("__len__")
        if type(self._length) is not int or self._length < 1:
            raise ValueError(f"{self._key}: has {self._length!r} documents")
        given = self._call("fingerprint")
        if not isinstance(given, str) or not given:
            raise ValueError(f"{self._key}: fingerprint() is {given!r}, not a text")
        digests = [self._digest(given) for _ in range(2)]
        if digests[0] != digests[1]:
            raise ValueError(f"{self._key}: the same index gives different documents")
        self.fingerprint = digests[0]
        """Hash of the fingerprint that the object gives, its length, and some documents."""

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> str | np.ndarray | None:
        where = f"{self._key}: document {index}"
        try:
            with self._lock:
                return _document(self._documents[int(index)])
        except ValueError as error:
            self._raise_or_log(f"{where}: {error}")
            return None
        except OSError as error:
            raise OSError(f"{where}: {describe_error(error)}") from error
        except Exception as error:
            raise ValueError(f"{where}: {describe_error(error)}") from error

    def place(self, index: int) -> str:
        return f"{self._key}, document {index}"

    @property
    def split_hashes(self) -> np.ndarray:
        return record_hashes(self._name, len(self))

    def _build(self, config: DocumentSource) -> Any:
        function = import_attribute("data.source", config.type)
        signature = Signature("data.source", config.type, function, n_leading=0)
        path = {"path": config.path} if config.path else {}
        if path and not signature.takes("path"):
            raise ValueError(f"data.path: has no effect: {config.type} has no argument path")
        arguments = path | signature.bind(
            "data.args", config.args, set_by=dict.fromkeys(path, "path")
        )
        try:
            documents = function(**arguments)
        except Exception as error:
            raise ValueError(f"{self._key}: {describe_error(error)}") from error
        for method in METHODS:
            if not callable(getattr(documents, method, None)):
                kind = type(documents).__name__
                raise ValueError(f"{self._key}: {kind} has no method {method}")
        return documents

    def _call(self, method: str) -> Any:
        try:
            return getattr(self._documents, method)()
        except Exception as error:
            raise ValueError(f"{self._key}: {method}: {describe_error(error)}") from error

    def _digest(self, given: str) -> str:
        digest = hashlib.sha256(f"{given} {len(self)}".encode(errors="surrogatepass"))
        for index in evenly_spaced(len(self), FINGERPRINT_SAMPLES):
            document = self[index]
            if isinstance(document, np.ndarray):
                digest.update(document.tobytes())
            else:
                digest.update(b"bad" if document is None else document.encode())
        return digest.hexdigest()

    def _raise_or_log(self, text: str) -> None:
        if not self._skips_bad:
            raise ValueError(text)
        logger.warning("data: skipped bad record: %s", text)


def _document(found: Any) -> str | np.ndarray:
    """Return text that is valid, or ids (s,). Raises ``ValueError`` for anything else.

    The ids are a copy in the machine's byte order: the object may reuse its array.
    """
    if isinstance(found, str):
        # A lone surrogate has no UTF-8.
        found.encode()
        return found
    if not isinstance(found, list | tuple | np.ndarray):
        raise ValueError(f"{type(found).__name__}, not text or a list of token ids")
    if len(found) == 0:
        return np.empty(0, np.int64)
    ids = np.array(found)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"{ids.ndim}-D {ids.dtype}, not a list of token ids")
    return ids.astype(ids.dtype.newbyteorder("="), copy=False)
