"""Training works in a release that lacks a private name or changed its signature."""

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
from tests.lib import forked
from tests.lib.launch import curve
from tests.lib.ranks import RankPool

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
RECOMPILES = "torch._dynamo.config:recompile_limit"
IGNORED = "torch.utils.checkpoint:SAC_IGNORED_OPS"
MODE = "torch.utils._python_dispatch:TorchDispatchMode"
# PyTorch itself needs these, so they are hidden only from Shardloom.
NEEDED = {*FOREACH, GLOO, WORLD, TIMEOUT, STRIDED, "torch:Tensor._make_wrapper_subclass",
          "torch:_C._disabled_torch_function_impl", BUDGET, DYNAMO, RECOMPILES, IGNORED,
          LOCAL, MODE}  # fmt: skip

SHORT = {
    "training.steps": "2",
    "training.global_batch_size": "4",
    "checkpoint.enable": "false",
}
EXPERTS = {"model.name": "qwen3_moe", "experts.balance_bias_rate": "0.01"}
MIXED = {"training.dtype": "float32", "training.mixed_precision_param": "bfloat16"}
AUTO = {"training.dtype": "float32", "training.mixed_precision_param": "auto"}
FLOAT8 = {"float8.recipe": "tensorwise", "float8.emulate": "true", "float8.skip_small": "false"}
SELECTIVE = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective": "op"}
COMPILED = {"compile.enable": "true"}
# These change no loss.
SAME_CURVE = (
    "parallelism.data_parallel", "parallelism.context", "activation_checkpoint", "compile",
)  # fmt: skip
# Settings of a run on two ranks that uses the names, each by itself; its loss is the same without.
USES: list[tuple[dict[str, str], list[str]]] = [
    (
        EXPERTS | SELECTIVE | {"training.max_norm": "0.1"},
        [*sorted(FOREACH), GLOO, TIMEOUT, WORLD, STRIDED, MODE, IGNORED],
    ),
    (MIXED | {"training.seq_len": "128"}, ["torch:_softmax_backward_data"]),
    (
        FLOAT8 | {"parallelism.tensor_parallel_degree": "2"},
        ["torch:Tensor._make_wrapper_subclass"],
    ),
    (FLOAT8, ["torch:_C._disabled_torch_function_impl"]),
    (FLOAT8, [LOCAL]),
    ({"parallelism.context_parallel_degree": "2"}, [ALL_TO_ALL]),
    (
        {"parallelism.data_parallel": "ddp"},
        ["torch.distributed._composable.replicate_with_fsdp:replicate", SET_TIMEOUT],
    ),
    (AUTO, ["torch.cpu:_is_avx512_bf16_supported", "torch.cpu:_is_amx_tile_supported"]),
    (
        COMPILED | {"compile.backend": "eager"},
        [RECOMPILES, "torch._dynamo.utils:get_compilation_metrics"],
    ),
]
# The key that requires the name, and a run that sets it.
REQUIRED: dict[str, tuple[str, dict[str, str]]] = {
    STRIDED: ("parallelism.tensor_parallel_degree", {"parallelism.tensor_parallel_degree": "2"}),
    BUDGET: (
        "activation_checkpoint.mode",
        {"activation_checkpoint.mode": "memory_budget"} | COMPILED,
    ),
    DYNAMO: ("compile.enable", SELECTIVE | COMPILED),
}
# Used only on GPUs, in plans of a step, in benchmarks or after a failure.
NOT_IN_A_RUN = {
    "torch:_scaled_mm",
    "torch._inductor.config:_micro_pipeline_tp",
    "torch._inductor.config:bucket_all_gathers_fx",
    "torch._inductor.config:bucket_reduce_scatters_fx",
    "torch._inductor.config:wrap_inductor_compiled_regions",
    "torch.distributed._symmetric_memory:enable_symm_mem_for_group",
    "torch.cuda.memory:_record_memory_history",
    "torch.cuda.memory:_dump_snapshot",
    "torch._subclasses.fake_tensor:FakeTensorMode",
    "torch._subclasses.fake_tensor:FakeTensor",
    "torch.distributed.tensor.debug:_clear_sharding_prop_cache",
    "torch.utils._pytree:tree_leaves",
    "torch._C:_current_graph_task_id",
    "torch._C:_get_dispatch_mode",
    "torch._C:_TorchDispatchModeKey.FAKE",
    "torch._C._distributed_c10d:_dump_fr_trace",
    "torch.testing._internal.distributed.fake_pg:FakeStore",
    "torch._dynamo.utils:calculate_time_spent",
    "torch._utils:_get_available_device_type",
}


