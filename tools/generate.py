"""Write text: ``python -m tools.generate CHECKPOINT [--prompt TEXT] [--tokens N] [...]``

In one process, from a checkpoint that any mesh wrote. Ends where the model ends its text, after N
tokens, or at Ctrl-C.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn as nn

from checkpoint.manifest import read_manifest
from checkpoint.states import ModelState
from checkpoint.storage import load_alone, read_index
from checkpoint.store import sizes_of
from config.job_config import Training
from metrics.sample import TEMPERATURE, draw, printable
from models import ModelSpec, TransformerArgs
from models.cache import cached
from models.meta import build_on_meta
from parallelisms.shared_parameters import keep_shared
from runtime import exit_codes
from runtime.distributed import compute_dtype
from tools.arguments import Parser, telling_mistakes, whole_number
from tools.saved_model import check_shapes, find_checkpoint, saved_model, saved_tokenizer

MOST_TOKENS = 256
# Tokens of a prompt at once: bounds the memory for its logits, of which only the last are needed.
CHUNK = 512
# Stands for bytes that are no character, or not yet one: after so many tokens they never will be.
REPLACEMENT, MOST_WAITING = "\ufffd", 3
# Earlier tokens that decide how the next is written, such as whether a space comes first.
CONTEXT = 32


@telling_mistakes
def main(arguments: list[str]) -> int:
    try:
        write(parse(arguments))
    except BrokenPipeError:
        # The reader has seen enough, but Python would flush at its end, and fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exit_codes.DONE


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line's options; a ``ValueError`` names the argument that is wrong."""
    parser = Parser("python -m tools.generate", description=__doc__)
    add = parser.add_argument
    add("checkpoint", type=Path, help="a checkpoint's folder; or a run's: its newest that verifies")
    add("--prompt", type=_text, default="", help="what the text begins with")
    add(
        "--tokens",
        type=whole_number(1, 2**31),
        metavar="N",
        help=f"at most so many; default {MOST_TOKENS}, or what a trained sequence has room for",
    )
    add(
        "--temperature",
        type=_real(0.0, math.inf),
        default=TEMPERATURE,
        metavar="T",
        help="0: always the likeliest token; default %(default)s",
    )
    add("--top-k", type=whole_number(1, 2**31), metavar="K", help="only of the K likeliest tokens")
    add(
        "--top-p",
        type=_real(0.0, 1.0),
        metavar="P",
        help="only of the fewest tokens that have P of the probability",
    )
    add("--seed", type=whole_number(0, 2**63 - 1), metavar="S", help="default 0")
    add(
        "--dtype",
        choices=["bfloat16", "float32", "float64"],
        help="default bfloat16 where the hardware has it, else float32",
    )
    add("--tokenizer", metavar="NAME", help="the run's own, if its file is elsewhere now")
    options = parser.parse_args(arguments)
    if options.top_p == 0.0:
        raise ValueError("argument --top-p: leaves no token; --temperature 0 takes the likeliest")
    for name in ("top_k", "top_p", "seed"):
        if options.temperature == 0.0 and getattr(options, name) is not None:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"argument {option}: does nothing with --temperature 0")
    return options


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("is not UTF-8") from None
    return text


def _real(least: float, most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not least <= number <= most or math.isinf(number):
            bounds = f"from {least:g}" + ("" if math.isinf(most) else f" to {most:g}")
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {bounds}")
        return number

    return parse


def write(options: argparse.Namespace) -> None:
    """Print prompt and text as it is drawn; raise ``ValueError`` for what cannot be done."""
    folder = find_checkpoint(options.checkpoint)
    manifest = read_manifest(folder)
    name, spec, args = saved_model(folder, manifest)
    found = saved_tokenizer(folder, manifest, options.tokenizer)
    if found is None:
        raise ValueError(f"{folder}: it names no tokenizer; --tokenizer does")
    _, tokenizer = found
    prompt = [tokenizer.bos_id, *tokenizer.encode(options.prompt).tolist()]
    count = _count(options.tokens, prompt, args.max_seq_len)
    if options.top_k is not None and options.top_k > tokenizer.n_vocab:
        raise ValueError(f"argument --top-k: there are only {tokenizer.n_vocab} tokens")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, options.dtype) if options.dtype else compute_dtype(Training(), device)
    model = load_model(folder, manifest, spec, args=args, dtype=dtype, device=device)
    print(f"{folder}: {name}, {dtype} on {device}", file=sys.stderr)

    choose = partial(
        draw,
        generator=torch.Generator().manual_seed(options.seed or 0),
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p or 1.0,
    )
    tokens = generate(
        model,
        spec,
        prompt=prompt,
        count=count,
        choose=lambda logits: choose(logits[: tokenizer.n_vocab]),
    )
    text, n_drawn, begin = Text(tokenizer.decode, prompt), 0, time.perf_counter()
    _print(options.prompt)
    # Ctrl-C ends the text, and what was drawn so far stays.
    with suppress(KeyboardInterrupt):
        for token in tokens:
            n_drawn += 1
            if token == tokenizer.eos_id:
                break
            _print(text.add(token))
    _print(text.rest() + "\n")
    rate = n_drawn / (time.perf_counter() - begin)
    print(f"{n_drawn} tokens after {len(prompt)}, {rate:,.1f} tokens/s", file=sys.stderr)


