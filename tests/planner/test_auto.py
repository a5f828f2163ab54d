"""Values for "auto" are those of the documented rule, by the memory of each choice."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from config import ConfigError, JobConfig, load_config
from config.auto import MODE, MODES, SIZE, with_values
from launcher.auto import decide_auto
from launcher.launch import check_run
from planner import auto
from planner.auto import SELECTIVE_PEAK, decide, rank_memory
from planner.step_plan import TIGHT, plan_step
from run_spec import RunSpec, resolve

pytestmark = pytest.mark.usefixtures("warm_starts")

N_RANKS = 2
SMALL = {
    "model.args.n_layers": 1, "model.args.dim": 64, "model.args.head_dim": 16,
    "model.args.hidden_dim": 96, "model.vocab_size": 512, "training.seq_len": 64,
    "training.global_batch_size": 48, SIZE: "auto", MODE: "auto",
}  # fmt: skip
# Of the 24 sequences of a rank.
SIZES = (1, 2, 3, 4, 6, 8, 12, 24)
# Bytes of a model, and of a sequence's activations.
MODEL, SEQUENCE = 1000, {"none": 100, "selective": 40, "full": 9}
PEAKS = {(mode, size): MODEL + size * SEQUENCE[mode] for mode, size in product(MODES, SIZES)}


def config_of(keys: dict[str, object]) -> JobConfig:
    texts = [part for key, value in (SMALL | keys).items() for part in (f"--{key}", f"{value}")]
    return load_config(Path("debug_model"), texts)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces plans by ``PEAKS``."""
    monkeypatch.setattr(auto, "resolve", lambda config, *_, **__: SimpleNamespace(config=config))
    monkeypatch.setattr(auto, "plan_step", planned)


