"""The run's own log lines, and which warnings of libraries are left out of them."""

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
    # Compiled blocks that are recomputed by choice do what it asks for: nothing there is in place.
    noisy = logging.getLogger("torch._higher_order_ops.wrap")
    noisy.addFilter(lambda record: "context_fn is passed" not in record.getMessage())
    # Each trace is written at the end of its cycle.
    warnings.filterwarnings("ignore", message="Warning: Profiler clears events")


def duration(seconds: float) -> str:
    """As 1:02:03; what is below zero, by a clock that was set back, as nothing."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


logger = logging.getLogger("shardloom")
