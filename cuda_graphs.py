"""Microbatches and the update as CUDA graphs, each of which the host launches at once.

A graph repeats what its capture did, with the same memory. So everything that changes from step to
step is in a tensor that lives on: inputs are copied to fixed buffers, weights are updated in place,
gradients stay in the graphs' memory.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn as nn

from runtime.log import logger

Inputs = tuple[torch.Tensor | None, ...]
"""Tensors on the device, and None for those that this run does not have."""


class RunMicrobatch(Protocol):
    """Accumulates the gradients of one microbatch; returns its loss, 0-d."""

    def __call__(self, inputs: Inputs, *, is_last: bool) -> torch.Tensor: ...


def run_step(run: RunMicrobatch, microbatches: Sequence[Inputs]) -> list[torch.Tensor]:
    """Accumulate the gradients of a step's microbatches; return their losses, 0-d."""
    n = len(microbatches)
    return [run(inputs, is_last=i == n - 1) for i, inputs in enumerate(microbatches)]


class GraphPool(Protocol):
    """Captures what functions do on a device, to replay it."""

    n_bytes: int
    """Memory that captures have taken from the device so far."""

    def warm_up(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` as ``capture`` will. It may compile, choose kernels, and allocate."""

    def capture(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Return the result of ``function``, and a call that computes it again in its memory.

        The result has no values before that call.
        """

    def reset(self) -> None:
        """Free all graphs, which nobody may replay any more."""


class CudaGraphPool:
    """CUDA graphs, which share one pool of memory because they run one after the other.

    It owns them: a graph that anyone else held would hold its memory, and NCCL's communicators.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self.n_bytes = 0
        self.reset()

    def reset(self) -> None:
        # A new pool: one without graphs cannot be captured to while a tensor lives in it, such as
        # a scale of float8.
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], Any]) -> Any:
        # Autograd runs backward on the streams of forward, and a capture waits for no other.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = function()
        torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def capture(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        # Other threads load data and save checkpoints meanwhile.
        capture: AbstractContextManager[None] = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        with capture:
            before = torch.cuda.memory_reserved()
            result = function()
            self.n_bytes += torch.cuda.memory_reserved() - before
        self._graphs.append(graph)
        return result, graph.replay


class _Graph(NamedTuple):
    replay: Callable[[], None]
    loss: torch.Tensor


class _Graphs(NamedTuple):
    """Graphs of all steps with one, two, or at least three microbatches."""

    buffers: Inputs
    captured: list[_Graph]
    """Of the first microbatch, those between, and the last: one, two or three."""
    gradients: list[torch.Tensor | None]
    """Of each parameter after a step."""


class MicrobatchGraphs:
    """Runs the microbatches of a step: eagerly in the first step of its kind, then as graphs.

    The first, the last and all other microbatches of a step differ in what they communicate, and
    the first one allocates the gradients. Gradients that a step leaves in ``parameters`` are those
    of the graphs: the next step overwrites them. Only the latest kind has graphs, because each has
    gradients of its own, and phases of a ramp do not return.
    """

    def __init__(
        self, run: RunMicrobatch, parameters: Sequence[nn.Parameter], pool: GraphPool
    ) -> None:
        """All microbatches have the same shapes."""
        self._run, self._parameters, self._pool = run, parameters, pool
        self._warm: set[int] = set()
        self._graphs: _Graphs | None = None
        self._n_captures = 0
        self.capture_id: int | None = None
        """Number of the capture whose memory has the gradients; None if they are elsewhere."""

    def __call__(self, microbatches: Sequence[Inputs]) -> list[torch.Tensor]:
        """Accumulate the gradients of a step; return the loss of each microbatch, 0-d."""
        # All microbatches between the first and the last are alike.
        n_graphs = min(len(microbatches), 3)
        if n_graphs not in self._warm:
            self._warm.add(n_graphs)
            # Of a phase that has ended. The step would need their memory a second time.
            self._free()
            self.capture_id = None
            return self._pool.warm_up(lambda: run_step(self._run, microbatches))
        if self._graphs is None or len(self._graphs.captured) != n_graphs:
            self._free()
            self._graphs = self._capture(microbatches[0], n_graphs)
            self._n_captures += 1
        self.capture_id = self._n_captures
        return self._replay(self._graphs, microbatches)

    def reset(self) -> None:
        """Free the graphs; the next step of each kind runs eagerly.

        Call after loading: weights may be elsewhere in memory, and an update that makes state of
        the optimizer must not be captured, because a replay would make it again.
        """
        self._warm.clear()
        self._free()

    def _free(self) -> None:
        self._graphs = None
        self._pool.reset()

    def _replay(self, graphs: _Graphs, microbatches: Sequence[Inputs]) -> list[torch.Tensor]:
        losses = []
        for index, inputs in enumerate(microbatches):
            is_last = index == len(microbatches) - 1
            graph = graphs.captured[-1 if is_last else min(index, 1)]
            for buffer, tensor in zip(graphs.buffers, inputs, strict=True):
                if buffer is not None and tensor is not None:
                    assert tensor.shape == buffer.shape, "all microbatches have the same shapes"
                    buffer.copy_(tensor)
            graph.replay()
            # The next replay overwrites it.
            losses.append(graph.loss.clone())
        for parameter, gradient in zip(self._parameters, graphs.gradients, strict=True):
            parameter.grad = gradient
        return losses

    def _capture(self, inputs: Inputs, n_graphs: int) -> _Graphs:
        """Capture microbatches like ``inputs``, in order: each continues from the one before it."""
        before = self._pool.n_bytes
        buffers = tuple(None if t is None else t.clone() for t in inputs)

        def capture(*, is_last: bool) -> _Graph:
            loss, replay = self._pool.capture(lambda: self._run(buffers, is_last=is_last))
            return _Graph(replay, loss)

        captured = [capture(is_last=i == n_graphs - 1) for i in range(n_graphs)]
        gib = (self._pool.n_bytes - before) / 2**30
        logger.info("CUDA graphs: captured a step in %d graphs, which take %.2f GiB", n_graphs, gib)
        return _Graphs(buffers, captured, [parameter.grad for parameter in self._parameters])


class UpdateGraph:
    """Runs the update of the weights: as a graph where ``MicrobatchGraphs`` has the gradients."""

    def __init__(self, update: Callable[..., torch.Tensor], pool: GraphPool) -> None:
        """``update`` takes 0-d tensors, and returns one."""
        self._update, self._pool = update, pool
        self._capture_id: int | None = None
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._result = torch.empty(())
        self._replay: Callable[[], None] = lambda: None

    def __call__(self, capture_id: int | None, *inputs: torch.Tensor) -> torch.Tensor:
        """Return ``update(*inputs)``. ``capture_id``: that of the gradients."""
        if capture_id is None:  # As in the first step, which also makes the optimizer's state.
            return self._pool.warm_up(lambda: self._update(*inputs))
        if capture_id != self._capture_id:
            self.reset()
            self._capture_id, self._inputs = capture_id, tuple(each.clone() for each in inputs)
            self._result, self._replay = self._pool.capture(lambda: self._update(*self._inputs))
        for buffer, tensor in zip(self._inputs, inputs, strict=True):
            buffer.copy_(tensor)
        self._replay()
        # The next replay overwrites it.
        return self._result.clone()

    def reset(self) -> None:
        """Free the graph; the next step whose gradients a capture has captures again."""
        self._capture_id = None
        self._pool.reset()
