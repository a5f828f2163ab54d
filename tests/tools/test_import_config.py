"""A translation trains as torchtitan would, and no key of torchtitan's is lost without a word."""

import math
import random
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tomli
import tomli_w

from config import ConfigError, JobConfig, load_config
from config.job_config import LrScheduler
from models import find_model
from optim.schedule import lr_factor
from runtime import exit_codes
from tests.lib.configs import all_keys
from tools import import_config
from tools.import_config import check, config_text
from tools.torchtitan.given import Translation
from tools.torchtitan.keys import BY_NAME, FLOAT8, KEYS, PAGE, RENAMED, Key, keys_table
from tools.torchtitan.translate import translate

# The same run in the names of 2024 and of 2025.
OLD = """
[job]
description = "Llama 3 8B training"
dump_folder = "./out"
use_for_integration_test = true
[profiling]
enable_profiling = true
profile_freq = 100
[model]
name = "llama3"
flavor = "8B"
norm_type = "rmsnorm"
tokenizer_path = "./tokenizer.model"
[optimizer]
name = "AdamW"
lr = 3e-4
fused = true
[training]
batch_size = 2
seq_len = 8192
warmup_steps = 200
max_norm = 1.0
steps = 1000
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
enable_loss_parallel = true
compile = true
dataset = "c4"
[experimental]
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "interleaved_1f1b"
pipeline_parallel_microbatches = 2
enable_async_tensor_parallel = true
[checkpoint]
enable_checkpoint = true
interval_type = "steps"
interval = 100
async_mode = "async_with_pinned_mem"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[float8]
enable_float8_linear = true
enable_fsdp_float8_all_gather = true
"""
NEW = """
[job]
description = "Llama 3 8B training"
dump_folder = "./out"
[profiling]
enable_profiling = true
profile_freq = 100
[model]
flavor = "8B"
hf_assets_path = "./tokenizer.model"
converters = ["quantize.linear.float8"]
[optimizer]
lr = 3e-4
implementation = "fused"
[training]
local_batch_size = 2
seq_len = 8192
dataset = "c4"
steps = 1000
[lr_scheduler]
warmup_steps = 200
[parallelism]
data_parallel_replicate_degree = 2
tensor_parallel_degree = 8
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
enable_async_tensor_parallel = true
[compile]
enable = true
[checkpoint]
enable = true
interval = 100
async_mode = "async_with_pinned_mem"
[activation_checkpoint]
selective_ac_option = "op"
[quantize.linear.float8]
filter_fqns = ["output"]
"""


def translated(toml: str = "", name: str = "run") -> tuple[Translation, JobConfig]:
    translation = translate(tomli.loads(toml), name)
    assert translation.problems == []
    return translation, check(config_text(translation), Path("run.toml"))


def titan_factor(step: int, steps: int, warmup: int, ratio: float | None, kind: str, low: float):
    """Factor on the lr of torchtitan since March 2025 for a 0-based step."""
    warmup = min(warmup, steps)
    decay = steps - warmup if ratio is None else min(round(steps * ratio), steps - warmup)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step + 1 - (steps + 1 - decay)) / decay if decay else 0.0
    if progress <= 0:
        return 1.0
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    left = {"linear": 1 - progress, "sqrt": 1 - math.sqrt(progress), "cosine": cosine}[kind]
    return low + (1 - low) * left


def titan_factor_of_2024(step: int, steps: int, warmup: int):
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 1 - (step - warmup) / max(1, steps - warmup)


def factors(config: JobConfig) -> list[float]:
    scheduler, steps = config.lr_scheduler, config.training.steps
    total = scheduler.total_steps or steps
    return [lr_factor(step, scheduler, total) for step in range(1, steps + 1)]


