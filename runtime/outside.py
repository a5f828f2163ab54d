"""Code outside of this repository that a configuration names as ``module:attribute``."""

import difflib
import functools
import importlib
import inspect
import json
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from config import ConfigError

ROOT = Path(__file__).parents[1]
OWN = ("build_model.py", "data", "models/meta.py", "optim", "parallelisms", "runtime")
QUIET = (
    "<frozen ",
    pkgutil.__file__,
    str(Path(importlib.__file__).parent),
    *(str(ROOT / each) for each in OWN),
)
# What errors of hardware, memory and network are not.
MISTAKES = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NameError, NotImplementedError,
    TypeError, ValueError,
)  # fmt: skip
P = ParamSpec("P")
R = TypeVar("R")
NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def import_attribute(key: str, name: str) -> Any:
    """Import ``name``, the ``module:attribute`` of a configuration's ``key``.

    It runs code: call it only with a name that the caller gave. Raises ``ValueError`` with the key,
    and the file and line of a mistake.
    """
    try:
        return pkgutil.resolve_name(name)
    except (Exception, SystemExit) as error:
        text = f"{key}: {name!r} cannot be imported: {describe_error(error)}"
        raise ValueError(text + _hint(name, error)) from error


def exits_are_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: ``sys.exit``, which only code outside calls in ``function``, raises
    ``RuntimeError``. Without it, ranks would end as if the run were done."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except SystemExit as error:
            text = f"sys.exit({error.code!r}) was called"
            raise RuntimeError(text).with_traceback(error.__traceback__) from None

    return run


@contextmanager
def mistakes_of(key: str, name: str) -> Iterator[None]:
    """Context that calls code outside, which a configuration's ``key`` names.

    An exception that no restart helps becomes a ``ConfigError`` with the file and line.
    """
    try:
        yield
    except ConfigError:
        raise
    except MISTAKES as error:
        raise ConfigError([f"{key}: {name!r}: {describe_error(error)}"]) from error


@contextmanager
def prints_to_stderr() -> Iterator[None]:
    """Context in which what code outside prints goes to stderr: a program reads stdout.

    Also what is printed by processes that start in it.
    """
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def describe_error(error: BaseException) -> str:
    """Type and text of an error that code outside raised, and the file and line where."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    text = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    # Those of the import system, and of what called it, say nothing.
    places = [frame for frame in frames if not frame.filename.startswith(QUIET)]
    own = [frame for frame in places if "site-packages" not in frame.filename]
    for place in (own or places)[-1:]:
        text += f" ({place.filename}, line {place.lineno})"
    return text


def _hint(name: str, error: BaseException) -> str:
    """Say what to do about a module or an attribute that is not there; "" for other errors."""
    module, _, attribute = name.partition(":")
    if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
        return "; is its folder in PYTHONPATH?"
    found = sys.modules.get(module)
    if isinstance(error, AttributeError) and found is not None and not hasattr(found, attribute):
        near = difflib.get_close_matches(attribute, dir(found), n=1)
        hint = f"; did you mean {module}:{near[0]}?" if near else ""
        return f" ({getattr(found, '__file__', None) or 'a built-in module'}){hint}"
    return ""


class Signature:
    """Parameters of a function or class outside, against which arguments are checked."""

    def __init__(
        self, key: str, name: str, function: Callable[..., Any], *, n_leading: int
    ) -> None:
        """``n_leading``: arguments that are passed by position. Raises ``ValueError``."""
        self._name = name
        try:
            parameters = list(_signature(function).parameters.values())
        except (TypeError, ValueError):
            raise ValueError(f"{key}: {name!r} cannot be called, or has no signature") from None
        self._takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
        takes_more = any(p.kind is Parameter.VAR_POSITIONAL for p in parameters)
        leading = [p for p in parameters if p.kind in POSITIONAL][:n_leading]
        if len(leading) < n_leading and not takes_more:
            raise ValueError(f"{key}: {name!r} takes {len(leading)} arguments, not {n_leading}")
        rest = [p for p in parameters if p not in leading]
        self._known = {p.name: p for p in rest if p.kind in NAMED}

    def takes(self, name: str) -> bool:
        """True if the function can be called with an argument of this name."""
        return self._takes_any or name in self._known

    def names(self, name: str) -> bool:
        """True if the function has a parameter of this name."""
        return name in self._known

    def bind(
        self, key: str, given: Mapping[str, Any], *, set_by: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return the arguments of a configuration's table ``key``, converted to their types.

        ``set_by``: arguments that the caller passes, and the keys that set them. Raises
        ``ValueError`` for unknown and missing names, and values of other types.
        """
        bound = {}
        for name, value in given.items():
            where = f"{key}.{name}"
            if name in set_by:
                raise ValueError(f"{where}: set {set_by[name]} instead")
            if not self.takes(name):
                names = [known for known in self._known if known not in set_by]
                near = difflib.get_close_matches(name, names, n=1)
                known = f"known: {', '.join(names) or 'none'}"
                hint = f"did you mean {near[0]}?" if near else known
                raise ValueError(f"{where}: {self._name} has no such argument; {hint}")
            bound[name] = _convert(where, self._known.get(name), value)
        for name, parameter in self._known.items():
            if parameter.default is Parameter.empty and name not in {*given, *set_by}:
                raise ValueError(f"{key}.{name}: must be set, because {self._name} needs it")
        return bound


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=True)
    except (NameError, AttributeError, SyntaxError):
        # An annotation that exists for type checkers only.
        return inspect.signature(function)


def _convert(key: str, parameter: Parameter | None, value: Any) -> Any:
    """Return ``value`` as the type of ``parameter``: its annotation's, else that of its default."""
    try:
        # As JSON, because TOML has no tuples.
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        raise ValueError(f"{key}: must be a finite number, a text, true, false or a list") from None
    if parameter is None:
        return value
    try:
        options = ConfigDict(strict=True, arbitrary_types_allowed=True)
        adapter = TypeAdapter(_type_of(parameter), config=options)
    except PydanticUserError:
        adapter = TypeAdapter(_type_of_default(parameter.default))
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        reasons = dict.fromkeys(item["msg"] for item in error.errors())
        raise ValueError(f"{key}: {' or '.join(reasons)}, got {value!r}") from None


def _type_of(parameter: Parameter) -> Any:
    annotation = parameter.annotation
    if annotation is Parameter.empty or isinstance(annotation, str):
        return _type_of_default(parameter.default)
    return annotation


def _type_of_default(default: Any) -> Any:
    if default is None or default is Parameter.empty:
        return Any
    # Programs write 0 for a number that need not be whole.
    return int | float if type(default) is int else type(default)
