"""Random damage to each kind of input: it is rejected by name, or what is read is what is there.

A plain reader, of a few lines, says what is there.
"""

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.lib.input_kinds import KINDS, Kind
from tests.lib.limits import limited_memory, time_limit
from tests.lib.random_damage import contents, damage

COUNT = 1600


@pytest.fixture(autouse=True)
def hub_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def run_trial(seed: int, base: Path) -> tuple[str, str]:
    """Damage an input and read it. Return the outcome and what is wrong with it."""
    rng = random.Random(seed)
    name = rng.choice(list(KINDS))
    kind, intact, folder = KINDS[name], base / "intact" / name, base / "trial" / name
    if not intact.exists():
        intact.mkdir(parents=True)
        kind.write(intact)
    shutil.rmtree(base / "trial", ignore_errors=True)
    shutil.copytree(intact, folder)
    (base / "trial" / "outside").mkdir()
    (base / "trial" / "outside" / "file").write_bytes(rng.randbytes(50))
    path = rng.choice(sorted(folder.iterdir()))
    siblings = [p.name for p in folder.iterdir()] if kind.depends else [path.name]
    way = damage(rng, path)
    before = contents(base / "trial")
    where = f"{name}: {way} {path.name}: "
    if name == "configuration" and way == "become_pipe":
        return "skipped", ""  # A configuration may come from a pipe: it is read until its end.
    try:
        with time_limit(), limited_memory():
            found = kind.read(folder)
    except ValueError as error:
        named = [*siblings]
        # What is gone can be named only by its folder.
        named += [str(folder)] if not path.is_file() else []
        named += [os.path.realpath(path)]
        # Such as tokenizer.json/tokenizer.json.
        said = str(error).replace(f"{folder}/", "")
        is_named = any(text in said for text in named)
        outcome, wrong = "rejected", "" if is_named else f"{where}no name in {str(error)[:300]!r}"
    except BaseException as error:
        outcome, wrong = "broken", f"{where}{type(error).__name__}: {str(error)[:300]}"
    else:
        is_right = found == what_is_there(kind, folder, intact)
        outcome, wrong = "read", "" if is_right else f"{where}read {str(found)[:300]}"
    if contents(base / "trial") != before:
        wrong += f"; {where}a file was changed"
    return outcome, wrong


def what_is_there(kind: Kind, folder: Path, intact: Path) -> Any:
    """Contents of a damaged input by a plain reader; where that fails, those of the intact one."""
    is_readable = all(path.is_file() or path.is_dir() for path in folder.iterdir() if path.exists())
    with suppress(Exception):
        if kind.plain is not None and is_readable:
            return kind.plain(folder)
    return kind.read(intact)


@pytest.mark.row(40, "Random damage is rejected by name, or harmless")
def test_damaged_input_is_rejected_or_read_as_it_is(
    tmp_path: Path,
    seeds: Callable[[int], Iterator[int]],
    record_result: Callable[[str], None],
) -> None:
    ends = Counter[str]()
    for seed in seeds(COUNT):
        outcome, wrong = run_trial(seed, tmp_path)
        assert not wrong
        ends[outcome] += 1
    record_result(
        f"{ends.total():,} damages to {len(KINDS)} kinds of input: {ends['rejected']:,} rejected"
        f" by name, {ends['read']:,} read as they are"
    )
