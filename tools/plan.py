"""Plan of a run: ``shardloom plan CONFIG [--world-size N] [--device NAME] [--section.key ...]``

Shows parameters, batch, steps, tokens, FLOPs, and the learning rate over steps, without starting a
run. Opens tokenizer and data, as training would. With --device: memory, collectives and time of a
step on these devices instead. If model.vocab_size is set, it opens neither.
"""

import json
import math
import os
import sys
from argparse import Namespace
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn as nn

from build_model import training_flops
from config import JobConfig, load_config
from config.auto import auto_keys, with_values
from config.loader import parse_overrides
from launcher.launch import count_nodes, ranks_per_node
from models.meta import build_on_meta
from parallelisms.parallel_dims import resolve_degrees
from planner.auto import GIB, decide, without_data
from planner.picture import MARK, picture
from planner.plan_text import plan_json, plan_text
from planner.roofline import peak_flops, step_time
from planner.search import Search
from planner.search_text import search_json, search_text
from planner.step_plan import plan_step, without_bfloat16
from run_spec import resolve
from run_summary import drawing, plan_lines
from runtime import exit_codes
from runtime.devices import find_hardware
from runtime.filesystem import replaced_file
from runtime.hub_paths import pin_names
from runtime.log import say
from runtime.machine import available_cpus
from runtime.outside import prints_to_stderr
from tools.cli import (
    Parser,
    check_output,
    path_argument,
    reporting_errors,
    split_overrides,
    whole_number,
)


@reporting_errors
def main(arguments: list[str]) -> int:
    own, overrides = split_overrides(arguments)
    parser = Parser("shardloom plan", description=__doc__)
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file, or its name")
    parser.add_argument(
        "--world-size",
        type=whole_number(1),
        metavar="N",
        help="ranks of all nodes; default: as train here",
    )
    parser.add_argument("--device", metavar="NAME", help="such as h100; see docs/planning.md")
    parser.add_argument(
        "--devices", type=path_argument, metavar="FILE", help="TOML file of more devices and links"
    )
    parser.add_argument(
        "--gpus-per-node",
        type=whole_number(1),
        metavar="N",
        help="default: as train here on several nodes, else as the device's servers",
    )
    parser.add_argument(
        "--picture",
        type=path_argument,
        metavar="FILE",
        help="write an SVG; needs --device; another file of this name is not overwritten",
    )
    parser.add_argument("--price", type=price, metavar="USD", help="of a device, per hour")
    parser.add_argument(
        "--search",
        action="store_true",
        help="the ten fastest meshes that fit, at training.global_batch_size and with the keys of"
        " the command line; needs --device",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; needs --device")
    # What is left, such as --lr, has hints where configurations are loaded.
    options, rest = parser.parse_known_args(own)
    check_options(options)
    n_ranks = options.world_size
    if n_ranks is None:
        n_nodes, n_on_each = count_nodes(os.environ), ranks_per_node(os.environ)
        n_ranks = n_nodes * n_on_each
        if n_nodes > 1:
            options.gpus_per_node = options.gpus_per_node or n_on_each
    given = [*rest, *overrides]
    config = load_config(options.config, given)
    if options.device is not None:
        keys, _ = parse_overrides(given)
        # A program may read the JSON.
        with prints_to_stderr():
            lines = step_lines(config, n_ranks, options, keys)
        say(*lines)
    else:
        print_run(pin_names(config), n_ranks)
    return exit_codes.DONE


def check_options(options: Namespace) -> None:
    """Raise ``ValueError`` for options that have no effect."""
    needing = {
        "--json": options.json or None,
        "--search": options.search or None,
        "--devices": options.devices,
        "--gpus-per-node": options.gpus_per_node,
        "--picture": options.picture,
        "--price": options.price,
    }
    given = [name for name, value in needing.items() if value is not None]
    if options.device is None and given:
        raise ValueError(f"{given[0]} needs --device")
    for name, other, is_given in (
        ("--picture", "--search", options.search),
        ("--price", "--search", options.search),
        ("--price", "--json", options.json),
    ):
        if name in given and is_given:
            raise ValueError(f"{name} has no effect with {other}")


def step_lines(
    config: JobConfig, n_ranks: int, options: Namespace, held: Collection[str]
) -> list[str]:
    """Lines on a step on ``options.device``, or JSON; a search keeps the keys that are ``held``."""
    if options.picture is not None:
        check_output(options.picture, MARK.encode())
    hardware = find_hardware(options.device, options.devices, options.gpus_per_node)
    if "bfloat16" not in hardware.device.tflops:
        config = without_bfloat16(config)
    # Simulating takes longer than finding out that there is no peak.
    peak_flops(config, hardware)
    if config.model.vocab_size is not None:
        config = without_data(config)
    # Afterwards: a tokenizer that is not needed may be missing from the cache of the Hub.
    config, decision = pin_names(config), None
    if options.search:
        report = partial(say, file=sys.stderr)
        answer = Search(config, n_ranks, hardware, held).run(available_cpus(), report)
        as_json = json.dumps(search_json(answer), indent=1).splitlines()
        return as_json if options.json else search_text(answer, n_ranks)
    if auto_keys(config):
        decision = decide(config, n_ranks, hardware.device.memory_gib * GIB, has_gpu=True)
        config = with_values(config, decision.values)
    # Also what was decided without data is rejected if training would reject them.
    run = resolve(config, n_ranks, has_gpu=True)
    plan = replace(decision.plan, run=run) if decision else plan_step(run, n_ranks)
    if options.picture is not None:
        with replaced_file(options.picture) as scratch:
            scratch.write_text(picture(plan, step_time(plan, hardware), hardware))
    if options.json:
        return json.dumps(plan_json(plan, hardware), indent=1).splitlines()
    text = plan_text(plan, hardware, options.price or hardware.device.usd_per_hour)
    return [decision.text, *text] if decision else text


def print_run(config: JobConfig, n_ranks: int) -> None:
    """Print what a run trains, and its schedule."""
    # The machine that will train may have GPUs that this one lacks.
    run = resolve(config, n_ranks, has_gpu=True)
    training, parallelism = run.config.training, run.config.parallelism
    module = build_on_meta(run.model_spec, run.model_args, getattr(torch, training.dtype))
    flops, _ = training_flops(run.model_spec, run.model_args, module, training.seq_len)
    degrees = resolve_degrees(parallelism, n_ranks)
    used = vars(degrees) | {"ep": parallelism.expert_parallel_degree}
    mesh = ", ".join(f"{name} {degree}" for name, degree in used.items() if degree > 1)
    say(
        f"model: {config.model.name} {config.model.flavor}, {sizes_text(module)}",
        f"mesh: {mesh or 'one rank'}",
        *plan_lines(run, batch_degree=degrees.batch, flops_per_token=flops),
        "",
        *drawing(run),
    )


def price(text: str) -> float:
    """Argument type for a price."""
    value = float(text)
    if not 0.0 < value < math.inf:
        raise ValueError(text)
    return value


def sizes_text(module: nn.Module) -> str:
    """Number of parameters and, with experts, of those that a token uses."""
    total = sum(parameter.numel() for parameter in module.parameters())
    unused = sum(
        (1.0 - getattr(m, "active_share", 1.0)) * sum(p.numel() for p in m.parameters())
        for m in module.modules()
    )
    active = f", {total - round(unused):,} active" if unused else ""
    return f"{total:,} parameters{active}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
