"""Precedence and syntax of values, and errors reported together and by name."""

import os
import re
from pathlib import Path

import pytest

from config import ConfigError, JobConfig, dump_toml, load_config
from config.job_config import DataSource, LrScheduler, Training
from config.loader import config_names, find_config
from tests.lib.repository import ROOT

DEBUG_MODEL = ROOT / "train_configs" / "debug_model.toml"


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text("[training]\nsteps = 7\nseq_len = 512\n")
    return path


def errors(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    return caught.value.messages


def test_command_line_overrides_file_overrides_default(toml: Path):
    training = load_config(toml, ["--training.steps", "9"]).training
    assert training == Training(steps=9, seq_len=512)
    assert training.gc_freq == Training().gc_freq


@pytest.mark.parametrize("overrides", [["--training.steps", "9"], ["--training.steps=9"]])
def test_override_with_space_or_equals_sign(toml: Path, overrides: list[str]):
    assert load_config(toml, overrides).training.steps == 9


def test_last_override_wins(toml: Path):
    assert load_config(toml, ["--training.steps=9", "--training.steps=8"]).training.steps == 8


def test_last_override_of_an_entry_and_of_its_table_wins(toml: Path):
    entry, table = ["--model.args.n_layers", "6"], ["--model.args", "{n_heads=2,n_layers=1}"]
    assert load_config(toml, [*entry, *table]).model.args == {"n_heads": 2, "n_layers": 1}
    again = load_config(toml, [*entry, *table, *entry])
    assert again.model.args == {"n_heads": 2, "n_layers": 6}
    assert load_config(toml, [*table, *entry, *table]).model.args["n_layers"] == 1


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("2024", "2024"),
        ("1e3", "1e3"),
        ("true", "true"),
        ("2024-01-01", "2024-01-01"),
        ("plain", "plain"),
        ('"quoted"', "quoted"),
        ("'2024'", "2024"),
    ],
)
def test_string_key_takes_the_literal_text(toml: Path, raw: str, text: str):
    assert load_config(toml, ["--job.name", raw]).job.name == text


def test_value_after_equals_sign_may_be_anything(toml: Path):
    overrides = ["--validation.sample_prompt=--steps=3", "--data.path=", "--data.subset", "a=b"]
    config = load_config(toml, overrides)
    assert config.validation.sample_prompt == "--steps=3"
    assert config.data.path == ""
    assert config.data.subset == "a=b"


@pytest.mark.parametrize(
    ("raw", "number"),
    [
        ("1e-3", 1e-3),
        ("1E-3", 1e-3),
        ("+1e-3", 1e-3),
        ("1_000", 1e3),
        (".001", 1e-3),
        ("+.5", 0.5),
        ("5.", 5.0),
        ("5.e-1", 0.5),
        (".5E1", 5.0),
        (" .001 ", 1e-3),
    ],
)
def test_numbers_in_common_notations_are_read(toml: Path, raw: str, number: float):
    for overrides in (["--optimizer.lr", raw], [f"--optimizer.lr={raw}"]):
        assert load_config(toml, overrides).optimizer.lr == number
    # Also in a key that may be absent.
    assert load_config(toml, ["--metrics.peak_tflops", raw]).metrics.peak_tflops == number


@pytest.mark.parametrize(
    ("key", "raw"),
    [
        *(("optimizer.lr", raw) for raw in ("5e", ".5.", ".", "1e-", "0,001", "1,", "1e-3 # low",
          "True", "'.001'", "NaN", "nan", "inf", "-.5", "-1e-3", "1e999", "1 000", "١")),
        *(("training.steps", raw) for raw in (".5", "5.", "1e3", "08", "-1", "5,", "1]\nb = [2")),
        *(("compile.enable", raw) for raw in ("True", "TRUE", "yes", "on", "1", "'true'", "")),
    ],
)  # fmt: skip
def test_other_notations_are_rejected_with_key_and_value(toml: Path, key: str, raw: str):
    for overrides in ([f"--{key}", raw], [f"--{key}={raw}"]):
        (message,) = errors(toml, *overrides)
        assert message.startswith(f"command line: {key}: ")
        shown = {"1e999": "inf", "1e3": "1000.0", "-.5": "-0.5", "-1e-3": "-0.001"}
        assert shown.get(raw, repr(raw)[1:-1].strip("'")) in message


def test_boolean_error_says_what_to_write(toml: Path):
    for key in ("compile.enable", "debug.deterministic"):
        assert "true or false" in errors(toml, f"--{key}=yes")[0]


def test_table_in_place_of_an_array_says_what_to_write(toml: Path):
    for key in ("training.batch_size_ramp", "data.sources"):
        assert f"write [[{key}]]" in errors(toml, f"--{key}={{steps = 2}}")[0]
    assert "[[" not in errors(toml, "--metrics.trackers={a = 2}")[0]


