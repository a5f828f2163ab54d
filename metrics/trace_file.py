"""Chrome traces as torch.profiler writes them, read as a stream whose events are not all kept.

Needs no PyTorch. Every file is untrusted: sizes are bounded, and what is damaged is named.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO, TypeGuard

from metrics.intervals import Interval
from runtime.filesystem import open_input, parse_object

CHUNK = 1 << 20
# Characters before the events, and of one event.
MAX_HEADER, MAX_EVENT = 1 << 26, 1 << 24
# Kept events need about 150 bytes each.
MAX_EVENTS = 2_000_000
STEP = "ProfilerStep#"
# Ranges that the trainer names, besides its steps.
DATA_WAIT, STEP_SYNC = "data wait", "step sync"
BETWEEN_STEPS = ("validation", "sampling", "checkpoint", "replica check", "gc")
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
# NCCL, NVSHMEM, and PyTorch's symmetric memory.
COLLECTIVE_KERNEL = re.compile(
    r"nccl|nvshmem|multimem_|(one|two)_shot_all_reduce|symm_mem|memcpy ptop", re.IGNORECASE
)
_BEGIN = re.compile(r'"traceEvents"\s*:\s*\[')
_SEPARATOR = re.compile(r"[\s,]*")


@dataclass(frozen=True)
class Collective:
    """One collective of a rank: a kernel of NCCL, or an operation of gloo's thread."""

    begin: float
    end: float
    name: str
    group: str
    """Process group as all of its ranks name it; "" if the trace does not say."""
    description: str
    """Mesh dim of the group, such as mesh_tp; "" if the trace does not say."""


@dataclass
class Trace:
    """Events of one rank; times in microseconds, on one clock for host and device."""

    path: Path
    rank: int
    world_size: int
    backend: str
    has_gpu: bool
    """The process had a GPU, whether or not the trace has its kernels."""
    groups: list[list[int]]
    """Ranks of this rank's process groups."""
    steps: dict[int, Interval] = field(default_factory=dict)
    device_steps: dict[int, Interval] = field(default_factory=dict)
    """From a step's first kernel to the end of its last."""
    main_thread: Any = None
    ranges: dict[str, list[Interval]] = field(default_factory=dict)
    """Ranges of the main thread that the trainer names."""
    ops: dict[Any, list[tuple[float, float, str, bool]]] = field(default_factory=dict)
    """Operators by thread, and whether autograd records each; empty if the trace has kernels."""
    kernels: list[tuple[float, float, str]] = field(default_factory=list)
    """All but collectives."""
    collectives: list[Collective] = field(default_factory=list)


def read_trace(path: Path) -> Trace:
    """Read a trace, gzipped or not. Raises ``OSError``, and ``ValueError`` if it is no trace."""
    with open_input(path) as file:
        is_gzip = file.peek(2)[:2] == b"\x1f\x8b"
        stream = gzip.GzipFile(fileobj=file) if is_gzip else file
        text = TextIOWrapper(stream, encoding="utf-8", errors="replace")
        try:
            return _read(path, text)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            raise ValueError(f"{path}: torn or damaged; its gzip stream ends early") from None
        except RecursionError:
            raise ValueError(f"{path}: not a trace: nested too deep") from None


def _read(path: Path, text: TextIO) -> Trace:
    header, rest = _read_header(path, text)
    trace = _empty_trace(path, header)
    n_kept = 0
    for event in _iterate_events(path, text, rest):
        if event.get("ph") != "X":
            continue
        begin, length, name = event.get("ts"), event.get("dur"), event.get("name")
        if not (_is_number(begin) and _is_number(length) and isinstance(name, str)):
            raise ValueError(f"{path}: an event without ts, dur or name")
        n_kept += _keep(trace, event, begin, begin + length, name)
        if n_kept > MAX_EVENTS:
            raise ValueError(f"{path}: more than {MAX_EVENTS:,} events; trace a smaller model")
    if trace.kernels or any(each.group != "gloo" for each in trace.collectives):
        trace.ops.clear()
    return trace


