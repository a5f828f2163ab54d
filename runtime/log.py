import logging
import sys
import warnings


def init_logging() -> None:
    """Send our log lines to stdout; the launcher chooses whose are shown."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logger = logging.getLogger("shardloom")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    # True under tensor parallel, and harmless: no model writes into its activations.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


logger = logging.getLogger("shardloom")
