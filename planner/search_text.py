"""The answer of a search as lines of at most 100 columns, and as JSON."""

import json
from textwrap import wrap
from typing import Any

from planner.search import ALIKE, GIB, N_BEST, Answer, Found

HEAD = (
    " #  dp rep  shard  tp  cp  pp  ep  schedule     recompute  reshard  size  float8"
    "     GiB  tokens/s"
)
# Fields of a choice that the alternatives of a row may differ in, as columns.
ALIKE_NAMES = {
    "dp_replicate": "dp rep",
    "schedule": "schedule",
    "mode": "recompute",
    "reshard": "reshard",
    "size": "size",
    "recipe": "float8",
}


def search_text(answer: Answer, world_size: int) -> list[str]:
    """Table of the best, why the next lost, and the lines of each to paste."""
    best = answer.best[:N_BEST]
    lines = [
        f"search: of {answer.n_choices:,} choices {answer.n_estimated:,} were estimated: the others"
        " do not fit, or are slower;",
        f"{answer.n_fitting:,} may fit; tokens/s of a device, modelled",
        HEAD,
    ]
    for number, found in enumerate(best, start=1):
        lines += [_row(number, found, world_size), *_alike_lines(found)]
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
    """Lines of TOML, which change the configuration of the search to that of ``found``."""
    lines = []
    for name, table in found.settings.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return lines


def search_json(answer: Answer) -> dict[str, Any]:
    """The answer as a JSON object; sizes in bytes."""
    return {
        "choices": answer.n_choices,
        "estimated": answer.n_estimated,
        "fitting": answer.n_fitting,
        "best": [
            {
                "settings": found.settings,
                "degrees": vars(found.choice.degrees) | {"ep": found.choice.ep},
                "peak": found.peak,
                "alike": found.alike,
                "modelled": {
                    "step_seconds": found.seconds,
                    "parts": found.parts,
                    "tokens_per_second": found.tokens_per_second,
                },
            }
            for found in answer.best
        ],
    }


def _alike_lines(found: Found) -> list[str]:
    """Values of single columns with which the row would be about as fast."""
    values = [f"{ALIKE_NAMES[name]} {', '.join(map(str, v))}" for name, v in found.alike.items()]
    text = f"within {ALIKE:.0%}: {'; '.join(values)}"
    indent = " " * 4
    return wrap(text, 100, initial_indent=indent, subsequent_indent=indent) if values else []


def _row(number: int, found: Found, world_size: int) -> str:
    choice = found.choice
    schedule = choice.schedule if choice.pp > 1 else "-"
    return (
        f"{number:>2}{choice.dp_replicate:>8}{choice.dp_shard:>7}{choice.tp:>4}{choice.cp:>4}"
        f"{choice.pp:>4}{choice.ep:>4}  {schedule.replace('1F1B', '') or '1F1B':<13}"
        f"{choice.mode:<11}{choice.reshard:<9}{choice.size:>4}  {choice.recipe[:6]:<6}"
        f"{found.peak / GIB:>8.1f}{found.tokens_per_second / world_size:>10,.0f}"
    )
