"""torch.compile: one graph per block, or one per piece of a block that cannot be one graph."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn

from config.job_config import Compile
from parallelisms.pieces import wrap_piece
from runtime.compat import configure, inductor_options
from runtime.log import logger

# Of one function: for training, validation and samples, and for layers of several kinds.
_COMPILATIONS = 8


def apply_compile(
    blocks: nn.ModuleDict,
    *,
    config: Compile,
    pieces: Mapping[str, bool],
    recomputes: bool,
    buckets_collectives: bool,
) -> None:
    """Compile each block as one graph, in place. Equal blocks share one compilation.

    ``pieces``: if there are any, the methods that a block consists of, and whether each is a graph;
    those that are, are compiled instead. ``recomputes``: backward recomputes some of the blocks.
    ``buckets_collectives``: the graphs hold the collectives of their weights.
    """
    if not config.enable:
        return
    if recomputes:
        # Forward may set weights as attributes of modules; recomputation in backward need not.
        path = "torch._dynamo.config:skip_fwd_side_effects_in_bwd_under_checkpoint"
        configure(path, True, key="compile.enable")
    # Shapes do not change in training; what else runs (validation, a sample) is worth a compilation
    # of its own, and symbolic shapes are where compilers fail.
    options: dict[str, Any] = {"backend": config.backend, "fullgraph": True, "dynamic": False}
    if buckets_collectives and config.backend == "inductor":
        # One gather of a block's weights and one reduction of its gradients, not one per weight.
        options["options"] = inductor_options(
            bucket_all_gathers_fx="all", bucket_reduce_scatters_fx="all"
        )
    graphs = [path for path, is_graph in pieces.items() if is_graph]
    # Recomputed pieces are all called by one function, so their compilations add up.
    torch.compiler.config.recompile_limit = _COMPILATIONS * max(1, len(graphs))
    for block in blocks.values():
        for path in graphs:
            wrap_piece(block, path, lambda method: torch.compile(method, **options))
        if not pieces:
            block.compile(**options)
    what = f", of each: {', '.join(graphs)}" if pieces else ""
    logger.info("compile: %d blocks with %s%s", len(blocks), config.backend, what)
