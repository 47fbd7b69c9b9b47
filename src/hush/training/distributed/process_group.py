"""Reducer of a process group: each rank sums its share, adds the noise of a slice, and all gather.

The proof that the law is that of one process is in docs/guarantees/distributed.md.
"""

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hush.accounting.ledger import Ledger, Snapshot
from hush.core.errors import DataError, InvalidValue, LedgerError, ProcessFailed, Unsupported, short_repr
from hush.core.guarantee import Adjacency
from hush.core.parts import Sampling
from hush.core.plan import Plan
from hush.core.randomness import (
    RandomSource,
    Stream,
    SystemSource,
    derive_source,
    fill_state,
    substream,
)
from hush.core.value import check_kind
from hush.training.data import Batch, Data, count, held_slots
from hush.training.distributed.handshake import (
    check_same_draw,
    check_same_step,
    check_same_weights,
)
from hush.training.distributed.processes import Processes, group_initialized, process_group
from hush.training.distributed.shares import NO_RECORD, Placement, place, share_of
from hush.training.fingerprint import fingerprint
from hush.training.noisy_mean import BlockNoise, NoisyMean
from hush.training.options import Distributed
from hush.training.reducer import LedgerOrPath, Local, StepStreams
from hush.training.run_folder import open_ledger

if TYPE_CHECKING:
    from hush.training.step import PrivateStep


def reducer_of(distributed: Distributed, *, sharded: bool = False, users: bool = False) -> Local:
    """Reducer of a step or a run, before any handshake.

    Args:
        distributed: Options of the caller.
        sharded: Whether parameters are split over the ranks; then one rank is a group as well.
        users: Whether units of privacy own several records.
    """
    check_kind("distributed", distributed, Distributed)
    processes, shard = process_group(distributed.processes, sharded=sharded), distributed.shard
    if not isinstance(shard, bool):
        raise InvalidValue(
            f"shard={short_repr(shard)} must be True or False: whether the data passed on a rank is its "
            "own part, or all of it.",
            key="shard",
        )
    if shard and users:
        raise Unsupported(
            "shard=True with units: an owner with records on two ranks would be drawn, clipped and "
            "counted on each of them, and cost more than is charged, and no rank sees all owners. Let "
            "every rank read all records (leave shard out)."
        )
    if shard and processes is None and not group_initialized():
        raise InvalidValue(
            "shard=True and torch.distributed is not initialised: a part of the data would be trained "
            "on as all of it. Call torch.distributed.init_process_group first (one process will do), or "
            "leave shard out.",
            key="shard",
        )
    # the part of the only rank is all of the data
    return Local() if processes is None else ProcessGroup(processes, shard=shard)


