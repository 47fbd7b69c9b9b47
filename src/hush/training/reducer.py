"""Reducers: operations of a step that differ between one process and several processes.

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
    """Random sources of one rank in one step, except the source for drawing slots."""

    masks: Stream  # dropout, views and randomised clipping
    coordinates: Stream  # coordinate sampling
    noise: Stream


class Local:
    """Reducer for one process; subclasses are for several ranks."""

    processes: Any = False
    """Process group, as in `hush.Distributed.processes`."""
    rank = 0
    size = 1
    modules = WHOLE
    """Access to the parameters, which may be sharded over ranks."""
    _compared: tuple[Data, int] | None = None

    @property
    def description(self) -> str:
        """Number of ranks and sharding; noise is repeatable only if the description is the same."""
        sharded = " with sharded parameters" * self.modules.sharded
        return f"{self.size} process{'es' * (self.size > 1)}{sharded}"

    def propagate_errors(self) -> AbstractContextManager[None]:
        """Context that propagates errors to all ranks."""
        return nullcontext()

    def exchange(self, phase: str, content: Any = None) -> list[Any]:
        """All-gather small plain data; returns a list by rank."""
        return [content]

    def agree(self, phase: str, facts: dict[str, Any], content: Any = None) -> list[Any]:
        """Like `exchange`, after verifying that the facts are equal on all ranks."""
        return [content]

    def gather(self, phase: str, content: Any) -> list[Any]:
        """All-gather any object; returns a list by rank."""
        return [content]

    def broadcast(self, phase: str, make: Callable[[], Any], *, short: bool = False) -> Any:
        """Broadcast the object that rank 0 creates; `short` plain data saves one collective."""
        return make()

    def copy_of_first(self, phase: str, tensors: list[Tensor]) -> None:
        """Overwrite tensors with the tensors of rank 0."""

    def joined(self, step: "PrivateStep", generator: "torch.Generator | None") -> "Local":
        """Reducer of a new step, after a handshake of the ranks."""
        return self

    def open_ledger(self, ledger: LedgerOrPath | None, plan: Plan, adjacency: Adjacency) -> Ledger:
        """Ledger of rank 0; a copy in memory on the other ranks."""
        return open_ledger(ledger, plan, adjacency)

    def shared_source(self, source: Stream) -> Stream:
        """Random source that draws the same numbers on every rank."""
        return source

    def adopt_weights(self) -> None:
        """Compare the weights of all ranks before the next sum, after a change outside of the step."""

    def check_whole(self, what: str) -> None:
        """Raise if parameters are sharded, because `what` needs whole weights."""

    def whole_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Gather the state of a step into whole tensors, for a checkpoint."""
        return state

    def own_state(self, step: "PrivateStep", state: dict[str, Any]) -> dict[str, Any]:
        """Replace the whole tensors of a checkpoint by this rank's shards."""
        return state

    def free_whole_weights(self) -> None:
        """Free gathered weights, except this rank's shards."""

    def begin(self, step: "PrivateStep", data: Data, present: Tensor | None, steps: int | None) -> int:
        """Compare weights, data and planned steps of all ranks; return the number of slots."""
        self._compared = None
        return self.slots(data)

    def slots(self, data: Data) -> int:
        """Number of slots; the ranks first compare data that is new."""
        if self._compared is None or self._compared[0] is not data:
            self._compared = data, self._compare(data)
        return self._compared[1]

    def _compare(self, data: Data) -> int:
        return count(data)

    def share(self, batch: Batch) -> Batch:
        """Part of a batch that this rank processes (sensitive)."""
        return batch

    def streams(self, source: Stream) -> StepStreams:
        """Random sources of the next step; the source of the step advances equally on all ranks."""
        return StepStreams(substream(source), source, source)

    def own_source(self, source: Stream, use: str) -> Stream:
        """Random source of this rank for one purpose in a step."""
        return source

    def probing(self, data: Data) -> AbstractContextManager[None]:
        """Context for the probe; it gathers sharded weights."""
        return nullcontext()

    def block_sizes(self, parameters: dict[str, nn.Parameter], sizes: list[int]) -> list[int]:
        """Sizes of this rank's part of each block of a clipped sum."""
        return sizes

    def tape(self, tape: Any) -> Any:
        """Tape whose sums are this rank's shards."""
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
        """Noisy mean of the sum over all ranks, from a function that computes this rank's sum."""
        return mean(compute())

    def privatize(self, total: Tensor, mean: NoisyMean) -> Tensor:
        """Noisy mean of the sum over all ranks, on every rank; `total` is overwritten."""
        return mean(total)

    def charge(self, ledger: Ledger, plan: Plan, **details: Any) -> None:
        """Charge a step; return only if every rank has the charged release."""
        ledger.charge(plan, **details)

    def set_gradients(self, parameters: list[nn.Parameter], update: Tensor) -> None:
        """Set the gradients of the parameters from this rank's flat vector."""
        set_gradients(parameters, update)

    def release_name(self, update: Tensor) -> str:
        """Fingerprint of a private gradient; equal on all ranks."""
        return fingerprint([update])

    def trial_name(self, update: Tensor, name: str) -> str:
        """Label of a trial, computed from the labels of all ranks."""
        return name
