"""torch.compile: one graph per block, or per compile region of a block with graph breaks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn

from config.job_config import Compile
from runtime.compat import configure, inductor_options, raise_recompile_limit
from runtime.log import logger

# Training, validation, samples, and fewer samples than fill a group.
GRAPHS_PER_LAYER = 4


def apply_compile(
    blocks: nn.ModuleDict,
    *,
    config: Compile,
    regions: Mapping[str, bool],
    recomputes: bool,
    buckets_collectives: bool,
    splits_matmuls: bool,
) -> None:
    """Compile each block as one graph. Mutates ``blocks``; equal blocks share one compilation.

    ``regions``: methods of a block by dotted path. If there are any, those with True are compiled,
    each as one graph, instead of the block.
    ``recomputes``: backward recomputes some of the blocks.
    ``buckets_collectives``: the graphs contain the collectives of their weights (SimpleFSDP).
    ``splits_matmuls``: matmuls overlap with their collectives of tensor parallel.
    Raises ``ConfigError`` if this PyTorch lacks an option that recomputed blocks need.
    """
    if not config.enable:
        return
    if recomputes:
        # Forward may set weights as attributes of modules; recomputation may skip that.
        path = "torch._dynamo.config:skip_fwd_side_effects_in_bwd_under_checkpoint"
        configure(path, True, key="compile.enable")
    # Graphs of all blocks count as recompilations of one function, and layers may be of many kinds.
    # Names are indices in the whole model, and a rank may have several stages of it.
    indices = [int(name) for name in blocks if name.isdecimal()]
    raise_recompile_limit(GRAPHS_PER_LAYER * (2 + max([len(blocks), *indices])))
    # Training has fixed shapes. Validation and samples get their own compilation, because symbolic
    # shapes are less reliable.
    options: dict[str, Any] = {"backend": config.backend, "fullgraph": True, "dynamic": False}
    # Not in inductor's config: since PyTorch 2.13 that is one per thread, and on GPUs a thread of
    # autograd's own compiles backward.
    wanted: dict[str, Any] = {"_micro_pipeline_tp": True} if splits_matmuls else {}
    if buckets_collectives:
        # One all-gather and one reduce-scatter per block instead of one per weight.
        wanted |= {"bucket_all_gathers_fx": "all", "bucket_reduce_scatters_fx": "all"}
    if wanted and config.backend == "inductor":
        options["options"] = inductor_options(**wanted)
    graphs = [path for path, is_graph in regions.items() if is_graph]
    for block in blocks.values():
        for path in graphs:
            wrap_region(block, path, lambda method: torch.compile(method, **options))
        if not regions:
            block.compile(**options)
    suffix = f", regions = {', '.join(graphs)}" if regions else ""
    logger.info("compile: %d blocks, backend = %s%s", len(blocks), config.backend, suffix)


def wrap_region(
    block: nn.Module, path: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace the method at the dotted ``path`` with ``wrap(method)``. Mutates ``block``."""
    owner, _, name = path.rpartition(".")
    module = block.get_submodule(owner)
    setattr(module, name, wrap(getattr(module, name)))
