"""A release in which a private name is gone, or is called in another way, trains all the same."""

import pkgutil
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from config import ConfigError
from runtime import compat
from runtime.private_names import PRIVATE
from tests.ranks import RankPool
from tests.reliability import forked

Fault = Callable[[str], None]

FOREACH = {path for path in PRIVATE if path.startswith("torch:_foreach_")}
OPERATIONS = [path for path in PRIVATE if path.startswith("torch:ops.")]
C10D, GLOO = "torch.distributed.distributed_c10d", "torch.distributed:ProcessGroupGloo._Options"
WORLD, TIMEOUT = f"{C10D}:_world", f"{C10D}:default_pg_timeout"
SET_TIMEOUT = f"{C10D}:_set_pg_timeout"
STRIDED = "torch.distributed.tensor.placement_types:_StridedShard"
LOCAL = "torch.distributed.tensor:DTensor._local_tensor"
ALL_TO_ALL = "torch.distributed._functional_collectives:all_to_all_single_autograd"
BUDGET = "torch._functorch.config:activation_memory_budget"
DYNAMO = "torch._dynamo.config:skip_fwd_side_effects_in_bwd_under_checkpoint"
IGNORED = "torch.utils.checkpoint:SAC_IGNORED_OPS"
# PyTorch itself would fail without them, so they are only hidden from us.
NEEDED = {*FOREACH, GLOO, WORLD, TIMEOUT, STRIDED, "torch:Tensor._make_wrapper_subclass",
          "torch:_C._disabled_torch_function_impl", BUDGET, DYNAMO, IGNORED, LOCAL}  # fmt: skip

SHORT = {"training.steps": "3", "checkpoint.enable": "false"}
EXPERTS = {"model.name": "qwen3_moe", "experts.balance_bias_rate": "0.01"}
MIXED = {"training.dtype": "float32", "training.mixed_precision_param": "bfloat16"}
AUTO = {"training.dtype": "float32", "training.mixed_precision_param": "auto"}
FLOAT8 = {"float8.recipe": "tensorwise", "float8.emulate": "true", "float8.skip_small": "false"}
SELECTIVE = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective": "op"}
COMPILED = {"compile.enable": "true"}
# What a run uses them in, on two ranks, and the loss is the same without them.
USES: dict[str, dict[str, str]] = {
    "torch:_foreach_norm": {},
    "torch:_foreach_mul_": {"training.max_norm": "0.1"},
    "torch:_foreach_add_": EXPERTS,
    "torch:_foreach_zero_": EXPERTS,
    "torch:_softmax_backward_data": MIXED | {"training.seq_len": "128"},
    "torch:Tensor._make_wrapper_subclass": FLOAT8,
    "torch:_C._disabled_torch_function_impl": FLOAT8,
    LOCAL: FLOAT8,
    GLOO: {},
    TIMEOUT: {},
    WORLD: {},
    SET_TIMEOUT: {},
    ALL_TO_ALL: {"parallelism.context_parallel_degree": "2"},
    "torch.distributed._composable.replicate_with_fsdp:replicate": {
        "parallelism.data_parallel": "ddp"
    },
    STRIDED: {},
    IGNORED: SELECTIVE,
    "torch.cpu:_is_avx512_bf16_supported": AUTO,
    "torch.cpu:_is_amx_tile_supported": AUTO,
}
# What cannot be had without them, and the key that asks for it.
REFUSED: dict[str, tuple[str, dict[str, str]]] = {
    STRIDED: ("parallelism.tensor_parallel_degree", {"parallelism.tensor_parallel_degree": "2"}),
    BUDGET: (
        "activation_checkpoint.mode",
        {"activation_checkpoint.mode": "memory_budget"} | COMPILED,
    ),
    DYNAMO: ("compile.enable", SELECTIVE | COMPILED),
}
# Only GPUs and benchmarks use them.
ELSEWHERE = {
    "torch:_scaled_mm",
    "torch._inductor.config:_micro_pipeline_tp",
    "torch._inductor.config:bucket_all_gathers_fx",
    "torch._inductor.config:bucket_reduce_scatters_fx",
    "torch._inductor.config:wrap_inductor_compiled_regions",
    "torch.distributed._symmetric_memory:enable_symm_mem_for_group",
    "torch.cuda.memory:_record_memory_history",
    "torch.cuda.memory:_dump_snapshot",
    "torch.testing._internal.distributed.fake_pg:FakeStore",
    "torch._dynamo.utils:calculate_time_spent",
    "torch._utils:_get_available_device_type",
}
CASES = [("missing", path) for path in USES] + [
    ("changed", path) for path in USES if path not in NEEDED
]


def missing(path: str) -> None:
    """Take a private name away, from PyTorch too unless it needs it."""
    if path not in NEEDED:
        owner, name = _owner(path)
        delattr(owner, name)
        return
    resolve = pkgutil.resolve_name

    def without(name: str) -> Any:
        if name == path:
            raise AttributeError(name)
        return resolve(name)

    pkgutil.resolve_name = without


def changed(path: str) -> None:
    """Let a private name be called in another way."""

    def other(*, novel: int) -> int:
        return novel

    owner, name = _owner(path)
    setattr(owner, name, other)


def _owner(path: str) -> tuple[Any, str]:
    module, _, dotted = path.partition(":")
    *outer, name = dotted.split(".")
    return pkgutil.resolve_name(":".join([module, ".".join(outer)]) if outer else module), name


FAULTS: dict[str, Fault] = {"missing": missing, "changed": changed}