@pytest.mark.parametrize("kind", ["linear", "sqrt", "cosine"])
@pytest.mark.parametrize("ratio", [None, 0.0, 0.1, 0.333, 0.8, 1.0])
@pytest.mark.parametrize(("steps", "warmup"), [(10, 2), (1000, 200), (997, 0), (7, 7), (5, 200)])
def test_each_step_has_the_lr_of_torchtitan(
    steps: int, warmup: int, ratio: float | None, kind: str
):
    ratio_line = "" if ratio is None else f"decay_ratio = {ratio}"
    toml = (
        f"[training]\nsteps = {steps}\n[lr_scheduler]\nwarmup_steps = {warmup}\n"
        f"decay_type = '{kind}'\nmin_lr_factor = 0.1\n{ratio_line}"
    )
    _, config = translated(toml)
    wanted = [titan_factor(step, steps, warmup, ratio, kind, 0.1) for step in range(steps)]
    assert factors(config) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(("steps", "warmup"), [(10, 2), (1000, 200), (30, 0), (7, 7), (5, 200)])
def test_each_step_has_the_lr_of_torchtitan_of_2024(steps: int, warmup: int):
    _, config = translated(f"[training]\nsteps = {steps}\nwarmup_steps = {warmup}")
    wanted = [titan_factor_of_2024(step, steps, warmup) for step in range(steps)]
    assert factors(config) == pytest.approx(wanted, abs=1e-12)


def test_same_run_in_the_names_of_two_years():
    (_, old), (_, new) = translated(OLD), translated(NEW)
    # What torchtitan changed in between: the schedule, the rotary frequencies, the vocabulary.
    changed = {"lr_scheduler": LrScheduler()}
    changed["model"] = new.model
    assert old.model_copy(update=changed) == new.model_copy(update=changed)
    assert find_model("llama3", "8B", old.model.args)[1].rope_scaling is None
    assert find_model("llama3", "8B", new.model.args)[1].rope_scaling is not None
    assert (new.job.name, new.job.output_dir, new.data.tokenizer) == (
        "run", "./out", "./tokenizer.model",
    )  # fmt: skip
    assert new.float8.recipe == "tensorwise"
    assert not new.float8.skip_small
    parallelism = new.parallelism
    assert parallelism.pipeline_parallel_stages_per_rank == 2
    # With microbatches of one sequence it has no effect.
    assert not parallelism.tensor_parallel_async
    assert (new.checkpoint.async_mode, new.checkpoint.keep_latest_k) == ("async", 10)


def test_defaults_of_torchtitan_are_written_out():
    _, config = translated()
    assert (config.training.steps, config.optimizer.lr) == (10000, 8e-4)
    assert (config.lr_scheduler.decay_type, config.lr_scheduler.min_lr_factor) == ("linear", 0.0)
    assert config.activation_checkpoint.selective == 2
    assert not config.checkpoint.enable
    assert not config.validation.enable
    assert config.training.mixed_precision_param == "bfloat16"
    assert config.data.path == "tests/assets/c4_test/*.json"
    assert config.data.validation_percent == 0.0
    assert config.model.vocab_size == 2048


