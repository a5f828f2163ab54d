"""Any mesh's checkpoint writes the text of the whole model without a cache, in float64.

The truth is put together without the code that loads checkpoints, and drawn by ``metrics.sample``.
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
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn as nn
from tokenizers import decoders
from tokenizers.models import BPE

from checkpoint.manifest import read_manifest, write_manifest
from checkpoint.storage import Reader
from config.job_config import Training
from data.tokenizer import Tokenizer, load_tokenizer
from metrics.sample import draw, sample
from models import find_model
from parallelisms import materialize
from runtime.distributed import compute_dtype
from tests.data.test_tokenizer import RANDOM, TEXTS, load_json
from tests.layouts import CP, EP, PP, TP
from tests.reliability.forked import checkpoints, codes, log, started, tensors
from tests.test_train import ROOT
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


def large_weights() -> None:
    """Of the blocks, so that attention is far from uniform and a token depends on all before."""

    def fill(parameter: torch.Tensor, *, std: float, key: int) -> None:
        original(parameter, std=10.0 * std if std <= 0.02 else std, key=key)

    original, materialize.fill_trunc_normal = materialize.fill_trunc_normal, fill


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The folder of a short run on two ranks, with a checkpoint of each step."""

    @cache
    def folder_of(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        with started(folder, 2, plant=large_weights, **SHORT, **RUNS[name]) as processes:
            assert codes(processes) == {0}, log(folder)
        return folder / "debug_model"

    return folder_of


@pytest.fixture(scope="module")
def run_folder(trained: Trained) -> Path:
    return trained("fsdp")


def newest(run_folder: Path) -> Path:
    return checkpoints(run_folder.parent)[0]


def whole_model(checkpoint: Path) -> nn.Module:
    manifest = read_manifest(checkpoint)
    model_config, saved = manifest["config"]["model"], manifest["model_args"]
    spec, args = find_model(model_config["name"], model_config["flavor"])
    model = spec.model_cls(replace(args, vocab_size=saved["vocab_size"], max_seq_len=SEQ_LEN))
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
def plain_text(checkpoint: Path, seed: int, count: int) -> str:
    tokens = sample(
        whole_model(checkpoint),
        [BYTES.bos_id, *PROMPT.encode()],
        count=count,
        n_ids=BYTES.n_vocab,
        seq_len=SEQ_LEN,
        multiple_of=1,
        seed=seed,
    )
    return shown(tokens)


def shown(tokens: list[int]) -> str:
    """Prompt and text, to where the model ends it."""
    return PROMPT + BYTES.decode(tokens).partition("<|end_of_text|>")[0] + "\n"


def written(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> str:
    arguments = [str(folder), "--prompt", PROMPT, "--dtype", "float64", *options]
    assert generate.main(arguments) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that is told."""
    assert generate.main([*arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("\n")
    assert "Traceback" not in err
    (line,) = err.splitlines()
    return line


@pytest.mark.parametrize("name", RUNS)
def test_any_mesh_writes_the_plain_text(
    trained: Trained, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    texts = [written(capsys, trained(name), "--tokens", "20", "--seed", seed) for seed in "01"]
    assert texts == [plain_text(newest(trained(name)), seed, count=20) for seed in (0, 1)]
    assert texts[0] != texts[1]


def test_two_meshes_write_the_same(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (written(capsys, trained(name), "--tokens", "50") for name in ("fsdp", "tp"))
    assert first == second


def load_all_but(fqn: str) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        def read_data(self: Reader, plan: Any, planner: Any) -> Any:
            for item in plan.items:
                planner.resolve_tensor(item).zero_()
            items = [item for item in plan.items if item.storage_index.fqn != fqn]
            return original(self, replace(plan, items=items), planner)

        original = Reader.read_data
        monkeypatch.setattr(Reader, "read_data", read_data)

    return plant


def without_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "cached", lambda *args, **keys: nullcontext())


def draw_without_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    def warm(*args: Any, **keys: Any) -> int:
        return draw(*args, **keys | {"temperature": 1.0})

    monkeypatch.setattr(generate, "draw", warm)


@pytest.mark.parametrize(
    "fault",
    [
        load_all_but("model.layers.3.feed_forward.w2.weight"),
        load_all_but("model.output.weight"),
        without_cache,
        draw_without_temperature,
    ],
)
def test_a_fault_is_seen(
    run_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
) -> None:
    want = plain_text(newest(run_folder), 0, count=40)
    fault(monkeypatch)
    assert written(capsys, run_folder, "--tokens", "40") != want


@torch.no_grad()
@pytest.mark.parametrize("name", RUNS)
def test_cold_text_is_the_likeliest_without_a_cache(
    trained: Trained,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    # The first: later ones have learned to repeat themselves.
    checkpoint, tokens, seen = checkpoints(trained(name).parent)[-1], [], []

    def watched(logits: torch.Tensor, **choice: Any) -> int:
        seen.append(logits)
        tokens.append(draw(logits, **choice))
        return tokens[-1]

    monkeypatch.setattr(generate, "draw", watched)
    text = written(capsys, checkpoint, "--tokens", "50", "--temperature", "0")
    prompt = [BYTES.bos_id, *PROMPT.encode()]
    logits = whole_model(checkpoint)(torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1]
    want = logits[:, : BYTES.n_vocab]
    torch.testing.assert_close(torch.stack(seen).to(want), want, rtol=0, atol=1e-9)
    assert tokens == want.argmax(dim=-1).tolist()
    assert text == shown(tokens)
    assert len({*tokens}) > 4


def test_a_long_prompt_comes_in_chunks(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    want = plain_text(newest(run_folder), 0, count=40)
    monkeypatch.setattr(generate, "CHUNK", 3)
    assert written(capsys, run_folder, "--tokens", "40") == want


def test_choices_reach_the_draw(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cold = written(capsys, run_folder, "--temperature", "0")
    assert written(capsys, run_folder, "--top-k", "1") == cold
    assert written(capsys, run_folder, "--top-p", "1e-9") == cold
    assert written(capsys, run_folder, "--temperature", "1e-9") == cold
    assert written(capsys, run_folder) != cold


def test_defaults_fill_a_sequence(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(run_folder), "--prompt", PROMPT, "--temperature", "0"]
    room = SEQ_LEN - len(PROMPT.encode())
    said = []
    for options in ([], ["--tokens", str(room)]):
        assert generate.main(arguments + options) == 0
        said.append(capsys.readouterr())
    assert said[0].out == said[1].out
    first, last = said[0].err.splitlines()
    dtype = compute_dtype(Training(), torch.device("cpu"))
    if not torch.cuda.is_available():
        assert first == f"{newest(run_folder)}: llama3, {dtype} on cpu"
    assert re.fullmatch(rf"{room} tokens after {SEQ_LEN - room + 1}, [\d.,]+ tokens/s", last)


def drawn(monkeypatch: pytest.MonkeyPatch, *tokens: int | type[BaseException]) -> None:
    """Whatever the logits are."""
    rest = iter(tokens)

    def next_token(logits: torch.Tensor, **choice: Any) -> int:
        assert logits.shape == (BYTES.n_vocab,)
        token = next(rest)
        if isinstance(token, int):
            return token
        raise token

    monkeypatch.setattr(generate, "draw", next_token)


def test_text_ends_where_the_model_ends_it(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn(monkeypatch, *b"ab", BYTES.eos_id)
    assert written(capsys, run_folder) == PROMPT + "ab\n"


def test_what_was_drawn_stays_when_interrupted(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of a character that is cut, what there is.
    drawn(monkeypatch, *b"ab", *"é".encode()[:1], KeyboardInterrupt)
    assert generate.main([str(run_folder)]) == 0
    out, err = capsys.readouterr()
    assert out == "ab\ufffd\n"
    assert "3 tokens after 1," in err


def test_logits_that_are_not_finite_are_told(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw_of_nan(logits: torch.Tensor, **choice: Any) -> int:
        return draw(logits * torch.nan, **choice)

    monkeypatch.setattr(generate, "draw", draw_of_nan)
    assert generate.main([str(run_folder)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "the model's logits are not finite"


def copied(run_folder: Path, folder: Path) -> Path:
    return shutil.copytree(run_folder, folder / run_folder.name)


def damage(checkpoint: Path) -> None:
    path = checkpoint / "rank-00001.bin"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_newest_that_verifies_is_taken(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(run_folder, tmp_path)
    third, second, first = there = sorted((folder / "checkpoints").iterdir(), reverse=True)
    texts = [written(capsys, path) for path in there]
    assert len({*texts}) == 3
    assert written(capsys, folder) == texts[0]
    damage(third)
    assert generate.main([str(folder)]) == 0
    assert capsys.readouterr().err.startswith(f"passed over: {third / 'rank-00001.bin'}: ")
    assert written(capsys, folder) == texts[1]
    assert refusal(capsys, str(third)).startswith(f"{third}: nothing that verifies: {third}")
    (second / "state.json").unlink()
    assert written(capsys, folder) == texts[2]
    damage(first)
    assert refusal(capsys, str(folder)).startswith(f"{folder}: nothing that verifies: ")
    # A run that may be running is only read.
    assert sorted((folder / "checkpoints").iterdir(), reverse=True) == there


Facts = dict[str, Any]


def nothing_known(facts: Facts) -> None:
    del facts["config"], facts["model_args"]


def no_table(facts: Facts) -> None:
    facts["config"] = {"model": None}


def unknown_family(facts: Facts) -> None:
    facts["config"]["model"]["name"] = "llama9"


def other_arguments(facts: Facts) -> None:
    facts["model_args"]["n_experts"] = 4


def other_tokenizer(facts: Facts) -> None:
    facts["fingerprints"]["tokenizer"] = "0" * 64


def missing_tokenizer(facts: Facts) -> None:
    facts["config"]["data"]["tokenizer"] = "nowhere/tokenizer.json"


def other_shapes(facts: Facts) -> None:
    facts["model_args"]["vocab_size"] += 64


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (nothing_known, "its manifest.json does not say of which model it is"),
        (no_table, "its manifest.json does not say of which model it is"),
        (unknown_family, "model.name: 'llama9' is not one of"),
        (other_arguments, "llama3 is another model now: n_experts: 4 to no such argument"),
        (other_tokenizer, "data.tokenizer: bytes is not the tokenizer that the model was trained"),
        (missing_tokenizer, "data.tokenizer: nowhere/tokenizer.json: "),
        (other_shapes, "model.output.weight is [320, 128], not [384, 128]"),
    ],
)
def test_a_model_that_cannot_be_built_is_named(
    run_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    edit: Callable[[Facts], None],
    told: str,
) -> None:
    folder = newest(copied(run_folder, tmp_path))
    facts = read_manifest(folder)
    edit(facts)
    files = facts.pop("files")
    (folder / "manifest.json").unlink()
    write_manifest(folder, files, facts)
    line = refusal(capsys, str(folder))
    assert line.startswith(str(folder))
    assert told in line


def test_tokenizer_may_lie_elsewhere(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = newest(copied(run_folder, tmp_path))
    facts = read_manifest(folder)
    missing_tokenizer(facts)
    files = facts.pop("files")
    (folder / "manifest.json").unlink()
    write_manifest(folder, files, facts)
    want = written(capsys, newest(run_folder))
    assert written(capsys, folder, "--tokenizer", "bytes") == want


def test_folders_without_a_checkpoint_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing, file = tmp_path / "missing", tmp_path / "file"
    file.touch()
    for path in (missing, file):
        assert refusal(capsys, str(path)) == f"{path}: no such folder"
    line = refusal(capsys, str(tmp_path))
    assert line.startswith(f"{tmp_path}: no checkpoint (manifest.json), and no run")
    (tmp_path / "manifest.json").write_text("{}")
    assert refusal(capsys, str(tmp_path)).startswith(f"{tmp_path}: nothing that verifies: ")


@pytest.mark.parametrize(
    ("options", "told"),
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
        (["--top-k", "259"], "argument --top-k: there are only 258 tokens"),
        (["--top-p", "0"], "argument --top-p: leaves no token"),
        (["--top-p", "1.1"], "argument --top-p: '1.1' is not a number from 0 to 1"),
        (["--seed", "9" * 5000], "argument --seed: "),
        (["--seed", "-1"], "argument --seed: "),
        (["--temperature", "0", "--seed", "0"], "argument --seed: does nothing"),
        (["--temperature", "0", "--top-k", "2"], "argument --top-k: does nothing"),
        (["--temperature", "0", "--top-p", "1"], "argument --top-p: does nothing"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--tokenizer", "gpt9"], "argument --tokenizer: 'gpt9' is not one of"),
        (["--token", "3"], "unrecognized arguments: --token 3"),
        (["another"], "unrecognized arguments: another"),
    ],
)
def test_bad_arguments_are_named(
    run_folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], told: str
) -> None:
    assert told in refusal(capsys, str(run_folder), *options)


def test_no_argument_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys) == "the following arguments are required: checkpoint"


def byte_fallback(folder: Path) -> Tokenizer:
    """Words that begin with a space, and tokens of single bytes for what is no word."""
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


def pieces(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> list[str]:
    text = generate.Text(tokenizer.decode, prompt)
    return [*(text.add(token) for token in tokens), text.rest()]


@pytest.mark.parametrize("text", [*TEXTS[:5], RANDOM[:1000]], ids=range(6))
def test_characters_come_whole(text: str) -> None:
    tokens = list(text.encode())
    found = pieces(BYTES, [BYTES.bos_id], tokens)
    assert "".join(found) == text
    # As soon as they are: with their last byte.
    ends = [
        token for character in text for token in [""] * (len(character.encode()) - 1) + [character]
    ]
    assert found == [*ends, ""]


def test_single_tokens_would_cut_characters() -> None:
    text = TEXTS[2]
    assert "".join(BYTES.decode([token]) for token in text.encode()) != text


def test_bytes_that_are_no_text_are_told_once() -> None:
    random = np.random.default_rng(0)
    for _ in range(100):
        # Many that begin a character, and few that go on with one.
        tokens = random.choice([0x41, 0x80, 0xC3, 0xE6, 0xF0, 0x9F, 0xFF, 257], 200).tolist()
        found = pieces(BYTES, [BYTES.bos_id], tokens)
        assert "".join(found) == BYTES.decode(tokens)
        # Also of what will never be a character, no more waits than might be one.
        behind = [len(BYTES.decode(tokens[:n])) - len("".join(found[:n])) for n in range(200)]
        assert max(behind) <= generate.MOST_WAITING


def test_words_keep_their_spaces(tmp_path: Path) -> None:
    tokenizer = byte_fallback(tmp_path)
    the, accented, letter = 258, 259, 260
    emoji = [2 + value for value in "🙂".encode()]
    tokens = [accented, letter, the, *emoji, accented, *emoji, *emoji, letter] * 10
    assert tokenizer.decode(tokens)[:8] == "éa the🙂 é"[:8]
    found = pieces(tokenizer, [0, the], tokens)
    assert "".join(found) == " " + tokenizer.decode(tokens)
    assert "\ufffd" not in "".join(found)


def test_reader_that_leaves_is_no_error(run_folder: Path) -> None:
    """The real program, whose output nobody reads."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "tools.generate", str(run_folder), "--tokens", "5"]
    done = subprocess.run(
        command, cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=120
    )
    os.close(write_end)
    assert done.returncode == 0
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == [str(newest(run_folder))]


def test_terminals_that_know_few_characters_get_text(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    drawn(monkeypatch, *"ü.".encode(), BYTES.eos_id)
    assert generate.main([str(run_folder), "--prompt", PROMPT]) == 0
    out.seek(0)
    assert out.read() == PROMPT.replace("é", "?") + "?.\n"


def test_a_terminal_gets_no_escapes(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", out)
    drawn(monkeypatch, *b"\x1b[2J.", BYTES.eos_id)
    assert generate.main([str(run_folder), "--prompt", "\x1b]0;x\x07"]) == 0
    assert not {"\x1b", "\x07"} & set(out.getvalue())
    assert "[2J." in out.getvalue()
