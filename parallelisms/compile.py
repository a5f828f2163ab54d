"""torch.compile, one graph per block."""

import torch
import torch.nn as nn

from config.job_config import Compile
from runtime.log import logger

# One gather of a block's weights and one reduction of its gradients, instead of one per weight.
_BUCKETS = {"bucket_all_gathers_fx": "all", "bucket_reduce_scatters_fx": "all"}


def apply_compile(blocks: nn.ModuleDict, *, config: Compile, buckets_collectives: bool) -> None:
    """Compile each block as one graph, in place. Equal blocks share one compilation.

    ``buckets_collectives``: the blocks' graphs hold the collectives of their weights.
    """
    if not config.enable:
        return
    if buckets_collectives:
        # Weights appear and disappear as attributes; backward replays a graph and needs neither.
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    options = _BUCKETS if buckets_collectives and config.backend == "inductor" else None
    for block in blocks.values():
        # Shapes do not change in training; what else runs (validation, a sample) is worth a
        # compilation of its own, and symbolic shapes are where compilers fail.
        block.compile(backend=config.backend, fullgraph=True, dynamic=False, options=options)
    logger.info("compile: %d blocks with %s", len(blocks), config.backend)
