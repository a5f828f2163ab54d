"""Plan of a run: ``shardloom plan CONFIG [--ranks N] [--section.key value ...]``

Shows parameters, batch, steps, tokens, FLOPs, and the learning rate over steps, without starting a
run. Opens tokenizer and data, as training would.
"""

import os
import sys
from pathlib import Path

import torch
import torch.nn as nn

from build_model import training_flops
from config import load_config
from launcher.launch import find_nodes, ranks_per_node
from models.meta import build_on_meta
from parallelisms.parallel_dims import resolve_degrees
from run_spec import resolve
from run_summary import drawing, plan_lines
from runtime import exit_codes
from runtime.hub_paths import pin_names
from runtime.log import say
from tools.cli import Parser, reporting_errors, split_overrides, whole_number


@reporting_errors
def main(arguments: list[str]) -> int:
    own, overrides = split_overrides(arguments)
    parser = Parser("shardloom plan", description=__doc__)
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file, or its name")
    parser.add_argument(
        "--ranks", type=whole_number(1), metavar="N", help="of all nodes; default: as train here"
    )
    # What is left, such as --lr, has hints where configurations are loaded.
    options, rest = parser.parse_known_args(own)
    n_ranks = options.ranks or find_nodes(os.environ).count * ranks_per_node(os.environ)
    config = pin_names(load_config(options.config, [*rest, *overrides]))
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
    return exit_codes.DONE


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
