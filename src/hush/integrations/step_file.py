"""Secret state of a private step, beside its ledger and apart from the checkpoints of another library.

Checkpoints of a training library are copied, uploaded and published: they hold what is charged. The key
of the noise, from which the releases' noise can be computed, and the number of records skipped are kept
in a file of their own, which only its owner may read.
"""

from typing import Any

import torch

from hush.core.errors import CheckpointError
from hush.training import checkpoint
from hush.training.checks.same_run import check_same_origin, origin_of
from hush.training.data import Data
from hush.training.run_folder import step_file
from hush.training.step import PrivateStep

_IN_CHECKPOINT = ("model", "optimizer")
"""Parts of a step's state that the library's own checkpoint has."""


def save_step(
    step: PrivateStep, data: Data, generator: torch.Generator | None, *, secure: bool = False
) -> dict[str, Any]:
    """Keep the secret state of a step in its file, and return the public name of that state.

    Args:
        step: between two batches. Of several ranks, rank 0 writes.
        data: its records, by which a resumed run is held to the same.
        generator: that it was made with.
        secure: that it was made with.

    Returns:
        For the library's checkpoint: the run, its step, and the ledger that it is charged to.
    """
    name = {"run": step.run, "steps": step.steps, "ledger": step.ledger.identity}
    path = step.ledger.path
    if path is None or (step.processes is not None and step.processes.rank > 0):
        return name
    state = {key: part for key, part in step.state_dict().items() if key not in _IN_CHECKPOINT}
    file = step_file(path)
    states = checkpoint.load(file) if file.exists() else {}
    kept = {"step": state, "origin": origin_of(data, generator, secure=secure)}
    checkpoint.save(file, {**states, _key(name): kept})
    return name


def load_step(
    step: PrivateStep,
    name: dict[str, Any],
    data: Data,
    generator: torch.Generator | None,
    *,
    secure: bool = False,
) -> None:
    """Go on from the secret state of that name, and the weights and optimizer as they are now.

    Args:
        step: on the same ledger, with the model and the optimizer as the checkpoint had them.
        name: of `save_step`.
        data: to go on with.
        generator: as it is passed now.
        secure: likewise.
    """
    if step.processes is not None and step.processes.rank > 0:
        step.load_state_dict({})  # that of rank 0 is loaded
        return
    path = step.ledger.path
    if path is None or step.ledger.identity != name["ledger"]:
        raise CheckpointError(
            f"the checkpoint is of a run that was charged to ledger {name['ledger']}, and this one is "
            f"{step.ledger.identity}{' in memory' * (path is None)}: what the run has spent is not on "
            "it. Pass ledger= with the path of that run's ledger, from its first step on."
        )
    file = step_file(path)
    states = checkpoint.load(file) if file.exists() else {}
    if _key(name) not in states:
        raise CheckpointError(
            f"{file} has no state of step {name['steps']} of run {name['run']}: without the key of its "
            "noise the run cannot go on as it began. Restore the file; or load the weights alone and "
            "begin a new run on the same ledger, where both are charged."
        )
    kept = states[_key(name)]
    check_same_origin(kept["origin"], data, generator, secure=secure)
    here = {"model": step.model.state_dict(), "optimizer": step.optimizer.state_dict()}
    step.load_state_dict({**kept["step"], **here})


def _key(name: dict[str, Any]) -> str:
    return f"{name['run']}/{name['steps']}"