def planned(run: RunSpec, *_: object, **__: object) -> SimpleNamespace:
    config = run.config
    peak = PEAKS[config.activation_checkpoint.mode, config.training.decided_local_batch_size]
    records = [SimpleNamespace(record=SimpleNamespace(peak=size)) for size in (peak, MODEL)]
    return SimpleNamespace(stages=records)


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("enough", [1, 256, 10**9])
def test_choice_is_that_of_the_rule(enough: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On devices just large enough for each choice, and a byte too small for it."""
    monkeypatch.setattr(auto, "ENOUGH_TOKENS", enough)
    needed = {
        (mode, n): PEAKS[mode, n] * (SELECTIVE_PEAK if mode == "selective" else 1)
        for mode, n in product(MODES, SIZES)
    }
    peaks = [needed[choice] for choice in product(MODES, (1, 4, 24))]
    for limit in [peak - short for peak in peaks for short in (0, 1) if peak - short > min(peaks)]:
        largest = {
            mode: max((n for n in SIZES if needed[mode, n] <= limit + 0.5), default=0)
            for mode in MODES
        }
        good = [mode for mode in MODES if largest[mode] * 64 >= enough or largest[mode] == 24]
        mode = good[0] if good else max(MODES, key=lambda each: largest[each])
        found = decide(config_of({}), N_RANKS, (limit + 0.5) / TIGHT, has_gpu=True)
        assert found.values == {SIZE: largest[mode], MODE: mode}
        assert found.peak == PEAKS[mode, largest[mode]]


@pytest.mark.usefixtures("counted")
def test_one_key_leaves_the_other() -> None:
    memory = SELECTIVE_PEAK * (MODEL + 12 * 40) / TIGHT + 1
    found = decide(config_of({SIZE: 12}), N_RANKS, memory, has_gpu=True)
    assert found.values == {MODE: "selective"}
    found = decide(config_of({MODE: "full"}), N_RANKS, memory, has_gpu=True)
    assert found.values == {SIZE: 24}


@pytest.mark.usefixtures("counted")
def test_sizes_divide_each_batch_of_a_ramp() -> None:
    ramp = {"training.batch_size_ramp": "[{steps = 1, global_batch_size = 16}]"}
    assert decide(config_of(ramp), N_RANKS, 1e6, has_gpu=True).values == {SIZE: 8, MODE: "none"}


@pytest.mark.usefixtures("counted")
def test_nothing_fits_and_the_error_says_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "GIB", 1)
    text = r'training.local_batch_size: "auto" .* at least 1.01e\+03 GiB .* 90% .* is 900 GiB'
    with pytest.raises(ConfigError, match=text):
        decide(config_of({}), N_RANKS, 1000, has_gpu=True)


@pytest.mark.usefixtures("counted")
def test_a_mode_that_is_not_supported_does_not_hide_that_others_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def legal_sizes(smallest: JobConfig, *_: object, **__: object) -> list[JobConfig]:
        if smallest.activation_checkpoint.mode == "full":
            raise ConfigError(["activation_checkpoint.mode: not supported"])
        return [smallest]

    monkeypatch.setattr(auto, "legal_sizes", legal_sizes)
    with pytest.raises(ConfigError, match="finds nothing that fits"):
        decide(config_of({}), N_RANKS, 1000, has_gpu=True)


def test_memory_is_that_of_a_plan() -> None:
    """The limit is between that of one and of two sequences."""
    config = config_of({"training.global_batch_size": 4})
    run = resolve(with_values(config, {SIZE: 1, MODE: "none"}), N_RANKS, has_gpu=True)
    one = plan_step(run, N_RANKS).stages[0].record.peak
    found = decide(config, N_RANKS, (one + 1) / TIGHT, has_gpu=True)
    assert found.values[SIZE] == 1 or found.values[MODE] != "none"
    assert found.peak <= one


@pytest.mark.parametrize(
    ("n_ranks", "memory"), [(1, 80.0), (2, 60.0), (3, 30.0), (4, 30.0), (5, 20.0)]
)
def test_ranks_share_the_smallest_gpu(
    n_ranks: int, memory: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [SimpleNamespace(total_memory=80), SimpleNamespace(total_memory=60)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    assert rank_memory(n_ranks, has_gpu=True) == memory


def test_launcher_decides_for_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of({"training.global_batch_size": 4})
    check_run(config, N_RANKS, 1)
    decided = decide_auto(config, N_RANKS, 1)
    assert decided == with_values(config, {SIZE: 2, MODE: "none"})
    text = '"auto": training.local_batch_size = 2, activation_checkpoint.mode = "none", which takes'
    assert text in capsys.readouterr().out


def test_errors_of_the_other_process_are_raised() -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab_size: must be at least the tokenizer's"):
        decide_auto(config_of({"model.vocab_size": 5}), N_RANKS, 1)


def test_a_schedule_of_one_s_own_may_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = "print('Hello')\ndef up(step, total, warmup_steps):\n    return step / total\n"
    (tmp_path / "printing_schedule.py").write_text(own)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    keys = {"lr_scheduler.decay_type": "printing_schedule:up", "training.global_batch_size": 4}
    decided = decide_auto(config_of(keys), N_RANKS, 1)
    assert decided.training.decided_local_batch_size == 2


def test_launcher_accepts_what_some_mode_supports() -> None:
    never = {"parallelism.data_parallel": "simple_fsdp"}
    never |= {"parallelism.fsdp_reshard_after_forward": "never"}
    check_run(config_of(never), N_RANKS, 1)
    with pytest.raises(ConfigError, match=r"activation_checkpoint\.mode = \"none\""):
        check_run(config_of(never | {MODE: "full"}), N_RANKS, 1)
    with pytest.raises(ConfigError, match=r"training\.global_batch_size: .* multiple"):
        check_run(config_of({"training.global_batch_size": 5}), N_RANKS, 1)


def test_what_is_undecided_is_rejected_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(config_of({}), N_RANKS)
    keys = [message.partition(": ")[0] for message in caught.value.messages]
    assert keys == [SIZE, MODE]
