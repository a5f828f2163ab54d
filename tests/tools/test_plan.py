"""A plan has the numbers of the run that the same configuration would be."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from runtime import exit_codes
from tools import plan

MOE = ["qwen3_moe_debug", "--world-size", "4", "--training.local_batch_size", "2"]


def lines_of(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Values of the lines by name."""
    rows = [line.partition(": ") for line in capsys.readouterr().out.splitlines()]
    return {name: value for name, _, value in rows if value}


def test_plan_of_experts_with_a_ramp(capsys: pytest.CaptureFixture[str]) -> None:
    ramp = "[{steps=50,global_batch_size=8},{steps=50,global_batch_size=16}]"
    keys = ["--training.batch_size_ramp", ramp, "--training.global_batch_size", "32"]
    assert plan.main([*MOE, *keys, "--lr_scheduler.decay_ratio=0.2"]) == exit_codes.DONE
    lines = lines_of(capsys)
    # Three quarters of the experts' weights are not used by a token.
    total, active = 1_463_680, 1_463_680 - 3 * 8 * 96 * 128 * 4 * 3 // 4
    assert lines["model"] == f"qwen3_moe debugmodel, {total:,} parameters, {active:,} active"
    assert lines["mesh"] == "dp_shard 4, ep 2"
    assert lines["batch"].startswith("8,192 tokens per step, 32 sequences of 256; 4 microbatches")
    n_tokens = (50 * 8 + 50 * 16 + 200 * 32) * 256
    assert lines["training"].startswith(f"300 steps, {n_tokens:,} tokens, about ")
    # PaLM's convention; the embedding is no matmul.
    per_token = 6 * (active - 320 * 128 - (2 * 128 + 2 * 32) * 4 - 128) + 12 * 4 * 4 * 32 * 256
    assert lines["training"].endswith(f", {per_token * n_tokens:.3g} FLOPs")
    assert lines["learning rate"] == (
        "0.003 after 20 steps of warmup, cosine decay from step 240 to 0.0003 at step 300; adamw"
    )


