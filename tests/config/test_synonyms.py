"""An unknown key is answered with the key that its author means."""

from pathlib import Path

import pytest

from config import ConfigError, load_config
from config.synonyms import ABSENT, SYNONYMS
from models import MODEL_SPECS
from tests.lib.configs import all_keys, write

KEYS = all_keys()
ARGUMENTS = {
    name for spec in MODEL_SPECS.values() for args in spec.flavors.values() for name in vars(args)
}


def errors(folder: Path, toml: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(write(folder, toml), list(overrides))
    return caught.value.messages


@pytest.mark.parametrize("key", sorted(set(SYNONYMS.values())))
def test_synonyms_stand_for_keys_that_exist(key: str):
    assert key in KEYS or key.removeprefix("model.args.") in ARGUMENTS


@pytest.mark.parametrize("name", SYNONYMS)
def test_synonym_is_no_key_and_is_found_without_its_section(name: str, tmp_path: Path):
    assert name not in ARGUMENTS or SYNONYMS[name] in (f"model.args.{name}", "training.seq_len")
    assert name not in {key.partition(".")[2] for key in KEYS}
    wanted = f"did you mean {SYNONYMS[name]}?"
    for section in ("training", "model", "parallelism"):
        (message,) = errors(tmp_path, "", f"--{section}.{name}=1")
        assert message.endswith(wanted)
    (message,) = errors(tmp_path, "", f"--{name.upper().replace('_', '-')}", "1")
    assert message.endswith(wanted)
    if name not in ("model", "optimizer", "lr_scheduler", "compile"):
        (message,) = errors(tmp_path, f"{name} = 1")
        assert message.endswith(wanted)


def test_names_without_a_key_are_no_names():
    assert not {*ABSENT} & {*SYNONYMS, *ARGUMENTS, *(key.rpartition(".")[2] for key in KEYS)}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--lr=1", "optimizer.lr"),
        ("--seed=1", "debug.seed"),
        ("--steps=1", "training.steps or validation.steps"),
        ("--training.lr=1", "optimizer.lr"),
        ("--optimizer.steps=1", "training.steps or validation.steps"),
        ("--Training.seq_len=1", "[training]"),
        ("--training.enable=1", "compile.enable or checkpoint.enable or validation.enable"),
        ("--model.dim=1", "model.args.dim"),
    ],
)
def test_key_of_another_section_is_found(typed: str, meant: str, tmp_path: Path):
    (message,) = errors(tmp_path, "", typed)
    assert message.endswith(f"did you mean {meant}?")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--dropout=0.1", "there is no dropout"),
        ("--model.dropout=0.1", "there is no dropout"),
        ("--model.args.dropout=0", "there is no dropout"),
        ("--init_from=resume", "a run started again resumes"),
    ],
)
def test_what_has_no_key_is_said_to_have_none(typed: str, said: str, tmp_path: Path):
    (message,) = errors(tmp_path, "", typed)
    assert message.endswith(f"; {said}")


def test_keys_of_a_table_of_another_program_are_named(tmp_path: Path):
    toml = "[distributed]\ntp = 2\ndp_shard = 4\nfoo = 1\n[train]\nmax_steps = 10\nsteps = 1"
    toml += "\ndropout = 0"
    distributed, train = errors(tmp_path, toml)
    assert distributed.endswith(
        "distributed: unknown table; distributed.tp is parallelism.tensor_parallel_degree;"
        " distributed.dp_shard is parallelism.data_parallel_shard_degree"
    )
    assert "; train.max_steps is training.steps; train.dropout: there is no dropout; did" in train


def test_arguments_of_a_model_are_named_as_everywhere(tmp_path: Path):
    toml = "[model.args]\nhidden_size = 64\nn_layers = 2\nfoo = 1"
    in_file, typed = errors(tmp_path, toml, "--model.args.num_heads=2")
    assert in_file.endswith("hidden_size: unknown argument; did you mean dim?")
    assert typed.startswith("command line: model.args.num_heads: unknown argument; did you mean n_")
    # A family of the user's own may have any arguments.
    load_config(write(tmp_path, toml), ["--model.name=mine:SPEC"])
