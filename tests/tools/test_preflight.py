"""Preflight reports faulty nodes before a run, with one real launcher per node."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from config import load_config
from config.job_config import Parallelism
from launcher.rendezvous import Nodes
from parallelisms.parallel_dims import ParallelDims
from runtime.exit_codes import BAD_CONFIG, DONE, FAILED
from tests.lib.forked import CONFIG
from tests.lib.launch import without_slow_phases
from tests.lib.patience import PATIENCE_SECONDS
from tests.lib.ports import free_port
from tests.lib.ranks import RankPool
from tests.lib.repository import ROOT
from tests.lib.warm import WarmPopen
from tools import preflight, preflight_rank, preflight_speed
from tools.preflight import meet
from tools.preflight_rank import below, unequal
from tools.preflight_speed import bus_bandwidth, mesh_groups, n_rounds, partner

HOST = socket.gethostname()
TORCH = re.escape(version("torch"))
EXPERTS = ROOT / "train_configs" / "qwen3_moe_debug.toml"


def start(
    *overrides: str,
    node: int = 0,
    count: int = 1,
    n_ranks: int = 1,
    port: int = 0,
    planted: str = "",
    other_folder: Path | None = None,
) -> subprocess.Popen[str]:
    """Start the launcher of one node."""
    environment = os.environ | {
        "NGPU": str(n_ranks),
        "NNODES": str(count),
        "NODE_RANK": str(node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port or free_port()),
        "PLANTED": planted,
        "OTHER_FOLDER": str(other_folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-P", "-m", "tests.tools.planted_preflight", "launch"]
    return WarmPopen(
        [*command, str(CONFIG), *overrides],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outputs(*launchers: subprocess.Popen[str]) -> list[tuple[int, str, str]]:
    """Exit code, stdout without slow phases of the start, and stderr of each launcher."""
    found = []
    try:
        for launcher in launchers:
            out, err = launcher.communicate(timeout=PATIENCE_SECONDS)
            found.append((launcher.returncode, without_slow_phases(out), err))
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
    return found


def test_good_nodes_pass_and_leave_no_files(tmp_path: Path) -> None:
    port = free_port()
    keys = ("--job.output_dir", str(tmp_path), "--parallelism.tensor_parallel_degree", "2")
    (code, out, err), (other_code, other_out, _) = outputs(
        *(start(*keys, node=node, count=2, n_ranks=2, port=port) for node in range(2))
    )
    assert (code, other_code, other_out) == (DONE, DONE, ""), out + err
    assert out.startswith("2 nodes, 4 ranks on cpu; 869,504 parameters, 0.01 GiB per checkpoint\n")
    assert re.search(rf"^1 +{HOST} ", out, re.MULTILINE)
    assert re.search(r"^dp_shard_cp = batch +2 +2 +[\d.]+ +[\d.]+$", out, re.MULTILINE)
    assert re.search(r"^tp +2 +2 +[\d.]+ +[\d.]+$", out, re.MULTILINE)
    assert out.endswith("\npreflight: passed\n")
    assert list(tmp_path.iterdir()) == []


def test_faults_of_a_node_are_reported(tmp_path: Path) -> None:
    shared, other = tmp_path / "shared", tmp_path / "other"
    shared.mkdir()
    other.mkdir()
    port = free_port()
    plants = ("", "other_folder wrong_clock", "other_versions slow_matmul slow_link")
    (code, out, err), *others = outputs(
        *(
            start(
                *("--job.output_dir", str(shared)),
                node=node,
                count=3,
                port=port,
                planted=planted,
                other_folder=other,
            )
            for node, planted in enumerate(plants)
        )
    )
    assert [code, *(other_code for other_code, *_ in others)] == [FAILED] * 3, out + err
    table = out.index("TFLOP/s")
    findings = [line for line in out[table:].splitlines() if re.match("(node|rank) ", line)]
    wanted = [
        rf"node 2 \({HOST}\): package torch is 0\.4\.1, but {TORCH} elsewhere",
        rf"node 1 \({HOST}\): cannot read in {other} what node 0 \({HOST}\) wrote to {shared}",
        rf"node 1 \({HOST}\): its clock is \+(4\.9|5\.0)\d\d s from node 0's, error bound 0\.\d+ s",
        rf"rank 2 \(node 2, {HOST}\): matmul at \S+ TFLOP/s, median .*",
        rf"rank 2 \(node 2, {HOST}\): best link at \S+ GB/s, median .*",
    ]
    assert len(findings) == len(wanted), out
    for finding, pattern in zip(findings, wanted, strict=True):
        assert re.fullmatch(pattern, finding)
    assert list(shared.iterdir()) == list(other.iterdir()) == []


def test_missing_node_and_unusable_paths_are_reported(tmp_path: Path) -> None:
    keys = ("--job.output_dir", str(tmp_path), "--comm.init_timeout_seconds", "2")
    a_file = tmp_path / "file"
    a_file.touch()
    below_a_file = ("--job.output_dir", str(a_file / "runs"))
    no_data = ("--data.source", "files", "--data.path", str(tmp_path / "*.txt"))
    head, follower, unwritable, unread = outputs(
        start(*keys, node=0, count=2),
        start(*keys, node=1, count=2),
        start(*below_a_file),
        start(*no_data),
    )
    assert head[0] == FAILED
    assert "node 1 did not join within 2 s\n" in head[2]
    assert f"nodes that joined: 0 ({HOST})" in head[2]
    assert follower[0] == FAILED
    assert "node 1: no answer from node 0 at 127.0.0.1:" in follower[2]
    assert unwritable[0] == FAILED
    assert unwritable[1].startswith("1 node, 1 rank on cpu; ")
    assert f"node 0 ({HOST}): cannot write to {a_file}: " in unwritable[1]
    assert unread[0] == BAD_CONFIG
    assert "data.path" in unread[2]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_hung_rank_is_reported(tmp_path: Path) -> None:
    port = free_port()
    keys = ("--job.output_dir", str(tmp_path), "--comm.train_timeout_seconds", "5")
    (code, _, err), (other_code, *_) = outputs(
        start(*keys, node=0, count=2, port=port),
        start(*keys, node=1, count=2, port=port, planted="hangs"),
    )
    assert (code, other_code) == (FAILED, FAILED)
    assert re.search(
        rf"rank 1 \({HOST}\) did not answer; last heartbeat at .* tools/preflight", err
    )


def test_signal_is_no_finding(tmp_path: Path) -> None:
    """A job that is preempted in its preflight is requeued, as one that trains."""
    ((code, _, err),) = outputs(start("--job.output_dir", str(tmp_path), planted="preempted"))
    assert (code, err) == (128 + signal.SIGTERM, "")


def test_bad_configuration_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(CONFIG), "--training.stepz", "3"]
    assert preflight.main(arguments, {}) == BAD_CONFIG
    assert "training.stepz" in capsys.readouterr().err
    arguments = [str(CONFIG), "--parallelism.tensor_parallel_degree", "2"]
    assert preflight.main(arguments, {"NGPU": "3"}) == BAD_CONFIG
    assert "does not divide 3 ranks" in capsys.readouterr().err
    assert preflight.main([str(CONFIG)], {"NNODES": "2"}) == BAD_CONFIG
    assert "MASTER_ADDR" in capsys.readouterr().err
    with socket.create_server(("", 0)) as other:
        port = str(other.getsockname()[1])
        environment = {"NNODES": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        assert preflight.main([str(CONFIG)], environment) == BAD_CONFIG
    assert f"MASTER_PORT={port}: cannot listen" in capsys.readouterr().err


def test_rendezvous_reports_missing_and_duplicate_nodes() -> None:
    def findings(*claims: tuple[int, int]) -> list[list[str]]:
        """Findings on nodes with these (NODE_RANK, number of ranks), if three are expected."""
        store = dist.HashStore()
        with ThreadPoolExecutor(len(claims)) as pool:
            futures = [
                pool.submit(meet, store, Nodes(3, node, "", 0), n_ranks=n, seconds=1.0)
                for node, n in claims
            ]
        return [future.result() for future in futures]

    assert findings((0, 8), (1, 8), (2, 8)) == [[], [], []]
    unequal_counts = [f"node 2 ({HOST}) has 4 ranks, but node 0 has 8"]
    assert findings((0, 8), (1, 8), (2, 4)) == [unequal_counts] * 3
    twice = [
        "node 2 did not join within 1 s",
        f"node 1: 2 launchers have this NODE_RANK: {HOST}, {HOST}",
        f"nodes that joined: 0 ({HOST}), 1 ({HOST})",
    ]
    assert findings((0, 8), (1, 8), (1, 8)) == [twice] * 3


def test_comparisons_report_the_minority() -> None:
    who = ["a", "b", "c", "d"]
    assert unequal("x", [2, 1, 1, 1], who) == ["a: x is 2, but 1 elsewhere"]
    assert unequal("x", [2, 1], who[:2]) == ["b: x is 1, but 2 elsewhere"]
    assert unequal("x", [1] * 4, who) == []
    assert below(0.5, "{} m/s", [4.0, 1.9, 1.9, 4.0], who) == [
        f"{name}: 1.9 m/s, median 4" for name in "bc"
    ]
    assert below(0.5, "{} m/s", [4.0, 2.0, 9.0, 4.0], who) == []
    assert below(0.5, "{} m/s", [0.0], who[:1]) == []


@pytest.mark.parametrize("count", range(1, 10))
def test_all_pairs_of_a_tournament_meet_once(count: int) -> None:
    met: Counter[tuple[int, int]] = Counter()
    for number in range(n_rounds(count)):
        pairs = [(own, partner(own, count, number)) for own in range(count)]
        both = [(own, other) for own, other in pairs if other is not None]
        assert all((other, own) in both and own != other for own, other in both)
        met.update(both)
    assert met == {(a, b): 1 for a in range(count) for b in range(count) if a != b}


def bandwidths_and_groups() -> dict[str, object]:
    device = torch.device("cpu")
    dims = ParallelDims.build(Parallelism(tensor_parallel_degree=2), 4, "cpu")
    found: dict[str, object] = {}
    for label, groups, group in mesh_groups([dims.weight_mesh, dims.data_mesh]):
        assert dist.get_process_group_ranks(group) in groups
        found[label] = groups

    def two_seconds(act: Callable[[], object], device: torch.device) -> float:
        act()
        return 2.0

    with patch.object(preflight_speed, "best_seconds", two_seconds):
        for kind in preflight_speed.KINDS:
            found[kind] = bus_bandwidth(kind, dist.group.WORLD, device)
    return found


def test_bus_bandwidth_matches_nccl_tests(ranks: RankPool) -> None:
    for found in ranks.run(bandwidths_and_groups, 4):
        assert found["dp_shard_cp = batch"] == [[0, 2], [1, 3]]
        assert found["tp"] == [[0, 1], [2, 3]]
        # 16 MiB in 2 seconds.
        assert found["all-reduce"] == pytest.approx(2**24 / 2 / 1e9 * 2 * 3 / 4)
        assert found["all-gather"] == pytest.approx(2**24 / 2 / 1e9 * 3 / 4)


def expert_dims() -> list[list[str]]:
    config = load_config(EXPERTS, ["--parallelism.expert_parallel_degree", "2"])
    return preflight_rank.compare_dims(empty_report(4), config, torch.device("cpu"))


def test_expert_mesh_dims_are_measured(ranks: RankPool) -> None:
    for rows in ranks.run(expert_dims, 4):
        assert [row[:3] for row in rows[1:]] == [
            ["dp_shard_cp = batch", "4", "1"],
            ["efsdp", "2", "2"],
            ["ep", "2", "2"],
        ]


def slowed(is_once: bool) -> tuple[list[float], int]:
    """Rank 1 measures 1.0, perhaps once; others 4.0. Return the speeds and how often."""
    measured = []

    def measure() -> float:
        measured.append(dist.get_rank())
        is_slow = dist.get_rank() == 1 and (len(measured) == 1 or not is_once)
        return 1.0 if is_slow else 4.0

    return preflight_rank.gather_speeds(measure, [[0, 1], [2, 3]]), len(measured)


@pytest.mark.parametrize("is_once", [True, False])
def test_what_is_slow_is_measured_again(ranks: RankPool, is_once: bool) -> None:
    speeds = [4.0 if is_once else 1.0, 4.0]
    assert ranks.run(slowed, 4, is_once) == [(speeds, 2)] * 4


def test_a_group_is_named_by_its_ranks_and_hosts() -> None:
    places = [preflight_rank.RankLocation(r, r // 2, f"n{r // 2}", r % 2 == 0) for r in range(4)]
    report = preflight_rank.Report(places, {}, [])
    assert preflight_rank.named(report, [0, 2]) == "ranks 0, 2 (n0, n1)"
    assert preflight_rank.named(report, [2, 3]) == "ranks 2, 3 (n1)"


def empty_report(count: int) -> preflight_rank.Report:
    """Report on ``count`` nodes of one rank before any check."""
    places = [preflight_rank.RankLocation(rank, rank, HOST, True) for rank in range(count)]
    return preflight_rank.Report(places, {}, [])


def test_too_little_disk_space_is_reported(ranks: RankPool, tmp_path: Path) -> None:
    for findings, title in ranks.run(compare_folders_of_large_model, 2, tmp_path):
        assert title == "1,000,000,000,000,000 parameters, 11175870.90 GiB per checkpoint"
        (finding,) = findings
        assert finding.startswith(f"node 0 ({HOST}): ")
        assert finding.endswith(f"GiB free in {tmp_path}; {title}")


def compare_folders_of_large_model(folder: Path) -> tuple[list[str], str]:
    config = load_config(CONFIG, ["--job.output_dir", str(folder)])
    report = empty_report(2)
    title = preflight_rank.compare_folders(report, config, 10**15)
    return report.findings, title


def test_unreadable_file_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may raise before it shows the file of another node."""
    monkeypatch.setattr(preflight_rank, "VISIBLE_SECONDS", 0.5)
    path = tmp_path / "token"
    path.mkdir()
    assert not preflight_rank.is_visible(path, "text")
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(preflight_rank.is_visible, path, "text")
        path.rmdir()
        path.write_text("text")
        assert future.result()
