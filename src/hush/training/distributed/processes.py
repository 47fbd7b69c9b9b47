"""Ranks of a private step: process group, messages, sums, and propagation of errors."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hush.accounting.ledger import Ledger
from hush.core.errors import InvalidValue, ProcessFailed, Unsupported, short_repr, shorten

_MESSAGE = 4096
"""Bytes of a message that every rank sends to every other: one collective of a known size."""
_LONGEST_ERROR = 600
# the older name is deprecated where the newer exists
_ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Processes:
    """Ranks of a `torch.distributed` group that run one private step together.

    Small messages go through gloo on the CPU, also where the group's own backend is nccl: a rank that
    waits for the others then waits for no GPU, and a peer that is gone is an error rather than an abort.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._control = _control_group(group)
        self._propagating = False
        self._propagated: Exception | None = None
        """Last error of this rank that the others know."""
        self.ledger: Ledger | None = None
        """Rank 0's, or a copy: void if weights were moved outside of a step on any rank."""
        self.standing = "No step was charged yet."
        """What is known of the newest charge, for the text of a failure."""
        self.broken: str | None = None
        """Why the ranks cannot reach each other any more; None while they can."""

    def exchange(self, phase: str, content: Any = None, error: Exception | None = None) -> list[Any]:
        """What each rank has to say at a phase of the step, by rank: small plain data.

        Every other collective comes right after one of these, so that a rank which cannot go on has the
        others meet it here, wherever it stopped.

        Args:
            phase: name of the place in the program; all ranks must be at the same one.
            content: plain data, a few hundred characters. With an error, why the ledger is void.
            error: why this rank cannot go on; it raises that itself afterwards.

        Raises:
            ProcessFailed: On every rank but those with an error, where one has; and on all of them if
                they are at different phases.
        """
        self._propagated = error or self._propagated
        text = json.dumps([phase, content, error and describe(error)], ensure_ascii=False).encode()
        sent = torch.zeros(_MESSAGE, dtype=torch.uint8)
        sent[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        # zeros: gloo takes a shorter message of another collective, and what was here must not end it
        received = torch.zeros(self.size * _MESSAGE, dtype=torch.uint8)
        with self.guarded(phase):
            _ALL_GATHER(received, sent, group=self._control)
        messages = self._read(phase, received)
        failed = {rank: message[2] for rank, message in enumerate(messages) if message[2] is not None}
        for rank in failed:
            if self.ledger is not None and self.ledger.voided is None and messages[rank][1]:
                self.ledger.void(messages[rank][1])
        if failed and error is None:
            named = "; ".join(f"rank {rank} stopped ({why})" for rank, why in failed.items())
            raise ProcessFailed(
                f"{named}, and rank {self.rank} of {self.size} was at {phase}: no rank goes on alone, "
                f"as the sum and its noise are made by all. {self.standing} {_WAY_OUT}"
            )
        phases = [message[0] for message in messages]
        if not failed and len(set(phases)) > 1:
            other = next(rank for rank, each in enumerate(phases) if each != phases[0])
            raise ProcessFailed(
                f"rank 0 is at {phases[0]} and rank {other} at {phases[other]}: ranks that do different "
                "things cannot make one step together. Call the same methods of the step on every "
                "rank, in the same order."
            )
        return [message[1] for message in messages]

    def _read(self, phase: str, received: Tensor) -> list[list[Any]]:
        """Messages of all ranks; raises where one is no message, but of a collective of the user's."""
        try:
            read = [
                json.loads(part.numpy().tobytes().rstrip(b"\0")) for part in received.split(_MESSAGE)
            ]
            return [[at, content, error] for at, content, error in read]
        except (ValueError, TypeError):
            self.broken = (
                f"rank {self.rank} of {self.size} was at {phase} and received what is no message of a "
                "private step: another rank was at a collective of its own in the same process group, "
                "such as a forward pass of a sharded model on one rank alone. Ranks that do different "
                f"things cannot make one step together. {self.standing} Call what meets the other ranks "
                f"on all of them, in the same order. {_WAY_OUT}"
            )
            raise ProcessFailed(self.broken) from None

    def gather(self, phase: str, content: Any) -> list[Any]:
        """Any object of each rank, by rank; for what is too long for `exchange`."""
        self.exchange(phase)
        received: list[Any] = [None] * self.size
        with self.guarded(phase):
            dist.all_gather_object(received, content, group=self._control)
        return received

    def broadcast_message(self, phase: str, make: Callable[[], Any]) -> Any:
        """Broadcast of small plain data that rank 0 makes; its errors propagate to all ranks."""
        content, failure = None, None
        if self.rank == 0:
            try:
                content = make()
            except Exception as error:
                failure = error
        said = self.exchange(phase, content, failure)[0]
        if failure is not None:
            raise failure
        return said

    def broadcast_object(self, phase: str, make: Callable[[], Any]) -> Any:
        """`broadcast_message` for objects of any kind and length."""
        made: list[Any] = [None]

        def keep() -> None:
            made[0] = make()

        self.broadcast_message(phase, keep)
        with self.guarded(phase):
            dist.broadcast_object_list(made, group=self._control, group_src=0)
        return made[0]

    def slice_size(self, size: int) -> int:
        """Numbers of a vector that each rank owns; the last ranks may own fewer, or none."""
        return -(-size // self.size)

    def sum_slices(self, padded: Tensor) -> Tensor:
        """This rank's slice of the sum of all ranks' vectors.

        Added in the order of ranks, so that a step that is repeated rounds as it did.

        Args:
            padded: as many slices as there are ranks, one after another.
        """
        sent = self._movable(padded)
        received = torch.empty_like(sent)
        with self.guarded("the sum of gradients"):
            dist.all_to_all_single(received, sent, group=self.group)
        slices = received.view(self.size, -1)
        total = slices[0]
        for other in slices[1:]:
            total += other
        return total.to(padded.device)

    def gather_slices(self, own: Tensor, padded: Tensor) -> None:
        """Fill a vector with the slices of all ranks, one after another."""
        sent = self._movable(own)
        received = padded if padded.device == sent.device else padded.to(sent.device)
        with self.guarded("gathering the noisy gradient"):
            _ALL_GATHER(received, sent, group=self.group)
        if received is not padded:
            padded.copy_(received)

    def copy_of_first(self, phase: str, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors with rank 0's."""
        self.exchange(phase)
        for tensor in tensors:
            moved = self._movable(tensor)
            with self.guarded(phase):
                dist.broadcast(moved, group=self.group, group_src=0)
            if moved is not tensor:
                tensor.copy_(moved)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Between collectives of vectors: errors cannot propagate, and the others lose this rank."""
        try:
            yield
        except Exception as error:
            self.broken = self.broken or f"rank {self.rank} stopped between two collectives ({error})."
            raise

    def propagate_errors(self) -> AbstractContextManager[None]:
        """Context whose errors propagate to the other ranks, so that none waits for this one."""
        return nullcontext() if self._propagating else self._propagate()

    @contextmanager
    def _propagate(self) -> Iterator[None]:
        self._propagating = True
        try:
            yield
        except ProcessFailed:  # the others know
            raise
        except Exception as error:
            if error is not self._propagated and self.broken is None:
                with suppress(ProcessFailed):
                    self.exchange("an error", self.ledger and self.ledger.voided, error)
            raise
        finally:
            self._propagating = False

    def _movable(self, tensor: Tensor) -> Tensor:
        """The tensor where the group's backend can send it."""
        backends = dist.get_backend_config(self.group)
        if f"{tensor.device.type}:" in backends and not (tensor.is_cuda and "cuda:gloo" in backends):
            return tensor.contiguous()
        return tensor.to("cpu" if "cpu:" in backends else "cuda").contiguous()

    @contextmanager
    def guarded(self, phase: str) -> Iterator[None]:
        """Turn an error of torch's collectives into one that says what is charged and how to go on."""
        self._check_open(phase)
        try:
            yield
        except RuntimeError as error:
            self.broken = (
                f"rank {self.rank} of {self.size} cannot go on at {phase}: another rank was killed "
                f"or ended, hung longer than the group's timeout or lost its connection "
                f"({shorten(str(error), 300)}). {self.standing} Nothing that is not charged was applied "
                f"here. {_WAY_OUT} For ranks that are slow and not gone, pass init_process_group a "
                "longer timeout."
            )
            raise ProcessFailed(self.broken) from error

    def _check_open(self, phase: str) -> None:
        """Raise where the ranks cannot reach each other any more."""
        if self.broken is None:
            try:
                dist.get_rank(self.group)
            except ValueError:  # torch does not know it any more
                self.broken = (
                    f"rank {self.rank} of {self.size} was at {phase} and the process group was destroyed"
                    f": a step is made by all ranks of the group it was made in. {self.standing} Call "
                    "destroy_process_group() after the last step; for a new group make a new step, and "
                    "load_state_dict."
                )
        if self.broken is not None:
            raise ProcessFailed(self.broken)


_WAY_OUT = (
    "Start all ranks again and resume from the last checkpoint (load_state_dict, or "
    "hush.Checkpoints(resume=True)): steps that were charged since are repeated and not paid again."
)


def describe(error: Exception) -> str:
    """Kind and text of an error, for the other ranks."""
    return shorten(f"{type(error).__name__}: {error}", _LONGEST_ERROR)


@lru_cache(maxsize=8)
def _control_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Group of the same ranks for small messages on the CPU, with the same timeout."""
    if "cpu:gloo" in dist.get_backend_config(group):
        return group
    options = getattr(group._get_backend(torch.device("cuda")), "options", None)
    made = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=getattr(options, "_timeout", None),
        backend="gloo",
        use_local_synchronization=True,
    )
    assert isinstance(made, dist.ProcessGroup)
    return made


Group = dist.ProcessGroup | Processes | Literal[False] | None
"""Ranks to run a step with, as people pass them: None is all processes, False this one alone."""


def group_initialized() -> bool:
    """Whether there is a group of all processes, of one or of several."""
    return dist.is_available() and dist.is_initialized()


def process_group(processes: Group, *, sharded: bool = False) -> Processes | None:
    """The ranks that run a step together; None where this process runs it alone.

    Args:
        processes: a group; None: that of all processes, if one was initialised; False: none.
        sharded: whether parameters are split over the ranks: then one rank is a group as well.
    """
    if processes is False:
        return None
    if isinstance(processes, Processes):
        return processes
    if not group_initialized():
        if processes is None:
            _check_launched_alone()
            return None
        raise InvalidValue(
            f"processes={short_repr(processes)} and torch.distributed is not initialised: there are no "
            "others to run the step with. Call torch.distributed.init_process_group first (torchrun "
            "sets what it needs), or leave processes out.",
            key="processes",
        )
    group = dist.group.WORLD if processes is None else processes
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise InvalidValue(
            f"processes={short_repr(processes)} must be a torch.distributed process group that this "
            "process is in: the sum and its noise are made by all of its ranks. Pass e.g. "
            "torch.distributed.group.WORLD, False for a step of this process alone, or leave it out.",
            key="processes",
        )
    return Processes(group) if sharded or dist.get_world_size(group) > 1 else None


def _check_launched_alone() -> None:
    """Raise in one of several processes of a launcher that have not met: each would train by itself."""
    launched = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and launched.isdecimal() and int(launched) > 1:
        raise Unsupported(
            f"WORLD_SIZE={launched}: a launcher started {launched} processes, and torch.distributed is "
            "not initialised, so that each would train a model of its own on the same records, charged "
            "as if it were the only one. Call torch.distributed.init_process_group() before making the "
            "step (accelerate.Accelerator() does), or pass processes=False for runs that have nothing "
            "to do with each other."
        )


def check_first_rank(what: str) -> None:
    """Raise on every rank but 0 of an initialised process group: a release is made once.

    Args:
        what: name of the release.
    """
    if not group_initialized() or dist.get_rank() == 0:
        return
    raise Unsupported(
        f"{what} on rank {dist.get_rank()} of {dist.get_world_size()} processes: each would release "
        "its own, under noise of its own, and one charge does not cover several releases. Call it on "
        "rank 0 alone, and send the others what it returns (torch.distributed.broadcast_object_list)."
    )
