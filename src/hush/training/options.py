"""Groups of options of a private step and of a run."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from hush.core.guarantee import Neighbours

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
    """User-level privacy: steps sample users instead of records: docs/guarantees/units.md.

    The record-to-user map is public, except under `ADD_REMOVE`.

    Args:
        owners: User id of each record: integers or strings, in the order of the records.
        per_unit: Maximum number of records of one user per step, sampled in each step.
        gradient: "mean" or "sum" of the gradients of a user's records; the result is clipped.
    """

    owners: "Owners"
    per_unit: int
    gradient: "Reduction" = "mean"


@dataclass(frozen=True, kw_only=True, eq=False)
class Randomness:
    """Source of sampling and noise; by default a cryptographic stream with a secret key.

    Args:
        generator: Seed of the stream, for tests: the seed reveals the noise, and the guarantee has
            `randomness: seeded`.
    """

    generator: "torch.Generator | None" = None


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Physical batch size and CUDA graphs; they do not change the guarantee.

    Args:
        physical_batch: Number of records to process at once; by default as many as fit in memory.
        replay: Use CUDA graphs on a GPU. None: if they are supported and faster, measured on synthetic
            records; True: raise if they are not supported; False: never.
    """

    physical_batch: int | None = None
    replay: bool | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Distributed:
    """Process group whose ranks run the step together; each reads all data. See docs/distributed.md.

    Args:
        processes: Process group; by default all processes if `torch.distributed` is initialised; False
            for this process alone.
    """

    processes: "Group" = None


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
    """Folder of a run, and resuming. See docs/resume.md.

    Args:
        directory: Folder for the run's plan, ledger, metrics, checkpoint and weights; None for no files.
        resume: Continue from the checkpoint in the directory, with bitwise identical results.
        reseed: Continue with new randomness; steps after the checkpoint are charged again.
        settings: Publishable options outside the plan (e.g. the data set), as plain data for
            settings.json. They must be equal when the run resumes.
    """

    directory: str | os.PathLike[str] | None = None
    resume: bool = False
    reseed: bool = False
    settings: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Logging:
    """Interval of evaluations and checkpoints, callbacks and progress. See docs/logging.md.

    Args:
        every: Number of steps between evaluations, each of which also writes metrics and a checkpoint;
            by default about an epoch.
        callbacks: Functions `on_step(step, metrics)` with `StepMetrics`, called by rank 0 after each
            step, also after repeated steps of a resumed run. If one returns True, the run ends, and all
            planned steps stay charged.
        progress: Show a progress bar; by default on a terminal.
    """

    every: int | None = None
    callbacks: "Sequence[OnStep]" = ()
    progress: bool | None = None
