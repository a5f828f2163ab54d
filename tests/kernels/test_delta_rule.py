"""The chunkwise gated delta rule matches the recurrence, also at document boundaries."""

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.delta_rule import CHUNK, _chunk_scan, _chunk_scan_backward, delta_rule
from tests.lib.delta_rule import token_by_token


@pytest.mark.parametrize("sizes", [(150,), (64, 64, 22), (63, 1, 1, 65, 20), (1,) * 150])
def test_chunks_match_token_by_token(sizes: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 150, 3, n, generator=generator, dtype=torch.float64) for n in (8, 8, 12)
    )
    g, beta = torch.rand(2, 2, 150, 3, generator=generator, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in (q, k, v, -3 * g, beta)]
    initial_state = torch.randn(
        2, 3, 8, 12, generator=generator, dtype=torch.float64, requires_grad=True
    )
    ids = torch.cat([torch.full((2, size), number) for number, size in enumerate(sizes)], dim=1)
    results = []
    for rule in (delta_rule, token_by_token):
        out, state = rule(*inputs, ids, initial_state)
        total = out.square().sum() + state.square().sum()
        results.append([out, state, *torch.autograd.grad(total, [*inputs, initial_state])])
    for got, want in zip(*results, strict=True):
        assert torch.allclose(got, want, rtol=1e-10, atol=1e-10)
    state = delta_rule(*inputs, ids)[1]
    assert state.untyped_storage().nbytes() == state.nbytes, (
        "the state shares storage with all chunks' states"
    )


@pytest.mark.parametrize("n", [1, 3])
def test_chunk_scan_passes_opcheck(n: int) -> None:
    b, c, k, v = 2, 4, 5, 6
    shapes = ((b, n, c, k), (b, n, c, v), (b, n, k, c), (b, n, 1, 1), (b, k, v))
    inputs = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    opcheck(_chunk_scan, inputs)
    assert torch.autograd.gradcheck(_chunk_scan, inputs)


def test_graph_size_is_independent_of_seq_len() -> None:
    """An unrolled loop would compile kernels for every chunk."""
    sizes = []
    for s in (2 * CHUNK, 8 * CHUNK):
        q, k, v = (torch.randn(1, s, 2, 8) for _ in range(3))
        g, beta = -torch.rand(2, 1, s, 2)
        sizes.append(len(make_fx(delta_rule)(q, k, v, g, -beta, None, None).graph.nodes))
    assert sizes[0] == sizes[1]


class _OpRecorder(TorchDispatchMode):
    """Recorder of ops on floating-point tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(a, torch.Tensor) and a.is_floating_point() for a in args):
            self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_ops_are_deterministic_on_gpus() -> None:
    """CPUs do not raise for the ops that torch.use_deterministic_algorithms rejects on GPUs."""
    q, k, v = (torch.rand(1, 70, 2, 8, requires_grad=True) for _ in range(3))
    g, beta = (torch.rand(1, 70, 2, requires_grad=True) for _ in range(2))

    with _OpRecorder() as recorder:
        delta_rule(q, k, v, -g, beta, None)[0].sum().backward()
        # Ops inside a custom op are not dispatched to the mode.
        inputs = [torch.rand(2, 3, *shape) for shape in ((4, 5), (4, 6), (5, 4), (1, 1))]
        w, u, k_end, gamma = inputs
        gradients = _chunk_scan._init_fn(w, u, k_end, gamma, torch.rand(2, 5, 6))
        _chunk_scan_backward._init_fn(*gradients, w, k_end, gamma)

    assert {"linalg_solve_triangular", "baddbmm", "baddbmm_"} <= recorder.names
    assert recorder.names.isdisjoint({"cumsum", "put_", "kthvalue", "median", "histc"})