def _read_header(path: Path, text: TextIO) -> tuple[dict[str, Any], str]:
    """Return what precedes the events, and the text already read after their bracket."""
    buffer = ""
    while (match := _BEGIN.search(buffer, max(0, len(buffer) - CHUNK - 64))) is None:
        chunk = text.read(CHUNK)
        if not chunk or len(buffer) > MAX_HEADER:
            raise ValueError(f'{path}: not a trace of torch.profiler: no "traceEvents"')
        buffer += chunk
    header = buffer[: match.start()].strip().rstrip(",")
    return parse_object(header + "}"), buffer[match.end() :]


def _iterate_events(path: Path, text: TextIO, buffer: str) -> Iterator[dict[str, Any]]:
    decoder, position = json.JSONDecoder(strict=False), 0
    while True:
        position = _SEPARATOR.match(buffer, position).end()  # type: ignore[union-attr]
        if buffer.startswith("]", position):
            return
        try:
            event, position = decoder.raw_decode(buffer, position)
        except json.JSONDecodeError:
            chunk = text.read(CHUNK)
            if not chunk or len(buffer) - position > MAX_EVENT:
                raise ValueError(f"{path}: torn or damaged after its last whole event") from None
            buffer, position = buffer[position:] + chunk, 0
            continue
        if not isinstance(event, dict):
            raise ValueError(f"{path}: not a trace: an event is no object")
        yield event


def _empty_trace(path: Path, header: dict[str, Any]) -> Trace:
    info = header.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    named = re.search(r"rank(\d{1,9})\b", path.name)
    rank = info.get("rank", int(named[1]) if named else 0)
    size = info.get("world_size", 1)
    if type(rank) is not int or type(size) is not int:
        raise ValueError(f"{path}: distributedInfo has no whole numbers for rank and world_size")
    configs = info.get("pg_config")
    configs = configs if isinstance(configs, list) else []
    groups = [each.get("ranks") for each in configs if isinstance(each, dict)]
    return Trace(
        path, rank, size, str(info.get("backend", "")),
        has_gpu=bool(header.get("deviceProperties")),
        groups=[ranks for ranks in groups if isinstance(ranks, list)],
    )  # fmt: skip


def _keep(trace: Trace, event: dict[str, Any], begin: float, end: float, name: str) -> bool:
    """Add what the summary needs of an event; return False if it needs nothing."""
    kind, thread = event.get("cat"), event.get("tid")
    if name.startswith(STEP) and name[len(STEP) :].isdecimal():
        return _keep_step(trace, kind, thread, int(name[len(STEP) :][:15]), (begin, end))
    if kind in KERNELS:
        if COLLECTIVE_KERNEL.search(name.partition("(")[0]):
            trace.collectives.append(_nccl(event, begin, end, name))
        else:
            trace.kernels.append((begin, end, name))
    elif kind == "user_annotation" and name.startswith("gloo:"):
        trace.collectives.append(Collective(begin, end, name, "gloo", ""))
    elif kind == "user_annotation" and name in (DATA_WAIT, STEP_SYNC, *BETWEEN_STEPS):
        trace.ranges.setdefault(name, []).append((begin, end))
    elif kind == "cpu_op" and not trace.has_gpu:
        is_recorded = "Sequence number" in _arguments(event)
        trace.ops.setdefault(thread, []).append((begin, end, name, is_recorded))
    else:
        return False
    return True


def _keep_step(trace: Trace, kind: Any, thread: Any, step: int, own: Interval) -> bool:
    if kind == "gpu_user_annotation":
        # One per stream.
        begin, end = trace.device_steps.get(step, own)
        trace.device_steps[step] = min(begin, own[0]), max(end, own[1])
    else:
        trace.steps[step], trace.main_thread = own, thread
    return True


def _nccl(event: dict[str, Any], begin: float, end: float, name: str) -> Collective:
    args = _arguments(event)
    text = {key: str(args.get(f"Process Group {key}", "")) for key in ("Name", "Ranks")}
    # Groups of other ranks may have the same name.
    group = f"{text['Name']} {text['Ranks']}".strip()
    short = str(args.get("Collective name") or name.partition("(")[0])
    return Collective(begin, end, short, group, str(args.get("Process Group Description", "")))


def _arguments(event: dict[str, Any]) -> dict[str, Any]:
    given = event.get("args")
    return given if isinstance(given, dict) else {}


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and abs(value) < 1e18