def missing(path: str) -> None:
    """Remove a private name, or hide it from Shardloom if PyTorch needs it."""
    if path not in NEEDED:
        owner, name = _owner(path)
        delattr(owner, name)
        return
    resolve = pkgutil.resolve_name

    def hidden(name: str) -> Any:
        if name == path:
            raise AttributeError(name)
        return resolve(name)

    pkgutil.resolve_name = hidden


def changed(path: str) -> None:
    """Change the signature of a private name."""

    def other(*, novel: int) -> int:
        return novel

    owner, name = _owner(path)
    setattr(owner, name, other)


def _owner(path: str) -> tuple[Any, str]:
    module, _, dotted = path.partition(":")
    *outer, name = dotted.split(".")
    return pkgutil.resolve_name(":".join([module, ".".join(outer)]) if outer else module), name


def plant(fault: Fault, paths: list[str]) -> None:
    for path in paths:
        fault(path)


CASES: list[tuple[Fault, dict[str, str], list[str]]] = [
    *((missing, keys, paths) for keys, paths in USES),
    *(
        (changed, keys, changeable)
        for keys, paths in USES
        if (changeable := [path for path in paths if path not in NEEDED])
    ),
]


def test_every_private_name_has_a_case() -> None:
    used = [path for _, paths in USES for path in paths]
    assert {*used, *REQUIRED, *NOT_IN_A_RUN, *OPERATIONS} == set(PRIVATE)


@pytest.fixture(scope="module")
def unpatched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, str]], Any]:
    """Curve of a run with all private names, by its settings that change it."""

    @cache
    def trained(uses: tuple[tuple[str, str], ...]) -> Any:
        return train(tmp_path_factory.mktemp("plain"), dict(uses))[1]

    def changing(uses: dict[str, str]) -> Any:
        return trained(tuple(item for item in uses.items() if not item[0].startswith(SAME_CURVE)))

    return changing


def train(folder: Path, uses: dict[str, str], plant: Callable[[], None] = forked.nothing) -> Any:
    """Train two steps on two ranks; return the log, and loss and gradient norm by step."""
    with forked.started(folder, 2, plant=plant, **SHORT, **uses) as processes:
        assert forked.codes(processes) == {0}, forked.log(folder)
    return forked.log(folder), curve(folder)


@pytest.mark.parametrize(
    ("fault", "keys", "paths"), CASES, ids=[f"{f.__name__}-{paths[0]}" for f, _, paths in CASES]
)
def test_curve_is_the_same_without_private_names(
    fault: Fault,
    keys: dict[str, str],
    paths: list[str],
    unpatched: Callable[[dict[str, str]], Any],
    tmp_path: Path,
) -> None:
    log, found = train(tmp_path, keys, partial(plant, fault, paths))
    for step, values in unpatched(keys).items():
        is_exact = "training.dtype" not in keys
        assert found[step] == pytest.approx(values, rel=1e-9 if is_exact else 2e-2)
    for path in paths:
        lines = [line for line in log.splitlines() if PRIVATE[path].consequence in line]
        named = [line for line in lines if path.replace(":", ".") in line]
        if path == SET_TIMEOUT and hasattr(dist, "set_timeout"):
            assert not named, "the public function is used, so nothing is lost"
            continue
        assert named, path
        assert torch.__version__ in named[0]


