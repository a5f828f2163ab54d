"""A checkpoint of any mesh generates the unsharded model's text, as without a KV cache, in float64.

The reference does not use the code that loads checkpoints; ``generation`` samples its text.
"""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn as nn
from tokenizers import decoders
from tokenizers.models import BPE

from checkpoint.manifest import read_manifest, write_manifest
from checkpoint.tensor_files import Reader
from config.job_config import Training
from data.tokenizer import Tokenizer, load_tokenizer
from generation import sample_batch, sample_token
from models import find_model
from models.moe import Experts
from parallelisms import materialize
from runtime import exit_codes
from runtime.distributed import compute_dtype
from tests.lib.forked import checkpoints, codes, log, started, tensors
from tests.lib.layouts import CP, EP, PP, TP
from tests.lib.patience import PATIENCE_SECONDS
from tests.lib.repository import ROOT
from tests.lib.tokenization import RANDOM, TEXTS, load_json
from tools import generate

SEQ_LEN, PROMPT = 64, "def é("
SHORT = {
    "training.steps": "3",
    "training.seq_len": str(SEQ_LEN),
    "checkpoint.interval": "1",
    "optimizer.lr": "2e-3",
}
RUNS = {
    "fsdp": {},
    "tp": {f"parallelism.{TP}": "2"},
    "pp": {f"parallelism.{PP}": "2", "model.flavor": "debugmodel_tied"},
    "qwen3": {"model.name": "qwen3"},
    "qwen3_moe": {"model.name": "qwen3_moe", f"parallelism.{EP}": "2"},
    "qwen3_next": {"model.name": "qwen3_next", f"parallelism.{CP}": "2"},
}
BYTES = load_tokenizer("bytes")
Trained = Callable[[str], Path]


