"""Which processes run a step together, and which of them may release something alone."""

import os
from typing import Literal

import torch.distributed as dist

from hush.core.errors import InvalidValue, Unsupported, short_repr
from hush.training.distributed.group import Processes

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
