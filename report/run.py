"""A run's folder as the report shows it. A damaged or missing file is a problem, not an error."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tomli
from pydantic import ValidationError

from config.job_config import JobConfig, LrScheduler, Training
from config.resume_compat import by_key, shown
from metrics.goodput import goodput
from metrics.history import ROLLED_BACK, History, Line, split_history
from metrics.metrics_file import read_metrics
from report.history import times_of
from report.marks import MAX_STEP, Mark, marks_of
from report.schedule_plan import SchedulePlan, plan_schedule
from runtime.exit_codes import last_step
from runtime.filesystem import parse_object, read_file
from runtime.log import duration, short_number
from runtime.printable import printable, printable_lines, reason_of
from runtime.provenance import attempt_numbers, path_of
from runtime.run_folder import read_records

MAX_SAMPLES, MAX_FILES, MAX_ROWS, MAX_TEXT = 200, 50, 500, 4000
# Of provenance/: objects, and texts that are shown as they are.
TEXTS = (".json", ".toml", ".diff")
StateOf = Callable[[Path, float, Sequence[Line], Mapping[str, Any]], tuple[str, str, float]]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Text that the model wrote after a step."""

    step: int
    prompt: str
    text: str
    seed: int | None


@dataclass(frozen=True, kw_only=True)
class Run:
    """All that the report shows of one run. Texts are escaped to be printable."""

    name: str
    state: str
    why: str
    facts: list[tuple[str, str, str]]
    """Name, value, and what the value is of or at."""
    history: History
    begin: float | None
    """Unix time of the first line, in seconds; None if no line has a time."""
    marks: list[Mark]
    config: dict[str, str]
    """Values by key, such as ``training.steps``."""
    max_norm: float | None
    plan: SchedulePlan | None
    samples: list[Sample]
    provenance: dict[str, dict[str, str]]
    """By file: values by key."""
    problems: list[str]


def read_run(folder: Path, name: str, now: float, state_of: StateOf) -> Run:
    """Read a run's folder at ``now``; ``state_of``: see ``tools.status``.

    Raises ``FileNotFoundError`` if ``folder`` has neither lines of metrics nor a configuration.
    """
    lines, problems = read_metrics(folder / "metrics.jsonl")
    tables = _read_config(folder / "config.toml", problems)
    if not lines and not tables:
        raise FileNotFoundError(f"{folder}: not a run: no line in metrics.jsonl, no config.toml")
    last = last_step(folder / "control")
    kept = [line for line in lines if line["step"] <= last]
    history = split_history(kept)
    rollbacks = [line for line in kept if ROLLED_BACK in line]
    marks, found = marks_of(folder, history.training, rollbacks)
    timed = [line for line in kept if line.get("time") is not None]
    records, _ = read_records(folder / "control" / "failures")
    failures = [record for record in records if type(record.get("attempt")) is int]
    state, why, end = state_of(folder / "control", now, timed, failures[-1] if failures else {})
    plan, max_norm = _plan(folder / "config.toml", tables, problems)
    facts = _facts(history, marks, tables, timed, end)
    kinds = {"restarts": "restart", "rollbacks": "rollback", "failed attempts": "failure"}
    counts = {text: sum(mark.kind == kind for mark in marks) for text, kind in kinds.items()}
    # Starts whose lines the next one repeated have no mark.
    written = (line.get("restarts") or 0 for line in lines)
    counts["restarts"] = max([counts["restarts"], *(int(n) for n in written if n < MAX_STEP)])
    facts += [(text, str(count), "") for text, count in counts.items() if count]
    return Run(
        name=printable(name),
        state=state,
        why=printable(why),
        facts=facts,
        history=history,
        begin=min((line["time"] for line in timed), default=None),
        marks=marks,
        config={printable(key): _short(shown(value)) for key, value in by_key(tables).items()},
        max_norm=max_norm,
        plan=plan,
        samples=_read_samples(folder / "samples.jsonl", last, problems),
        provenance=_read_provenance(folder / "provenance", problems),
        problems=[printable(text) for text in problems + found],
    )


def default_config() -> dict[str, str]:
    """Return the default of every key, as ``Run.config`` shows it."""
    return {key: shown(value) for key, value in by_key(JobConfig().model_dump()).items()}


def _facts(
    history: History,
    marks: Sequence[Mark],
    tables: dict[str, Any],
    timed: Sequence[Line],
    end: float,
) -> list[tuple[str, str, str]]:
    training = history.training
    facts: list[tuple[str, str, str]] = []
    steps = by_key(tables).get("training.steps")
    if training:
        of = f"of {steps:,}" if type(steps) is int else ""
        # The last steps before an early end may have no line, but a checkpoint and an end.
        ends = [mark.step for mark in marks if mark.kind == "end"]
        facts.append(("step", f"{max([training[-1]['step'], *ends]):,}", of))
        facts.append(("loss", _number(training[-1].get("loss")), ""))
    validations = [
        (line["validation_loss"], line["step"])
        for line in history.other
        if line.get("validation_loss") is not None
    ]
    if validations:
        loss, step = min(validations)
        facts.append(("best validation loss", f"{loss:.4f}", f"at {step:,}"))
    if training and training[-1].get("tokens") is not None:
        facts.append(("tokens", short_number(training[-1]["tokens"]), ""))
    rates = [line["tokens_per_second"] for line in training if line.get("tokens_per_second")]
    if rates:
        facts.append(("tokens per second", f"{median(rates):,.0f}", "median"))
    times = times_of(timed)
    if times:
        facts.append(("time", duration(min(max(end, times[-1]) - times[0], 1e12)), ""))
    if (share := goodput(timed, end)) is not None:
        facts.append(("goodput", f"{share:.1%}", ""))
    return facts


