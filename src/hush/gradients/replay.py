"""Clipped sums captured once as CUDA graphs, and replayed for every batch of the same size.

On a GPU, launching the kernels of a small model's private step takes longer than running them. A graph
launches them at once. The batch is padded to a round size with copies of its first record at weight 0.
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
from hush.gradients.tape import MaskedTape

_SIZE_MULTIPLE = 64
_WARM_UP = 3


@dataclass(frozen=True, eq=False)
class _Graph:
    """The graph for one batch size, with the memory that it reads from and writes to."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    targets: Tensor
    present: Tensor
    output: ClippedSum


class Replay:
    """Clipped sums of batches by replaying a captured CUDA graph.

    A batch with a record whose gradient is not finite, or whose ghost norm would be recomputed, is
    computed without the graph. Graphs are captured anew when a parameter or buffer has moved, is
    frozen or is unfrozen, or a module changes between training and evaluation; other changes to what
    forward() does are not seen. Sampled coordinates are drawn anew in every replay, from the generator
    that `mask` draws from.
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
        mask: CoordinateMask | None = None,
        generator: torch.Generator | None = None,
        present: Tensor | None = None,
    ) -> ClippedSum:
        """The clipped sum of one batch.

        Args:
            inputs: of the batch, records first.
            targets: of the batch.
            mask: zeroes coordinates at random, for plans that sample them.
            generator: the one that `mask` draws from.
            present: whether each slot holds a record; all of them if left out.

        Returns:
            The clipped sum; it may be the graph's own memory, overwritten by the next replay.
        """
        state = self._captured_state(generator)
        if state != self._state:
            self._graphs.clear()
            # memory of its own, in case something of the old graphs is still in use
            self._pool = torch.cuda.graph_pool_handle()
            self._state = state
        size = -(-len(inputs) // _SIZE_MULTIPLE) * _SIZE_MULTIPLE
        key = (size, inputs.shape[1:], inputs.dtype, targets.shape[1:], targets.dtype)
        if key not in self._graphs:
            self._graphs[key] = self._capture(inputs, targets, size, mask, generator)
        graph = self._graphs[key]
        graph.inputs[: len(inputs)] = inputs
        graph.targets[: len(targets)] = targets
        graph.present[: len(inputs)] = True if present is None else present
        if len(inputs) < size:
            graph.inputs[len(inputs) :] = inputs[0]
            graph.targets[len(inputs) :] = targets[0]
            graph.present[len(inputs) :] = False
        graph.graph.replay()
        if int(graph.output.skipped):
            # in the same places and shapes, by which kernels round
            tape = record(self._model, self._loss, graph.inputs, graph.targets, self._views)
            return self._clipping.clip(MaskedTape(tape, graph.present), mask)
        return graph.output

    def _capture(
        self,
        inputs: Tensor,
        targets: Tensor,
        size: int,
        mask: CoordinateMask | None,
        generator: torch.Generator | None,
    ) -> _Graph:
        inputs, targets = (rows[:1].repeat(size, *[1] * (rows.dim() - 1)) for rows in (inputs, targets))
        present = torch.ones(size, device=inputs.device, dtype=torch.bool)

        def clipped_sum() -> ClippedSum:
            tape = record(self._model, self._loss, inputs, targets, self._views)
            return self._clipping.clip(MaskedTape(tape, present), mask)

        graph = torch.cuda.CUDAGraph()
        # what the warm-up draws is discarded, and drawn again: a resumed run draws the same
        sources = [torch.cuda.default_generators[torch.cuda.current_device()]]
        sources += [] if generator is None else [generator]
        before = [source.get_state() for source in sources]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                clipped_sum()
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
                output = clipped_sum()
        finally:
            if collecting:
                gc.enable()
        return _Graph(graph, inputs, targets, present, output)

    def _captured_state(self, generator: torch.Generator | None) -> Any:
        """What a captured graph takes as given."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        return (
            [(tensor.data_ptr(), tensor.requires_grad) for tensor in tensors],
            [module.training for module in self._model.modules()],
            torch.is_autocast_enabled("cuda"),
            generator,
        )
