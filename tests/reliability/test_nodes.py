"""Nodes that would not train the same run end by name, as two real launchers on one machine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.exit_codes import BAD_CONFIG, DONE, read_exit_code
from tests.lib.launch import curve
from tests.lib.nodes import DIFFERENCE, HOST, copy_repository, run_nodes
from tests.lib.repository import ROOT

SAME_RUN = pytest.mark.row(31, "Ranks that would not train the same run are rejected by name")


def other_node(folder: Path, *, root: Path, lr: str, text: str, package: str) -> dict[str, Any]:
    """Keywords of ``start`` for a node with its own model, data and package in ``folder``."""
    (folder / "text").mkdir(parents=True)
    (folder / "text" / "a.txt").write_text(text)
    (folder / "my_models.py").write_text(f"from models.llama3 import SPEC  # {lr}\n")
    metadata = folder / f"xxhash-{package}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: xxhash\nVersion: {package}\n")
    return {
        "root": root,
        "cwd": folder,
        "environment": {"PYTHONPATH": str(folder)},
        "model.name": "my_models:SPEC",
        "data.source": "files",
        "data.path": "text/*.txt",
        "optimizer.lr": lr,
    }


@SAME_RUN
def test_nodes_with_differences_are_rejected(
    tmp_path: Path, record_result: Callable[[str], None]
) -> None:
    one = other_node(tmp_path / "a", root=ROOT, lr="0.1", text="one " * 500, package="9.0.0")
    copy = copy_repository(tmp_path / "copy")
    two = other_node(tmp_path / "b", root=copy, lr="0.5", text="two " * 500, package="9.0.1")
    two["training.max_norm"] = "7.0"
    two["environment"]["NVIDIA_TF32_OVERRIDE"] = "0"
    codes, outputs = run_nodes(tmp_path / "out", [one, two], is_warm=False)
    assert codes == [BAD_CONFIG] * 2, "\n".join(outputs)
    values = {
        "training.max_norm": ("1.0", "7.0"),
        "optimizer.lr": ("0.1", "0.5"),
        "package xxhash": ("9.0.0", "9.0.1"),
        "environment variable NVIDIA_TF32_OVERRIDE": ("absent", "0"),
    }
    contents = {"documents of text", "file optim/loss.py", "file my_models.py"}
    for output in outputs:
        found = {name: (first, second) for name, first, second in DIFFERENCE.findall(output)}
        assert found.keys() == values.keys() | contents, output
        assert {name: found[name] for name in values} == values
        # Nothing is said twice.
        assert output.count("must be equal") == len(found)
        assert "Traceback" not in output
    # It is rejected before the run exists.
    assert not (tmp_path / "out").exists()
    record_result(f"2 nodes: {len(found)} of {len(found)} differences named, exit code 2 on both")


@SAME_RUN
def test_mistake_on_one_node_ends_all(tmp_path: Path, record_result: Callable[[str], None]) -> None:
    for node in ("a", "b"):
        (tmp_path / node).mkdir()
    (tmp_path / "a" / "text.txt").write_text("text " * 500)
    keys = {"data.source": "files", "data.path": "*.txt"}
    nodes = [{"cwd": tmp_path / node, **keys} for node in ("a", "b")]
    codes, outputs = run_nodes(tmp_path / "out", nodes)
    assert codes == [BAD_CONFIG] * 2, "\n".join(outputs)
    for output in outputs:
        assert output.count(f"rank 1 ({HOST}): data.path") == 1, output
    record_result("data missing on one node: named, exit code 2 on both")


@SAME_RUN
def test_launcher_that_rejects_its_configuration_ends_all(
    tmp_path: Path, record_result: Callable[[str], None]
) -> None:
    codes, outputs = run_nodes(tmp_path / "out", [{}, {"training.seq_len": "0"}])
    assert codes == [BAD_CONFIG] * 2, "\n".join(outputs)
    assert f"node 1 ({HOST}): command line: training.seq_len" in outputs[0]
    # It does not repeat its own.
    assert outputs[1].count("training.seq_len") == 1
    record_result("a wrong key on one node: named, exit code 2 on both")


def test_nodes_may_have_other_numbers_of_ranks(tmp_path: Path) -> None:
    nodes = [{"environment": {"NGPU": number}} for number in ("1", "3")]
    # Microbatches of 2 sequences: with 3 ranks on each of two nodes 8 would be no multiple.
    codes, outputs = run_nodes(tmp_path / "out", nodes)
    assert codes == [DONE] * 2, "\n".join(outputs)
    assert list(curve(tmp_path / "out")) == [1]
    # 4 ranks.
    keys = {"training.global_batch_size": "10"}
    codes, outputs = run_nodes(tmp_path / "none", [node | keys for node in nodes])
    assert codes == [BAD_CONFIG] * 2, "\n".join(outputs)
    for output in outputs:
        assert output.count("10 is not a multiple of 2 * 4") == 1, output


def test_batch_that_does_not_fit_equal_nodes_starts_no_rank(tmp_path: Path) -> None:
    codes, outputs = run_nodes(tmp_path / "out", [{"training.global_batch_size": "6"}] * 2)
    assert codes == [BAD_CONFIG] * 2, "\n".join(outputs)
    for output in outputs:
        # A launcher that waits for more than two seconds says what it doubts.
        lines = [line for line in output.splitlines() if "waiting for" not in line]
        assert "\n".join(lines).count("6 is not a multiple of 2 * 2") == 2, "a line for each node"
        assert "on each rank" not in output
    assert not (tmp_path / "out").exists()


def test_mistake_of_a_launcher_is_told_to_the_scheduler(tmp_path: Path) -> None:
    """Slurm reads the code in control/, because srun flattens those of launchers."""
    control = tmp_path / "out" / "debug_model" / "control"
    control.mkdir(parents=True)
    codes, outputs = run_nodes(tmp_path / "out", [{}, {"environment": {"NGPU": "0"}}])
    assert codes == [BAD_CONFIG] * 2, "\n".join(outputs)
    for output in outputs:
        assert "NGPU='0': must be an integer, 1 or more" in output
    assert read_exit_code(control) == BAD_CONFIG
