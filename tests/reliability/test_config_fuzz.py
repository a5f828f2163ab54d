"""Configurations as nobody would write them: each is accepted or refused by name, at once."""

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
from typing import Any
from unittest.mock import patch

import pytest
import tomli_w

from config import ConfigError, JobConfig, dump_toml, load_config
from models import MODEL_SPECS, find_model
from parallelisms import support
from tests.config.test_changes import all_keys

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


def value(draws: random.Random, depth: int = 0) -> Any:
    """Anything that TOML can say."""
    kinds: list[Callable[[], Any]] = [
        lambda: draws.choice([-1, 0, 1, 2, 3, 4, 8, 64, 2**63 - 1, 2**64, -(2**70)]),
        lambda: draws.choice([0.0, 0.5, 1.0, 1e-30, 1e300, -0.1, math.nan, math.inf]),
        lambda: draws.choice(WORDS),
        lambda: "".join(draws.choices(string.printable, k=draws.randrange(80))),
        lambda: draws.random() < 0.5,
        lambda: date(2024, 1, 1),
    ]
    if depth < 3:
        kinds.append(lambda: [value(draws, depth + 1) for _ in range(draws.randrange(3))])
        kinds.append(lambda: {draws.choice(WORDS): value(draws, depth + 1)})
    return draws.choice(kinds)()


def fitting(draws: random.Random, key: str) -> Any:
    """A value that its own key may have, most of the time."""
    section, _, name = key.partition(".")
    default = getattr(JobConfig.model_fields[section].default, name)
    if key == "model.name":
        return draws.choice(list(MODEL_SPECS))
    if isinstance(default, bool):
        return draws.random() < 0.5
    if isinstance(default, int | None):
        return draws.choice([1, 2, 4, 8, 64, 1000])
    return draws.uniform(0.01, 0.9) if isinstance(default, float) else draws.choice([default, "x"])


def misspelled(draws: random.Random, key: str) -> str:
    place = draws.randrange(len(key))
    return key[:place] + draws.choice(["", draws.choice(string.printable)]) + key[place + 1 :]


def tables(draws: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in draws.sample(KEYS, draws.randrange(6)):
        written = misspelled(draws, key) if draws.random() < 0.05 else key
        section, _, name = written.partition(".")
        chosen = fitting(draws, key) if draws.random() < 0.8 else value(draws)
        if draws.random() < 0.05:
            found[section] = chosen
        elif isinstance(found.setdefault(section, {}), dict):
            found[section][name] = chosen
    return found


def bent(draws: random.Random, toml: bytes) -> bytes:
    """Broken by a few bytes."""
    content = bytearray(toml or b"[job]\n")
    for _ in range(draws.randrange(1, 5)):
        place = draws.randrange(len(content) + 1)
        content[place : place + draws.randrange(3)] = draws.choice(
            [draws.randbytes(1), b"\n", b'"', b"[", b"[" * 3000, b"=" + b"9" * 5000, b"\xff", b"\0"]
        )
    return bytes(content)


def override(draws: random.Random) -> list[str]:
    key = draws.choice(KEYS)
    if draws.random() < 0.1:
        key = misspelled(draws, key)
    is_fitting = key in KEYS and draws.random() < 0.6
    typed = str(fitting(draws, key)) if is_fitting else draws.choice([*TYPED, *WORDS])
    forms = [[f"--{key}", typed], [f"--{key}={typed}"], [f"--{key}"], [typed], [f"-{key}", typed]]
    return draws.choices(forms, weights=[16, 16, 1, 1, 1])[0]


def case(seed: int) -> Case:
    draws = random.Random(seed)
    toml = tomli_w.dumps(tables(draws)).encode()
    if draws.random() < 0.25:
        toml = bent(draws, toml)
    overrides = [part for _ in range(draws.randrange(3)) for part in override(draws)]
    return Case(toml, overrides, draws.choice([1, 2, 3, 4, 8]), draws.random() < 0.5)


def end_of(case: Case, folder: Path) -> tuple[str, list[str]]:
    """How the case ends, and what is wrong with that."""
    path = folder / FILE
    path.write_bytes(case.toml)
    begin = time.process_time()
    try:
        config = load_config(path, case.overrides)
        _, args = find_model(config.model.name, config.model.flavor)
        support.check_support(config, args, case.world_size, has_gpu=case.has_gpu)
    except ValueError as error:
        messages = error.messages if isinstance(error, ConfigError) else [str(error)]
        wrong = [f"names nothing: {text}" for text in messages if not names_something(text, case)]
        end = "refused"
    except BaseException as error:
        wrong, end = [f"{type(error).__name__}: {error}"], "broken"
    else:
        path.write_text(dump_toml(config))
        same = load_config(path, []) == config
        wrong, end = ([] if same else ["its dump is another configuration"]), "accepted"
    if (seconds := time.process_time() - begin) > SECONDS:
        wrong.append(f"took {seconds:.3f} s")
    return end, wrong


def names_something(message: str, case: Case) -> bool:
    """A key, the file, or what was typed."""
    typed = [text.partition("=")[0] for text in case.overrides]
    tables = [text.removeprefix("--").partition(".")[0] for text in typed]
    named = [*KEYS, FILE, "parallelism: the degrees", "model.flavor of", *map(repr, typed)]
    named += [f"command line: {text}" for text in (*typed, *tables) if text.strip("-")]
    return any(text in message for text in named)


@pytest.fixture
def without_collections() -> Iterator[None]:
    """Garbage of other tests is not what is timed here."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.row(22, "A bad configuration is refused before the start")
@pytest.mark.usefixtures("without_collections")
def test_any_configuration_is_accepted_or_refused_by_name(
    tmp_path: Path, trials: Callable[[int], int], seen: Callable[[str], None]
) -> None:
    count, ends = trials(10_000), Counter[str]()
    for seed in range(count):
        end, wrong = end_of(case(seed), tmp_path)
        ends[end] += 1
        assert not wrong, f"seed {seed}: {wrong}"
    assert min(ends["accepted"], ends["refused"]) > count / 20, ends
    seen(f"{count:,} random configurations: {ends['refused']:,} refused by name, 0 tracebacks")


def names_no_key(*_: Any, **__: Any) -> None:
    raise ConfigError(["something is wrong"])


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (patch("config.loader._messages", lambda *_: [][0]), "IndexError"),
        (patch("config.loader._messages", lambda *_: ["is wrong"]), "names nothing: is wrong"),
        (patch.object(support, "check_support", names_no_key), "names nothing: something"),
        (patch(f"{__name__}.dump_toml", lambda _: ""), "its dump is another"),
        (patch(f"{__name__}.find_model", lambda *_: sum(range(10**7))), "took"),
    ],
    ids=["traceback", "mistake", "refusal", "dump", "slow"],
)
def test_a_fault_of_the_loader_is_seen(tmp_path: Path, fault: Any, told: str) -> None:
    with fault:
        found = (text for seed in range(60) for text in end_of(case(seed), tmp_path)[1])
        assert any(told in text for text in found)
