"""Arguments of `hush.train` that a run cannot be made of, alone or beside others."""

from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from hush.accounting.ledger import Ledger
from hush.core.errors import CheckpointError, InvalidValue, Unsupported
from hush.core.value import check_kind
from hush.training.checkpoint import Scheduler
from hush.training.options import Checkpoints


def check_checkpoints(checkpoints: Checkpoints, ledger: object) -> None:
    """Raise if a run needs a directory and has none, or has two ledgers.

    Args:
        checkpoints: Folder of the run, and how it resumes.
        ledger: Ledger passed for the run.
    """
    for name, flag in (("resume", checkpoints.resume), ("reseed", checkpoints.reseed)):
        check_kind(name, flag, bool)
    directory = checkpoints.directory
    if (checkpoints.resume and directory is None) or (checkpoints.reseed and not checkpoints.resume):
        raise CheckpointError(
            "there is nothing to resume or reseed: only a run with a directory can go on. Pass "
            "checkpoints=hush.Checkpoints(directory=..., resume=True)."
        )
    if checkpoints.settings is not None and directory is None:
        raise InvalidValue(
            "settings were passed and no directory: they are kept beside the run, for resuming it. Pass "
            "directory= as well, or leave them out.",
            key="settings",
        )
    if ledger is not None:
        check_kind("ledger", ledger, Ledger)
    if ledger is not None and directory is not None:
        raise InvalidValue(
            "ledger and directory were both passed: a run with a directory is charged to the ledger in "
            "it. Pass one of the two; runs that add up share a ledger without a directory.",
            key="ledger",
        )


def check_scheduler(scheduler: Any, evaluation: Any) -> None:
    """Raise unless a schedule of learning rates can follow the run.

    Args:
        scheduler: of the run's optimizer; None: the rate stays.
        evaluation: data whose loss it may follow.
    """
    if scheduler is not None and not isinstance(scheduler, Scheduler):
        raise InvalidValue(
            f"scheduler={scheduler!r} must be a scheduler of torch.optim.lr_scheduler: another "
            "would be left out. Pass e.g. torch.optim.lr_scheduler.StepLR(optimizer, 100)."
        )
    if isinstance(scheduler, ReduceLROnPlateau) and evaluation is None:
        raise Unsupported(
            "ReduceLROnPlateau follows a loss, and that of the training records is not released. "
            "Pass evaluation data."
        )


def check_self_test(self_test: Any) -> None:
    """Raise unless the test of a step can be called, or is left out."""
    if self_test is not None and not callable(self_test):
        raise InvalidValue(
            f"self_test={self_test!r} cannot be called: it is to look at the step before it runs. Pass "
            "self_test=hush.audit.self_test, or leave it out.",
            key="self_test",
        )
