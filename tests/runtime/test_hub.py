"""Names of the Hugging Face Hub: one commit from the local cache, which a server here fills."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants, snapshot_download
from safetensors.torch import save

from config import ConfigError, JobConfig, load_config
from config.hub_names import FILES, TOKENIZER_FILES, WEIGHT_FILES, HubName, parse_hub_name
from data.tokenizer import find_tokenizer_file, load_tokenizer
from data.tokenizer_export import COMPANION_FILES
from models import MODEL_SPECS
from run_spec import resolve
from runtime import exit_codes
from runtime.hub_cache import NoNetwork, cached_folder, download
from runtime.hub_paths import local_path, pin_names
from tests.lib.hub import GATED, Hub, serve
from tests.lib.repository import ROOT
from tools import convert, fetch, generate, train_tokenizer

NAME = HubName("owner/model")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("repository") / "model"
    source = ["--data.source=files", f"--data.path={Path(__file__).parent}/*.py"]
    assert train_tokenizer.main([str(folder), "--vocab_size=300", *source]) == 0
    family = MODEL_SPECS["qwen3"].hugging_face
    assert family is not None
    config = family.config(MODEL_SPECS["qwen3"].flavors["debugmodel"])
    return {
        "README.md": b"not needed",
        "config.json": json.dumps(config).encode(),
        "model.safetensors": bytes(range(1, 251)) * 400,
        "tokenizer.json": (folder / "tokenizer.json").read_bytes(),
        "tokenizer_config.json": b'{"eos_token": "<|end_of_text|>"}',
    }


@pytest.fixture
def hub(files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve(Hub(dict(files))) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        # The library waits between its attempts.
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        yield hub


def config_of(**keys: str) -> JobConfig:
    tables: dict[str, dict[str, str]] = {}
    for key, value in keys.items():
        section, _, name = key.partition("__")
        tables.setdefault(section, {})[name] = value
    return JobConfig.model_validate(tables)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf:Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("hf:gpt2", HubName("gpt2")),
        ("hf:a/b@main", HubName("a/b", "main")),
        ("hf:a/b@refs/pr/3", HubName("a/b", "refs/pr/3")),
    ],
)
def test_names_are_parsed(text: str, name: HubName) -> None:
    assert parse_hub_name(text) == name
    assert str(name) == text


@pytest.mark.parametrize(
    "text",
    [
        "hf:",
        "hf:a/b/c",
        "hf:/a",
        "hf:a/",
        "hf:../a",
        "hf:a/..",
        "hf:a b",
        "hf:a/b@",
        "hf:a/b@../c",
        "hf:a/b@@c",
        "hf://a/b",
        "hf:a--b",
        "hf:https://huggingface.co/a/b",
        "hf:a/b\n",
    ],
)
def test_malformed_names_are_errors_of_their_key(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pin_names(config_of(data__tokenizer=text, model__flavor=text))
    keys = [message.partition(": ")[0] for message in caught.value.messages]
    assert keys == ["data.tokenizer", "model.flavor"]
    assert all("is not of the form hf:OWNER/NAME" in text for text in caught.value.messages)


def test_missing_names_say_what_to_run_and_copy(hub: Hub) -> None:
    name = "hf:owner/model@main"
    config = config_of(
        data__tokenizer=name, model__flavor="hf:a/b", checkpoint__initial_load_path=name
    )
    with pytest.raises(ConfigError) as caught:
        pin_names(config)
    commands = [f"./shardloom fetch {text}" for text in (name, "hf:a/b", f"--weights {name}")]
    for key, command, text in zip(FILES, commands, caught.value.messages, strict=True):
        assert text.startswith(f"{key}: hf:")
        assert f"run {command}. Without network" in text
        assert constants.HF_HUB_CACHE in text
    assert "copy models--owner--model" in caught.value.messages[0]
    assert not hub.requests, "nothing connects to the hub"


def test_names_stand_for_the_commit_in_the_cache(hub: Hub) -> None:
    folder = download(NAME, WEIGHT_FILES)
    assert folder.name == hub.commit
    assert {path.name for path in folder.iterdir()} == hub.files.keys() - {"README.md"}
    n_requests, first = len(hub.requests), hub.commit
    config = config_of(
        data__tokenizer=str(NAME), model__flavor=str(NAME), checkpoint__initial_load_path=str(NAME)
    )
    pinned = pin_names(config)
    names = {pinned.data.tokenizer, pinned.model.flavor, pinned.checkpoint.initial_load_path}
    assert names == {f"hf:owner/model@{first}"}
    assert pin_names(pinned) == pinned
    assert load_tokenizer(str(NAME)).fingerprint == load_tokenizer(str(folder)).fingerprint
    assert len(hub.requests) == n_requests
    # A new commit on the hub changes nothing until somebody fetches it.
    hub.files["tokenizer_config.json"] = b'{"eos_token": "<|begin_of_text|>"}'
    assert pin_names(config) == pinned
    download(NAME, TOKENIZER_FILES)
    newer = pin_names(config, ["data.tokenizer"])
    assert newer.data.tokenizer == f"hf:owner/model@{hub.commit}" != pinned.data.tokenizer
    assert load_tokenizer(newer.data.tokenizer).eos_id == load_tokenizer(str(NAME)).eos_id
    assert load_tokenizer(pinned.data.tokenizer).eos_id != load_tokenizer(str(NAME)).eos_id
    # The weights of the new commit are not there.
    with pytest.raises(ConfigError, match=r"initial_load_path: .*fetch --weights hf:owner/model"):
        pin_names(config, ["checkpoint.initial_load_path"])


def test_weights_may_be_gone_once_the_run_has_a_checkpoint(hub: Hub, tmp_path: Path) -> None:
    config = config_of(
        job__output_dir=str(tmp_path), job__name="run", checkpoint__initial_load_path=str(NAME)
    )
    with pytest.raises(ConfigError):
        pin_names(config)
    (tmp_path / "run" / "checkpoints" / "step-00000003").mkdir(parents=True)
    assert pin_names(config) == config


@pytest.mark.parametrize("lost", ["tokenizer.json", "tokenizer_config.json"])
def test_folder_that_is_not_complete_is_not_used(hub: Hub, lost: str) -> None:
    folder = download(NAME, TOKENIZER_FILES)
    (folder / lost).unlink()
    with pytest.raises(ValueError, match=r"^data\.tokenizer: .* not completely .*cache: run"):
        load_tokenizer(str(NAME))
    download(NAME, TOKENIZER_FILES)
    load_tokenizer(str(NAME))


def test_folder_without_a_list_of_its_files_is_not_used(hub: Hub, tmp_path: Path) -> None:
    """An older library leaves none: what is not there may be missing."""
    download(NAME, TOKENIZER_FILES)
    shutil.copytree(tmp_path / "hub", tmp_path / "other", symlinks=True)
    shutil.rmtree(tmp_path / "other" / "models--owner--model" / "trees")
    for cache in ("hub", "other"):
        constants.HF_HUB_CACHE = str(tmp_path / cache)
        if cache == "hub":
            cached_folder(NAME, TOKENIZER_FILES)
            continue
        with pytest.raises(ValueError, match="not completely in the local cache"):
            cached_folder(NAME, TOKENIZER_FILES)


def test_cache_that_the_library_filled_is_used(hub: Hub) -> None:
    folder = snapshot_download("owner/model", ignore_patterns=["*.safetensors"])
    assert local_path(str(NAME), TOKENIZER_FILES, key="") == folder
    assert set(COMPANION_FILES) <= set(TOKENIZER_FILES)


def test_run_resolves_its_names(hub: Hub, tmp_path: Path) -> None:
    download(NAME, TOKENIZER_FILES)
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\nname = "qwen3"\nflavor = "{NAME}"\n[data]\ntokenizer = "{NAME}"\n')
    run = resolve(pin_names(load_config(path, [])), world_size=1)
    assert run.model_args.dim == MODEL_SPECS["qwen3"].flavors["debugmodel"].dim
    assert run.tokenizer_text.startswith(f"hf:owner/model@{hub.commit} (")


def test_dropped_connection_is_resumed(hub: Hub) -> None:
    hub.drops = {"model.safetensors": 2}
    folder = download(NAME, WEIGHT_FILES)
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    assert not hub.drops["model.safetensors"]


def test_lost_connection_leaves_nothing_that_is_used(hub: Hub) -> None:
    hub.drops = {"tokenizer.json": 1000}
    with pytest.raises(NoNetwork, match=r"hf:owner/model: cannot download .* run this again"):
        download(NAME, TOKENIZER_FILES)
    with pytest.raises(ValueError, match="not completely in the local cache"):
        cached_folder(NAME, TOKENIZER_FILES)
    hub.drops = {}
    assert download(NAME, TOKENIZER_FILES) == cached_folder(NAME, TOKENIZER_FILES)


def test_wrong_bytes_are_deleted(hub: Hub) -> None:
    hub.corrupt = {"model.safetensors"}
    with pytest.raises(OSError, match=r"model\.safetensors: not the SHA-256 that the hub gave"):
        download(NAME, WEIGHT_FILES)
    hub.corrupt = set()
    folder = download(NAME, WEIGHT_FILES)
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (GATED, "is gated: accept its terms at http://127.*HF_TOKEN"),
        ((401, "GatedRepo"), "is gated: accept its terms"),
        ((404, "RepoNotFound"), "no such repository at http://127.*or a private one.*HF_TOKEN"),
        ((401, ""), "401.*if the repository is private or gated, set HF_TOKEN"),
        ((403, ""), "403.*if the repository is private or gated, set HF_TOKEN"),
        ((500, ""), "500.*run this again later"),
    ],
)
def test_answers_of_the_hub_are_explained(hub: Hub, status: tuple[int, str], text: str) -> None:
    hub.status = status
    with pytest.raises(ValueError, match=rf"^hf:owner/model.*{text}"):
        download(NAME, TOKENIZER_FILES)


def test_unknown_revision_is_named(hub: Hub) -> None:
    with pytest.raises(ValueError, match=r"hf:owner/model@v9: owner/model has no revision v9"):
        download(HubName("owner/model", "v9"), TOKENIZER_FILES)
    assert download(HubName("owner/model", hub.commit), TOKENIZER_FILES).name == hub.commit


def test_cache_that_cannot_be_written_is_named(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "hub").touch()
    with pytest.raises(OSError, match=r"the cache .*hub cannot be used: .*HF_HOME moves it"):
        download(NAME, TOKENIZER_FILES)


def test_fetch_prints_the_toml(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert fetch.main(["owner/model"]) == exit_codes.DONE
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"hf:owner/model: commit {hub.commit}, 3 files, ")
    path = tmp_path / "run.toml"
    path.write_text("\n".join(printed[1:]))
    config = load_config(path, [])
    assert (config.model.name, config.model.flavor) == ("qwen3", "hf:owner/model")
    assert config.data.tokenizer == "hf:owner/model"
    # What it prints can be fetched, too, and is there.
    assert fetch.main([str(path)]) == exit_codes.DONE
    assert pin_names(config).model.flavor == f"hf:owner/model@{hub.commit}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hf:a/b/c", "'hf:a/b/c' is not of the form"),
        ("https://huggingface.co/a/b", "'https://huggingface.co/a/b' is not of the form"),
        ("bytes", "bytes: neither a file nor a configuration of train_configs/"),
        ("a/b", "hf:a/b: no such repository"),
        ("absent.toml", "absent.toml"),
    ],
)
def test_fetch_rejects(hub: Hub, name: str, text: str, capsys: pytest.CaptureFixture) -> None:
    assert fetch.main([name]) == exit_codes.BAD_CONFIG
    assert text in capsys.readouterr().err


def test_fetch_of_pickled_weights_is_an_error(hub: Hub, capsys: pytest.CaptureFixture) -> None:
    hub.files["pytorch_model.bin"] = hub.files.pop("model.safetensors")
    assert fetch.main(["--weights", "owner/model"]) == exit_codes.BAD_CONFIG
    assert "no model.safetensors or model.safetensors.index.json" in capsys.readouterr().err


def test_weights_need_no_tokenizer(hub: Hub, capsys: pytest.CaptureFixture) -> None:
    del hub.files["tokenizer.json"]
    hub.files["model.safetensors"] = save({"lm_head.weight": torch.zeros(1, 1)})
    assert fetch.main(["--weights", "owner/model"]) == exit_codes.DONE
    printed = capsys.readouterr().out
    assert 'initial_load_path = "hf:owner/model"' in printed
    assert "no tokenizer: data.tokenizer: " in printed
    assert 'name = "qwen3"' in printed
    assert fetch.main(["owner/model"]) == exit_codes.BAD_CONFIG
    assert "data.tokenizer: " in capsys.readouterr().err


def test_config_without_names_of_the_hub_loads_its_tokenizer(
    hub: Hub, capsys: pytest.CaptureFixture
) -> None:
    for name in (str(ROOT / "train_configs/debug_model.toml"), "debug_model"):
        assert fetch.main([name]) == exit_codes.DONE
    assert "names nothing of the hub" in capsys.readouterr().out


def test_tools_take_names(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = find_tokenizer_file
    download(NAME, TOKENIZER_FILES)
    found = file(str(NAME))
    assert found is not None
    assert found.path.parent.name == hub.commit
    assert convert.main(["import", str(NAME), str(tmp_path / "x")]) == exit_codes.BAD_CONFIG
    assert "fetch --weights hf:owner/model" in capsys.readouterr().err
    assert generate.main([str(NAME)]) == exit_codes.BAD_CONFIG
    assert "convert import hf:owner/model" in capsys.readouterr().err


@pytest.mark.usefixtures("warm_starts")
def test_variables_of_the_library_are_followed(hub: Hub, tmp_path: Path) -> None:
    """As a user sees it: without network, with it, and without it again."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"
    steps = [
        ({"HF_HUB_OFFLINE": "1"}, exit_codes.BAD_CONFIG, "HF_HUB_OFFLINE is set. Without network"),
        ({"HF_ENDPOINT": nowhere}, exit_codes.BAD_CONFIG, f"cannot download from {nowhere}"),
        ({}, exit_codes.DONE, f"commit {hub.commit}"),
        ({"HF_HUB_OFFLINE": "1"}, exit_codes.DONE, "the cache has it already"),
    ]
    command = [sys.executable, "-m", "tools.fetch", "owner/model"]
    for variables, code, text in steps:
        environment = {**os.environ, **hub.environment(tmp_path / "home"), **variables}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
        assert text in done.stdout + done.stderr