def test_every_private_name_has_a_case() -> None:
    assert {*USES, *REFUSED, *ELSEWHERE, *OPERATIONS} == set(PRIVATE)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, str]], Any]:
    """The curve of a run in which nothing is missing, by what it uses."""

    @cache
    def trained(uses: tuple[tuple[str, str], ...]) -> Any:
        return train(tmp_path_factory.mktemp("plain"), dict(uses))[1]

    return lambda uses: trained(tuple(uses.items()))


def train(folder: Path, uses: dict[str, str], plant: Callable[[], None] = forked.nothing) -> Any:
    """What two ranks say, and the loss and gradient norm of three steps."""
    with forked.started(folder, 2, plant=plant, **SHORT, **uses) as processes:
        assert forked.codes(processes) == {0}, forked.log(folder)
    return forked.log(folder), forked.curve(folder)


@pytest.mark.parametrize(("fault", "path"), CASES)
def test_a_run_without_it_learns_the_same(
    fault: str, path: str, plain: Callable[[dict[str, str]], Any], tmp_path: Path
) -> None:
    said, found = train(tmp_path, USES[path], partial(FAULTS[fault], path))
    for step, values in plain(USES[path]).items():
        is_exact = "training.dtype" not in USES[path]
        assert found[step] == pytest.approx(values, rel=1e-9 if is_exact else 2e-2)
    lines = [line for line in said.splitlines() if PRIVATE[path].lost in line]
    if path == SET_TIMEOUT and hasattr(dist, "set_timeout"):
        assert not lines, "the public function is taken, so nothing is lost"
        return
    line, *_ = lines
    assert torch.__version__ in line
    assert path.replace(":", ".") in line


@pytest.mark.parametrize("path", REFUSED)
def test_what_needs_it_is_refused(path: str, tmp_path: Path) -> None:
    key, uses = REFUSED[path]
    plant, n_ranks = partial(missing, path), 4 if path == STRIDED else 2
    with forked.started(tmp_path, n_ranks, plant=plant, **SHORT, **uses) as processes:
        assert forked.codes(processes) == {2}, forked.log(tmp_path)
    said = forked.log(tmp_path)
    assert f"{key}: not available with torch {torch.__version__}" in said
    assert "Traceback" not in said


@pytest.fixture
def untried() -> Any:
    """Names are probed anew, now and afterwards."""
    for cached in (compat.has, compat._probe):
        cached.cache_clear()
    yield
    for cached in (compat.has, compat._probe):
        cached.cache_clear()


@pytest.mark.parametrize("path", [*ELSEWHERE, *OPERATIONS])
def test_elsewhere_it_is_told(
    path: str, untried: None, monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    if path in OPERATIONS:
        # One that is deleted is looked up again.
        monkeypatch.setattr(*_owner(path.rpartition(".")[0]), None)
    else:
        monkeypatch.delattr(*_owner(path))
    with pytest.raises(ConfigError, match=f"some.key: .* {torch.__version__.partition('+')[0]}"):
        compat.require(path, key="some.key")
    assert compat.find(path) is None
    assert PRIVATE[path].lost in told.text


class Gloo:
    """As PyTorch's, but made with an argument that no release has."""

    class _Options:
        _threads, _timeout, _devices = 2, None, None

    @staticmethod
    def create_default_device() -> None: ...

    def __init__(self, *place: Any, novel: bool, timeout: timedelta) -> None:
        self.given = place, novel, timeout


def test_what_a_wrapper_does_not_know_is_passed_on(
    untried: None, monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dist, "ProcessGroupGloo", Gloo)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    compat.give_gloo_one_worker()
    made: Any = dist.ProcessGroupGloo
    timeout = timedelta(seconds=7)
    group = made("store", 0, 2, timeout=timeout, novel=True)
    assert group.given == (("store", 0, 2), True, timeout)
    assert PRIVATE[GLOO].lost in told.text


def exchanged(kind: str) -> list[Any]:
    """What an all-to-all of uneven parts brings, and its gradient."""
    exchange: Any = compat._AllToAll.apply if kind == "ours" else compat.all_to_all()
    rank = dist.get_rank()
    come, go = ([1, 2], [1, 3]) if rank == 0 else ([3, 1], [2, 1])
    x = (torch.arange(sum(go), dtype=torch.float64) + 10 * rank).unsqueeze(-1).requires_grad_()
    out = exchange(x, come, go, dist.group.WORLD)
    (out * torch.arange(1.0, 1 + sum(come)).unsqueeze(-1)).sum().backward()
    return [out.flatten().tolist(), x.grad.flatten().tolist()]


def test_our_all_to_all_is_pytorchs(ranks: RankPool) -> None:
    assert ranks.run(exchanged, 2, "ours") == ranks.run(exchanged, 2, "pytorch's")


@pytest.mark.parametrize("name", ["add_", "mul_", "zero_", "norm"])
def test_one_by_one_is_the_same(name: str, untried: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def results() -> list[torch.Tensor]:
        tensors = [torch.arange(1.0, 4), torch.arange(5.0, 6)]
        more: dict[str, Any] = {
            "add_": [torch.ones(3), torch.ones(1)],
            "mul_": torch.tensor(3.0),
            "norm": 2.0,
        }
        made = compat.foreach(name, tensors, *([more[name]] if name in more else []))
        return made if name == "norm" else tensors

    together = results()
    monkeypatch.setattr(compat, "find", lambda path: None)
    assert all(map(torch.equal, results(), together))
