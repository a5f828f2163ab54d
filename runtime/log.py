"""The run's own log lines, and which warnings of libraries are silenced."""

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
    # Harmless: each trace is written at the end of its cycle.
    warnings.filterwarnings("ignore", message="Warning: Profiler clears events")


def duration(seconds: float) -> str:
    """As 1:02:03; below zero, as after a clock was set back, counts as 0."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


logger = logging.getLogger("shardloom")
