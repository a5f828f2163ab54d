"""Training writes one tokenizer in two formats, reproducibly, from a run's text."""

import json
import os
import subprocess
import sys
from pathlib import Path
from shlex import join

import numpy as np
import pytest
import tokenizers

from config.job_config import Data
from data import tokenizer_json
from data.tokenizer import load_tokenizer
from runtime import exit_codes
from tests.lib.repository import ROOT
from tests.lib.tokenization import assert_round_trips
from tools import train_tokenizer
from tools.train_tokenizer import FILES

N = 400
SOURCE = ["--data.source=files", f"--data.path={Path(json.__file__).parent}/*.py"]


def run(capsys: pytest.CaptureFixture, folder: Path, *arguments: str) -> tuple[int, str, str]:
    code = train_tokenizer.main([str(folder), *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "tokenizer"
    assert train_tokenizer.main([str(folder), f"--vocab_size={N}", *SOURCE]) == exit_codes.DONE
    assert {path.name for path in folder.iterdir()} == {*FILES}
    return folder


def test_both_formats_encode_equally(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(
        tokenizer_json.logger, "info", lambda text, *values: lines.append(text % values)
    )
    first, second = (load_tokenizer(str(trained / name)) for name in FILES[:2])
    assert "using tiktoken, which gives the same ids" in lines[0]
    reference = tokenizers.Tokenizer.from_file(str(trained / FILES[0]))
    reference.encode_special_tokens = True
    for tokenizer in (first, second):
        assert_round_trips(tokenizer)
        assert (tokenizer.n_vocab, tokenizer.bos_id, tokenizer.eos_id) == (N, N - 2, N - 1)
    rng = np.random.default_rng(0)
    samples = ["".join(map(chr, rng.integers(0, 0xD800, 200))) for _ in range(100)]
    for text in [*tokenizer_json.SAMPLES, *samples, Path(__file__).read_text()]:
        ids = reference.encode(text, add_special_tokens=False).ids
        assert first.encode(text).tolist() == second.encode(text).tolist() == ids
        assert first.decode(ids) == second.decode(ids) == text
    # In transformers, prompts start with bos, like documents in training.
    assert reference.encode("a").ids == [first.bos_id, *first.encode("a").tolist()]
    assert len(first.encode("import numpy as np\n    return self")) < 20, "nothing was learned"


def test_transformers_encodes_equally(trained: Path) -> None:
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(trained / FILES[0]))
    tokenizer = load_tokenizer(str(trained / FILES[0]))
    assert len(fast) == N
    assert fast.convert_tokens_to_ids("<|end_of_text|>") == tokenizer.eos_id
    for text in tokenizer_json.SAMPLES:
        # transformers would encode special tokens in the text as such.
        text = text.replace("<|", "<")
        assert fast.encode(text, add_special_tokens=False) == tokenizer.encode(text).tolist()


def test_same_text_gives_identical_files(trained: Path, tmp_path: Path) -> None:
    """Repeat in another process with one thread and another hash seed."""
    module = ["-m", "tools.train_tokenizer", str(tmp_path / "again"), "--vocab_size", str(N)]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, *module, *SOURCE], cwd=ROOT, env=environment, capture_output=True
    )
    assert done.returncode == exit_codes.DONE, done.stderr
    for name in FILES:
        assert (tmp_path / "again" / name).read_bytes() == (trained / name).read_bytes()


def test_summary_and_next_command_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config = tmp_path / "a run.toml"
    config.write_text("[debug]\nseed = 3\n")
    code, output, _ = run(
        capsys, tmp_path / "new" / "own", "--vocab_size=300", f"--config={config}", *SOURCE
    )
    assert code == exit_codes.DONE
    ids = load_tokenizer(str(tmp_path / "new" / "own" / FILES[0])).encode("a")
    assert len(ids) == 1
    assert "own: 300 tokens, 1." in output or "own: 300 tokens, 2." in output
    assert f"shardloom train '{config}' {SOURCE[0]}" in output
    assert output.endswith(f"--data.tokenizer {tmp_path}/new/own/tokenizer.json\n")


