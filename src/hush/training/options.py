"""Options of a private step and of a run that most leave at their defaults, in groups."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from hush.core.guarantee import Arithmetic, Neighbours

if TYPE_CHECKING:
    import torch

    from hush.gradients.tape import Reduction
    from hush.gradients.tree import Views
    from hush.training.data import Data
    from hush.training.distributed.processes import Group
    from hush.training.metrics import OnStep
    from hush.training.units import Owners


@dataclass(frozen=True, kw_only=True, eq=False)
class Units:
    """User-level privacy: steps draw owners of records and protect one owner: docs/guarantees/units.md.

    The assignment of records to owners is public unless the neighbours are `ADD_REMOVE`.

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
        generator: Seed of the stream, for tests: anyone who knows it can repeat the run, and the
            guarantee says `randomness: seeded`.
        secure: Draw from the operating system. Such a step cannot be repeated, so a resumed run pays
            again for the steps since its checkpoint.
        arithmetic: "proved" for exact noise; "assumed" for noise of torch's generator, faster and on a
            recognisable grid.
    """

    generator: "torch.Generator | None" = None
    secure: bool = False
    arithmetic: Arithmetic = "proved"


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Physical batches and CUDA graphs; neither changes the guarantee.

    Args:
        physical_batch: Number of records to process at once; None: as many as fit in memory.
        replay: Whether a GPU records the work of a physical batch as a CUDA graph and replays it. None:
            if it is possible and faster, as measured on synthetic records; True: raise if it is not
            possible; False: never.
    """

    physical_batch: int | None = None
    replay: bool | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Distributed:
    """Process group whose ranks run the step together. See docs/distributed.md.

    Args:
        processes: Process group; None: all processes if `torch.distributed` is initialised; False: this
            process alone.
        shard: Whether the data passed to `batches` is this rank's own part, without records of other
            ranks; `records` counts those of all ranks. False: every rank reads all data.
    """

    processes: "Group" = None
    shard: bool = False


class StepOptions(TypedDict, total=False):
    """Arguments of `PrivateStep` that `hush.train` passes on."""

    records: int | None
    units: Units | None
    neighbours: Neighbours
    views: "Views | None"
    public: "Data | None"
    execution: Execution


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Folder of a run, and how the run resumes from it. See docs/resume.md.

    Args:
        directory: Folder for the run's plan, ledger, metrics, checkpoint and weights; None: no files.
        resume: Continue from the checkpoint in the directory, exactly as the run would have.
        reseed: Continue with new randomness, and pay again for the steps since the checkpoint.
        settings: Publishable choices that are not in the plan (e.g. the data set), as plain data for
            settings.json. A run is resumed with the same ones.
    """

    directory: str | os.PathLike[str] | None = None
    resume: bool = False
    reseed: bool = False
    settings: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Logging:
    """Metrics of a run: how often, and who receives them. See docs/logging.md.

    Args:
        every: Number of steps between evaluations, which also write metrics and a checkpoint; None:
            about an epoch.
        callbacks: Functions on_step(step, metrics) of `StepMetrics`, called after each step by rank 0.
            A resumed run calls again for the steps that it repeats.
        progress: Show a progress bar.
    """

    every: int | None = None
    callbacks: "Sequence[OnStep]" = ()
    progress: bool = False
