import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from config import ConfigError, JobConfig, resume_compat
from config.resume_compat import changed_arguments, compare
from models import MODEL_SPECS, TransformerArgs, find_model
from models.transformer import RopeScaling
from tests.lib.configs import all_keys

RUN = {
    "model": {"vocab_size": 320},
    "training": {"global_batch_size": 16},
    "lr_scheduler": {"total_steps": 100},
}


def config(**keys: Any) -> JobConfig:
    """Resolved config with ``section__name=value`` overrides."""
    tables: dict[str, dict[str, Any]] = {section: dict(table) for section, table in RUN.items()}
    for key, value in keys.items():
        section, name = key.split("__")
        tables.setdefault(section, {})[name] = value
    return JobConfig.model_validate(tables)


def saved(**keys: Any) -> dict[str, Any]:
    """Config as a dict, as a checkpoint stores it."""
    return json.loads(json.dumps(config(**keys).model_dump()))


def misclassified() -> list[str]:
    """Keys in no class or in several, and unknown keys in a class."""
    classified = [*resume_compat.FROZEN, *resume_compat.RECORDED, *resume_compat.FREE]
    keys = all_keys()
    return sorted(
        [key for key in keys if classified.count(key) != 1] + [*set(classified) - set(keys)]
    )


def test_every_key_is_in_one_class() -> None:
    assert len(all_keys()) > 60
    assert misclassified() == []


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("FREE", resume_compat.FREE - {"metrics.log_freq"}),
        ("FREE", resume_compat.FREE | {"optimizer.lr"}),
        ("FROZEN", resume_compat.FROZEN | {"model.size"}),
    ],
)
def test_misclassified_key_is_detected(name: str, keys: frozenset[str]) -> None:
    with patch.object(resume_compat, name, keys):
        assert len(misclassified()) == 1


def test_same_config_has_no_changes() -> None:
    assert compare(saved(), config()) == resume_compat.Changes((), (), (), ())


FROZEN_CHANGES: dict[str, Any] = {
    "model__name": "qwen3",
    "model__flavor": "8B",
    "model__vocab_size": 512,
    "data__source": "c4",
    "data__subset": "en",
    "data__revision": "v1",
    "data__text_key": "body",
    "data__document_mask": True,
    "data__packing": "best_fit",
    "data__validation_percent": 3.0,
    "training__global_batch_size": 32,
    "training__dtype": "float64",
    "optimizer__name": "muon",
    "optimizer__state_dtype": "bfloat16",
    "optimizer__param_remainders": False,
    "debug__seed": 1,
}


def test_every_frozen_key_has_a_case() -> None:
    assert {key.replace("__", ".") for key in FROZEN_CHANGES} == resume_compat.FROZEN


@pytest.mark.parametrize("key", FROZEN_CHANGES)
def test_frozen_change_is_rejected_by_name(key: str) -> None:
    found = compare(saved(), config(**{key: FROZEN_CHANGES[key]}))
    assert found.recorded == found.free == ()
    with pytest.raises(ConfigError) as caught:
        found.raise_if_frozen_changed(Path("outputs/run"))
    first, message = caught.value.messages
    assert first == "job.name: outputs/run has a run with other settings"
    assert message.startswith(key.replace("__", ".") + ": ")
    is_batch_size = key == "training__global_batch_size"
    assert ("it follows the number of ranks" in message) == is_batch_size
    assert "set a new job.name, and checkpoint.initial_load_path" in message


def test_messages_have_old_and_new_value() -> None:
    now = config(
        optimizer__lr=0.001,
        compile__enable=True,
        metrics__peak_tflops=989.0,
        job__name="other",
        data__path="b/*.txt",
        debug__seed=7,
        data__text_key="body",
    )
    found = compare(saved(optimizer__lr=0.003, data__path="a/*.txt"), now)
    assert found.frozen == ("data.text_key: 'text' to 'body'", "debug.seed: 0 to 7")
    assert found.recorded == (
        "data.path: 'a/*.txt' to 'b/*.txt'",
        "optimizer.lr: 0.003 to 0.001",
        "compile.enable: false to true",
    )
    assert found.free == (
        "job.name: 'default' to 'other'",
        "metrics.peak_tflops: unset to 989.0",
    )
    with pytest.raises(ConfigError) as caught:
        found.raise_if_frozen_changed(Path("outputs/run"))
    assert len(caught.value.messages) == 3