def test_files_of_validation_are_not_learned(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("common words " * 90)
    (tmp_path / "b.txt").write_text("zzyzx " * 90)
    toml = f'[data]\nsource = "files"\npath = "{tmp_path}/*.txt"\nvalidation_percent = 0.0\n'
    toml += f'[[validation.sources]]\nname = "own"\npath = "{tmp_path}/b.txt"\n'
    options = ["--vocab_size=262", f"--config={_written(tmp_path / 'run.toml', toml)}"]
    code, _, error = run(capsys, tmp_path / "own", *options)
    assert code == exit_codes.BAD_CONFIG
    assert "b.txt is also a file of validation.sources, own" in error
    _written(tmp_path / "run.toml", f"{toml}exclude_from_training = true\n")
    assert run(capsys, tmp_path / "own", *options)[0] == exit_codes.DONE
    merges = json.loads((tmp_path / "own" / FILES[0]).read_text())["model"]["merges"]
    assert merges
    assert not any("z" in merge for merge in map("".join, merges))


def test_sources_contribute_bytes_by_weight(tmp_path: Path) -> None:
    for letter in "xyz":
        (tmp_path / f"{letter}.txt").write_text(letter * 3000)
    tables = [
        f'[[data.sources]]\npath = "{tmp_path}/{letter}.txt"\nweight = {weight}'
        for letter, weight in (("x", 3.0), ("y", 1.0), ("z", 4.0))
    ]
    config = train_tokenizer.load_config(
        _written(tmp_path / "run.toml", "\n".join(tables)), ["--data.validation_percent=0"]
    )
    counts = {}
    for max_bytes in (800, 100_000):
        text = "".join(train_tokenizer._texts(config.data, 0, max_bytes))
        counts[max_bytes] = [text.count(letter) for letter in "xyz"]
    # No source repeats.
    assert counts == {800: [300, 100, 400], 100_000: [3000, 3000, 3000]}


def test_characters_are_not_split(tmp_path: Path) -> None:
    path = _written(tmp_path / "text.txt", "ééé")
    overrides = ["--data.source=files", f"--data.path={path}", "--data.validation_percent=0"]
    config = train_tokenizer.load_config(Path(os.devnull), overrides)
    assert list(train_tokenizer._texts(config.data, 0, 5)) == ["éé"]


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vocab_size=257"], "argument --vocab_size: 257 is less than the 258"),
        (["--vocab_size=x"], "argument --vocab_size: invalid int value"),
        ([], "required: --vocab_size"),
        (["--vocab_size=300", "--max_bytes=0"], "argument --max_bytes: 0 is less than 1"),
        (["--vocab_size=300", "--max_bytes=9"], r"9 bytes of text give only \d+ tokens, not 300"),
        (["--vocab_size=300", "--data.source=files", "--data.path=/none/*"], "no file matches"),
        (["--vocab_size=300", "--data.pth=a"], "data.pth: unknown key; did you mean data.path"),
        (["--vocab_size=300", "--config=absent.toml"], "absent.toml"),
        (["--vocab_size=300", "--size=1"], "unrecognized arguments: --size=1"),
    ],
)
def test_bad_arguments_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture, arguments: list[str], message: str
) -> None:
    code, _, error = run(capsys, tmp_path / "out", *arguments)
    assert code == exit_codes.BAD_CONFIG
    assert tokenizer_json.re.search(message, error)
    assert not (tmp_path / "out").exists()


def test_folder_may_be_the_last_argument(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = ["--data.source", "files", "--data.path", SOURCE[1].partition("=")[2]]
    folder = tmp_path / "tokenizer"
    assert train_tokenizer.main([*source, "--vocab_size", "300", str(folder)]) == exit_codes.DONE
    assert (folder / FILES[0]).exists()
    # The printed command has all overrides, and the tokenizer.
    assert join([*source, "--data.tokenizer", str(folder / FILES[0])]) in capsys.readouterr().out


def test_source_without_text_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    table = _written(tmp_path / "empty.jsonl", json.dumps({"text": ""}) + "\n")
    source = ["--data.source=files", f"--data.path={table}", "--data.validation_percent=0"]
    code, _, error = run(capsys, tmp_path / "out", "--vocab_size=300", *source)
    assert (code, "no text to train on" in error) == (exit_codes.BAD_CONFIG, True)


@pytest.mark.parametrize("name", FILES)
def test_no_file_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture, name: str) -> None:
    (tmp_path / name).write_text("mine")
    code, _, error = run(capsys, tmp_path, "--vocab_size=300", *SOURCE)
    assert code == exit_codes.BAD_CONFIG
    assert f"{name} already exists" in error
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_source_of_unknown_length_is_read_once(tmp_path: Path) -> None:
    """A streamed dataset does not know its length."""
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "validation"):
        rows = "".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(10))
        (folder / f"{split}-00000-of-00001.jsonl").write_text(rows)
    texts = train_tokenizer._texts(Data(source="huggingface", path=str(folder)), 0, 10**6)
    assert sorted(texts) == sorted(f"row {i}" for i in range(10))
