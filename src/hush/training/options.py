"""Options of a private step and of a training run, by topic."""

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
    """User-level privacy: steps sample users instead of records.

    The record-to-user map is public, except under `ADD_REMOVE`. See docs/guarantees/units.md.

    Args:
        owners: User id of each record (integers or strings), in the order of the records.
        per_unit: Maximum number of records of one user per step; each step samples them.
        gradient: Aggregation of the gradients of a user's records, "mean" or "sum", before clipping.
    """

    owners: "Owners"
    per_unit: int
    gradient: "Reduction" = "mean"


@dataclass(frozen=True, kw_only=True, eq=False)
class Randomness:
    """Random source for sampling and noise; by default a cryptographic stream with a secret key.

    Args:
        generator: Seed of the stream, for tests. The seed reveals the noise, so the guarantee has
            `randomness: seeded`.
    """

    generator: "torch.Generator | None" = None


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Physical batch size and CUDA graphs; they do not change the guarantee.

    Args:
        physical_batch: Number of records to process at once; by default as many as fit in memory.
        replay: Whether to use CUDA graphs on a GPU. None: use them if they are supported, and faster on
            synthetic records; True: raise if they are not supported; False: never use them.
    """

    physical_batch: int | None = None
    replay: bool | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Distributed:
    """Process group whose ranks run the step together. See docs/distributed.md.

    Args:
        processes: Process group; each rank must be able to read all data. By default all processes if
            `torch.distributed` is initialised; False for this process alone.
    """

    processes: "Group" = None


class StepOptions(TypedDict, total=False):
    """Arguments of `hush.train` that it passes to `PrivateStep`."""

    records: int | None
    units: Units | None
    neighbours: Neighbours
    views: "Views | None"
    public: "Data | None"
    execution: Execution


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Folder of a run, and options for resuming it. See docs/resume.md.

    Args:
        directory: Folder for the run's plan, ledger, metrics, checkpoint and weights; None to write no
            files.
        resume: Whether to continue from the checkpoint in the directory. The results are bitwise equal
            to an uninterrupted run.
        reseed: Whether to continue with new randomness. Steps after the checkpoint are charged again.
        settings: Public options outside the plan (e.g. the name of the data set), as plain data. They
            are written to settings.json and must be equal when the run resumes.
    """

    directory: str | os.PathLike[str] | None = None
    resume: bool = False
    reseed: bool = False
    settings: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Logging:
    """Evaluation interval, callbacks and progress bar. See docs/logging.md.

    Args:
        every: Number of steps between evaluations; by default about an epoch. Metrics and a checkpoint
            are written after each evaluation.
        callbacks: Functions `on_step(step, metrics)` with `StepMetrics`. Rank 0 calls them after each
            step, including repeated steps of a resumed run. If a callback returns True, the run ends,
            and all planned steps are charged.
        progress: Whether to show a progress bar; by default only on a terminal.
    """

    every: int | None = None
    callbacks: "Sequence[OnStep]" = ()
    progress: bool | None = None
