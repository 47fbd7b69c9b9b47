"""Clipped sums captured once as CUDA graphs, and replayed for every batch of the same size.

On a GPU, launching the kernels of a small model's private step takes longer than running them. A graph
launches them at once. The batch is padded to a round size with copies of its first record at weight 0.
"""

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hush.clipping.norms import L2Linf, Linf
from hush.core.errors import PerformanceWarning, Unsupported
from hush.core.parts import Clipping
from hush.core.tape import ClippedSum, CoordinateMask
from hush.gradients.cuda_graphs.batch_graph import BatchGraph
from hush.gradients.cuda_graphs.captured_state import given, signature
from hush.gradients.cuda_graphs.cuda_graph import CapturedGraph, CaptureError, capture_graph
from hush.gradients.cuda_graphs.padding import (
    occupied_slots,
    pad,
    pad_with_false,
    padded_size,
    records_of,
)
from hush.gradients.recording import record
from hush.gradients.tape import MaskedTape
from hush.gradients.tree import Loss, Views, tree_leaves, tree_map

_MOST_GRAPHS = 64
_MOST_CHANGES = 16
"""Changes of what the graphs take as given after which capturing them costs more than they save."""

Capture = Callable[..., CapturedGraph[Any]]


class Replay:
    """Clipped sums of batches in padded layout, by replaying a captured CUDA graph where there is one.

    **Guarantee.** The layout, places and shapes by which kernels round, follows from the number of slots
    alone: a batch that is computed without a graph is padded like any other. That is one with a record
    whose gradient is not finite, or whose ghost norm would be recomputed, and one of a shape that could
    not be captured. See docs/guarantees/tape.md, 8.

    Graphs are captured anew when a parameter or buffer moves, is frozen or unfrozen, when autocast or an
    allowed precision changes, or when a number, string or truth value in an attribute of a module does
    (training mode, a dropout probability). Other changes to what forward() does, such as a global,
    are not seen. Random numbers that the model draws on the GPU, and sampled coordinates, are
    fresh in every replay.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        clipping: Clipping,
        views: Views | None = None,
        *,
        most_records: int | None = None,
        required: bool = True,
        capture: Capture = capture_graph,
    ) -> None:
        """Replay of a model's clipped sums, before anything is captured.

        Args:
            model: the trained one.
            loss: one value per record.
            clipping: in one block.
            views: of each record, whose mean gradient is clipped.
            most_records: physical batch: no batch is padded beyond it.
            required: raise where a batch cannot be captured; otherwise warn once and do without.
            capture: makes graphs.
        """
        self._model = model
        self._loss = loss
        self._clipping = clipping
        self._views = views
        # graphs materialise every record that may be clamped, and the others' sums must not round
        # otherwise for one that makes a graph's result useless
        self._materialise = _every_coordinate if isinstance(clipping, (Linf, L2Linf)) else None
        self._most_records = most_records
        self._required = required
        self._capture_graph = capture
        self._graphs: dict[Any, BatchGraph | None] = {}
        # one after the other, the graphs share their memory
        self._pool: Any = None
        self._given: Any = None
        self._trained: set[tuple[int, int]] = set()
        """Address and size of the parameters that the graphs give sums for."""
        self._unconfirmed = False
        """Whether graphs were replayed since what they take as given was last compared."""
        self._stale = False
        """Whether such a replay turned out to be of what is no longer given."""
        self._generator: torch.Generator | None = None
        self._changes = 0
        self._explained = False
        self._finite: Tensor | None = None
        """Whether all sums replayed since the last question were of finite gradients."""

    def __call__(
        self,
        inputs: Any,
        targets: Any,
        mask: CoordinateMask | None = None,
        generator: torch.Generator | None = None,
        present: Tensor | None = None,
        *,
        randomness: Callable[..., AbstractContextManager[None]] = lambda **_: nullcontext(),
        verify: bool = True,
    ) -> ClippedSum:
        """The clipped sum of one batch.

        Args:
            inputs: of the batch, records first: a tensor or a tree of them.
            targets: of the batch.
            mask: zeroes coordinates at random, for plans that sample them.
            generator: the one that `mask` draws from.
            present: whether each slot holds a record; all of them if left out.
            randomness: context that seeds torch's generators; with `host=False` only the GPU's.
            verify: see that what a graph takes as given has not changed before it is replayed, wait for
                the GPU to say that the replay can be used, and compute the batch without one if not.
                Otherwise `failed` says so later, and the sum must not be used then; only for parameters
                that `fits`.

        Returns:
            The clipped sum; it may be the graph's own memory, overwritten by the next replay.
        """
        mask = mask or self._materialise
        self._generator = generator
        size = padded_size(records_of(inputs), self._most_records)
        key = size, signature(inputs), signature(targets)
        graph = None if verify else self._graphs.get(key)
        if graph is not None:
            self._unconfirmed = True
        else:
            self._forget_if_changed()
            if key not in self._graphs:
                self._graphs[key] = self._capture(inputs, targets, size, mask, generator)
            graph = self._graphs[key]
        if graph is None:
            rows, labels = (tree_map(part, lambda rows: pad(rows, size)) for part in (inputs, targets))
            slots = pad_with_false(occupied_slots(inputs, present), size)
            with randomness():
                return self.clip_padded(rows, labels, slots, mask)
        graph.fill(inputs, targets, present)
        with randomness(host=False):  # a model that draws on the CPU is not captured
            sources = _sources(generator, graph.present.device)
            before = [source.get_state() for source in sources] if verify else []
            graph.captured.replay()
            if not verify or not self.failed():
                return graph.captured.output
            # in the same places and shapes, by which kernels round, and with the same random numbers
            for source, state in zip(sources, before, strict=True):
                source.set_state(state)
            return self.clip_padded(graph.inputs, graph.targets, graph.present, mask)

    @property
    def captured(self) -> bool:
        """Whether there is a graph."""
        return any(graph is not None for graph in self._graphs.values())

    def fits(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the graphs, if there are any, give sums for these parameters and no others."""
        return {(value.data_ptr(), value.numel()) for value in parameters} == self._trained

    def confirm(self) -> None:
        """Compare what replays without `verify` took as given, for `failed`; the GPU works meanwhile."""
        if self._unconfirmed:
            self._forget_if_changed()

    def failed(self) -> bool:
        """Whether a replay since the last question cannot be used; waits for the GPU.

        It met what is not finite, or something that it takes as given had changed.
        """
        self.confirm()
        stale, self._stale = self._stale, False
        if self._finite is None or bool(self._finite):
            return stale
        self._finite.fill_(True)
        return True

    def clip_padded(
        self, inputs: Any, targets: Any, present: Tensor, mask: CoordinateMask | None
    ) -> ClippedSum:
        """The clipped sum without a graph, of a batch that is padded already."""
        tape = record(self._model, self._loss, inputs, targets, self._views)
        return self._clipping.clip(MaskedTape(tape, present), mask)

    def _capture(
        self,
        inputs: Any,
        targets: Any,
        size: int,
        mask: CoordinateMask | None,
        generator: torch.Generator | None,
    ) -> BatchGraph | None:
        """Graph of batches of this shape; None where there is to be none."""
        if not self._required and self._changes > _MOST_CHANGES:
            self._explain("what forward() reads from the model's attributes changes again and again")
            return None
        if not self._required and len(self._graphs) >= _MOST_GRAPHS:
            return None
        # memory of the graph's own, which is not to be the batch's
        rows, labels = (
            tree_map(part, lambda value: pad(value[:1], size).clone()) for part in (inputs, targets)
        )
        device = next(tree_leaves(inputs)).device
        present = torch.ones(size, device=device, dtype=torch.bool)
        if self._finite is None:
            self._finite = torch.ones((), device=device, dtype=torch.bool)
        all_finite = self._finite
        before = all_finite.clone()  # of replays of this step that nobody has asked about yet

        def work() -> ClippedSum:
            """The clipped sum, zero where a gradient or what an empty slot holds is not finite."""
            tape = record(self._model, self._loss, rows, labels, self._views)
            clipped = self._clipping.clip(MaskedTape(tape, present), mask)
            total = {name: part.contiguous() for name, part in clipped.total.items()}
            # an empty slot is not skipped, and what it holds times a weight of 0 may not be finite
            lengths = torch.stack([norm.double() for norm in torch._foreach_norm(list(total.values()))])
            finite = lengths.isfinite().all() & (clipped.skipped == 0)
            all_finite.logical_and_(finite)
            for part in total.values():  # in place: a second copy of all sums would stay in the graph
                part.masked_fill_(~finite, 0.0)
            return replace(clipped, total=total)

        try:
            captured = self._capture_graph(work, self._memory(), generator)
        except CaptureError as error:
            self._pool = None
            self._explain(str(error))
            return None
        finally:
            all_finite.copy_(before)
        return BatchGraph(captured, rows, labels, present, [size])

    def _explain(self, reason: str) -> None:
        """Raise, or warn the first time, that a batch cannot be replayed."""
        if self._required:
            raise Unsupported(
                f"replay=True records the work of a batch as a CUDA graph, and this model's cannot be "
                f"recorded: {reason}. Leave replay out, and steps are computed without."
            )
        if self._explained:
            return
        self._explained = True
        warnings.warn(
            f"the GPU waits for Python in this model's steps, and they cannot be replayed as a CUDA "
            f"graph: {reason}. They are computed without one; replay=False says that this is meant.",
            PerformanceWarning,
            stacklevel=2,
        )

    def _memory(self) -> Any:
        if self._pool is None and torch.cuda.is_available():
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def _forget_if_changed(self) -> None:
        """Drop all graphs if something that they take as given has changed."""
        unconfirmed, self._unconfirmed = self._unconfirmed, False
        now = (*given(self._model, self._loss), self._generator)
        if now == self._given:
            return
        if unconfirmed:
            self._stale = True
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the graphs may be at work
        if self._graphs:
            self._changes += 1
        trained = [value for value in self._model.parameters() if value.requires_grad]
        self._trained = {(value.data_ptr(), value.numel()) for value in trained}
        self._graphs.clear()
        self._given = now
        # memory of its own, in case something of the old graphs is still in use
        self._pool = None


def _every_coordinate(values: Tensor) -> Tensor:
    """Mask that keeps all coordinates."""
    return values


def _sources(generator: torch.Generator | None, device: torch.device) -> list[torch.Generator]:
    """Generators that a graph draws from."""
    shared = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
    return [*shared, *([] if generator is None else [generator])]
