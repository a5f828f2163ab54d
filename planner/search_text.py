"""The answer of a search as lines of at most 100 columns, and as JSON."""

import json
from typing import Any

from planner.search import GIB, N_BEST, Answer, Found, settings

HEAD = (
    " #  dp rep  shard  tp  cp  pp  ep  schedule     recompute  reshard  size  float8"
    "     GiB  tokens/s"
)


def search_text(answer: Answer, world_size: int) -> list[str]:
    """Table of the best, why the next lost, and the lines of each to paste."""
    best = answer.best[:N_BEST]
    lines = [
        f"search: {answer.n_choices:,} choices, {answer.n_fitting:,} of which may fit;"
        " tokens/s of a device, modelled",
        HEAD,
        *(_row(number, found, world_size) for number, found in enumerate(best, start=1)),
    ]
    if any(found.is_estimate for found in answer.best):
        lines.append(
            "~: estimated; ./shardloom plan with its lines counts the memory of a pipeline"
        )
    for found in answer.best[N_BEST:]:
        lines += [_row(N_BEST + 1, found, world_size), f"    {why_slower(found, best[-1])}"]
    for number, found in enumerate(best, start=1):
        lines += ["", f"# {number}", *toml_lines(found)]
    return lines


def why_slower(found: Found, other: Found) -> str:
    """Reason why ``found`` takes longer than ``other``, which is faster."""
    parts = found.parts.keys() | other.parts.keys()
    more = {part: found.parts.get(part, 0.0) - other.parts.get(part, 0.0) for part in sorted(parts)}
    part = max(more, key=more.__getitem__)
    seconds = 1e3 * (found.seconds - other.seconds)
    if seconds < 0.05:
        return f"lost to the tenth: as fast, and takes {found.peak / GIB:.1f} GiB"
    return (
        f"lost to the tenth by {seconds:,.1f} ms of a step: {part} takes {1e3 * more[part]:,.1f}"
        " ms more"
    )


def toml_lines(found: Found) -> list[str]:
    """Lines of TOML."""
    lines = []
    for name, table in settings(found.choice).items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return lines


def search_json(answer: Answer) -> dict[str, Any]:
    """The answer as a JSON object; sizes in bytes."""
    return {
        "choices": answer.n_choices,
        "fitting": answer.n_fitting,
        "best": [
            {
                "settings": settings(found.choice),
                "degrees": vars(found.choice.degrees) | {"ep": found.choice.ep},
                "peak": found.peak,
                "peak_is_estimate": found.is_estimate,
                "modelled": {
                    "step_seconds": found.seconds,
                    "parts": found.parts,
                    "tokens_per_second": found.tokens_per_second,
                },
            }
            for found in answer.best
        ],
    }


def _row(number: int, found: Found, world_size: int) -> str:
    choice, mark = found.choice, "~" if found.is_estimate else " "
    schedule = choice.schedule if choice.pp > 1 else "-"
    return (
        f"{number:>2}{choice.dp_replicate:>8}{choice.dp_shard:>7}{choice.tp:>4}{choice.cp:>4}"
        f"{choice.pp:>4}{choice.ep:>4}  {schedule.replace('1F1B', '') or '1F1B':<13}"
        f"{choice.mode:<11}{choice.reshard:<9}{choice.size:>4}  {choice.recipe[:6]:<6}"
        f"{mark}{found.peak / GIB:>7.1f}{found.tokens_per_second / world_size:>10,.0f}"
    )
