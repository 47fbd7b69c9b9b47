"""Reducers: the operations of a step that differ between one process and several.

`Local` is for one process. `distributed.process_group.ProcessGroup` sums over ranks, and
`distributed.sharded.Sharded` supports parameters that are sharded over ranks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hush.accounting.ledger import Ledger, LedgerOrPath
from hush.core.guarantee import Adjacency
from hush.core.plan import Plan
from hush.core.randomness import Stream, substream
from hush.gradients.models import WHOLE
from hush.training.data import Batch, Data, count
from hush.training.fingerprint import fingerprint
from hush.training.noisy_mean import NoisyMean, set_gradients
from hush.training.run_folder import open_ledger

if TYPE_CHECKING:
    import torch

    from hush.training.step import PrivateStep


@dataclass(frozen=True)
class StepStreams:
    """Random sources of one rank in one step, other than for drawing slots."""

    masks: Stream  # dropout, views and coins of a clipping
    coordinates: Stream  # sampling of coordinates
    noise: Stream


class Local:
    """Reducer of one process; subclasses are for several ranks."""

    processes: Any = False
    """Ranks, as in `hush.Distributed.processes`."""
    rank = 0
    size = 1
    modules = WHOLE
    """Modules; their parameters may be sharded over ranks."""
    _compared: tuple[Data, int] | None = None

    @property
    def description(self) -> str:
        """Description of the ranks that draw the noise; equal descriptions draw equal noise."""
        sharded = " with sharded parameters" * self.modules.sharded
        return f"{self.size} process{'es' * (self.size > 1)}{sharded}"

    def propagate_errors(self) -> AbstractContextManager[None]:
        """Context that propagates its errors to all ranks."""
        return nullcontext()

    def exchange(self, phase: str, content: Any = None) -> list[Any]:
        """Small plain data of each rank, by rank."""
        return [content]

    def agree(self, phase: str, facts: dict[str, Any], content: Any = None) -> list[Any]:
        """Like `exchange`, after verifying that the facts are equal on all ranks."""
        return [content]

    def gather(self, phase: str, content: Any) -> list[Any]:
        """Any object of each rank, by rank."""
        return [content]

    def broadcast(self, phase: str, make: Callable[[], Any], *, short: bool = False) -> Any:
        """Object created by rank 0; `short` plain data save one collective."""
        return make()

    def copy_of_first(self, phase: str, tensors: list[Tensor]) -> None:
        """Overwrite tensors with those of rank 0."""

    def joined(self, step: "PrivateStep", generator: "torch.Generator | None") -> "Local":
        """Reducer of a new step, after a handshake of the ranks."""
        return self

    def open_ledger(self, ledger: LedgerOrPath | None, plan: Plan, adjacency: Adjacency) -> Ledger:
        """Ledger of rank 0; a copy in memory on the other ranks."""
        return open_ledger(ledger, plan, adjacency)

    def shared_source(self, source: Stream) -> Stream:
        """Source with the same numbers on every rank."""
        return source

    def adopt_weights(self) -> None:
        """Compare the weights of all ranks before the next sum, because they were set outside of the
        step."""

    def check_whole(self, what: str) -> None:
        """Raise if `what` needs all weights, and they are sharded."""

    def whole_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state of a step with whole tensors, for a checkpoint."""
        return state

    def own_state(self, step: "PrivateStep", state: dict[str, Any]) -> dict[str, Any]:
        """The state of a checkpoint with this rank's shards in place of whole tensors."""
        return state

    def free_whole_weights(self) -> None:
        """Free gathered weights after evaluation, except this rank's shards."""

    def begin(self, step: "PrivateStep", data: Data, present: Tensor | None, steps: int | None) -> int:
        """Number of slots, after the ranks have compared weights, data and steps to come."""
        self._compared = None
        return self.slots(data)

    def slots(self, data: Data) -> int:
        """Number of slots; the ranks compare new data."""
        if self._compared is None or self._compared[0] is not data:
            self._compared = data, self._compare(data)
        return self._compared[1]

    def _compare(self, data: Data) -> int:
        return count(data)

    def share(self, batch: Batch) -> Batch:
        """Slots of a batch that this rank processes (sensitive)."""
        return batch

    def streams(self, source: Stream) -> StepStreams:
        """Random sources of the next step; the step's source advances equally on every rank."""
        return StepStreams(substream(source), source, source)

    def own_source(self, source: Stream, use: str) -> Stream:
        """Random source of this rank for one purpose in a step."""
        return source

    def probing(self, data: Data) -> AbstractContextManager[None]:
        """Context of the probe; it gathers sharded weights."""
        return nullcontext()

    def block_sizes(self, parameters: dict[str, nn.Parameter], sizes: list[int]) -> list[int]:
        """Sizes of this rank's part of each block of a clipped sum."""
        return sizes

    def tape(self, tape: Any) -> Any:
        """Tape that returns sums for this rank's parameters."""
        return tape

    def sum_share(
        self, step: "PrivateStep", batch: Batch, compute: Callable[[Batch, int | None], Tensor]
    ) -> Tensor:
        """Clipped sum of this rank's share of a batch (sensitive)."""
        return compute(batch, None)

    def whole_sum(self, total: Tensor) -> Tensor:
        """Sum over all ranks (sensitive)."""
        return total

    def noisy_mean(self, compute: Callable[[], Tensor], mean: NoisyMean) -> Tensor:
        """Noisy mean of the shares of all ranks."""
        return mean(compute())

    def privatize(self, total: Tensor, mean: NoisyMean) -> Tensor:
        """Noisy mean of the sum over all ranks, on every rank; `total` is overwritten."""
        return mean(total)

    def charge(self, ledger: Ledger, plan: Plan, **details: Any) -> None:
        """Charge a step; returns only if every rank has the charged release."""
        ledger.charge(plan, **details)

    def set_gradients(self, parameters: list[nn.Parameter], update: Tensor) -> None:
        """Set the gradients of the parameters from this rank's flat vector."""
        set_gradients(parameters, update)

    def release_name(self, update: Tensor) -> str:
        """Fingerprint of a private gradient, the same on every rank."""
        return fingerprint([update])

    def trial_name(self, update: Tensor, name: str) -> str:
        """Label of a trial, from the test records of all ranks."""
        return name
