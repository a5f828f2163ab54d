"""Generate text: ``shardloom generate CHECKPOINT [--prompt TEXT] [--tokens N] [...]``

Runs in one process, from a checkpoint saved on any mesh. Stops at the end-of-text token, after N
tokens, or at Ctrl-C.
"""

import argparse
import math
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
from checkpoint.tensor_files import load_single_process
from config.job_config import Training
from generation import TEMPERATURE, sample_token
from kernels.grouped_mm import disable_broken_grouped_mm
from models import ModelSpec
from models.kv_cache import cached
from models.meta import build_on_meta
from parallelisms.tied_weights import preserve_tied_weights
from runtime import exit_codes
from runtime.distributed import compute_dtype
from runtime.log import say
from runtime.printable import printable_lines
from saved_model import SavedModel, find_checkpoint, saved_model, saved_tokenizer
from tools.cli import Parser, path_argument, path_text, reporting_errors, whole_number

DEFAULT_TOKENS = 256
# Prompt tokens per forward: bounds the memory for logits, of which only the last are needed.
PREFILL_CHUNK = 512
# Tokenizers decode invalid or incomplete bytes to this. After so many tokens they are invalid.
REPLACEMENT, MAX_PENDING = "\ufffd", 3
# Preceding tokens decoded with the next one: they decide, for example, whether a space comes first.
CONTEXT = 32


