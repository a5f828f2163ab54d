"""Random configurations are accepted, or rejected quickly with the key in the error."""

import gc
import math
import random
import string
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, get_origin
from unittest.mock import patch

import pytest
import tomli
import tomli_w

from config import ConfigError, JobConfig, dump_toml, load_config
from config.job_config import literals
from models import MODEL_SPECS, find_model
from parallelisms import constraints
from tests.lib.configs import all_keys

KEYS = all_keys()
FILE = "run.toml"
SECONDS = 0.05
WORDS = ["llama3", "8B", "op", "ddp", "always", "full", "auto", "float64", "huggingface", "x", ""]
TYPED = [
    "1", "-1", "0", "1e999", "nan", "true", "True", "None", "null", "[1", "{", '"', "'", "\n", "\\",
    "1\n[job]", "=", "--", "-5", "9" * 5000, "[" * 5000, "\ud800", "\0", "é", "2024-01-01", "0x10",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    toml: bytes
    overrides: list[str]
    world_size: int
    has_gpu: bool


def random_value(rng: random.Random, depth: int = 0) -> Any:
    """Return a random TOML value."""
    kinds: list[Callable[[], Any]] = [
        lambda: rng.choice([-1, 0, 1, 2, 3, 4, 8, 64, 2**63 - 1, 2**64, -(2**70)]),
        lambda: rng.choice([0.0, 0.5, 1.0, 1e-30, 1e300, -0.1, math.nan, math.inf]),
        lambda: rng.choice(WORDS),
        lambda: "".join(rng.choices(string.printable, k=rng.randrange(80))),
        lambda: rng.random() < 0.5,
        lambda: date(2024, 1, 1),
    ]
    if depth < 3:
        kinds.append(lambda: [random_value(rng, depth + 1) for _ in range(rng.randrange(3))])
        kinds.append(lambda: {rng.choice(WORDS): random_value(rng, depth + 1)})
    return rng.choice(kinds)()


def valid_value(rng: random.Random, key: str) -> Any:
    """Return a value that is usually valid for ``key``."""
    section, _, name = key.partition(".")
    default = getattr(JobConfig.model_fields[section].default, name)
    if key == "model.name":
        return rng.choice(list(MODEL_SPECS))
    if isinstance(default, bool):
        return rng.random() < 0.5
    if isinstance(default, int | None):
        return rng.choice([1, 2, 4, 8, 64, 1000])
    return rng.uniform(0.01, 0.9) if isinstance(default, float) else rng.choice([default, "x"])


def misspelled(rng: random.Random, key: str) -> str:
    place = rng.randrange(len(key))
    return key[:place] + rng.choice(["", rng.choice(string.printable)]) + key[place + 1 :]


def tables(rng: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in rng.sample(KEYS, rng.randrange(6)):
        written = misspelled(rng, key) if rng.random() < 0.05 else key
        section, _, name = written.partition(".")
        chosen = valid_value(rng, key) if rng.random() < 0.8 else random_value(rng)
        if rng.random() < 0.05:
            found[section] = chosen
        elif isinstance(found.setdefault(section, {}), dict):
            found[section][name] = chosen
    return found


def corrupted(rng: random.Random, toml: bytes) -> bytes:
    """Corrupt a few bytes of ``toml``."""
    content = bytearray(toml or b"[job]\n")
    for _ in range(rng.randrange(1, 5)):
        place = rng.randrange(len(content) + 1)
        content[place : place + rng.randrange(3)] = rng.choice(
            [rng.randbytes(1), b"\n", b'"', b"[", b"[" * 3000, b"=" + b"9" * 5000, b"\xff", b"\0"]
        )
    return bytes(content)


def override(rng: random.Random) -> list[str]:
    key = rng.choice(KEYS)
    if rng.random() < 0.1:
        key = misspelled(rng, key)
    is_valid = key in KEYS and rng.random() < 0.6
    typed = str(valid_value(rng, key)) if is_valid else rng.choice([*TYPED, *WORDS])
    forms = [[f"--{key}", typed], [f"--{key}={typed}"], [f"--{key}"], [typed], [f"-{key}", typed]]
    return rng.choices(forms, weights=[16, 16, 1, 1, 1])[0]


def case(seed: int) -> Case:
    rng = random.Random(seed)
    toml = tomli_w.dumps(tables(rng)).encode()
    if rng.random() < 0.25:
        toml = corrupted(rng, toml)
    overrides = [part for _ in range(rng.randrange(3)) for part in override(rng)]
    return Case(toml, overrides, rng.choice([1, 2, 3, 4, 8]), rng.random() < 0.5)


def outcome_of(case: Case, folder: Path) -> tuple[str, list[str]]:
    """Load the case; return its outcome and the problems with it."""
    path = folder / FILE
    path.write_bytes(case.toml)
    begin = time.process_time()
    try:
        config = load_config(path, case.overrides)
        _, args = find_model(config.model.name, config.model.flavor)
        constraints.check_constraints(config, args, case.world_size, has_gpu=case.has_gpu)
    except ValueError as error:
        messages = error.messages if isinstance(error, ConfigError) else [str(error)]
        wrong = [f"names nothing: {text}" for text in messages if not names_something(text, case)]
        outcome = "rejected"
    except BaseException as error:
        wrong, outcome = [f"{type(error).__name__}: {error}"], "broken"
    else:
        path.write_text(dump_toml(config))
        same = load_config(path, []) == config
        wrong, outcome = ([] if same else ["its dump is another configuration"]), "accepted"
    if (seconds := time.process_time() - begin) > SECONDS:
        wrong.append(f"took {seconds:.3f} s")
    return outcome, wrong


def names_something(message: str, case: Case) -> bool:
    """True if the message has a key or an argument, or the file if that is no TOML."""
    typed = [text.partition("=")[0] for text in case.overrides]
    tables = [text.removeprefix("--").partition(".")[0] for text in typed]
    named = [*KEYS, "model.flavor of", *map(repr, typed)]
    try:
        written = tomli.loads(case.toml.decode())
        keys = [f"{s}.{k}" for s, t in written.items() if isinstance(t, dict) for k in t]
        named += [*keys, *(f"{FILE}: {section}" for section in written)]
    except (ValueError, RecursionError):
        named.append(FILE)
    named += [f"command line: {text}" for text in (*typed, *tables) if text.strip("-")]
    return any(text in message for text in named)


@pytest.fixture
def without_collections() -> Iterator[None]:
    """Disable garbage collection, which would distort the timing."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.row(22, "A bad configuration is rejected before the start")
@pytest.mark.usefixtures("without_collections")
def test_random_configuration_is_accepted_or_rejected_by_key(
    tmp_path: Path, trials: Callable[[int], int], record_result: Callable[[str], None]
) -> None:
    count, ends = trials(10_000), Counter[str]()
    for seed in range(count):
        outcome, wrong = outcome_of(case(seed), tmp_path)
        ends[outcome] += 1
        assert not wrong, f"seed {seed}: {wrong}"
    assert min(ends["accepted"], ends["rejected"]) > count / 20, ends
    record_result(
        f"{count:,} random configurations: {ends['rejected']:,} rejected by name, 0 tracebacks"
    )


@pytest.mark.parametrize("seed", range(20))
def test_choices_are_read_in_any_case(seed: int) -> None:
    rng = random.Random(seed)
    for key in KEYS:
        section, _, name = key.partition(".")
        owner = type(JobConfig.model_fields[section].default)
        annotation = owner.model_fields[name].annotation
        for choice in literals(annotation):
            if isinstance(choice, str):
                typed = "".join(rng.choice([c.lower(), c.upper()]) for c in choice)
                given, wanted, wrong = typed, choice, f"{typed} "
                if get_origin(annotation) is list:
                    given, wanted, wrong = [typed], [choice], [f"{typed} "]
                assert getattr(owner(**{name: given}), name) == wanted
                with pytest.raises(ValueError, match="Input should be"):
                    owner(**{name: wrong})


def takes_too_long(*_: Any) -> None:
    end = time.process_time() + 2 * SECONDS
    while time.process_time() < end:
        pass


def names_no_key(*_: Any, **__: Any) -> None:
    raise ConfigError(["something is wrong"])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (patch("config.loader._messages", lambda *_: [][0]), "IndexError"),
        (patch("config.loader._messages", lambda *_: ["is wrong"]), "names nothing: is wrong"),
        (patch.object(constraints, "check_constraints", names_no_key), "names nothing: something"),
        (patch(f"{__name__}.dump_toml", lambda _: ""), "its dump is another"),
        (patch(f"{__name__}.find_model", takes_too_long), "took"),
    ],
    ids=["traceback", "mistake", "rejection", "dump", "slow"],
)
def test_loader_fault_is_detected(tmp_path: Path, fault: Any, message: str) -> None:
    with fault:
        found = (text for seed in range(200) for text in outcome_of(case(seed), tmp_path)[1])
        assert any(message in text for text in found)
