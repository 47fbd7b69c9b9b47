"""Reducer of a process group: reduce-scatter the sum, add noise on each rank, and gather the slices.

docs/guarantees/distributed.md proves that the noisy gradient has the same distribution as in a single
process.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from hush.accounting.ledger import Ledger, LedgerOrPath
from hush.core.errors import InvalidValue, LedgerError, Unsupported, short_repr
from hush.core.guarantee import Adjacency
from hush.core.plan import Plan
from hush.core.randomness import Stream, derive_source, substream
from hush.core.value import check_kind
from hush.gradients.models import is_sharded
from hush.training.data import Batch, Data
from hush.training.distributed.handshake import (
    compared_slots,
    draw_facts,
    step_facts,
    tensors_digest,
    weights_digest,
)
from hush.training.distributed.processes import Facts, Processes
from hush.training.fingerprint import fingerprint
from hush.training.noisy_mean import NoisyMean
from hush.training.options import Distributed
from hush.training.reducer import Local, StepStreams
from hush.training.run_folder import open_ledger

if TYPE_CHECKING:
    from hush.training.step import PrivateStep


def reducer_of(distributed: Distributed, *, sharded: bool = False) -> Local:
    """Reducer of a step or a run, before any handshake.

    With `sharded` parameters, a single rank also uses a process group.
    """
    check_kind("distributed", distributed, Distributed)
    processes = distributed.processes
    if isinstance(processes, Processes):  # passed by the run that creates the step
        return ProcessGroup(processes)
    if processes is False or (processes is None and not dist.is_initialized()):
        launched = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
        if processes is None and launched.isdecimal() and int(launched) > 1:
            raise Unsupported(
                f"WORLD_SIZE={launched}: a launcher started {launched} processes, and each would train "
                "a separate model on the same records, with a separate charge. Call "
                "torch.distributed.init_process_group() before creating the step "
                "(accelerate.Accelerator() does), or pass "
                "distributed=hush.Distributed(processes=False) for independent runs."
            )
        return Local()
    group = dist.group.WORLD if processes is None else processes
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise InvalidValue(
            f"processes={short_repr(processes)} must be a torch.distributed process group that "
            "contains this process. Pass e.g. torch.distributed.group.WORLD, or False for this "
            "process alone, or leave it out.",
            key="processes",
        )
    several = sharded or dist.get_world_size(group) > 1
    return ProcessGroup(Processes(group)) if several else Local()


class ProcessGroup(Local):
    """Reducer for several ranks that each have the whole model."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.rank, self.size = processes.rank, processes.size
        for name in ("propagate_errors", "exchange", "broadcast", "copy_of_first", "gather", "agree"):
            setattr(self, name, getattr(processes, name))
        self._compare = partial(compared_slots, processes=processes)  # type: ignore[method-assign]
        self._adopted = False
        """Whether weights were set outside of the step since the ranks last compared them."""

    def joined(self, step: "PrivateStep", generator: torch.Generator | None) -> "ProcessGroup":
        self.agree("the handshake", step_facts(step, generator))
        if not is_sharded(step.model):
            return self
        # import here, because it is slow
        from hush.training.distributed.sharded import Sharded, sharded_modules

        return Sharded(self, sharded_modules(step, self.processes))

    def open_ledger(self, ledger: LedgerOrPath | None, plan: Plan, adjacency: Adjacency) -> Ledger:
        """Ledger of rank 0, and in-memory copies on the other ranks.

        The other ranks pass None, the same path, or an empty in-memory ledger, which becomes the copy.
        """
        on_disk = ledger.path is not None if isinstance(ledger, Ledger) else ledger is not None
        said = self.exchange("the ledger's path", on_disk)
        if any(said) and not said[0]:
            raise LedgerError(
                f"rank {said.index(True)} has the path of a ledger, but rank 0, which writes the "
                "charges, has none. Pass ledger= on every rank."
            )
        own = [ledger if isinstance(ledger, Ledger) else Ledger()]

        def open_first() -> list[bytes]:
            own[0] = open_ledger(ledger, plan, adjacency)
            return own[0].snapshot()

        snapshot = self.broadcast("opening the ledger", open_first)
        if self.rank:
            own[0].mirror(snapshot)
        self.processes.ledger = own[0]
        return own[0]

    def shared_source(self, source: Stream) -> Stream:
        source.set_state(self.broadcast("the shared source", source.get_state))
        return source

    def adopt_weights(self) -> None:
        self._adopted = True

    def begin(self, step: "PrivateStep", data: Data, present: Tensor | None, steps: int | None) -> int:
        entries = step.optimizer.state_dict()["state"].values()
        facts: Facts = {
            "weights": weights_digest(step.model),
            "states of the optimizer": tensors_digest(v for entry in entries for v in entry.values()),
            "the number of steps to take": steps,
        }
        empty = "" if present is None else fingerprint([present])
        facts["which slots are empty"] = empty.encode()
        self.agree("comparing the weights and steps", facts)
        self._adopted, self._compared = False, None
        return self.slots(data)

    def whole_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """State with the past noise of all slices; a collective call with correlated noise."""
        if "past_noise" not in state or not state["steps"]:  # there is no noise to gather yet
            return state
        slices = self.gather("the past noise", state["past_noise"].cpu())
        return {**state, "past_noise": torch.cat(slices, dim=1)}

    def own_state(self, step: "PrivateStep", state: dict[str, Any]) -> dict[str, Any]:
        if "past_noise" not in state:
            return state
        past = state["past_noise"]
        size = -(-past.shape[1] // self.size)
        return {**state, "past_noise": past[:, self.rank * size : (self.rank + 1) * size]}

    def share(self, batch: Batch) -> Batch:
        """Contiguous part of a batch that this rank processes (sensitive)."""
        drawn = len(batch.indices)
        cuts = [drawn * number // self.size for number in range(self.size + 1)]
        if batch.counts is None:
            return replace(batch, indices=batch.indices[cuts[self.rank] : cuts[self.rank + 1]])
        ends = pad(batch.counts.cumsum(0), (1, 0))
        units = torch.searchsorted(ends[1:], torch.tensor(cuts), right=True).tolist()
        first, last = [0, *units[1:-1], len(batch.counts)][self.rank : self.rank + 2]
        counts = batch.counts[first:last]
        return replace(batch, indices=batch.indices[ends[first] : ends[last]], counts=counts)

    def streams(self, source: Stream) -> StepStreams:
        """Random sources of the next step, with keys derived from the step's key, the purpose and the
        rank.

        Keys differ between ranks, steps and numbers of ranks: docs/guarantees/distributed.md, 3.
        """
        root = substream(source)
        return StepStreams(
            self._stream(root, "masks"),
            self._stream(root, "coordinates"),
            self._stream(root, "noise"),
        )

    def own_source(self, source: Stream, use: str) -> Stream:
        return self._stream(substream(source), use)

    def _stream(self, root: Stream, use: str) -> Stream:
        return derive_source(root, f"{use} of rank {self.rank} of {self.size}".encode())

    def sum_share(
        self, step: "PrivateStep", batch: Batch, compute: Callable[[Batch, int | None], Tensor]
    ) -> Tensor:
        before = step.skipped
        total = compute(self.share(batch), None)
        step.gradients.skipped = before + sum(self._agree_on_draw(step, batch, step.skipped - before))
        return total

    def _agree_on_draw(self, step: "PrivateStep", batch: Batch, content: int) -> list[int]:
        """All-gather a number, after verifying that all ranks have the same step and draw."""
        adopted, self._adopted = self._adopted, False
        facts = draw_facts(step, batch, adopted=adopted)
        return self.agree(f"the sum of step {step.steps + 1}", facts, content)

    def whole_sum(self, total: Tensor) -> Tensor:
        whole = pad(total, (0, -len(total) % self.size))  # one slice per rank
        self.processes.gather_slices(self.processes.sum_slices(whole), whole)
        return whole[: len(total)]

    def noisy_mean(self, compute: Callable[[], Tensor], mean: NoisyMean) -> Tensor:
        with self.propagate_errors():
            total = compute()
            with self.processes.moving():
                whole = pad(total, (0, -len(total) % self.size))
                held = self.processes.sum_slices(whole)
            return self._gathered(held, whole, mean)

    def privatize(self, total: Tensor, mean: NoisyMean) -> Tensor:
        self.exchange("the noise")
        whole = pad(total, (0, -len(total) % self.size))
        held = whole.view(self.size, -1)[self.rank].clone()
        return self._gathered(held, whole, mean)

    def _own(self, mean: NoisyMean) -> NoisyMean:
        """Noisy mean of this rank's slice, with the entries of each block that lie in the slice."""
        sizes = mean.layout.block_sizes
        size = -(-sum(sizes) // self.size)
        first, last = self.rank * size, (self.rank + 1) * size
        own = [
            max(0, min(end, last) - max(end - block, first))
            for end, block in zip(accumulate(sizes), sizes, strict=True)
        ]
        return replace(mean, layout=replace(mean.layout, block_sizes=own), basis=None)

    def _gathered(self, held: Tensor, whole: Tensor, mean: NoisyMean) -> Tensor:
        """Add noise to this rank's slice and gather the slices of all ranks."""
        own = self._own(mean)
        with self.processes.moving():
            part = held[: sum(own.layout.block_sizes)]  # excludes the padding of the last slices
            if len(part):
                part.copy_(own(part))
            self.processes.gather_slices(held, whole)
        total = whole[: sum(mean.layout.block_sizes)]
        return total if mean.basis is None else mean.basis.to_parameters(total)

    def charge(self, ledger: Ledger, plan: Plan, **details: Any) -> None:
        """Charge a step to the ledger of rank 0, and then to the copies of the other ranks.

        **Guarantee.** The method returns only after rank 0 has written the charge, and only if every
        rank has the charged release: docs/guarantees/distributed.md, 5.
        """
        processes, step, phase = self.processes, details["step"], f"the charge of step {details['step']}"
        # bytes are not shown: a release that is not yet charged is private
        facts = {"run": details["run"], "step": step, "the release": details["release"].encode()}
        heads, kinds = zip(*self.agree(phase, facts, [ledger.head, details["arithmetic"]]), strict=True)
        if "assumed" in kinds:
            details["arithmetic"] = "assumed"
        if len(set(heads)) > 1:  # rank 0 charged another release
            snapshot = self.broadcast("the ledger", ledger.snapshot)
            if self.rank:
                ledger.mirror(snapshot)
        on_ledger = f"Step {step} is on the ledger."
        processes.standing = f"Step {step} may be charged." if self.rank else on_ledger

        def charged() -> str:
            ledger.charge(plan, **details)
            return ledger.head

        head = self.broadcast(f"{phase} on disk", charged, short=True)
        processes.standing = on_ledger
        if self.rank:
            ledger.follow(plan, **details)
            if ledger.head != head:
                raise LedgerError(
                    f"the charges of ranks {self.rank} and 0 differ after step {step}. "
                    "Resume all ranks from the last checkpoint."
                )

    def trial_name(self, update: Tensor, name: str) -> str:
        proposal = {"the proposal to test": fingerprint([update]).encode()}
        names = self.agree("the name of a trial", proposal, name)
        return hashlib.sha256("".join(names).encode()).hexdigest()[:16]