@reporting_errors
def main(arguments: list[str]) -> int:
    options = parse(arguments)
    try:
        write_text(options)
    except torch.OutOfMemoryError:
        text = "the GPU has too little free memory; CUDA_VISIBLE_DEVICES= generates on the CPU"
        raise ValueError(f"{options.checkpoint}: {text}") from None
    return exit_codes.DONE


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; raise ``ValueError`` that names a wrong argument."""
    parser = Parser("shardloom generate", description=__doc__)
    add = parser.add_argument
    add(
        "checkpoint",
        type=path_argument,
        help="a checkpoint, or a run folder: its newest that verifies",
    )
    add("--prompt", type=_text, default="", help="beginning of the text")
    add(
        "--tokens",
        type=whole_number(1, 2**31),
        metavar="N",
        help=f"maximum of new tokens; default {DEFAULT_TOKENS}, bounded by training.seq_len",
    )
    add(
        "--temperature",
        type=_real_number(0.0, math.inf),
        default=TEMPERATURE,
        metavar="T",
        help="0: greedy decoding; default %(default)s",
    )
    add(
        "--top-k",
        type=whole_number(1, 2**31),
        metavar="K",
        help="sample from the K most likely tokens",
    )
    add(
        "--top-p",
        type=_real_number(0.0, 1.0),
        metavar="P",
        help="sample from the smallest set of tokens with total probability P (nucleus)",
    )
    add("--seed", type=whole_number(0, 2**63 - 1), metavar="S", help="default 0")
    add(
        "--dtype",
        choices=["bfloat16", "float32", "float64"],
        help="default bfloat16 if the hardware supports it, else float32",
    )
    add(
        "--tokenizer",
        type=path_text,
        metavar="NAME",
        help="the run's tokenizer, if its file has moved",
    )
    add("--model", metavar="MODULE:ATTRIBUTE", help="the run's model.name, if outside of Shardloom")
    options = parser.parse_args(arguments)
    if options.top_p == 0.0:
        raise ValueError("argument --top-p: must be > 0; for greedy decoding set --temperature 0")
    for name in ("top_k", "top_p", "seed"):
        if options.temperature == 0.0 and getattr(options, name) is not None:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"argument {option}: has no effect with --temperature 0")
    return options


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("is not UTF-8") from None
    return text


def _real_number(least: float, most: float) -> Callable[[str], float]:
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


def write_text(options: argparse.Namespace) -> None:
    """Print the prompt and the text as it is sampled.

    Raises ``ValueError`` for a checkpoint, tokenizer or argument that cannot be used.
    """
    folder = find_checkpoint(options.checkpoint)
    manifest = read_manifest(folder)
    saved = saved_model(folder, manifest, options.model)
    spec, args = saved.spec, saved.args
    found = saved_tokenizer(folder, manifest, options.tokenizer)
    if found is None:
        raise ValueError(f"{folder}: names no tokenizer; set --tokenizer")
    _, tokenizer = found
    if tokenizer.n_vocab > args.vocab_size:
        text = f"the tokenizer has {tokenizer.n_vocab} tokens, but the model only {args.vocab_size}"
        raise ValueError(f"{folder}: {text}")
    prompt = tokenizer.encode_prompt(options.prompt)
    count = _num_tokens(options.tokens, prompt, args.max_seq_len)
    if options.top_k is not None and options.top_k > tokenizer.n_vocab:
        raise ValueError(
            f"argument --top-k: must be <= {tokenizer.n_vocab}, the size of the vocabulary"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, options.dtype) if options.dtype else compute_dtype(Training(), device)
    model = load_model(folder, saved, dtype=dtype, device=device)
    say(f"{folder}: {saved.name}, {dtype} on {device}", file=sys.stderr)

    choose = partial(
        sample_token,
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
    streamer, n_sampled, begin = TextStreamer(tokenizer.decode, prompt), 0, time.perf_counter()
    _print(options.prompt)
    # Ctrl-C ends the text and keeps what was sampled so far.
    with suppress(KeyboardInterrupt):
        for token in tokens:
            n_sampled += 1
            if token == tokenizer.eos_id:
                break
            _print(streamer.put(token))
    _print(streamer.flush() + "\n")
    rate = n_sampled / (time.perf_counter() - begin)
    print(f"{n_sampled} tokens after {len(prompt)}, {rate:,.1f} tokens/s", file=sys.stderr)


def _print(text: str) -> None:
    print(printable_lines(text) if sys.stdout.isatty() else text, end="", flush=True)


def _num_tokens(wanted: int | None, prompt: list[int], seq_len: int) -> int:
    # The last sampled token takes no position: the model never reads it.
    room = seq_len + 1 - len(prompt)
    text = f"the model was trained on sequences of {seq_len}, and the prompt has {len(prompt)}"
    if room < 1:
        raise ValueError(f"argument --prompt: too long: {text}")
    if wanted is not None and wanted > room:
        raise ValueError(f"argument --tokens: at most {room}: {text}")
    return wanted or min(DEFAULT_TOKENS, room)


def load_model(
    folder: Path, saved: SavedModel, *, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """Load the unsharded model of a verified checkpoint to ``device``."""
    model = build_on_meta(saved.spec, saved.args, dtype)
    with preserve_tied_weights(model):
        model.to_empty(device=device)
    # Fills only the buffers, which follow from the args. The weights are loaded below.
    cast(Any, model).init_weights(lambda parameter, *, std: None)
    weights = ModelState(model)
    state = {"model": weights.state_dict()}
    load_single_process(state, folder, saved.index)
    weights.load_state_dict(state["model"])
    disable_broken_grouped_mm(saved.spec.moes(model), device=device, dtype=dtype)
    return model.eval()


@torch.inference_mode()
def generate(
    model: nn.Module,
    spec: ModelSpec,
    *,
    prompt: list[int],
    count: int,
    choose: Callable[[torch.Tensor], int],
) -> Iterator[int]:
    """Yield ``count`` tokens after ``prompt``; ``choose`` samples one from logits (vocab,)."""
    device = next(model.parameters()).device
    tokens, n_seen = torch.tensor([prompt], device=device), 0
    with cached(spec.attentions(model), spec.delta_nets(model), max_seq_len=len(prompt) + count):
        for _ in range(count):
            for chunk in tokens.split(PREFILL_CHUNK, dim=1):
                positions = torch.arange(n_seen, n_seen + chunk.shape[1], device=device)[None]
                logits = model(chunk, positions)
                n_seen += chunk.shape[1]
            token = choose(logits[0, -1])
            yield token
            tokens = torch.tensor([[token]], device=device)


class TextStreamer:
    """Incremental detokenizer that holds incomplete characters back until their last byte."""

    def __init__(self, decode: Callable[[list[int]], str], prompt: list[int]) -> None:
        self._decode, self._n_pending = decode, 0
        self._ids = self._newest(prompt, decode(prompt))
        self._n_emitted = len(decode(self._ids))

    def put(self, token: int) -> str:
        """Add a token; return the text that can no longer change."""
        self._ids.append(token)
        text = self._decode(self._ids)
        certain = len(text)
        self._n_pending = self._n_pending + 1 if text.endswith(REPLACEMENT) else 0
        if self._n_pending > 0:
            # The last bytes may still become a character, and some tokenizers then change the rest.
            n_incomplete = len(text) - len(text.rstrip(REPLACEMENT))
            certain -= min(n_incomplete, MAX_PENDING)
            if self._n_pending <= MAX_PENDING:
                certain = self._n_emitted
        new_text = text[self._n_emitted : certain]
        self._n_emitted = max(self._n_emitted, certain)
        if self._n_pending == 0 and len(self._ids) > 2 * CONTEXT:
            # Later tokens cannot change the oldest text, so it is not decoded again.
            self._ids = self._newest(self._ids, text)
            self._n_emitted = len(self._decode(self._ids))
        return new_text

    def _newest(self, ids: list[int], text: str) -> list[int]:
        """The last tokens of ``ids``, whose text is the end of ``text``.

        A cut within a character spoils all bytes that follow, in tokenizers with byte fallback.
        """
        cuts = (ids[-n:] for n in range(CONTEXT, len(ids)))
        return next((cut for cut in cuts if text.endswith(self._decode(cut).lstrip(" "))), [*ids])

    def flush(self) -> str:
        """Return the text held back, after the last token."""
        return self._decode(self._ids)[self._n_emitted :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