def _read_config(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        return tomli.loads(read_file(path).decode())
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path}: {reason_of(error)}")
    return {}


def _plan(
    path: Path, tables: dict[str, Any], problems: list[str]
) -> tuple[SchedulePlan | None, float | None]:
    """Plan of the schedule, and the norm to which gradients are clipped."""
    if not tables:
        return None, None
    try:
        # Keys that another version of Shardloom had change no plan.
        training = Training.model_validate(_known(tables.get("training"), Training.model_fields))
        scheduler = _known(tables.get("lr_scheduler"), LrScheduler.model_fields)
        lr = JobConfig.model_validate({"optimizer": {"lr": tables["optimizer"]["lr"]}}).optimizer.lr
        plan = plan_schedule(training, LrScheduler.model_validate(scheduler), lr)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        problems.append(f"{path}: no plan of the learning rate: {where}: {first['msg']}")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        problems.append(f"{path}: no plan of the learning rate: {error}")
    else:
        return plan, training.max_norm
    return None, None


def _known(table: Any, fields: Mapping[str, object]) -> dict[str, Any]:
    return {key: value for key, value in dict(table or {}).items() if key in fields}


def _read_samples(path: Path, last_step: float, problems: list[str]) -> list[Sample]:
    """Samples in the order of the file; of many, the last and even ones before it."""
    records, found = read_records(path, _is_sample)
    records = [record for record in records if record["step"] <= last_step]
    problems += found
    if len(records) > MAX_SAMPLES:
        problems.append(f"{path}: {MAX_SAMPLES} of {len(records):,} samples are shown")
        last = len(records) - 1
        records = [records[last * i // (MAX_SAMPLES - 1)] for i in range(MAX_SAMPLES)]
    return [
        Sample(
            step=record["step"],
            prompt=_short(record.get("prompt") or "", printable_lines),
            text=_short(record["text"], printable_lines),
            seed=record.get("seed"),
        )
        for record in records
    ]


def _is_sample(record: dict[str, Any]) -> bool:
    kinds = {"prompt": (str, type(None)), "text": (str,), "seed": (int, type(None))}
    is_step = type(record.get("step")) is int and 0 <= record["step"] < 1 << 53
    return is_step and all(isinstance(record.get(key), kind) for key, kind in kinds.items())


def _read_provenance(folder: Path, problems: list[str]) -> dict[str, dict[str, str]]:
    paths = sorted(path for path in folder.glob("*") if path.suffix in TEXTS)
    if len(paths) > MAX_FILES:
        problems.append(f"{folder}: the newest {MAX_FILES} of {len(paths):,} files are shown")
        paths = sorted(_newest_first(folder, paths)[:MAX_FILES])
    files = {}
    for path in paths:
        try:
            content = read_file(path)
        except OSError as error:
            problems.append(f"{path}: {error.strerror or error}")
            continue
        rows = _flatten(parse_object(content))
        if path.suffix != ".json":
            rows = {"": _short(content.decode(errors="replace"), printable_lines)}
        if not rows:
            problems.append(f"{path}: no JSON object")
            continue
        if len(rows) > MAX_ROWS:
            problems.append(f"{path}: {MAX_ROWS} of {len(rows):,} values are shown")
        files[printable(path.name)] = dict(list(rows.items())[:MAX_ROWS])
    return files


def _newest_first(folder: Path, paths: Sequence[Path]) -> list[Path]:
    """Order ``paths``: each attempt, newest first, and the files that it names; then the rest."""
    found: list[Path] = []
    for number in attempt_numbers(folder)[: -MAX_FILES - 1 : -1]:
        found.append(path := path_of(folder, number))
        with suppress(OSError):
            record = parse_object(read_file(path))
            found += [folder / str(record.get(kind)) for kind in ("config", "software", "diff")]
    # An attempt may name a file that is gone, or none.
    known = frozenset(paths)
    return list(dict.fromkeys([*(path for path in found if path in known), *reversed(paths)]))


def _flatten(record: dict[str, Any]) -> dict[str, str]:
    """Values by dotted key. Not recursive, because files may be nested deep."""
    rows: dict[str, str] = {}
    rest: list[tuple[str, Any]] = list(reversed(record.items()))
    while rest:
        key, value = rest.pop()
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            value = {str(number): item for number, item in enumerate(value)}
        if isinstance(value, dict) and value:
            rest += [(f"{key}.{name}", inner) for name, inner in reversed(value.items())]
        else:
            if isinstance(value, list):
                value = " ".join(map(str, value))
            text = value if isinstance(value, str) else shown(value)
            rows[_short(key)] = _short(text, printable_lines) or "none"
    return rows


def _short(text: str, escape: Callable[[str], str] = printable) -> str:
    cut = f" ... ({len(text):,} characters)" if len(text) > MAX_TEXT else ""
    return escape(text[:MAX_TEXT] + cut)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