@pytest.mark.parametrize(
    ("toml", "key", "value"),
    [
        ("[parallelism]\ndata_parallel_replicate_degree = 4\ndata_parallel_shard_degree = 1",
         "parallelism.data_parallel", "ddp"),
        ("[training]\ndata_parallel_type = 'ddp'\ndata_parallel_degree = -1",
         "parallelism.data_parallel", "ddp"),
        ("[training]\ndata_parallel_type = 'ddp'", "training.mixed_precision_param", "float32"),
        ("[parallelism]\ncontext_parallel_degree = 2", "parallelism.context_parallel_method",
         "allgather"),
        ("[parallelism]\nfsdp_reshard_after_forward = 'never'",
         "parallelism.fsdp_reshard_after_forward", "never"),
        ("[training]\nenable_cpu_offload = true", "parallelism.fsdp_cpu_offload", True),
        ("[training]\nglobal_batch_size = 64", "training.global_batch_size", 64),
        ("[training]\nglobal_batch_size = -1", "training.global_batch_size", None),
        ("[model]\nflavor = '8B_flex'", "data.document_mask", True),
        ("[model]\nattn_mask_type = 'block_causal'", "data.document_mask", True),
        ("[model]\nname = 'qwen3'\nflavor = '30B-A3B'", "experts.balance_loss", 0.0),
        ("[training]\nseed = 7", "debug.seed", 7),
        ("[activation_checkpoint]\nmode = 'full'", "activation_checkpoint.mode", "full"),
        ("[model]\nconverters = ['float8']\n[float8]\nrecipe_name = 'rowwise'", "float8.recipe",
         "rowwise"),
        ("[model]\nconverters = 'float8'\n[float8]\nfilter_fqns = 'output,auto_filter_small_kn'",
         "float8.skip_small", True),
        ("[model]\nconverters = ['float8']\n[float8]\nfilter_fqns = ['output', 'attention.wk']",
         "float8.skip", ["attention.wk"]),
        ("[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule ="
         " 'Interleaved1F1B'\npipeline_parallel_layers_per_stage = 2",
         "parallelism.pipeline_parallel_stages_per_rank", 2),
        ("[experimental]\npipeline_parallel_degree = 2\npipeline_parallel_microbatches = 4",
         "parallelism.pipeline_parallel_microbatch_size", 2),
        ("[training]\ndataset = 'c4'\ndataset_path = '/data/c4'", "data.path",
         "/data/c4/en/c4-train.*.json.gz"),
        ("[validation]\nenable = true", "validation.steps", "all"),
        ("[validation]\nenable = true\nsteps = 20", "validation.steps", 20),
        ("[training]\nfp8_linear = 'dynamic'", "float8.recipe", "tensorwise"),
        ("[training]\ncheckpoint_folder = 'saved'\ncheckpoint_interval = 9", "checkpoint.interval",
         9),
        ("[training]\ncheckpoint_folder = ''\ncheckpoint_interval = 9", "checkpoint.enable", False),
        ("[checkpoint]\nenable = true\ninitial_load_path = 'llama'\ninitial_load_in_hf = true",
         "checkpoint.initial_load_path", "llama"),
        # torchtitan starts from random weights.
        # Without a path, it loads the folder with the tokenizer.
        ("[model]\nhf_assets_path = 'llama'\n[checkpoint]\nenable = true\n"
         "initial_load_in_hf = true", "checkpoint.initial_load_path", "llama"),
        ("[model]\nname = 'llama3'\nflavor = '8B'\nconverters = ['float8']\n"
         "[float8]\nfilter_fqns = ['layers.3', 'layers.1.attention']",
         "float8.skip", ["layers.3", "layers.30", "layers.31", "layers.1.attention"]),
        ("[training]\ndtype = 'bfloat16'\nmixed_precision_param = 'bfloat16'",
         "optimizer.param_remainders", False),
        ("[checkpoint]\ninitial_load_path = 'llama'\ninitial_load_in_hf = true",
         "checkpoint.initial_load_path", ""),
    ],
)  # fmt: skip
def test_meaning_is_translated(toml: str, key: str, value: Any):
    _, config = translated(toml)
    section, _, name = key.partition(".")
    assert getattr(getattr(config, section), name) == value