def enlarge_weights() -> None:
    """Enlarge the blocks' initial weights, so that a token depends on all before it."""

    def fill(parameter: torch.Tensor, *, std: float, key: int) -> None:
        original(parameter, std=10.0 * std if std <= 0.02 else std, key=key)

    original, materialize.fill_trunc_normal = materialize.fill_trunc_normal, fill


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Folder of a short run on two ranks, with a checkpoint of each step."""

    @cache
    def folder_of(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        with started(folder, 2, plant=enlarge_weights, **SHORT, **RUNS[name]) as processes:
            assert codes(processes) == {0}, log(folder)
        return folder / "debug_model"

    return folder_of


@pytest.fixture(scope="module")
def run_folder(trained: Trained) -> Path:
    return trained("fsdp")


def newest(run_folder: Path) -> Path:
    return checkpoints(run_folder.parent)[0]


def unsharded_model(checkpoint: Path) -> nn.Module:
    manifest = read_manifest(checkpoint)
    model_config, saved = manifest["config"]["model"], manifest["model_args"]
    spec, args = find_model(model_config["name"], model_config["flavor"])
    model = spec.model_cls(replace(args, **saved | {"max_seq_len": SEQ_LEN}))
    model.double().init_weights()
    weights = {
        fqn.removeprefix("model."): tensor
        for fqn, tensor in tensors(checkpoint).items()
        if fqn.startswith("model.")
    }
    model.load_state_dict(weights)
    return model


@cache
@torch.no_grad()
def reference_text(checkpoint: Path, seed: int, count: int) -> str:
    (tokens,) = sample_batch(
        unsharded_model(checkpoint),
        [[BYTES.bos_id, *PROMPT.encode()]],
        count=count,
        n_ids=BYTES.n_vocab,
        length=SEQ_LEN,
        seeds=[seed],
    )
    return printed(tokens)


def printed(tokens: list[int]) -> str:
    """Prompt and text up to the end-of-text token."""
    return PROMPT + BYTES.decode(tokens).partition("<|end_of_text|>")[0] + "\n"


def generated(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> str:
    """Run the tool; return its output."""
    arguments = [str(folder), "--prompt", PROMPT, "--dtype", "float64", *options]
    assert generate.main(arguments) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the tool, which must fail; return its one line of error."""
    assert generate.main([*arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("\n")
    assert "Traceback" not in err
    (line,) = err.splitlines()
    return line


@pytest.mark.parametrize("name", RUNS)
def test_any_mesh_generates_the_reference_text(
    trained: Trained, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    texts = [generated(capsys, trained(name), "--tokens", "20", "--seed", seed) for seed in "01"]
    assert texts == [reference_text(newest(trained(name)), seed, count=20) for seed in (0, 1)]
    assert texts[0] != texts[1]


def test_two_meshes_generate_the_same_text(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (generated(capsys, trained(name), "--tokens", "50") for name in ("fsdp", "tp"))
    assert first == second


def skip_loading(fqn: str) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        def read_data(self: Reader, plan: Any, planner: Any) -> Any:
            for item in plan.items:
                planner.resolve_tensor(item).zero_()
            items = [item for item in plan.items if item.storage_index.fqn != fqn]
            return original(self, replace(plan, items=items), planner)

        original = Reader.read_data
        monkeypatch.setattr(Reader, "read_data", read_data)

    return plant


def disable_kv_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "cached", lambda *args, **keys: nullcontext())


def ignore_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    def sample_token_at_1(*args: Any, **keys: Any) -> int:
        return sample_token(*args, **keys | {"temperature": 1.0})

    monkeypatch.setattr(generate, "sample_token", sample_token_at_1)


@pytest.mark.parametrize(
    "fault",
    [
        skip_loading("model.layers.1.feed_forward.w2.weight"),
        skip_loading("model.output.weight"),
        disable_kv_cache,
        ignore_temperature,
    ],
)
def test_fault_changes_the_text(
    run_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
) -> None:
    want = reference_text(newest(run_folder), 0, count=40)
    fault(monkeypatch)
    assert generated(capsys, run_folder, "--tokens", "40") != want


@torch.no_grad()
@pytest.mark.parametrize("name", RUNS)
def test_greedy_text_is_argmax_of_reference_logits(
    trained: Trained,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    # The first checkpoint: later ones have learned to repeat tokens.
    checkpoint, tokens, seen = checkpoints(trained(name).parent)[-1], [], []

    def recording_sample_token(logits: torch.Tensor, **choice: Any) -> int:
        seen.append(logits)
        tokens.append(sample_token(logits, **choice))
        return tokens[-1]

    monkeypatch.setattr(generate, "sample_token", recording_sample_token)
    text = generated(capsys, checkpoint, "--tokens", "50", "--temperature", "0")
    prompt = [BYTES.bos_id, *PROMPT.encode()]
    logits = unsharded_model(checkpoint)(torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1]
    want = logits[:, : BYTES.n_vocab]
    torch.testing.assert_close(torch.stack(seen).to(want), want, rtol=0, atol=1e-9)
    assert tokens == want.argmax(dim=-1).tolist()
    assert text == printed(tokens)
    assert len({*tokens}) > 4


def test_long_prompt_is_prefilled_in_chunks(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    want = reference_text(newest(run_folder), 0, count=40)
    monkeypatch.setattr(generate, "PREFILL_CHUNK", 3)
    assert generated(capsys, run_folder, "--tokens", "40") == want


def test_sampling_options_take_effect(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    greedy = generated(capsys, run_folder, "--temperature", "0")
    assert generated(capsys, run_folder, "--top-k", "1") == greedy
    assert generated(capsys, run_folder, "--top-p", "1e-9") == greedy
    assert generated(capsys, run_folder, "--temperature", "1e-9") == greedy
    assert generated(capsys, run_folder) != greedy


def test_default_tokens_fill_the_sequence(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(run_folder), "--prompt", PROMPT, "--temperature", "0"]
    room = SEQ_LEN - len(PROMPT.encode())
    outputs = []
    for options in ([], ["--tokens", str(room)]):
        assert generate.main(arguments + options) == 0
        outputs.append(capsys.readouterr())
    assert outputs[0].out == outputs[1].out
    first, last = outputs[0].err.splitlines()
    dtype = compute_dtype(Training(), torch.device("cpu"))
    if not torch.cuda.is_available():
        assert first == f"{newest(run_folder)}: llama3, {dtype} on cpu"
    assert re.fullmatch(rf"{room} tokens after {SEQ_LEN - room + 1}, [\d.,]+ tokens/s", last)


def force_tokens(monkeypatch: pytest.MonkeyPatch, *tokens: int | type[BaseException]) -> None:
    """Sample these tokens, whatever the logits are; raise those that are exceptions."""
    remaining = iter(tokens)

    def next_token(logits: torch.Tensor, **choice: Any) -> int:
        assert logits.shape == (BYTES.n_vocab,)
        token = next(remaining)
        if isinstance(token, int):
            return token
        raise token

    monkeypatch.setattr(generate, "sample_token", next_token)


def test_text_ends_at_the_end_of_text_token(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    force_tokens(monkeypatch, *b"ab", BYTES.eos_id)
    assert generated(capsys, run_folder) == PROMPT + "ab\n"


def test_interrupt_keeps_the_text_so_far(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last character is incomplete.
    force_tokens(monkeypatch, *b"ab", *"é".encode()[:1], KeyboardInterrupt)
    assert generate.main([str(run_folder)]) == 0
    out, err = capsys.readouterr()
    assert out == "ab\ufffd\n"
    assert "3 tokens after 1," in err


def test_nonfinite_logits_are_an_error(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw_of_nan(logits: torch.Tensor, **choice: Any) -> int:
        return sample_token(logits * torch.nan, **choice)

    monkeypatch.setattr(generate, "sample_token", draw_of_nan)
    assert generate.main([str(run_folder)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "the model's logits are not finite"


def copy_run(run_folder: Path, folder: Path) -> Path:
    return shutil.copytree(run_folder, folder / run_folder.name)


def damage(checkpoint: Path) -> None:
    path = checkpoint / "rank-00001.bin"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_newest_checkpoint_that_verifies_is_loaded(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_run(run_folder, tmp_path)
    third, second, first = found = sorted((folder / "checkpoints").iterdir(), reverse=True)
    texts = [generated(capsys, path) for path in found]
    assert len({*texts}) == 3
    assert generated(capsys, folder) == texts[0]
    damage(third)
    assert generate.main([str(folder)]) == 0
    assert capsys.readouterr().err.startswith(f"skipped: {third / 'rank-00001.bin'}: ")
    assert generated(capsys, folder) == texts[1]
    assert error_of(capsys, str(third)).startswith(f"{third}: no checkpoint verifies: {third}")
    (second / "state.json").unlink()
    assert generated(capsys, folder) == texts[2]
    damage(first)
    assert error_of(capsys, str(folder)).startswith(f"{folder}: no checkpoint verifies: ")
    # The run may be in progress, so it is only read.
    assert sorted((folder / "checkpoints").iterdir(), reverse=True) == found


def test_experts_that_grouped_mm_cannot_compute_run_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captured_log: pytest.LogCaptureFixture
) -> None:
    """On a GPU it needs rows of a multiple of 16 bytes; here it is used on the CPU."""

    def build(self: Experts, *sizes: int) -> None:
        built(self, *sizes)
        self.grouped_device_type = "cpu"

    def fill(state: dict[str, Any], *_: Any) -> None:
        for tensor in state["model"].values():
            tensor.normal_()

    built = Experts.__init__
    monkeypatch.setattr(Experts, "__init__", build)
    monkeypatch.setattr(generate, "load_single_process", fill)
    spec, args = find_model("qwen3_moe", "debugmodel", {"hidden_dim": 100})
    saved: Any = SimpleNamespace(spec=spec, args=args, index={})
    cpu = torch.device("cpu")
    model = generate.load_model(tmp_path, saved, dtype=torch.bfloat16, device=cpu)
    tokens = generate.generate(
        model, spec, prompt=[1], count=2, choose=lambda logits: int(logits.argmax())
    )
    assert len(list(tokens)) == 2
    assert "using a loop over experts" in captured_log.text


Metadata = dict[str, Any]


def delete_model(metadata: Metadata) -> None:
    del metadata["config"], metadata["model_args"]


def replace_model_by_none(metadata: Metadata) -> None:
    metadata["config"] = {"model": None}


def rename_model(metadata: Metadata) -> None:
    metadata["config"]["model"]["name"] = "llama9"


def add_argument(metadata: Metadata) -> None:
    metadata["model_args"]["n_experts"] = 4


def change_tokenizer(metadata: Metadata) -> None:
    metadata["fingerprints"]["tokenizer"] = "0" * 64


def move_tokenizer(metadata: Metadata) -> None:
    metadata["config"]["data"]["tokenizer"] = "nowhere/tokenizer.json"


def change_vocab_size(metadata: Metadata) -> None:
    metadata["model_args"]["vocab_size"] += 64


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (delete_model, "manifest.json has no valid model.name and model_args"),
        (replace_model_by_none, "manifest.json: config has a key outside of a table"),
        (rename_model, "model.name: 'llama9' is not one of"),
        (add_argument, "llama3 has changed since it was saved: n_experts: 4 no longer exists"),
        (change_tokenizer, "data.tokenizer: bytes is not the tokenizer that the model was trained"),
        (move_tokenizer, "data.tokenizer: nowhere/tokenizer.json: "),
        (change_vocab_size, "tensor output.weight is [320, 128], not [384, 128]"),
    ],
)
def test_unusable_manifest_error_names_the_key(
    run_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    edit: Callable[[Metadata], None],
    message: str,
) -> None:
    folder = newest(copy_run(run_folder, tmp_path))
    metadata = read_manifest(folder)
    edit(metadata)
    files = metadata.pop("files")
    (folder / "manifest.json").unlink()
    write_manifest(folder, files, metadata)
    line = error_of(capsys, str(folder))
    assert line.startswith(str(folder))
    assert message in line


def test_tokenizer_option_replaces_a_moved_file(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = newest(copy_run(run_folder, tmp_path))
    metadata = read_manifest(folder)
    move_tokenizer(metadata)
    files = metadata.pop("files")
    (folder / "manifest.json").unlink()
    write_manifest(folder, files, metadata)
    want = generated(capsys, newest(run_folder))
    assert generated(capsys, folder, "--tokenizer", "bytes") == want


def test_folder_without_checkpoint_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing, file = tmp_path / "missing", tmp_path / "file"
    file.touch()
    for path in (missing, file):
        assert error_of(capsys, str(path)) == f"{path}: no such folder"
    line = error_of(capsys, str(tmp_path))
    assert line.startswith(f"{tmp_path}: no checkpoint (manifest.json), nor a run folder")
    (tmp_path / "manifest.json").write_text("{}")
    assert error_of(capsys, str(tmp_path)).startswith(f"{tmp_path}: no checkpoint verifies: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "0"], "argument --tokens: '0' is not a whole number"),
        (["--tokens", "many"], "argument --tokens: 'many' is not a whole number"),
        (["--tokens", "65"], "argument --tokens: at most 64: the model was trained on sequences"),
        (["--prompt", "x" * 64], "argument --prompt: too long: the model was trained on sequences"),
        (["--prompt", "\udcff"], "argument --prompt: is not UTF-8"),
        (["--prompt"], "argument --prompt: expected one argument"),
        (["--temperature", "-0.1"], "argument --temperature: '-0.1' is not a number from 0"),
        (["--temperature", "nan"], "argument --temperature: 'nan' is not a number"),
        (["--temperature", "inf"], "argument --temperature: 'inf' is not a number"),
        (["--top-k", "0"], "argument --top-k: '0' is not a whole number"),
        (["--top-k", "259"], "argument --top-k: must be <= 258"),
        (["--top-p", "0"], "argument --top-p: must be > 0"),
        (["--top-p", "1.1"], "argument --top-p: '1.1' is not a number from 0 to 1"),
        (["--seed", "9" * 5000], "argument --seed: "),
        (["--seed", "-1"], "argument --seed: "),
        (["--temperature", "0", "--seed", "0"], "argument --seed: has no effect"),
        (["--temperature", "0", "--top-k", "2"], "argument --top-k: has no effect"),
        (["--temperature", "0", "--top-p", "1"], "argument --top-p: has no effect"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--tokenizer", "gpt9"], "argument --tokenizer: 'gpt9' is not one of"),
        (["--token", "3"], "unrecognized arguments: --token 3"),
        (["another"], "unrecognized arguments: another"),
    ],
)
def test_bad_argument_error_names_the_argument(
    run_folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert message in error_of(capsys, str(run_folder), *options)


def test_missing_argument_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of(capsys) == "the following arguments are required: checkpoint"


def byte_fallback(folder: Path) -> Tokenizer:
    """Tokenizer of words with a leading space, and of single bytes for all else."""
    words = ["<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), "▁the", "▁é", "a"]
    model = BPE(vocab={word: i for i, word in enumerate(words)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return load_json(folder, json.loads(tokenizer.to_str()))


def stream(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> list[str]:
    """Text that the streamer returns for each token, and at the end."""
    streamer = generate.TextStreamer(tokenizer.decode, prompt)
    return [*(streamer.put(token) for token in tokens), streamer.flush()]


@pytest.mark.parametrize("text", [*TEXTS[:5], RANDOM[:1000]], ids=range(6))
def test_streamer_returns_whole_characters(text: str) -> None:
    tokens = list(text.encode())
    found = stream(BYTES, [BYTES.bos_id], tokens)
    assert "".join(found) == text
    # Each character comes with its last byte.
    ends = [
        token for character in text for token in [""] * (len(character.encode()) - 1) + [character]
    ]
    assert found == [*ends, ""]


def test_decoding_single_tokens_would_split_characters() -> None:
    text = TEXTS[2]
    assert "".join(BYTES.decode([token]) for token in text.encode()) != text


def test_streamer_returns_invalid_bytes_once() -> None:
    random = np.random.default_rng(0)
    for _ in range(100):
        # Many bytes that begin a character, and few that continue one.
        tokens = random.choice([0x41, 0x80, 0xC3, 0xE6, 0xF0, 0x9F, 0xFF, 257], 200).tolist()
        found = stream(BYTES, [BYTES.bos_id], tokens)
        assert "".join(found) == BYTES.decode(tokens)
        # Of invalid bytes too, at most MAX_PENDING are held back.
        behind = [len(BYTES.decode(tokens[:n])) - len("".join(found[:n])) for n in range(200)]
        assert max(behind) <= generate.MAX_PENDING


def test_streamer_finds_characters_after_invalid_bytes() -> None:
    """Of a decoder that replaces each byte of what may still become a character."""

    def decode(ids: list[int]) -> str:
        return re.sub(r"[\udc80-\udcff]", "\ufffd", bytes(ids).decode(errors="surrogateescape"))

    for n_invalid in range(6):
        tokens = [0xFF] * n_invalid + list("\U0001f642é".encode()) + [0x41]
        streamer = generate.TextStreamer(decode, [])
        assert "".join(map(streamer.put, tokens)) + streamer.flush() == decode(tokens)


def test_streamer_keeps_spaces_between_words(tmp_path: Path) -> None:
    tokenizer = byte_fallback(tmp_path)
    the, accented, letter = 258, 259, 260
    emoji = [2 + value for value in "🙂".encode()]
    tokens = [accented, letter, the, *emoji, accented, *emoji, *emoji, letter] * 10
    assert tokenizer.decode(tokens)[:8] == "éa the🙂 é"[:8]
    found = stream(tokenizer, [0, the], tokens)
    assert "".join(found) == " " + tokenizer.decode(tokens)
    assert "\ufffd" not in "".join(found)


def test_streamer_keeps_long_runs_of_byte_tokens(tmp_path: Path) -> None:
    """A run that begins within a character would be invalid as a whole."""
    tokenizer = byte_fallback(tmp_path)
    tokens = [2 + value for value in ("語" * 60).encode()]
    assert "".join(stream(tokenizer, [0], tokens)) == "語" * 60
    assert "".join(stream(tokenizer, [0, *tokens], tokens)) == "語" * 60


def test_closed_output_pipe_is_not_reported(run_folder: Path) -> None:
    """Run the program with a pipe that nobody reads."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "tools.generate", str(run_folder), "--tokens", "5"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    os.close(write_end)
    assert done.returncode == exit_codes.CLOSED_PIPE
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == [str(newest(run_folder))]


def test_ascii_terminal_gets_escapes(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    force_tokens(monkeypatch, *"ü.".encode(), BYTES.eos_id)
    assert generate.main([str(run_folder), "--prompt", PROMPT]) == 0
    out.seek(0)
    assert out.read() == PROMPT.replace("é", "\\xe9") + "\\xfc.\n"


def test_terminal_gets_no_escape_sequences(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", out)
    force_tokens(monkeypatch, *b"\x1b[2J.", BYTES.eos_id)
    assert generate.main([str(run_folder), "--prompt", "\x1b]0;x\x07"]) == 0
    assert not {"\x1b", "\x07"} & set(out.getvalue())
    assert "[2J." in out.getvalue()