def _print(text: str) -> None:
    if sys.stdout.isatty():
        text = printable(text)
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, errors="replace").decode(encoding), end="", flush=True)


def _count(wanted: int | None, prompt: list[int], seq_len: int) -> int:
    # The last token drawn takes no position: the model never reads it.
    room = seq_len + 1 - len(prompt)
    text = f"the model was trained on sequences of {seq_len}, and the prompt has {len(prompt)}"
    if room < 1:
        raise ValueError(f"argument --prompt: too long: {text}")
    if wanted is not None and wanted > room:
        raise ValueError(f"argument --tokens: at most {room}: {text}")
    return wanted or min(MOST_TOKENS, room)


def load_model(
    folder: Path,
    manifest: dict[str, Any],
    spec: ModelSpec,
    *,
    args: TransformerArgs,
    dtype: torch.dtype,
    device: torch.device,
) -> nn.Module:
    """The model of a checkpoint that was verified, whole on ``device``."""
    model = build_on_meta(spec, args, dtype)
    with keep_shared(model):
        model.to_empty(device=device)
    # Fills the buffers, which follow from ``args``; the weights come from the checkpoint below.
    cast(Any, model).init_weights(lambda parameter, *, std: None)
    weights = ModelState(model)
    state = {"model": weights.state_dict()}
    index = read_index(folder, sizes_of(manifest))
    have = {fqn: entry for fqn, entry in index.items() if fqn.startswith("model.")}
    check_shapes(folder, have, {f"model.{fqn}": t.shape for fqn, t in state["model"].items()})
    load_alone(state, folder, index)
    weights.load_state_dict(state["model"])
    return model


@torch.inference_mode()
def generate(
    model: nn.Module,
    spec: ModelSpec,
    *,
    prompt: list[int],
    count: int,
    choose: Callable[[torch.Tensor], int],
) -> Iterator[int]:
    """``count`` tokens after ``prompt``; ``choose`` picks each from its logits (vocab,)."""
    device = next(model.parameters()).device
    given, n_seen = torch.tensor([prompt], device=device), 0
    with cached(spec.attentions(model), spec.delta_nets(model), max_seq_len=len(prompt) + count):
        for _ in range(count):
            for chunk in given.split(CHUNK, dim=1):
                positions = torch.arange(n_seen, n_seen + chunk.shape[1], device=device)[None]
                logits = model(chunk, positions)
                n_seen += chunk.shape[1]
            token = choose(logits[0, -1])
            yield token
            given = torch.tensor([[token]], device=device)


class Text:
    """Ids to text as they come: a character that is incomplete waits for the rest of its bytes."""

    def __init__(self, decode: Callable[[list[int]], str], prompt: list[int]) -> None:
        self._decode, self._ids = decode, prompt[-CONTEXT:]
        self._n_told, self._n_waiting = len(decode(self._ids)), 0

    def add(self, token: int) -> str:
        """The text that has become certain with ``token``."""
        self._ids.append(token)
        text = self._decode(self._ids)
        certain = len(text)
        self._n_waiting = self._n_waiting + 1 if text.endswith(REPLACEMENT) else 0
        if self._n_waiting > 0:
            # The last may still become a character; with some tokenizers, so may all before it.
            certain = self._n_told if self._n_waiting <= MOST_WAITING else certain - 1
        piece = text[self._n_told : certain]
        self._n_told = max(self._n_told, certain)
        if self._n_waiting == 0 and len(self._ids) > 2 * CONTEXT:
            # Later tokens no longer change the oldest text: stop decoding it again.
            self._ids = self._ids[-CONTEXT:]
            self._n_told = len(self._decode(self._ids))
        return piece

    def rest(self) -> str:
        """The text that was held back; for the end."""
        return self._decode(self._ids)[self._n_told :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