def test_steps_of_a_validation_are_said_to_count_global_batches():
    every, few = "[validation]\nenable = true", "[validation]\nenable = true\nsteps = 20"
    named = [
        [n for n in translated(toml)[0].notes if "validation.steps" in n] for toml in (every, few)
    ]
    assert [len(notes) for notes in named] == [0, 1]
    assert "global batch" in named[1][0]


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("[model]\nname = 'llama4'", "model.name: 'llama4' is not supported"),
        ("[model]\nflavor = '9B'", "model.flavor: '9B' of llama3 is not one of"),
        ("[model]\nconverters = ['mx']", "model.converters"),
        ("[model]\nnorm_type = 'np_layernorm'", "RMSNorm"),
        ("[optimizer]\nname = 'Adam'", "optimizer.name = 'Adam'"),
        ("[optimizer]\nearly_step_in_backward = true", "without clipping"),
        ("[training]\ndataset = 'my_data'", "docs/howto/data.md"),
        ("[training]\nmax_norm = inf", "1e9"),
        ("[training]\nmax_norm = 0.0", "1e9"),
        ("[training]\nsteps = -1", "training.steps = -1: out of range"),
        ("[training]\nsteps = 'ten'", "training.steps: must be of type int, got 'ten'"),
        ("[training]\nbatch_size = 1\nlocal_batch_size = 2", "remove one"),
        ("[training]\nmuon = true", "training.muon: not a known key"),
        ("[training]\nseqlen = 8", "did you mean training.seq_len?"),
        ("[lr_scheduler]\ndecay_ratio = nan", "out of range"),
        ("[lr_scheduler]\nwarmup_steps = -1", "out of range"),
        ("[checkpoint]\nenable = true\ninterval_type = 'seconds'", "in steps"),
        ("[checkpoint]\nenable = true\ninitial_load_path = 'step-10'", "Hugging Face"),
        ("[checkpoint]\nload_step = 10", "rollback"),
        ("[fault_tolerance]\nenable = true", "TorchFT"),
        ("[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule ="
         " 'ZBVZeroBubble'", "choose one of 1F1B"),
        ("[experimental]\npipeline_parallel_degree = 2\npipeline_parallel_split_points ="
         " ['layers.1', 'layers.2']", "3 stages are no multiple"),
        (f"[model]\nconverters = ['float8']\n[{FLOAT8}]\nrecipe_name = 'rowwise_with_gw_hp'",
         "rowwise_with_gw_hp"),
        ("[debug]\nmoe_force_load_balance = true", "without the router"),
    ],
)  # fmt: skip
def test_what_changes_the_training_is_rejected_with_advice(toml: str, says: str):
    assert any(says in problem for problem in translate(tomli.loads(toml), "run").problems)


def test_constraints_of_ours_are_checked():
    toml = "[training]\nlocal_batch_size = 1\n[parallelism]\npipeline_parallel_degree = 2"
    with pytest.raises(ConfigError, match=r"run\.toml: translated: training\.global_batch_size"):
        translated(toml)


def other_value(key: Key) -> Any:
    """Return a value that is not the default."""
    choices = {
        "model.norm_type": "layernorm", "training.data_parallel_type": "ddp",
        "activation_checkpoint.mode": "full", "lr_scheduler.decay_type": "cosine",
        "parallelism.fsdp_reshard_after_forward": "never", "training.dataset": "c4",
        "model.flavor": "8B", "model.name": "llama2", "model.attn_mask_type": "block_causal",
        "activation_checkpoint.selective_ac_option": "op", "checkpoint.async_mode": "async",
        "training.dtype": "bfloat16", "training.mixed_precision_param": "float32",
        "training.mixed_precision_reduce": "bfloat16", "training.enable_selective_ac": True,
    }  # fmt: skip
    by_kind = {bool: key.default is False, int: 3, float: 0.25, str: "x", list: ["x"]}
    return choices.get(key.name, by_kind[key.kinds[0]])


@pytest.mark.parametrize("name", [*BY_NAME, *RENAMED])
def test_no_value_is_dropped_silently(name: str):
    """Any other value than the default changes the translation, or is reported."""
    key = BY_NAME[RENAMED.get(name, (name, ""))[0]]
    table: Any = other_value(key)
    for part in reversed(name.split(".")):
        table = {part: table}
    found, base = translate(table, "run"), translate({}, "run")
    is_told = any(name in line for line in [*found.dropped_lines(), *found.problems])
    is_copied = key.way in ("copied", "derived") and found.keys != base.keys
    is_comment = found.description != base.description
    assert is_told or is_copied or is_comment


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_default_of_each_key_is_translated(key: Key):
    assert key.name not in RENAMED
    if key.way == "copied":
        assert key.to in all_keys()
    if key.default is None or key.name == "training.warmup_pct":
        return
    table: Any = key.default
    for part in reversed(key.name.split(".")):
        table = {part: table}
    found = translate(table, "run")
    assert found.problems == []
    check(config_text(found), Path("run.toml"))