def test_text_with_a_comment_sign_is_not_cut(toml: Path):
    for raw in ('"x" # y', "'a' # 'b'", "3 # y", "x # y"):
        assert load_config(toml, ["--data.subset", raw]).data.subset == raw


def test_override_sets_only_one_key(toml: Path):
    (message,) = errors(toml, "--training.steps", "3\nseq_len = 4")
    assert "training.steps" in message


@pytest.mark.parametrize("raw", ["[" * 5000, "9" * 5000], ids=["nested", "digits"])
def test_unparsable_value_names_the_key(toml: Path, raw: str):
    (message,) = errors(toml, f"--training.steps={raw}")
    assert "command line: training.steps: " in message


def test_invalid_utf8_names_the_key(toml: Path):
    argument = os.fsdecode(b"--job.output_dir=caf\xe9")
    assert errors(toml, argument) == ["command line: --job.output_dir: 'caf\\udce9' is not UTF-8"]


MANY_OVERRIDES = [
    *("--job.name", "2024"),
    *("--job.output_dir", 'C:\\runs "été"\t'),
    *("--model.vocab_size", "512"),
    *("--data.path", "/data/**/*.txt"),
    *("--training.global_batch_size", "64"),
    *("--training.dtype", "float64"),
    *("--optimizer.lr", "1"),
    *("--optimizer.eps", "1e-30"),
    *("--lr_scheduler.total_steps", "1_000"),
    *("--lr_scheduler.min_lr_factor", "0.1234567890123456789"),
    *("--parallelism.data_parallel_shard_degree", "2"),
    *("--activation_checkpoint.selective", "2"),
    *("--compile.enable", "true"),
    *("--validation.sample_prompt", "def f():\r\n    '''\u2028\x7f'''\n"),
    *("--metrics.peak_tflops", "989.5"),
    *("--debug.seed", str(2**63 - 1)),
]


@pytest.mark.parametrize("overrides", [[], MANY_OVERRIDES], ids=["as it is", "many overrides"])
def test_dumped_config_loads_as_equal(tmp_path: Path, overrides: list[str]):
    config = load_config(DEBUG_MODEL, overrides)
    dumped = tmp_path / "dumped.toml"
    dumped.write_text(dump_toml(config), encoding="utf-8")
    assert load_config(dumped, []) == config
    changed = {key[2:] for key in overrides[::2]}
    defaults = JobConfig().model_dump()
    for section, values in config.model_dump().items():
        for key, value in values.items():
            # The comparison above proves something only if every override took effect.
            assert f"{section}.{key}" not in changed or value != defaults[section][key]


def test_none_is_not_dumped(toml: Path):
    assert load_config(toml, []).lr_scheduler == LrScheduler()
    assert "total_steps" not in dump_toml(load_config(toml, []))


@pytest.mark.parametrize(
    "text",
    [
        "[training\nsteps = 3",
        "steps: 3",
        "[job]\nname='a'\nname='b'",
        "[training]\nsteps = " + "[" * 5000,
        "[training]\nsteps = " + "9" * 5000,
    ],
    ids=["table", "yaml", "twice", "nested", "digits"],
)
def test_syntax_error_names_the_file(tmp_path: Path, text: str):
    path = tmp_path / "broken.toml"
    path.write_text(text)
    (message,) = errors(path)
    assert message.startswith(str(path))


def test_syntax_error_shows_the_line(tmp_path: Path):
    path = tmp_path / "broken.toml"
    for line in ("lr = .001", "enable = True", "lr = 1e-3,"):
        path.write_bytes(f"[optimizer]\r\n\r\n{line}\r\n".encode())
        (message,) = errors(path)
        assert "line 3" in message
        assert message.endswith(f": {line}")


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte-order mark"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_files_of_any_editor_are_read(tmp_path: Path, mark: bytes, end: str):
    path = tmp_path / "run.toml"
    path.write_bytes(mark + f"[training]{end}steps = 7 # few{end}seq_len = 512{end}".encode())
    assert load_config(path, []).training == Training(steps=7, seq_len=512)


def test_unreadable_file_is_named(tmp_path: Path):
    not_text = tmp_path / "binary.toml"
    not_text.write_bytes(b"\xff\xfe")
    for path in (tmp_path / "absent.toml", tmp_path, not_text):
        (message,) = errors(path)
        assert message.startswith(str(path))


