"""State of a selection that is not finished: what a resumed one goes on from (secret)."""

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hush.core.atomic_files import make_folder, replace_file
from hush.core.errors import CheckpointError
from hush.core.plan import Plan
from hush.training.tuning.space import Dimension, Settings
from hush.training.tuning.trial import Outcome

_STATE = "unfinished.secret"


@dataclass(kw_only=True)
class Unfinished:
    """A selection under way: the settings of all its trials, and the best one so far.

    How many trials there are and how they scored is not released: the file of it is removed in the end.
    """

    run: str
    """Name of the selection on its ledger."""
    identity: str
    """What was asked for; a resumed selection asks for the same."""
    trials: list[Settings]
    seeds: list[int | None]
    finished: int = 0
    best: Outcome | None = None
    path: Path | None = field(default=None, compare=False)

    def add(self, outcome: Outcome) -> None:
        """Count the next trial; only the better one is kept (of equals the first: tuning.md, ties)."""
        if self.best is None or outcome.score > self.best.score:
            self.best = outcome
        self.finished += 1
        self.save()

    def save(self) -> None:
        if self.path is None:
            return
        try:
            content = pickle.dumps(self)
        except Exception as error:
            raise CheckpointError(
                f"the best model so far cannot be kept for resuming ({error}): a class that is defined "
                "in a function has no name to be read back by. Define it in a module, or leave out "
                "directory=."
            ) from None
        replace_file(self.path, content, secret=True)

    def remove(self) -> None:
        """Delete everything about trials that are not released."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def identity(space: Mapping[str, Dimension], plan: Plan, budget: Any) -> str:
    """Text that is equal for selections that ask for the same."""
    ranges = {name: repr(dimension) for name, dimension in space.items()}
    return json.dumps([ranges, plan.to_plain(), budget.to_plain()], sort_keys=True)


def stored(folder: Path, asked: str, *, resume: bool) -> Unfinished | None:
    """The selection to go on with in a folder, None for a new one.

    Files there are trusted, as the program that trains is: they are this user's own.
    """
    path = folder / _STATE
    if not resume:
        if folder.exists() and any(folder.iterdir()):
            raise CheckpointError(
                f"{folder} already holds a selection or something else: starting over would spend its "
                "budget a second time without saying so. Resume it, or name another directory."
            )
        return None
    if not path.exists():
        raise CheckpointError(
            f"there is no unfinished selection in {folder} to resume: starting one under a mistyped "
            "name would pay for everything again. Check the name, or start without resume."
        )
    state = pickle.loads(path.read_bytes())
    if not isinstance(state, Unfinished) or state.identity != asked:
        raise CheckpointError(
            f"the selection in {folder} was begun with another space, plan or budget: its trials would "
            "not be those that are charged. Resume with the same ones, or name another directory."
        )
    state.path = path
    return state


def begin(state: Unfinished, folder: Path | None) -> Unfinished:
    """Put a new selection on disk, where it has a folder."""
    if folder is not None:
        make_folder(folder)
        state.path = folder / _STATE
        state.save()
    return state
