"""Reducers: the parts of a step that differ between one process (`Local`) and several.

`distributed.process_group.ProcessGroup` sums over ranks, and `distributed.sharded.Sharded` also over
parameters that are split over ranks.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hush.accounting.ledger import Ledger
from hush.core.guarantee import Adjacency
from hush.core.plan import Plan
from hush.core.randomness import RandomSource, Stream, substream
from hush.gradients.models import WHOLE
from hush.training.data import Batch, Data, count
from hush.training.fingerprint import fingerprint
from hush.training.noisy_mean import NoisyMean, set_gradients
from hush.training.run_folder import open_ledger

if TYPE_CHECKING:
    import torch

    from hush.training.step import PrivateStep

LedgerOrPath = Ledger | str | os.PathLike[str] | None


@dataclass(frozen=True)
class StepStreams:
    """Random sources of one rank in one step, except for the draw of slots."""

    masks: Stream  # dropout, views and coins of a clipping
    coordinates: RandomSource  # sampling of coordinates
    noise: RandomSource


@dataclass(frozen=True)
class Placement:
    """Slots that a rank can read, numbered over the data of all ranks."""

    first: int
    """Number of this rank's first slot."""
    held: int
    slots: int
    """Number of slots of all ranks."""


class Local:
    """Reducer of one process. Its subclasses override the work of several ranks."""

    processes: Any = False
    """Ranks, as an option of a step or a run (`hush.Distributed.processes`)."""
    rank = 0
    size = 1
    shard = False
    """Whether each rank holds its own part of the data."""
    modules = WHOLE
    """Modules, whose parameters may be split over ranks."""
    _placed: tuple[Data, Placement] | None = None

    @property
    def description(self) -> str:
        """Ranks that draw the noise; a resumed run with the same description repeats it."""
        sharded = " with sharded parameters" * self.modules.sharded
        return f"{self.size} process{'es' * (self.size > 1)}{sharded}"

    def propagate_errors(self) -> AbstractContextManager[None]:
        """Context that raises its errors on all ranks."""
        return nullcontext()

    def exchange(self, phase: str, content: Any = None) -> list[Any]:
        """Small plain data of each rank, by rank."""
        return [content]

    def agree(self, phase: str, facts: dict[str, Any], content: Any = None) -> list[Any]:
        """Like `exchange`, after a check that facts, by name, are equal on all ranks."""
        return [content]

    def gather(self, phase: str, content: Any) -> list[Any]:
        """Any object of each rank, by rank."""
        return [content]

    def broadcast(self, phase: str, make: Callable[[], Any], *, short: bool = False) -> Any:
        """Object that rank 0 makes; `short` plain data take one collective less."""
        return make()

    def copy_of_first(self, phase: str, tensors: list[Tensor]) -> None:
        """Overwrite tensors with rank 0's."""

    def joined(self, step: "PrivateStep", generator: "torch.Generator | None") -> "Local":
        """Reducer of a new step, after the ranks have compared their steps."""
        return self

    def open_ledger(self, ledger: LedgerOrPath, plan: Plan, adjacency: Adjacency) -> Ledger:
        """Ledger of rank 0; a copy in memory on the other ranks."""
        return open_ledger(ledger, plan, adjacency)

    def shared_source(self, source: RandomSource) -> RandomSource:
        """Source that gives every rank the numbers of rank 0."""
        return source

    def adopt_weights(self) -> None:
        """Compare the weights of all ranks before the next sum: they were set outside of the step."""

    def check_whole(self, what: str) -> None:
        """Raise if `what` needs all weights, and a rank holds a part of them."""

    def free_whole_weights(self) -> None:
        """Keep only this rank's shards of sharded weights: evaluation leaves some of them whole."""

    def begin(self, step: "PrivateStep", data: Data, present: Tensor | None, steps: int | None) -> int:
        """Number of slots of all ranks, after they have compared weights, data and steps to come."""
        self._placed = None
        return self.place(data).slots

    def place(self, data: Data) -> Placement:
        """Place of this rank's data among the slots of all ranks; the ranks compare new data."""
        if self._placed is None or self._placed[0] is not data:
            self._placed = data, self._compare(data)
        return self._placed[1]

    def _compare(self, data: Data) -> Placement:
        slots = count(data)
        return Placement(0, slots, slots)

    def share(self, batch: Batch) -> Batch:
        """Slots of a batch that this rank processes, numbered as in its own data (sensitive)."""
        return batch

    def streams(self, source: RandomSource) -> StepStreams:
        """Sources of the next step; the step's source advances equally on every rank."""
        return StepStreams(substream(source), source, source)

    def own_source(self, source: RandomSource, use: str) -> RandomSource:
        """Source of one rank's own numbers for one use in a step."""
        return source

    def probing(self, data: Data) -> AbstractContextManager[None]:
        """Context of the probe; it gathers weights that are split over ranks."""
        return nullcontext()

    def block_sizes(self, parameters: dict[str, nn.Parameter], sizes: list[int]) -> list[int]:
        """Sizes of the blocks of a clipped sum that this rank holds."""
        return sizes

    def tape(self, tape: Any) -> Any:
        """Tape that sums over this rank's parameters."""
        return tape

    def sum_share(
        self, step: "PrivateStep", batch: Batch, compute: Callable[[Batch, int | None], Tensor]
    ) -> Tensor:
        """Clipped sum of this rank's share of a batch, in a number of passes or None (sensitive)."""
        return compute(batch, None)

    def whole_sum(self, total: Tensor) -> Tensor:
        """Sum of the shares of all ranks (sensitive)."""
        return total

    def noisy_mean(self, compute: Callable[[], Tensor], mean: NoisyMean) -> Tensor:
        """Noisy mean of the shares of all ranks; noise is drawn during the computation if that pays."""
        with mean.early() as drawn:
            total, ready = compute(), drawn()
        return mean(total, ready)

    def privatize(self, total: Tensor, mean: NoisyMean) -> Tensor:
        """Noisy mean of the sum over all ranks, which every rank has; `total` is overwritten."""
        return mean(total)

    def charge(self, ledger: Ledger, plan: Plan, **details: Any) -> None:
        """Charge a step on disk; returns only if every rank has the release that is charged."""
        ledger.charge(plan, **details)

    def set_gradients(self, parameters: list[nn.Parameter], update: Tensor) -> None:
        """Set the gradients of the parameters from this rank's flat vector."""
        set_gradients(parameters, update)

    def release_name(self, update: Tensor) -> str:
        """Fingerprint of a private gradient, the same on every rank."""
        return fingerprint([update])

    def trial_name(self, update: Tensor, name: str) -> str:
        """Name of a trial, of the records of the test on all ranks."""
        return name
