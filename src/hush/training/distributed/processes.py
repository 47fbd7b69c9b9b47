"""Communication between the ranks of a private step, and propagation of errors."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hush.accounting.ledger import Ledger
from hush.core.errors import ProcessFailed, Unsupported, shorten

_MESSAGE = 4096
"""Size in bytes of a message between ranks; each message needs one collective."""
_LONGEST_ERROR = 600
# newer versions of torch deprecate the older name
_ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_WAY_OUT = (
    "Start all ranks again and resume from the last checkpoint (load_state_dict, or "
    "hush.Checkpoints(resume=True)): charged steps after it are repeated without a new charge."
)
Facts = dict[str, Any]
"""Values that must be equal on all ranks, by name. Error messages do not show private values (bytes)."""


class Processes:
    """Ranks of a `torch.distributed` group that run a private step together.

    Small messages use gloo on the CPU, so GPUs do not wait and a lost peer raises an error.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._control = _control_group(group)
        self._propagating = False
        self._propagated: Exception | None = None
        """Last error that this rank has propagated."""
        self.ledger: Ledger | None = None
        """Ledger of rank 0, or its copy. It is void if any rank changed weights outside of a step."""
        self.standing = "No step was charged yet."
        """Description of the last charge, for error messages."""
        self.broken: str | None = None
        """Reason why the ranks can no longer communicate, or None."""

    def exchange(self, phase: str, content: Any = None, error: Exception | None = None) -> list[Any]:
        """All-gather small plain data.

        Every other collective follows an exchange. A rank that cannot continue sends its error and, if
        its ledger is void, the reason. All ranks then raise. They also raise if their phases differ.
        """
        self._propagated = error or self._propagated
        why = error and shorten(f"{type(error).__name__}: {error}", _LONGEST_ERROR)
        text = json.dumps([phase, content, why], ensure_ascii=False).encode()
        sent = torch.zeros(_MESSAGE, dtype=torch.uint8)
        sent[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        # initialise with zeros: gloo accepts a shorter message of another collective, and does not
        # write the rest
        received = torch.zeros(self.size * _MESSAGE, dtype=torch.uint8)
        at = f"rank {self.rank} of {self.size} was at {phase}"
        with self.guarded(phase):
            _ALL_GATHER(received, sent, group=self._control)
        try:
            texts = [part.numpy().tobytes().rstrip(b"\0") for part in received.split(_MESSAGE)]
            phases, contents, errors = zip(*map(json.loads, texts), strict=True)
        except (ValueError, TypeError):
            self.broken = (
                f"{at}, and another rank at a different collective of the same process group, e.g. a "
                f"forward pass of a sharded model on one rank. {self.standing} Call collectives on "
                f"all ranks in the same order. {_WAY_OUT}"
            )
            raise ProcessFailed(self.broken) from None
        failed = [rank for rank, each in enumerate(errors) if each is not None]
        for rank in failed:
            if self.ledger is not None and self.ledger.voided is None and contents[rank]:
                self.ledger.void(contents[rank])
        if failed and error is None:
            named = "; ".join(f"rank {rank} stopped ({errors[rank]})" for rank in failed)
            raise ProcessFailed(
                f"{named}, and {at}: all ranks must stop, because every rank contributes to the sum and "
                f"the noise. {self.standing} {_WAY_OUT}"
            )
        if not failed and len(set(phases)) > 1:
            other = next(rank for rank, each in enumerate(phases) if each != phases[0])
            raise ProcessFailed(
                f"rank 0 is at {phases[0]} and rank {other} at {phases[other]}. Call the same methods "
                "of the step on every rank, in the same order."
            )
        return list(contents)

    def agree(self, phase: str, facts: Facts, content: Any = None) -> list[Any]:
        """Like `exchange`, but all ranks raise if a fact differs between ranks (compared by hash)."""
        hashes = [hashlib.sha256(repr(value).encode()).hexdigest()[:16] for value in facts.values()]
        said = self.exchange(phase, [hashes, content])
        for rank, (other, _) in enumerate(said):
            for (name, value), first, own in zip(facts.items(), said[0][0], other, strict=True):
                if first != own:
                    private = isinstance(value, bytes)
                    shown = "it is private and not shown" if private else f"here it is {value}"
                    raise ProcessFailed(
                        f"ranks 0 and {rank} differ in {name} ({shorten(shown, 400)}) at {phase}. "
                        "The step was not charged. Pass equal arguments and make equal calls on every "
                        "rank, resume all ranks from one checkpoint, or pass "
                        "distributed=hush.Distributed(processes=False) for independent runs."
                    )
        return [each for _, each in said]

    def gather(self, phase: str, content: Any) -> list[Any]:
        """All-gather an object of any size; `exchange` is only for small data."""
        self.exchange(phase)
        received: list[Any] = [None] * self.size
        with self.guarded(phase):
            dist.all_gather_object(received, content, group=self._control)
        return received

    def broadcast(self, phase: str, make: Callable[[], Any], *, short: bool = False) -> Any:
        """Broadcast an object from rank 0, or its error; `short` plain data needs one collective."""
        made: list[Any] = [None]
        failure = None
        if self.rank == 0:
            try:
                made[0] = make()
            except Exception as error:
                failure = error
        said = self.exchange(phase, made[0] if short else None, failure)[0]
        if failure is not None:
            raise failure
        if short:
            return said
        with self.guarded(phase):
            dist.broadcast_object_list(made, group=self._control, group_src=0)
        return made[0]

    def sum_slices(self, padded: Tensor) -> Tensor:
        """Reduce-scatter: this rank's slice of the sum of all ranks' vectors."""
        sent = self._movable(padded)
        received = torch.empty_like(sent)
        with self.guarded("the sum of gradients"):
            dist.all_to_all_single(received, sent, group=self.group)
        # add in the order of ranks, so a repeated step rounds identically
        total, *others = received.view(self.size, -1).unbind()
        for other in others:
            total += other
        return total.to(padded.device)

    def gather_slices(self, own: Tensor, padded: Tensor) -> None:
        """All-gather the slices of all ranks into a vector."""
        sent = self._movable(own)
        received = padded if padded.device == sent.device else padded.to(sent.device)
        with self.guarded("gathering the noisy gradient"):
            _ALL_GATHER(received, sent, group=self.group)
        if received is not padded:
            padded.copy_(received)

    def copy_of_first(self, phase: str, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors with the tensors of rank 0."""
        first = self.broadcast(phase, lambda: [tensor.cpu() for tensor in tensors])
        for tensor, value in zip(tensors, first, strict=True):
            tensor.copy_(value)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Context between collectives of vectors, in which errors cannot be propagated."""
        try:
            yield
        except Exception as error:
            self.broken = self.broken or f"rank {self.rank} stopped between two collectives ({error})."
            raise

    @contextmanager
    def propagate_errors(self) -> Iterator[None]:
        """Context that propagates errors to the other ranks."""
        if self._propagating:
            yield
            return
        self._propagating = True
        try:
            yield
        except ProcessFailed:  # all ranks raise this error
            raise
        except Exception as error:
            if error is not self._propagated and self.broken is None:
                with suppress(ProcessFailed):
                    self.exchange("an error", self.ledger and self.ledger.voided, error)
            raise
        finally:
            self._propagating = False

    def _movable(self, tensor: Tensor) -> Tensor:
        """Copy the tensor to a device that the backend supports, if necessary."""
        backends = dist.get_backend_config(self.group)
        if f"{tensor.device.type}:" in backends and not (tensor.is_cuda and "cuda:gloo" in backends):
            return tensor.contiguous()
        return tensor.to("cpu" if "cpu:" in backends else "cuda").contiguous()

    @contextmanager
    def guarded(self, phase: str) -> Iterator[None]:
        """Context that translates errors of a collective to `ProcessFailed`, with the last charge."""
        own = f"rank {self.rank} of {self.size}"
        try:
            dist.get_rank(self.group)
        except ValueError:
            self.broken = self.broken or (
                f"{own} was at {phase} and the process group was destroyed. {self.standing} Call "
                "destroy_process_group() after the last step. For a new group, create a new step and "
                "call load_state_dict."
            )
        if self.broken is not None:
            raise ProcessFailed(self.broken)
        try:
            yield
        except RuntimeError as error:
            self.broken = (
                f"{own} cannot continue at {phase}: another rank was killed, ended, exceeded the "
                f"timeout or lost its connection ({shorten(str(error), 300)}). {self.standing} "
                f"{_WAY_OUT} For slow ranks, pass a longer timeout to init_process_group."
            )
            raise ProcessFailed(self.broken) from error


@lru_cache(maxsize=8)
def _control_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Group of the same ranks for small messages on the CPU."""
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
"""`processes` argument: None for all processes, False for this process alone."""


def check_first_rank(what: str) -> None:
    """Raise on ranks other than 0 of an initialised process group."""
    if dist.is_initialized() and dist.get_rank():
        raise Unsupported(
            f"{what} on rank {dist.get_rank()} of {dist.get_world_size()} processes: each rank would "
            "release a separate result. Call it on rank 0 only, and broadcast the result "
            "(torch.distributed.broadcast_object_list)."
        )
