"""``~`` and variables in every path that a user writes: one rule, and errors by name."""

import os
import pwd
import re
from pathlib import Path

import pytest

from config import ConfigError, JobConfig, dump_toml, load_config
from config.job_config import PATH, DataSource, Job
from config.paths import expand_path, literal_path
from tools import generate, prepare, slurm_begin, status

ME = pwd.getpwuid(os.getuid())
ENVIRONMENT = {"DATA": "/data", "A_1": "a b", "COST": "5$", "NESTED": "~/x", "EMPTY": ""}


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("", ""),
        ("bytes", "bytes"),
        ("allenai/c4", "allenai/c4"),
        ("books/**/*.[tj]*", "books/**/*.[tj]*"),
        ("$DATA/*.txt", "/data/*.txt"),
        ("${DATA}_2/x", "/data_2/x"),
        ("$A_1.txt", "a b.txt"),
        ("a/$DATA$DATA", "a//data/data"),
        ("$$DATA", "$DATA"),
        ("$$$DATA", "$/data"),
        # As in a shell, a value is not expanded again, and a lone $ is a character.
        ("$COST/x", "5$/x"),
        ("a$ b$/c$1", "a$ b$/c$1"),
        ("a~/~b", "a~/~b"),
        ("./~", "./~"),
    ],
)
def test_variables_are_expanded(text: str, path: str) -> None:
    assert expand_path(text, ENVIRONMENT) == path


def test_home_directories_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of me")
    assert expand_path("~") == "/home/of me"
    assert expand_path("~/a/*.txt") == "/home/of me/a/*.txt"
    assert expand_path("$HOME/a") == expand_path("${HOME}/a") == "/home/of me/a"
    assert expand_path(f"~{ME.pw_name}/a") == f"{ME.pw_dir}/a"
    # A variable of a file of settings often has a ~ that no shell has seen.
    assert expand_path("$NESTED/y", ENVIRONMENT) == "/home/of me/x/y"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("$ABSENT/x", "ABSENT is not set"),
        ("a/${ABSENT}", "ABSENT is not set"),
        ("$EMPTY/x", "EMPTY is empty"),
        ("${DATA", "only $NAME"),
        ("${DATA:-x}", "only $NAME"),
        ("${}", "only $NAME"),
        ("~nobody-has-this-name/x", "~nobody-has-this-name is no user"),
    ],
)
def test_unknown_variables_and_users_are_named(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)) as caught:
        expand_path(text, ENVIRONMENT)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("path", ["a", "$HOME", "~", "~me/$x${y}$", "$$", "", "/a/*~"])
def test_literal_path_survives_expansion(path: str) -> None:
    assert expand_path(literal_path(path), {}) in (path, f"./{path}")


def path_keys() -> dict[str, str]:
    """Every marked key, with the TOML that sets it to {}."""
    keys = {
        f"{section}.{name}": f"[{section}]\n{name} = '{{}}'\n"
        for section, info in JobConfig.model_fields.items()
        for name, field in type(info.default).model_fields.items()
        if PATH in field.metadata
    }
    sources = [n for n, field in DataSource.model_fields.items() if PATH in field.metadata]
    array = "[[data.sources]]\n[[data.sources]]\n{} = '{{}}'\n"
    return keys | {f"data.sources[1].{name}": array.format(name) for name in sources}


def value_of(config: JobConfig, key: str) -> str:
    if key.startswith("data.sources"):
        return config.data.sources[1].path
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def test_marked_keys_are_those_that_name_files() -> None:
    assert path_keys().keys() == {
        "job.output_dir",
        "model.flavor",
        "data.path",
        "data.sources[1].path",
        "data.tokenizer",
        "checkpoint.initial_load_path",
    }