def test_all_errors_are_reported_with_their_origin(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text("steps = 3\n[training]\nseq_len = 0\ngc_freq = 1.5\n[modle]\nname = 'llama3'\n")
    overrides = ["--steps", "3", "--optimizer.lr", "fast", "--debug.seed=-1"]
    overrides += ["--trainings.steps=3", "--chec[point.enable=true", "--compile.enable"]
    origins = {
        "steps": str(path),
        "training.seq_len": str(path),
        "training.gc_freq": str(path),
        "modle": str(path),
        "'--steps'": "command line",
        "optimizer.lr": "command line",
        "debug.seed": "command line",
        "trainings": "command line",
        "chec[point": "command line",
        "--compile.enable": "command line",
    }
    messages = errors(path, *overrides)
    assert len(messages) == len(origins)
    for key, origin in origins.items():
        assert sum(message.startswith(f"{origin}: {key}") for message in messages) == 1, key


def test_union_branches_are_one_error(toml: Path):
    (message,) = errors(toml, "--activation_checkpoint.selective", "0")
    assert message.count("activation_checkpoint.selective") == 1


@pytest.mark.parametrize(
    ("override", "suggested"),
    [
        ("--training.step=3", "training.steps?"),
        ("--training.stpes=3", "training.steps?"),
        ("--training.global-batch-size=3", "training.global_batch_size?"),
        ("--training.lr=3", "optimizer.lr?"),
        ("--traning.steps=3", "[training]?"),
    ],
)
def test_unknown_keys_and_tables_suggest_a_known_one(toml: Path, override: str, suggested: str):
    (message,) = errors(toml, override)
    assert "unknown" in message
    assert message.endswith(suggested)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["run.toml"], "name the configuration first"),
        (["--config", "run.toml"], "name the configuration first"),
        (["--config_file=run.toml"], "name the configuration first"),
        (["--job.config_file", "run.toml"], "name the configuration first"),
        (["training.steps=3"], "write --training.steps=3"),
        (["-training.steps", "3"], "write --training.steps=3"),
        (["--data.path", "a.txt", "b.txt", "c.txt"], "(and 1 more); quote"),
        (["--data.path", "a.txt", *(f"{n}.txt" for n in range(1000))], "(and 999 more); quote"),
        (["--validation.sample_prompt", "Once", "upon"], "quote"),
    ],
)
def test_arguments_in_other_forms_are_one_error_with_a_hint(
    toml: Path, arguments: list[str], hint: str
):
    (message,) = errors(toml, *arguments)
    assert hint in message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lama3_8b", "train_configs/; did you mean llama3_8b?"),
        ("zzz", "train_configs/; the names are debug_model, "),
        ("optimizer.lr", "write --optimizer.lr=VALUE"),
        ("no.toml", "No such file or directory"),
        ("no/llama3_8b", "No such file or directory"),
    ],
)
def test_config_that_does_not_exist(name: str, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(Path(name), [])


def test_committed_config_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert load_config(Path("llama3_8b"), []).model.flavor == "8B"
    # A file of that name comes first, but no folder: of a run, or of a model.
    (tmp_path / "llama3_8b").mkdir()
    assert load_config(Path("llama3_8b"), []).model.flavor == "8B"
    (tmp_path / "llama3_8b").rmdir()
    (tmp_path / "llama3_8b").write_text("[model]\nflavor = '70B'\n")
    assert load_config(Path("llama3_8b"), []).model.flavor == "70B"


def test_every_committed_config_is_found_by_name() -> None:
    for name in config_names():
        assert find_config(Path(name)).is_file()


def test_no_suggestion_without_a_similar_name(toml: Path):
    assert all("did you mean" not in m for m in errors(toml, "--training.zzz=3", "--zzz.steps=3"))


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("/data/books/**/*.txt", "books"),
        ("/data/books.jsonl", "books.jsonl"),
        ("/data/books/tokens/", "tokens"),
        ("allenai/c4", "c4"),
        ("*.txt", "*.txt"),
        ("", "files"),
    ],
)
def test_source_label_is_the_end_of_its_path(path: str, label: str):
    assert DataSource(path=path).label == label
    assert DataSource(path=path, name="mine").label == "mine"


def test_choices_and_their_abbreviations_become_canonical(toml: Path):
    typed = ["--optimizer.name=AdamW", "--parallelism.data_parallel", "FSDP2"]
    typed += ["--training.dtype=BF16", "--debug.deterministic=Elastic"]
    config = load_config(toml, typed)
    assert (config.optimizer.name, config.parallelism.data_parallel) == ("adamw", "fsdp2")
    assert (config.training.dtype, config.debug.deterministic) == ("bfloat16", "elastic")
    # An abbreviation stands only for a choice that the key has.
    (message,) = errors(toml, "--training.mixed_precision_param=fp64")
    assert "'fp64'" in message
    # In each table of an array too.
    toml.write_text("[[data.sources]]\ntype = 'Text'\npath = 'x.txt'\n")
    assert load_config(toml, []).data.sources[0].type == "text"


def test_sections_are_frozen(toml: Path):
    with pytest.raises(ValueError, match="frozen"):
        load_config(toml, []).training.steps = 3  # type: ignore[misc]