def test_ranks_are_those_of_an_allocation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the shell of ``salloc``, which has no head node, because nothing has started."""
    for name, value in {"SLURM_JOB_ID": "1", "SLURM_NNODES": "4", "NGPU": "2"}.items():
        monkeypatch.setenv(name, value)
    assert plan.main(["debug_model"]) == exit_codes.DONE
    assert lines_of(capsys)["mesh"] == "dp_shard 8"
    assert plan.main([*STEP[:1], *STEP[3:]]) == exit_codes.DONE
    # Its nodes have other numbers of devices than the servers that are sold.
    out = capsys.readouterr().out
    assert out.startswith("devices: 8 of NVIDIA H100 80GB SXM, 2 a node")
    assert re.search(r"dp_shard_cp all_gather +8  network", out)
    assert plan.main([*STEP[:1], *STEP[3:], "--gpus-per-node=8"]) == exit_codes.DONE
    assert re.search(r"dp_shard_cp all_gather +8  node", capsys.readouterr().out)
    # Its servers share the link of their rack.
    assert plan.main(["debug_model", "--device=gb200"]) == exit_codes.DONE
    assert re.search(r"dp_shard_cp all_gather +8  node", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (["--lr_scheduler.decay_ratio", "0"], "0.003 after 20 steps of warmup, constant"),
        (
            ["--lr_scheduler.decay_ratio", "0.001"],
            "0.003 after 20 steps of warmup, constant: lr_scheduler.decay_ratio of 300 steps is no"
            " step",
        ),
        (["--lr_scheduler.warmup_steps", "300"], "warmup to 0.003 at step 300"),
        (
            ["--lr_scheduler.total_steps", "580", "--lr_scheduler.decay_type", "linear"],
            "0.003 after 20 steps of warmup, linear decay from step 20 to 0.0003 at step 580;"
            " 0.00165 at step 300, the last",
        ),
    ],
)
def test_learning_rate_in_words(
    capsys: pytest.CaptureFixture[str], keys: list[str], text: str
) -> None:
    assert plan.main(["debug_model", *keys]) == exit_codes.DONE
    assert lines_of(capsys)["learning rate"] == f"{text}; adamw"


def test_epochs_are_of_documents_with_begin_and_end(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # 64 documents are read: four epochs.
    texts = ["ab", "", "abc", "abc"] * 4
    (tmp_path / "short.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    keys = ["--data.source=files", f"--data.path={tmp_path}/short.jsonl", "--training.steps=1"]
    keys += ["--lr_scheduler.warmup_steps=0", "--data.validation_percent=0"]
    keys += ["--validation.enable=false"]
    # An empty document has neither begin nor end.
    epochs = 16 * 256 / (4 * (2 + 3 + 3 + 3 * 2))
    for packing, text in (("concat", ", about"), ("best_fit", ", up to about")):
        assert plan.main(["debug_model", *keys, f"--data.packing={packing}"]) == exit_codes.DONE
        assert f"{text} {epochs:.2g} epochs" in lines_of(capsys)["training"]


def test_tokens_of_whole_documents_are_at_most_those_of_full_sequences(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert plan.main(["debug_model", "--data.packing", "best_fit"]) == exit_codes.DONE
    line = lines_of(capsys)["training"]
    assert re.match(r"300 steps, up to [\d,]+ tokens, up to about [\d.]+ epochs, ", line)


def test_a_schedule_of_one_s_own_is_drawn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planned_schedule.py").write_text("def up(step, total):\n    return step / total\n")
    monkeypatch.syspath_prepend(tmp_path)
    keys = ["--lr_scheduler.decay_type", "planned_schedule:up"]
    path = tmp_path / "run.toml"
    path.write_text("[training]\nsteps = 8\n")
    assert plan.main([str(path), *keys, "--optimizer.lr", "0.5"]) == exit_codes.DONE
    out = capsys.readouterr().out
    assert "learning rate: 0.5 times planned_schedule:up, 0.5 at step 8; adamw" in out
    assert "│   ▄█" not in out.splitlines()[-7]
    assert out.splitlines()[-7].endswith("│      ▄█")


SMALL = ["debug_model", "--model.args.n_layers=1"]
STEP = [*SMALL, "--world-size=4", "--device=h100", "--model.vocab_size=320"]
TP = "--parallelism.tensor_parallel_degree=2"


def test_a_step_is_planned_as_table_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([*STEP, TP]) == exit_codes.DONE
    table = capsys.readouterr().out.splitlines()
    assert max(map(len, table)) <= 100
    (run,) = (line.split() for line in table if line.startswith("run, modelled: "))
    steps, tokens = (int(run[place].replace(",", "")) for place in (2, 4))
    assert tokens == steps * 2 * 8 * 256
    # On four devices; a small run's hours too are digits.
    assert run[run.index("device") - 1].replace(".", "").isdecimal()
    often = r"checkpoint: [\d.]+ GB, each \d+ steps: \d:\d\d:\d\d apart"
    assert any(re.fullmatch(often, line) for line in table)
    assert plan.main([*STEP, TP, "--json"]) == exit_codes.DONE
    text = capsys.readouterr().out
    (stage,) = json.loads(text)["stages"]
    sizes = stage["memory"]
    assert sizes.pop("peak") == sum(sizes.values())
    # A small model's in MiB, of which two decimals say something.
    assert f"{sum(sizes.values()) / 2**20:.2f} MiB of 79.1 GiB, fits" in "\n".join(table)
    # An all-gather before each pair of matmuls and before the output.
    gathers = [c for c in stage["collectives"] if (c["dim"], c["kind"]) == ("tp", "all_gather")]
    assert [c["calls"] for c in gathers if c["phase"] == "forward"] == [2 * 1 + 1]
    modelled = json.loads(text)["modelled"]
    assert sum(modelled["parts"].values()) == pytest.approx(modelled["step_seconds"])
    # Weights and two moments in float32.
    assert modelled["checkpoint_bytes"] == pytest.approx(3 * 4 * 281_000, rel=1e-2)
    assert plan.main([*STEP, TP, "--json"]) == exit_codes.DONE
    assert capsys.readouterr().out == text


def test_own_devices(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        '[devices.tiny]\ntitle = "tiny"\ntflops = { bfloat16 = 1 }\nmemory_gib = 0.001\n'
        'memory_gb_per_second = 1\ngpus_per_node = 1\nlink = "string"\nnetwork = "string"\n'
        "[links.string]\ngb_per_second = 1\n"
    )
    arguments = [*SMALL, "--world-size=1", "--device=tiny", "--devices", str(path)]
    for mode, advice in (
        ("fsdp2", "shard them over more ranks"),
        ("ddp", "shard them with --parallelism.data_parallel fsdp2"),
    ):
        assert plan.main([*arguments, "--parallelism.data_parallel", mode]) == exit_codes.DONE
        out = capsys.readouterr().out
        assert "DOES NOT FIT" in out
        assert f"optimizer state alone do not fit: {advice}\n" in out
    path.write_text(path.read_text().replace("memory_gib = 0.001", "memory_gib = 0.01"))
    assert plan.main(arguments) == exit_codes.DONE
    [advice] = re.findall(r"may fit with (.+)\n", capsys.readouterr().out)
    assert advice.startswith("--training.local_batch_size auto --training.global_batch_size ")
    assert advice.endswith(" --activation_checkpoint.mode auto")
    # What it decides is planned.
    assert plan.main([*arguments, *advice.split()]) == exit_codes.DONE
    capsys.readouterr()
    path.write_text(path.read_text().replace("memory_gib", "memory"))
    assert plan.main(arguments) == exit_codes.BAD_CONFIG
    assert "devices.tiny.memory_gib" in capsys.readouterr().err


def test_picture_replaces_only_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.svg"
    for _ in range(2):
        assert plan.main([*STEP, "--picture", str(path)]) == exit_codes.DONE
        ElementTree.fromstring(path.read_text())
    for text in ("", "[training]\nsteps = 8\n", "<svg></svg>"):
        path.write_text(text)
        assert plan.main([*STEP, "--picture", str(path)]) == exit_codes.BAD_CONFIG
        assert f"{path}: exists and was not written" in capsys.readouterr().err
        assert path.read_text() == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "CONFIG"),
        (["nothing"], "nothing: neither a file nor a configuration"),
        (["debug_model", "--world-size", "0"], "--world-size"),
        (["debug_model", "--lr", "1"], "did you mean optimizer.lr?"),
        (["debug_model", "training.steps=4"], "write --training.steps=4"),
        (["debug_model", "--json"], "--json needs --device"),
        (["debug_model", "--gpus-per-node=4"], "--gpus-per-node needs --device"),
        ([*STEP, "--price=-1"], "--price"),
        ([*STEP, "--training.dtype=float64"], "training.dtype: the peak of NVIDIA H100"),
        ([*STEP[:2], "--device=h1000"], "--device: h1000 is none of a100, "),
        ([*STEP, "--parallelism.tensor_parallel_degree=3"], "parallelism.tensor_parallel_degree"),
        ([*STEP, "--optimizer.name=torch.optim:SGD"], "optimizer.name: is not planned yet"),
        ([*STEP, "--search", "--picture=x.svg"], "--picture has no effect with --search"),
        ([*STEP, "--search", "--price=3"], "--price has no effect with --search"),
        ([*STEP, "--json", "--price=3"], "--price has no effect with --json"),
        ([*STEP, "--picture=no/x.svg"], "no/x.svg: no folder no"),
        (["debug_model", "--world-size=3", "--parallelism.tensor_parallel_degree=2"], "3 ranks"),
    ],
)
def test_mistakes_are_named(
    capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    assert plan.main(arguments) == exit_codes.BAD_CONFIG
    assert text in capsys.readouterr().err