@pytest.mark.parametrize("key", path_keys())
def test_config_expands_path_key(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("COST", "5$HOME~")
    monkeypatch.delenv("ABSENT", raising=False)
    file, toml = tmp_path / "run.toml", path_keys()[key]
    expected = {"~/x": "/home/me/x", "$HOME/x*": "/home/me/x*", "a/$COST/$$b": "a/5$HOME~/$b"}
    for text, path in expected.items():
        file.write_text(toml.format(text))
        config = load_config(file, [])
        assert value_of(config, key) == path
        # The saved configuration of a run names the same files, wherever it is read.
        file.write_text(dump_toml(config))
        monkeypatch.delenv("COST", raising=False)
        assert load_config(file, []) == config
        monkeypatch.setenv("COST", "5$HOME~")
    file.write_text(toml.format("${ABSENT}/x"))
    with pytest.raises(ConfigError) as caught:
        load_config(file, [])
    (message,) = caught.value.messages
    assert message.startswith(f"{file}: {key}: ")
    assert "ABSENT is not set" in message


def test_command_line_expands_as_the_file_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    file = tmp_path / "run.toml"
    file.touch()
    config = load_config(file, ["--job.output_dir", "~/runs", "--data.path=$HOME/*.txt"])
    assert (config.job.output_dir, config.data.path) == ("/home/me/runs", "/home/me/*.txt")
    sources = """[{path = "~/a"}, {path = "$ABSENT"}]"""
    with pytest.raises(ConfigError, match=r"^command line: data\.sources\[1\]\.path: .*ABSENT"):
        load_config(file, ["--data.sources", sources])


def test_other_keys_stay_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[validation]\nsample_prompt = '~ costs $ABSENT'\n")
    config = load_config(file, ["--data.subset", "$ABSENT"])
    assert config.validation.sample_prompt == "~ costs $ABSENT"
    assert config.data.subset == "$ABSENT"


def test_config_file_and_tools_expand_their_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.toml").write_text("[training]\nsteps = 7\n")
    assert load_config(Path("~/run.toml"), []).training.steps == 7
    options, _ = prepare.parse(["~/tokens", "--config", "$HOME/run.toml"])
    assert options.folder == tmp_path / "tokens"
    assert load_config(options.config, []).training.steps == 7
    options = generate.parse(["~/run", "--tokenizer", "~/tokenizer.json"])
    assert options.checkpoint == tmp_path / "run"
    assert options.tokenizer == str(tmp_path / "tokenizer.json")
    assert generate.parse(["~", "--tokenizer", "bytes"]).tokenizer == "bytes"
    (tmp_path / "sweep.toml").write_text("[[runs]]\noptimizer.lr = 0.1\n")
    assert "--optimizer.lr=0.1" in slurm_begin.overrides_of(Path("~/sweep.toml"), "0", Job())
    assert status.main(["$ABSENT_FOLDER/run"]) == 2
    message = capsys.readouterr().err
    assert "RUN_FOLDER" in message
    assert "ABSENT_FOLDER is not set" in message


@pytest.mark.parametrize(
    "url",
    [
        "https://host/a.txt?X-Amz-Signature=SECRET",
        "https://host/a.txt?SECRET",
        "https://me:SECRET@host/a.txt",
        "https://SECRET@host/a.txt",
        "s3://key:SECRET@bucket/*.txt",
        "abfs://data@account.dfs.core.windows.net/*.txt?sig=SECRET",
        "https://me:$PASSWORD@host/a.txt",
        "https://host/a.txt$QUERY",
    ],
)
def test_credentials_in_urls_are_rejected_and_not_repeated(url: str) -> None:
    environment = {"PASSWORD": "SECRET", "QUERY": "?token=SECRET"}
    with pytest.raises(ValueError, match="paths are logged and saved; credentials") as caught:
        expand_path(url, environment)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    "path",
    [
        "s3://bucket/shard-?.jsonl",
        "abfs://data@account.dfs.core.windows.net/**/*.parquet",
        "https://host/a@b.txt",
        "what?a=b@c:d.txt",
        "C://me:x@y",
    ],
)
def test_other_urls_and_paths_are_accepted(path: str) -> None:
    assert expand_path(path, {}) == path
