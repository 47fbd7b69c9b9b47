"""Clipped sums recorded once, as CUDA graphs, and replayed for every batch of the same size.

On a GPU the private step of a small model takes longer to ask for than to do. A graph asks once. The
batch is filled up to a round size with copies of its first record that count for nothing.
"""

import gc
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hush.core.errors import Unsupported
from hush.core.parts import Clipping
from hush.core.tape import ClippedSum, CoordinateMask
from hush.gradients.recording import Loss, Views, record
from hush.gradients.tape import OccupiedTape

_ROUND = 64
_WARM_UP = 3


@dataclass(frozen=True, eq=False)
class _Graph:
    """The work for one size of batch, with the memory that it reads from and writes to."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    targets: Tensor
    present: Tensor
    output: ClippedSum


class Replay:
    """Clips and sums batches by replaying the work of an earlier one.

    Records whose gradient is not finite, or whose norm has to be looked at twice, make the batch be
    done anew without replay. The graphs are recorded anew when a parameter or buffer has moved, is
    frozen or is unfrozen, or a module changes between training and evaluation; other changes to what
    forward() does are not seen. Coordinates that are sampled are drawn anew in every replay, from the
    generator that `thin` draws from.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, clipping: Clipping, views: Views | None = None
    ) -> None:
        if not next(model.parameters()).is_cuda:
            raise Unsupported(
                "replay=True records CUDA graphs and the model is not on a GPU. Move the model there, "
                "or leave replay out."
            )
        if len(clipping.sensitivity(sum(p.numel() for p in model.parameters() if p.requires_grad))) > 1:
            raise Unsupported(
                "replay=True is for clipping in one block, and blocks of a gradient are not replayed. "
                "Leave replay out."
            )
        self._model = model
        self._loss = loss
        self._clipping = clipping
        self._views = views
        self._graphs: dict[Any, _Graph] = {}
        # one after the other, the graphs share their memory
        self._pool = torch.cuda.graph_pool_handle()
        self._state: Any = None

    def __call__(
        self,
        inputs: Tensor,
        targets: Tensor,
        thin: CoordinateMask | None = None,
        generator: torch.Generator | None = None,
        present: Tensor | None = None,
    ) -> ClippedSum:
        state = self._now(generator)
        if state != self._state:
            self._graphs.clear()
            # memory of its own, in case something of the old graphs is still in use
            self._pool = torch.cuda.graph_pool_handle()
            self._state = state
        size = -(-len(inputs) // _ROUND) * _ROUND
        key = (size, inputs.shape[1:], inputs.dtype, targets.shape[1:], targets.dtype)
        if key not in self._graphs:
            self._graphs[key] = self._captured(inputs, targets, size, thin, generator)
        graph = self._graphs[key]
        for held, given in ((graph.inputs, inputs), (graph.targets, targets)):
            held[: len(given)] = given
        graph.present[: len(inputs)] = True if present is None else present
        if len(inputs) < size:
            graph.inputs[len(inputs) :] = inputs[0]
            graph.targets[len(inputs) :] = targets[0]
            graph.present[len(inputs) :] = False
        graph.graph.replay()
        if int(graph.output.skipped):
            # in the same places and shapes, by which kernels round
            tape = record(self._model, self._loss, graph.inputs, graph.targets, self._views)
            return self._clipping.clip(OccupiedTape(tape, graph.present), thin)
        return graph.output

    def _captured(
        self,
        inputs: Tensor,
        targets: Tensor,
        size: int,
        thin: CoordinateMask | None,
        generator: torch.Generator | None,
    ) -> _Graph:
        first, second = (given[:1].repeat(size, *[1] * (given.dim() - 1)) for given in (inputs, targets))
        present = torch.ones(size, device=inputs.device, dtype=torch.bool)

        def work() -> ClippedSum:
            tape = record(self._model, self._loss, first, second, self._views)
            return self._clipping.clip(OccupiedTape(tape, present), thin)

        graph = torch.cuda.CUDAGraph()
        # what is drawn to warm up is thrown away, and drawn again: a resumed run draws the same
        sources = [torch.cuda.default_generators[torch.cuda.current_device()]]
        sources += [] if generator is None else [generator]
        before = [source.get_state() for source in sources]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                work()
        torch.cuda.current_stream().wait_stream(side)
        for source, state in zip(sources, before, strict=True):
            source.set_state(state)
        if generator is not None:
            graph.register_generator_state(generator)
        # a graph of another step that is collected meanwhile would spoil this one
        collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                output = work()
        finally:
            if collecting:
                gc.enable()
        return _Graph(graph, first, second, present, output)

    def _now(self, generator: torch.Generator | None) -> Any:
        """What the recorded work took for granted."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        return (
            [(tensor.data_ptr(), tensor.requires_grad) for tensor in tensors],
            [module.training for module in self._model.modules()],
            torch.is_autocast_enabled("cuda"),
            generator,
        )