def test_renames_lead_to_keys():
    assert {new for new, _ in RENAMED.values()} <= set(BY_NAME)
    assert len(BY_NAME) == len(KEYS)


def test_page_has_the_table():
    assert PAGE.read_text().endswith(keys_table()), "run: python -m tools.torchtitan.keys"


def test_random_files_are_translated_or_rejected_by_key():
    values = [0, 1, -1, 2**70, 0.5, math.nan, math.inf, "", "x", "a,b", True, [], ["x"], [1]]
    for seed in range(300):
        rng = random.Random(seed)
        tables: dict[str, Any] = {}
        for name in rng.sample([*BY_NAME, *RENAMED, "model.zzz"], 6):
            *parts, last = name.split(".")
            table = tables
            for part in parts:
                table = table.setdefault(part, {})
            table[last] = rng.choice(values)
        translation = translate(tables, rng.choice(["run", "", "a b", "../x"]))
        named = [re.search(r"(\w+\.)+\w+", problem) for problem in translation.problems]
        assert all(named), translation.problems
        with suppress(ConfigError):
            if not translation.problems:
                check(config_text(translation), Path("run.toml"))


def test_command_writes_a_file_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source, target = tmp_path / "llama3_8b.toml", tmp_path / "out of it.toml"
    source.write_text(NEW)
    assert import_config.main([str(source), "-o", str(target)]) == exit_codes.DONE
    errors = capsys.readouterr().err
    assert errors.endswith(f"shardloom train '{target}' trains it\n")
    assert "'./tokenizer.model' does not exist; put the tokenizer there" in errors
    assert "optimizer.implementation: the fused implementation" in errors
    text = target.read_text()
    assert "\n# Llama 3 8B training\n" in text
    assert load_config(target, []).job.name == "llama3_8b"
    # It overwrites nothing.
    assert import_config.main([str(source), "-o", str(target)]) == exit_codes.BAD_CONFIG
    assert target.read_text() == text
    capsys.readouterr()
    assert import_config.main([str(source)]) == exit_codes.DONE
    assert capsys.readouterr().out == text
    assert import_config.main([str(target)]) == exit_codes.BAD_CONFIG
    *problems, hint = capsys.readouterr().err.splitlines()
    assert f"{target}: data.source: not a known key of torchtitan; remove it" in problems
    assert hint == (
        f"{target}: also loads as a configuration of Shardloom; if it is one, train it as it is"
    )


def test_file_of_common_keys_is_rejected_for_what_it_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source = tmp_path / "common.toml"
    keys = "[checkpoint]\nenable = true\ninitial_load_path = 'outputs/step-10'"
    source.write_text(f"[model]\nname = 'llama3'\nflavor = '8B'\n{keys}\n")
    assert import_config.main([str(source)]) == exit_codes.BAD_CONFIG
    problem, hint = capsys.readouterr().err.splitlines()[-2:]
    assert "a checkpoint of torchtitan cannot be read" in problem
    assert "also loads" in hint


def test_command_rejects_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source, target = tmp_path / "x.toml", tmp_path / "out.toml"
    source.write_text(tomli_w.dumps({"model": {"name": "flux"}, "training": {"steps": 0.5}}))
    assert import_config.main([str(source), "-o", str(target)]) == exit_codes.BAD_CONFIG
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"{source}: training.steps: must be of type int")
    assert second.startswith(f"{source}: model.name: 'flux' is not supported")
    assert not target.exists()
    assert import_config.main([str(tmp_path / "absent.toml")]) == exit_codes.BAD_CONFIG
    assert "absent.toml" in capsys.readouterr().err