@pytest.mark.parametrize("path", REQUIRED)
def test_keys_that_need_a_private_name_are_rejected(path: str, tmp_path: Path) -> None:
    key, uses = REQUIRED[path]
    plant, n_ranks = partial(missing, path), 4 if path == STRIDED else 2
    with forked.started(tmp_path, n_ranks, plant=plant, **SHORT, **uses) as processes:
        assert forked.codes(processes) == {2}, forked.log(tmp_path)
    log = forked.log(tmp_path)
    assert f"{key}: not available: PyTorch {torch.__version__}" in log
    assert "Traceback" not in log


@pytest.fixture
def empty_probe_cache() -> Any:
    """Names are probed again, now and after the test."""
    for cached in (compat.has, compat._probe):
        cached.cache_clear()
    yield
    for cached in (compat.has, compat._probe):
        cached.cache_clear()


@pytest.mark.parametrize("path", [*sorted(NOT_IN_A_RUN), *OPERATIONS])
def test_missing_name_is_logged_and_required_by_key(
    path: str,
    empty_probe_cache: None,
    monkeypatch: pytest.MonkeyPatch,
    captured_log: pytest.LogCaptureFixture,
) -> None:
    if path in OPERATIONS:
        # A deleted op would be resolved again.
        monkeypatch.setattr(*_owner(path.rpartition(".")[0]), None)
    else:
        monkeypatch.delattr(*_owner(path))
    with pytest.raises(ConfigError, match=f"some.key: .* {torch.__version__.partition('+')[0]}"):
        compat.require(path, key="some.key")
    assert compat.find(path) is None
    assert PRIVATE[path].consequence in captured_log.text


class Gloo:
    """ProcessGroupGloo with a constructor argument that no release has."""

    class _Options:
        _threads, _timeout, _devices = 2, None, None

    @staticmethod
    def create_default_device() -> None: ...

    def __init__(self, *place: Any, novel: bool, timeout: timedelta) -> None:
        self.given = place, novel, timeout


def test_unknown_gloo_arguments_are_passed_on(
    empty_probe_cache: None, monkeypatch: pytest.MonkeyPatch, captured_log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dist, "ProcessGroupGloo", Gloo)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    compat.limit_gloo_to_one_thread()
    gloo: Any = dist.ProcessGroupGloo
    timeout = timedelta(seconds=7)
    group = gloo("store", 0, 2, timeout=timeout, novel=True)
    assert group.given == (("store", 0, 2), True, timeout)
    assert PRIVATE[GLOO].consequence in captured_log.text


def all_to_all(kind: str) -> list[Any]:
    """Output and gradient of an all-to-all with uneven splits."""
    function: Any = compat._AllToAll.apply if kind == "fallback" else compat.all_to_all()
    rank = dist.get_rank()
    output_splits, input_splits = ([1, 2], [1, 3]) if rank == 0 else ([3, 1], [2, 1])
    x = (
        (torch.arange(sum(input_splits), dtype=torch.float64) + 10 * rank)
        .unsqueeze(-1)
        .requires_grad_()
    )
    out = function(x, output_splits, input_splits, dist.group.WORLD)
    (out * torch.arange(1.0, 1 + sum(output_splits)).unsqueeze(-1)).sum().backward()
    return [out.flatten().tolist(), x.grad.flatten().tolist()]


def test_fallback_all_to_all_equals_pytorchs(ranks: RankPool) -> None:
    assert ranks.run(all_to_all, 2, "fallback") == ranks.run(all_to_all, 2, "pytorch")


@pytest.mark.parametrize("name", ["add_", "mul_", "zero_", "norm"])
def test_foreach_fallback_equals_foreach(
    name: str, empty_probe_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def results() -> list[torch.Tensor]:
        tensors = [torch.arange(1.0, 4), torch.arange(5.0, 6)]
        arguments: dict[str, Any] = {
            "add_": [torch.ones(3), torch.ones(1)],
            "mul_": torch.tensor(3.0),
            "norm": 2.0,
        }
        returned = compat.foreach(name, tensors, *([arguments[name]] if name in arguments else []))
        return returned if name == "norm" else tensors

    fused = results()
    monkeypatch.setattr(compat, "find", lambda path: None)
    assert all(map(torch.equal, results(), fused))
