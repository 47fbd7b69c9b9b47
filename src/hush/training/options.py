"""Options of a private step that most runs leave at their defaults, in four groups."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hush.core.guarantee import Arithmetic

if TYPE_CHECKING:
    import torch

    from hush.gradients.tape import Reduction
    from hush.training.distributed.process_group import Group
    from hush.training.units import Owners


@dataclass(frozen=True, kw_only=True, eq=False)
class Units:
    """User-level privacy: steps draw owners of records instead of records, and protect one owner.

    The assignment of records to owners is public unless the neighbours are `ADD_REMOVE`. See
    docs/guarantees/units.md.

    Args:
        owners: Owner of each record: integers or names, in the order of the records.
        per_unit: Maximum number of records of one owner in a step, sampled anew each time.
        gradient: "mean" or "sum" of the gradients of an owner's records; the result is clipped.
    """

    owners: "Owners"
    per_unit: int
    gradient: "Reduction" = "mean"


@dataclass(frozen=True, kw_only=True, eq=False)
class Randomness:
    """Source of sampling and noise; by default a cryptographic stream with a secret key.

    Args:
        generator: Seed of the stream, for tests: anyone who knows the seed can repeat the run, and the
            guarantee says `randomness: seeded`.
        secure: Draw from the operating system instead of a stream. Such a step cannot be repeated, so a
            resumed run pays again for the steps since its checkpoint.
        arithmetic: "proved" for exact noise; "assumed" for noise from torch's generator, which is faster
            and lies on a recognisable grid.
    """

    generator: "torch.Generator | None" = None
    secure: bool = False
    arithmetic: Arithmetic = "proved"


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Physical batches and CUDA graphs; neither changes the guarantee.

    Args:
        physical_batch: Number of records to process at once; None: as many as fit in memory.
        replay: Whether a GPU records the work of a physical batch as a CUDA graph and replays it, which
            is much faster for small models. None: where it is possible and faster, as measured on
            synthetic records; True: raise if it is not possible; False: never.
    """

    physical_batch: int | None = None
    replay: bool | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Distributed:
    """Process group whose ranks run the step together. See docs/distributed.md.

    Args:
        processes: Process group of the step; None: all processes if `torch.distributed` is initialised;
            False: this process alone.
        shard: Whether the data passed to `batches` is this rank's own part, disjoint from the parts of
            other ranks; `records` is then the number over all ranks. False: every rank reads all data.
    """

    processes: "Group" = None
    shard: bool = False
