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


class Recorder(Protocol):
    """Records what a function does on a device, and repeats it."""

    n_bytes: int
    """Memory that recordings have taken from the device so far."""

    def warm_up(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` as ``record`` will. It may compile, choose kernels, and allocate."""

    def record(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Return the result of ``function``, and a call that computes it again in its memory.

        The result has no values before that call.
        """

    def forget(self) -> None:
        """Free all recordings, which nobody may repeat any more."""


class CudaRecorder:
    """Records CUDA graphs, which share one pool of memory because they run one after the other.

    It owns them: a graph that anyone else held would hold its memory, and NCCL's communicators.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self.n_bytes = 0
        self.forget()

    def forget(self) -> None:
        # A new pool: one without graphs cannot be recorded to while a tensor lives in it, such as
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

    def record(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
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
    """Graphs of all steps of one kind: the shapes, and whether there are one, two or more."""

    kind: tuple[Any, ...]
    buffers: Inputs
    first: _Graph
    middle: _Graph | None
    last: _Graph | None
    """None if a step has one microbatch."""
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
        self, run: RunMicrobatch, parameters: Sequence[nn.Parameter], recorder: Recorder
    ) -> None:
        self._run, self._parameters, self._recorder = run, parameters, recorder
        self._warm: set[tuple[Any, ...]] = set()
        self._graphs: _Graphs | None = None
        self._n_recorded = 0
        self.recording: int | None = None
        """Number of the recording whose memory has the gradients; None if they are elsewhere."""

    def __call__(self, microbatches: Sequence[Inputs]) -> list[torch.Tensor]:
        """Accumulate the gradients of a step; return the loss of each microbatch, 0-d."""
        shapes = {tuple(None if t is None else t.shape for t in each) for each in microbatches}
        # All microbatches between the first and the last are alike.
        kind = (*shapes, min(len(microbatches), 3))
        if kind not in self._warm or len(shapes) > 1:
            self._warm.add(kind)
            # Of a phase that has ended. The step would need their memory a second time.
            self.forget()
            self.recording = None
            return self._recorder.warm_up(lambda: run_step(self._run, microbatches))
        if self._graphs is None or self._graphs.kind != kind:
            self.forget()
            self._graphs = self._record(microbatches, kind)
            self._n_recorded += 1
        self.recording = self._n_recorded
        return self._replay(self._graphs, microbatches)

    def forget(self) -> None:
        """Free the graphs; the next step records again. Weights may be elsewhere in memory."""
        self._graphs = None
        self._recorder.forget()

    def _replay(self, graphs: _Graphs, microbatches: Sequence[Inputs]) -> list[torch.Tensor]:
        losses = []
        for index, inputs in enumerate(microbatches):
            is_last = index == len(microbatches) - 1
            graph = graphs.first if index == 0 else graphs.last if is_last else graphs.middle
            assert graph is not None
            for buffer, tensor in zip(graphs.buffers, inputs, strict=True):
                if buffer is not None and tensor is not None:
                    buffer.copy_(tensor)
            graph.replay()
            # The next replay overwrites it.
            losses.append(graph.loss.clone())
        for parameter, gradient in zip(self._parameters, graphs.gradients, strict=True):
            parameter.grad = gradient
        return losses

    def _record(self, microbatches: Sequence[Inputs], kind: tuple[Any, ...]) -> _Graphs:
        """Record a step of such microbatches, in order: each continues from the one before it."""
        n, before = len(microbatches), self._recorder.n_bytes
        buffers = tuple(None if t is None else t.clone() for t in microbatches[0])

        def record(*, is_last: bool) -> _Graph:
            loss, replay = self._recorder.record(lambda: self._run(buffers, is_last=is_last))
            return _Graph(replay, loss)

        first = record(is_last=n == 1)
        middle = record(is_last=False) if n > 2 else None
        last = record(is_last=True) if n > 1 else None
        gib = (self._recorder.n_bytes - before) / 2**30
        logger.info("CUDA graphs: recorded a step of %d microbatches, in %.2f GiB", n, gib)
        gradients = [parameter.grad for parameter in self._parameters]
        return _Graphs(kind, buffers, first, middle, last, gradients)


class UpdateGraph:
    """Runs the update of the weights: as a graph where ``MicrobatchGraphs`` has the gradients."""

    def __init__(self, update: Callable[..., torch.Tensor], recorder: Recorder) -> None:
        """``update`` takes 0-d tensors, and returns one."""
        self._update, self._recorder = update, recorder
        self._recording: int | None = None
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._result = torch.empty(())
        self._replay: Callable[[], None] = lambda: None

    def __call__(self, recording: int | None, *inputs: torch.Tensor) -> torch.Tensor:
        """Return ``update(*inputs)``. ``recording``: that of the gradients."""
        if recording is None:  # As in the first step, which also makes the optimizer's state.
            return self._recorder.warm_up(lambda: self._update(*inputs))
        if recording != self._recording:
            self.forget()
            self._recording, self._inputs = recording, tuple(each.clone() for each in inputs)
            self._result, self._replay = self._recorder.record(lambda: self._update(*self._inputs))
        for buffer, tensor in zip(self._inputs, inputs, strict=True):
            buffer.copy_(tensor)
        self._replay()
        # The next replay overwrites it.
        return self._result.clone()

    def forget(self) -> None:
        """Free the graph; the next step with gradients of a recording records again."""
        self._recording = None
        self._recorder.forget()
