"""Logger setup, silenced library warnings, and duration formatting."""

import logging
import sys
import warnings


def init_logging() -> None:
    """Log to stdout on every rank; the launcher selects the ranks that are shown."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logger = logging.getLogger("shardloom")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    # True under tensor parallel, but harmless: no model mutates its activations.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # Harmless: each trace is exported at the end of its cycle.
    warnings.filterwarnings("ignore", message="Warning: Profiler clears events")


def duration(seconds: float) -> str:
    """Format as 1:02:03. Negative seconds, from a clock that was set back, count as 0."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


logger = logging.getLogger("shardloom")
