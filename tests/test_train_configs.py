"""Every committed TOML loads, names an existing model and fits its mesh."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli
import tomli_w
import torch
from huggingface_hub import constants

from config import ConfigError, JobConfig, load_config
from models import find_model
from models.meta import build_on_meta
from parallelisms.constraints import check_constraints
from planner.auto import GIB, without_data
from planner.step_plan import plan_step
from run_spec import resolve
from runtime.devices import find_hardware
from runtime.hub_paths import pin_names
from tests.lib.configs import all_keys
from tests.lib.repository import ROOT

FOLDER = ROOT / "train_configs"
WORLD_SIZES = {
    "debug_model": 2,
    "llama3_124m": 1,
    "llama3_350m": 1,
    "llama3_1b": 8,
    "llama3_8b": 64,
    "llama3_70b": 256,
    "llama3_405b": 512,
    "qwen3_124m": 1,
    "qwen3_350m": 1,
    "qwen3_0.6b": 8,
    "qwen3_8b": 64,
    "qwen3_moe_debug": 2,
    "qwen3_moe_30b_a3b": 64,
    "qwen3_next_debug": 2,
    "qwen3_next_80b_a3b": 128,
}
PUBLISHED_PARAMETERS = {
    "llama3_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "qwen3_0.6b": 596_049_920,
    "qwen3_8b": 8_190_735_360,
    "qwen3_moe_30b_a3b": 30_532_122_624,
    "qwen3_next_80b_a3b": 79_674_391_296,
}


def load(name: str) -> JobConfig:
    return load_config(FOLDER / f"{name}.toml", [])


def test_every_config_is_tested():
    assert {path.stem for path in FOLDER.glob("*.toml")} == set(WORLD_SIZES)


@pytest.mark.parametrize("name", WORLD_SIZES)
def test_config_fits_its_hardware(name: str):
    config = load(name)
    _, args = find_model(config.model.name, config.model.flavor)
    check_constraints(config, args, WORLD_SIZES[name], has_gpu=True)
    assert config.training.seq_len <= args.max_seq_len
    schema, comment = (FOLDER / f"{name}.toml").read_text().splitlines()[:2]
    assert schema == "#:schema ../config/schema.json"
    assert comment.startswith("# ")
    if name in PUBLISHED_PARAMETERS:
        assert re.search(rf"for {WORLD_SIZES[name]} (GPUs|H100)", comment)


@pytest.mark.parametrize("name", WORLD_SIZES)
def test_job_name_is_the_file_name(name: str):
    assert load(name).job.name == name


@pytest.mark.parametrize("name", WORLD_SIZES)
def test_config_says_how_to_get_its_tokenizer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    config, text = load(name), (FOLDER / f"{name}.toml").read_text()
    if config.data.tokenizer == "bytes":
        return
    assert config.data.tokenizer.startswith("hf:")
    assert f"# ./shardloom fetch train_configs/{name}.toml\ntokenizer = " in text
    assert ("hf:meta-llama/" in text) == ("# Gated: accept its terms at https://" in text)
    command = f"run ./shardloom fetch {config.data.tokenizer}. Without network"
    with pytest.raises(ConfigError, match=rf"^data\.tokenizer: .*{command}"):
        pin_names(config)


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_model_has_the_published_number_of_parameters(name: str):
    config = load(name)
    spec, published = find_model(config.model.name, config.model.flavor)
    assert config.model.vocab_size == published.vocab_size
    args = replace(published, max_seq_len=config.training.seq_len)
    dtype = getattr(torch, config.training.dtype)
    model = build_on_meta(spec, args, dtype)
    parameters = list(model.parameters())
    assert sum(p.numel() for p in parameters) == PUBLISHED_PARAMETERS[name]
    assert {(p.device.type, p.dtype) for p in parameters} == {("meta", dtype)}


VARIANTS = {
    "ddp": "parallelism.data_parallel ddp",
    "simple_fsdp": "parallelism.data_parallel simple_fsdp",
    "pipeline": "parallelism.pipeline_parallel_degree 2",
    "interleaved": "parallelism.pipeline_parallel_degree 2"
    " parallelism.pipeline_parallel_schedule Interleaved1F1B",
    "context": "parallelism.context_parallel_degree 2",
    "muon": "optimizer.name muon",
    "bfloat16": "training.dtype bfloat16",
    "float8": "float8.recipe rowwise float8.emulate true",
    "full": "activation_checkpoint.mode full",
    "budget": "activation_checkpoint.mode memory_budget compile.enable true",
    "elastic": "debug.deterministic elastic",
    "c4": "data.source c4",
    "skip": "numerics.on_nonfinite skip numerics.on_spike rollback data.on_bad_record skip",
    "off": "checkpoint.enable false validation.enable false experts.balance_loss 0.0",
}


def variant(typed: str) -> JobConfig:
    words = typed.split()
    pairs = zip(words[::2], words[1::2], strict=True)
    return load_config(FOLDER / "debug_model.toml", [f"--{key}={value}" for key, value in pairs])


@pytest.mark.parametrize("name", [*WORLD_SIZES, *VARIANTS])
def test_a_default_that_is_written_out_changes_nothing(name: str):
    """So one file may serve several models and meshes, with each key written out."""
    config = variant(VARIANTS[name]) if name in VARIANTS else load(name)
    world_size = WORLD_SIZES.get(name, 2)
    _, args = find_model(config.model.name, config.model.flavor)
    degrees = check_constraints(config, args, world_size, has_gpu=True)
    given = config.model_dump(exclude_unset=True)
    for key in all_keys():
        section, _, option = key.partition(".")
        default = getattr(JobConfig.model_fields[section].default, option)
        tables = {**given, section: {option: default, **given.get(section, {})}}
        written = JobConfig.model_validate(tomli.loads(tomli_w.dumps(without_none(tables))))
        assert written == config, key
        assert check_constraints(written, args, world_size, has_gpu=True) == degrees, key


def without_none(tables: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """TOML has no null: such a default is an absent key."""
    return {
        section: {key: value for key, value in table.items() if value is not None}
        for section, table in tables.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_config_fits_the_memory_of_its_hardware(name: str) -> None:
    device = find_hardware("h100", None).device
    config = without_data(load(name))
    plan = plan_step(resolve(config, WORLD_SIZES[name], has_gpu=True), WORLD_SIZES[name])
    peak = max(stage.record.peak for stage in plan.stages)
    assert peak < 0.9 * device.memory_gib * GIB