class ProcessGroup(Local):
    """Reducer of several ranks that all hold the whole model."""

    def __init__(self, processes: Processes, *, shard: bool) -> None:
        """A reducer before the handshake.

        Args:
            processes: Ranks that run the step together.
            shard: Whether each rank holds its own part of the data.
        """
        self.processes = processes
        self.rank, self.size, self.shard = processes.rank, processes.size, shard
        self.propagate_errors = processes.propagate_errors  # type: ignore[method-assign]
        self.gather = processes.gather  # type: ignore[method-assign]
        self.copy_of_first = processes.copy_of_first  # type: ignore[method-assign]
        self._placed: tuple[Data, Placement] | None = None
        self._adopted = False
        """Whether weights were set outside of the step since the ranks last compared theirs."""

    def exchange(self, phase: str, content: Any = None) -> list[Any]:
        said: list[Any] = self.processes.exchange(phase, content)
        return said

    def broadcast(self, phase: str, make: Callable[[], Any]) -> Any:
        return self.processes.broadcast_object(phase, make)

    @property
    def description(self) -> str:  # type: ignore[override]
        return f"{self.size} process{'es' * (self.size > 1)}"

    def joined(self, step: "PrivateStep", generator: torch.Generator | None) -> "ProcessGroup":
        check_same_step(step, self.processes, generator)
        if "torch.distributed.fsdp" not in sys.modules:  # importing it takes as long as many steps
            return self
        from hush.training.distributed.sharded import Sharded, sharded_modules

        modules = sharded_modules(step, self.processes)
        return self if modules is None else Sharded(self, modules)

    def open_ledger(self, ledger: LedgerOrPath, plan: Plan, adjacency: Adjacency) -> Ledger:
        """Ledger of rank 0; on the other ranks a copy in memory that counts the charges of rank 0.

        Args:
            ledger: Ledger of rank 0. On other ranks: None, the same path, or an empty ledger in memory,
                which becomes the copy.
            plan: Plan of the step.
            adjacency: Adjacency relation of the step.
        """
        processes = self.processes
        own = isinstance(ledger, Ledger) and not ledger.mirrored and bool(ledger.path or ledger.counts)
        if own and processes.rank:
            raise LedgerError(
                f"rank {processes.rank} has a ledger of its own and charges are written by rank 0 "
                "alone: two ledgers would each hold a part of what was spent. Pass the path, or leave "
                "ledger out, on every rank but 0."
            )
        on_disk = ledger.path is not None if isinstance(ledger, Ledger) else ledger is not None
        said = processes.exchange("the ledger's path", on_disk)
        if any(said) and not said[0]:
            raise LedgerError(
                f"rank {said.index(True)} was given the path of a ledger and rank 0 was not: rank 0 "
                "alone writes charges, so that none would be on disk, and what was spent would be "
                "forgotten when the processes end. Nothing was drawn or charged. Pass ledger= on every "
                "rank, rank 0 first."
            )
        first: list[Ledger] = []

        def opened_by_first() -> Snapshot:
            first.append(open_ledger(ledger, plan, adjacency))
            return first[0].snapshot()

        snapshot = processes.broadcast_object("opening the ledger", opened_by_first)
        opened = first[0] if first else ledger if isinstance(ledger, Ledger) else Ledger()
        if not first:
            opened.mirror(snapshot)
        processes.ledger = opened
        return opened

    def shared_source(self, source: RandomSource) -> RandomSource:
        if isinstance(source, SystemSource):
            return SharedSystemSource(source.device, self.processes)
        source.set_state(self.broadcast("the shared source", source.get_state))
        return source

    def adopt_weights(self) -> None:
        self._adopted = True

    def check_weights(self, step: "PrivateStep") -> None:
        check_same_weights(step.model, step.optimizer, self.processes)
        self._adopted = False

    def placement(self, data: Data, present: Tensor | None = None) -> Placement:
        """Place of this rank's data among all slots; the ranks compare new data."""
        if self._placed is None or self._placed[0] is not data:
            self._placed = data, place(data, present, self.processes, shard=self.shard)
        return self._placed[1]

    def count(self, data: Data) -> int:
        held = held_slots(data) if self.shard else count(data)
        said: list[int] = self.exchange("the number of records", held)
        if not any(said):
            raise DataError(NO_RECORD)
        return sum(said) if self.shard else held

    def slots(self, data: Data) -> int:
        return self.placement(data).slots

    def place(self, data: Data, present: Tensor | None) -> int:
        placement = place(data, present, self.processes, shard=self.shard)
        self._placed = data, placement
        return placement.slots

    def first_slot(self, data: Data) -> int:
        return self.placement(data).first

    def draw(self, sampling: Sampling, units: int, source: RandomSource) -> Tensor:
        if not isinstance(source, SharedSystemSource):
            return sampling.draw(units, source)
        own = SystemSource(source.device)  # sending who was drawn takes less than a coin for each
        drawn: Tensor = self.broadcast("the draw", lambda: sampling.draw(units, own).cpu())
        return drawn

    def share(self, batch: Batch) -> Batch:
        return share_of(batch, self.placement(batch.data), self.processes, shard=self.shard)

    def streams(self, source: RandomSource) -> StepStreams:
        """Sources of the next step, under keys hashed from a key of the step, the use and the rank.

        No two ranks, steps or numbers of ranks share a key: docs/guarantees/distributed.md, 3.
        """
        if isinstance(source, SystemSource):
            own = SystemSource(source.device)
            return StepStreams(substream(own), own, own)
        root = substream(source)
        return StepStreams(
            self._stream(root, "masks"),
            _like(source, self._stream(root, "coordinates")),
            _like(source, self._stream(root, "noise")),
        )

    def own_source(self, source: RandomSource, use: str) -> RandomSource:
        if isinstance(source, SystemSource):
            return SystemSource(source.device)
        return _like(source, self._stream(substream(source), use))

    def _stream(self, root: Stream, use: str) -> Stream:
        stream = derive_source(root, f"{use} of rank {self.rank} of {self.size}".encode())
        assert isinstance(stream, Stream)
        return stream

    def sum_share(
        self, step: "PrivateStep", batch: Batch, compute: Callable[[Batch, int | None], Tensor]
    ) -> Tensor:
        before = step.skipped
        total = compute(self.share(batch), None)
        skipped = self._check_same_draw(step, batch, step.skipped - before)
        step.skipped = before + sum(skipped)
        return total

    def _check_same_draw(self, step: "PrivateStep", batch: Batch, content: int) -> list[int]:
        adopted, self._adopted = self._adopted, False
        return check_same_draw(step, batch, self.processes, content, adopted=adopted)

    def whole_sum(self, total: Tensor) -> Tensor:
        whole = self._padded(total)
        self.processes.gather_slices(self.processes.sum_slices(whole), whole)
        return whole[: len(total)]

    def noisy_mean(self, compute: Callable[[], Tensor], mean: NoisyMean) -> Tensor:
        """Noisy mean of the shares of all ranks: one reduction of as many numbers as one gradient."""
        own = self._own(mean)
        with self.propagate_errors():
            with own.early() as drawn:
                total = compute()
                with self.processes.moving():
                    whole = self._padded(total)
                    held, ready = self.processes.sum_slices(whole), drawn()
            return self._gathered(own, held, whole, mean, ready)

    def privatize(self, total: Tensor, mean: NoisyMean) -> Tensor:
        self.exchange("the noise")
        whole = self._padded(total)
        held = whole.view(self.size, -1)[self.rank].clone()
        return self._gathered(self._own(mean), held, whole, mean, None)

    def _own(self, mean: NoisyMean) -> NoisyMean:
        """Noise of this rank's slice: its part of each block of the clipping."""
        sizes = mean.layout.block_sizes
        size = self.processes.slice_size(sum(sizes))
        first, last = self.rank * size, (self.rank + 1) * size
        own = [
            max(0, min(end, last) - max(end - block, first))
            for end, block in zip(accumulate(sizes), sizes, strict=True)
        ]
        return replace(mean, layout=replace(mean.layout, block_sizes=own), basis=None)

    def _gathered(
        self, own: NoisyMean, held: Tensor, whole: Tensor, mean: NoisyMean, ready: BlockNoise | None
    ) -> Tensor:
        """Add noise to this rank's slice and gather the slices of all ranks."""
        with self.processes.moving():
            part = held[: sum(own.layout.block_sizes)]  # the rest of the last slices is padding
            if len(part):
                part.copy_(own(part, ready))
            self.processes.gather_slices(held, whole)
        total = whole[: sum(mean.layout.block_sizes)]
        return total if mean.basis is None else mean.basis.to_parameters(total)

    def _padded(self, vector: Tensor) -> Tensor:
        """Copy of a vector, padded with zeros to as many slices as there are ranks."""
        whole = vector.new_zeros(self.processes.slice_size(len(vector)) * self.size)
        whole[: len(vector)] = vector
        return whole

    def charge(self, ledger: Ledger, plan: Plan, **details: Any) -> None:
        """Charge a step to the ledger of rank 0 on disk, and then to the copies of the other ranks.

        **Guarantee.** It returns on a rank only after the charge is on rank 0's disk, and only if every
        rank has the release that is charged: docs/guarantees/distributed.md, 5.
        """
        processes, step, release = self.processes, details["step"], details["release"]
        named = [details["run"], step, release]
        content = [named, ledger.head, details["arithmetic"]]
        said = processes.exchange(f"the charge of step {step}", content)
        for rank, (other, *_) in enumerate(said):
            if other != said[0][0]:
                raise ProcessFailed(
                    # their fingerprints belong to releases without a charge
                    f"ranks 0 and {rank} do not have the same release to charge ({_named(said[0][0])} "
                    f"and {_named(other)}; what they would release is not shown): a charge is for one "
                    "release, and the models would part. Nothing was charged or applied. Run the same "
                    "torch, drivers and kind of device on every rank, and resume all of them from one "
                    "checkpoint."
                )
        if any(arithmetic == "assumed" for *_, arithmetic in said):
            details["arithmetic"] = "assumed"
        if any(head != said[0][1] for _, head, _ in said):  # rank 0 was charged for something of its own
            snapshot = processes.broadcast_object("the ledger", ledger.snapshot)
            if processes.rank:
                ledger.mirror(snapshot)
        processes.standing = (
            f"Step {step} is on the ledger." if processes.rank == 0 else f"Step {step} may be charged."
        )

        def charged() -> list[str | int]:
            ledger.charge(plan, **details)
            return [release, step, ledger.head]

        confirmed = processes.broadcast_message(f"the charge of step {step} on disk", charged)
        processes.standing = f"Step {step} is on the ledger."
        if processes.rank == 0:
            return
        ledger.follow(plan, **details)
        if confirmed != [release, step, ledger.head]:
            raise LedgerError(
                f"rank {processes.rank} counts other charges than the ledger of rank 0 after step "
                f"{step}: what was spent would be told differently. Resume all ranks from the last "
                "checkpoint."
            )

    def trial_name(self, update: Tensor, name: str) -> str:
        said = self.exchange("the name of a trial", [fingerprint([update]), name])
        for rank, (proposal, _) in enumerate(said):
            if proposal != said[0][0]:
                raise ProcessFailed(
                    f"ranks 0 and {rank} do not have the same proposal to test (what they would release "
                    "is not shown): a verdict is on one proposal, and the models would part. It was not "
                    "applied. Run the same torch, drivers and kind of device on every rank, and resume "
                    "all of them from one checkpoint."
                )
        return hashlib.sha256("".join(each for _, each in said).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class SharedSystemSource(SystemSource):
    """Operating system's source of rank 0, whose numbers every rank gets."""

    processes: Processes = field(compare=False)

    def array(self, count: int) -> npt.NDArray[np.int64]:
        own = SystemSource(self.device)
        words: npt.NDArray[np.int64] = self.processes.broadcast_object(
            "shared randomness", partial(own.array, count)
        )
        return words


def _like(source: RandomSource, stream: Stream) -> RandomSource:
    """Source of the same kind that draws from the stream, or from a state drawn from it."""
    if not isinstance(source, torch.Generator):
        return stream
    generator = torch.Generator(source.device)
    fill_state(generator, stream)
    return generator


def _named(held: list[Any]) -> str:
    run, step, _ = held
    return f"step {step} of run {run}"
