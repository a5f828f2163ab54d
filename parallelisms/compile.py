import torch.nn as nn

from config.job_config import Compile
from runtime.log import logger


def apply_compile(blocks: nn.ModuleDict, *, config: Compile) -> None:
    """Compile each block as one graph, in place. Equal blocks share one compilation."""
    if not config.enable:
        return
    for block in blocks.values():
        # Shapes do not change in training; what else runs (validation, a sample) is worth a
        # compilation of its own, and symbolic shapes are where compilers fail.
        block.compile(backend=config.backend, fullgraph=True, dynamic=False)
    logger.info("compile: %d blocks with %s", len(blocks), config.backend)