def test_recorded_changes_are_accepted() -> None:
    found = compare(saved(), config(training__seq_len=4096, lr_scheduler__total_steps=200))
    assert len(found.recorded) == 2
    found.raise_if_frozen_changed(Path("outputs/run"))


def test_keys_of_other_versions_are_compared_as_defaults() -> None:
    older = saved()
    del older["numerics"], older["optimizer"]["beta2"], older["training"]["dtype"]
    older["training"]["loss_scale"], older["vocabulary"] = 2.0, 5
    found = compare(older, config())
    assert (found.frozen, found.recorded, found.free) == ((), (), ())
    assert found.gone == ("training.loss_scale: 2.0", "vocabulary: 5")
    # A missing key had its default, which may differ from the new value.
    now = config(optimizer__beta2=0.99, training__dtype="float64", numerics__on_nonfinite="skip")
    found = compare(older, now)
    assert found.frozen == ("training.dtype: 'float32' to 'float64'",)
    assert found.recorded == (
        "optimizer.beta2: 0.95 to 0.99",
        "numerics.on_nonfinite: 'stop' to 'skip'",
    )


def test_dump_without_nones_compares_equal() -> None:
    dumped = config().model_dump(exclude_none=True)
    assert compare(dumped, config()) == resume_compat.Changes((), (), (), ())


ARGS = find_model("llama3", "debugmodel")[1]


@pytest.mark.parametrize("field", [f.name for f in fields(TransformerArgs)])
def test_changed_argument_is_named(field: str) -> None:
    value = getattr(ARGS, field)
    other = RopeScaling(factor=8.0) if field == "rope_scaling" else type(value)(not value)
    found = changed_arguments(asdict(ARGS), replace(ARGS, **{field: other}))
    if field == "max_seq_len":  # follows training.seq_len
        assert found == []
    else:
        assert [text.partition(":")[0] for text in found] == [field]


def test_derived_arguments_are_not_compared() -> None:
    args = find_model("qwen3_moe", "debugmodel")[1]
    other = {name: 2 * getattr(args, name) + 1 for name in resume_compat.DERIVED_ARGUMENTS}
    assert changed_arguments(asdict(args), replace(args, **other)) == []
    with patch.object(resume_compat, "DERIVED_ARGUMENTS", set()):
        assert len(changed_arguments(asdict(args), replace(args, **other))) == 2


def test_published_arguments_differ_only_from_others() -> None:
    published = [args for spec in MODEL_SPECS.values() for args in spec.flavors.values()]
    for one in published:
        through_json = json.loads(json.dumps(asdict(one)))
        for other in published:
            is_same = replace(one, max_seq_len=0) == replace(other, max_seq_len=0)
            assert (changed_arguments(through_json, other) == []) == is_same


def test_nested_arguments_are_named() -> None:
    one = replace(ARGS, rope_scaling=RopeScaling(factor=8.0))
    other = replace(ARGS, rope_scaling=RopeScaling(factor=32.0))
    assert changed_arguments(asdict(one), other) == ["rope_scaling.factor: 8.0 to 32.0"]
    assert len(changed_arguments(asdict(one), ARGS)) == 1


def test_arguments_of_other_versions() -> None:
    @dataclass(frozen=True)
    class Later:
        dim: int
        is_new: bool = False

    assert changed_arguments({"dim": 8}, Later(8)) == []
    assert changed_arguments({"dim": 8}, Later(8, is_new=True)) == ["is_new: false to true"]
    assert changed_arguments({}, Later(8)) == ["dim: unset to 8"]
    assert changed_arguments({"dim": 8, "old": 3}, Later(8)) == ["old: 3 no longer exists"]
