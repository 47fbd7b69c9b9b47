"""Checkpoint of a private step, and how a run resumes from it."""

import copy
import hashlib
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hush.core.errors import CheckpointError, PrivacyWarning
from hush.core.randomness import SystemSource, cryptographic
from hush.core.release import Selective
from hush.core.value import check_kind
from hush.training import checkpoint
from hush.training.checks.same_run import check_same_origin, origin_of
from hush.training.data import Data
from hush.training.options import Randomness
from hush.training.phases.private_gradient import fingerprint
from hush.training.run_folder import RunFolder

if TYPE_CHECKING:
    from hush.training.phases.resumable import ResumableStep
    from hush.training.phases.state import StepState

Scheduler = LRScheduler | ReduceLROnPlateau

_FACTS = {
    "plan": "plan",
    "records": "so many records,",
    "neighbours": "neighbours",
    "kind": "optimizer",
    "secure": "secure randomness",
    "exact": "exact noise",
    "settings": "an optimizer of the settings",
    "views": "views",
}

NEWER = {"replayed", "processes", "sharded"}
"""Entries that checkpoints of earlier versions lack: they were of one process, without a decision."""


def save_run(
    folder: RunFolder, step: "ResumableStep", scheduler: Scheduler | None, origin: dict[str, Any]
) -> None:
    """Write the run's checkpoint: the step, the scheduler, and the origin that resuming is held to."""
    state = None if scheduler is None else scheduler.state_dict()
    whole = {"step": step.state_dict(), "scheduler": state, "origin": origin}
    checkpoint.save(folder.checkpoint, whole)


def resume_run(
    folder: RunFolder | None,
    step: "ResumableStep",
    scheduler: Scheduler | None,
    data: Data,
    randomness: Randomness,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Origin of a run and its metrics up to the last checkpoint, which is loaded if there is one.

    Of several ranks, 0 alone has the folder, and reads the checkpoint for all.
    """
    generator, secure = randomness.generator, randomness.secure

    def read() -> dict[str, Any]:
        assert folder is not None
        folder.check_ledger(step.ledger)
        if not folder.checkpoint.exists():
            return {"origin": origin_of(data, generator, secure=secure)}
        whole = checkpoint.load(folder.checkpoint)
        check_same_origin(whole.get("origin", {}), data, generator, secure=secure)
        return whole

    state: dict[str, Any] = _by_first(step, "the checkpoint", read)
    if "step" not in state:
        return state["origin"], []
    step.load_state_dict(state["step"])
    if scheduler is not None and state["scheduler"] is not None:
        scheduler.load_state_dict(state["scheduler"])
    return state["origin"], _by_first(step, "the metrics", lambda: _metrics(folder, step.steps))


def _metrics(folder: RunFolder | None, step: int) -> list[dict[str, Any]]:
    return [] if folder is None else folder.metrics(up_to=step)


def _by_first(step: "StepState", phase: str, make: Callable[[], Any]) -> Any:
    """What this process makes, or rank 0 where there are several."""
    return make() if step.processes is None else step.processes.broadcast_object(phase, make)


def state_of(step: "StepState") -> dict[str, Any]:
    """Checkpoint: all that the step needs to go on exactly as it would have."""
    source = step.generator
    return {
        **_facts(step),
        "run": step.run,
        "charged_run": step.charged_run,
        "ledger": step.ledger.digest_at(step.charged_run, step.steps),
        "charges": sum(step.ledger.counts.values()),
        "randomness": step.secrecy,
        "steps": step.steps,
        "skipped": step.skipped,
        "accepted": step.accepted,
        "generator": None if isinstance(source, SystemSource) else source.get_state(),
        "model": step.model.state_dict(),
        "frame": None if step.basis_schedule is None else step.basis_schedule.state_dict(),
        "optimizer": step.optimizer.state_dict(),
        "replayed": step.replayed,
        "processes": ranks_of(step),
        "sharded": step.sharded is not None,
    }


def load_state(step: "StepState", state: dict[str, Any]) -> None:
    """Load a checkpoint into the step; raise if it is of another run or its charges are missing.

    A state that cannot be loaded leaves the model and the optimizer as they were.
    """
    _check(step, state)
    before = copy.deepcopy((step.model.state_dict(), step.optimizer.state_dict()))
    try:
        _load(step, state)
    except (RuntimeError, TypeError, KeyError, ValueError, AttributeError) as error:
        step.model.load_state_dict(before[0])
        step.optimizer.load_state_dict(before[1])
        raise CheckpointError(
            f"the checkpoint is of another model, or damaged: {error}. Resume with the model it was "
            "written for."
        ) from None


def _load(step: "StepState", state: dict[str, Any]) -> None:
    step.model.load_state_dict(state["model"])
    step.optimizer.load_state_dict(state["optimizer"])
    if step.basis_schedule is not None:
        step.basis_schedule.load_state_dict(state["frame"])
    if not isinstance(step.generator, SystemSource):
        step.generator.set_state(state["generator"])
    step.run, step.steps, step.skipped = state["run"], state["steps"], state["skipped"]
    step.charged_run, step.secrecy = state["charged_run"], state["randomness"]
    if isinstance(step.plan.release, Selective):
        step.accepted_trials = state["accepted"]
    step.replayed = state.get("replayed")  # so that steps taken again round alike
    theirs = _noise_layout(state.get("processes", 1), sharded=state.get("sharded", False))
    ours = _noise_layout(ranks_of(step), sharded=step.sharded is not None)
    if isinstance(step.generator, SystemSource):
        step.reseed()
    elif theirs != ours and _charged_since(step):
        warnings.warn(
            f"steps were charged by {theirs} since the checkpoint, and this run has {ours}, which add "
            f"other noise: they are drawn anew and charged again. Resume with {theirs} to repeat them "
            "without a charge.",
            PrivacyWarning,
            stacklevel=4,
        )
        step.reseed()


def _noise_layout(ranks: int, *, sharded: bool) -> str:
    """Who draws the noise of which coordinates, in words."""
    return f"{ranks} process{'es' * (ranks > 1)}{' with sharded parameters' * sharded}"


def _charged_since(step: "StepState") -> bool:
    """Whether the ledger has a charge, whole or torn, of the step after the checkpoint.

    A torn one may show a part of its release, which only the same noise gives again: ledger.md, 4.
    """
    if step.ledger.last_step(step.run) > step.steps:
        return True
    once = step.ledger.counts_repeating(step.plan, step.run, step.steps + 1)
    return once != step.ledger.counts


def ranks_of(step: "StepState") -> int:
    """Number of processes that run the step together."""
    return 1 if step.processes is None else step.processes.size


def _check(step: "StepState", state: dict[str, Any]) -> None:
    missing = state_of(step).keys() - check_kind("state", state, dict).keys() - NEWER
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {', '.join(sorted(missing))}: it would not go on as it began. Pass "
            "what state_dict() gave."
        )
    for name, ours in _facts(step).items():
        if state[name] != ours:
            theirs, own = _differing(state[name], ours) if name == "settings" else (state[name], ours)
            differing = (
                "other owners (units=), per_unit or gradient"
                if name == "units"  # the digests say nothing to a reader
                else f"{_FACTS[name]} {theirs} and this one has {own}"
            )
            raise CheckpointError(
                f"the checkpoint is of a run with {differing}: it would not go on as it began. "
                "Resume with the same plan, data, owners, optimizer, views and "
                "source of randomness; a scheduler changes the learning rate on the way."
            )
    selective = isinstance(step.plan.release, Selective)
    counts = ["steps", "skipped", "charges", *(["accepted"] if selective else [])]
    for name in counts:
        if type(state[name]) is not int or state[name] < 0:
            raise CheckpointError(
                f"the checkpoint has {name}={state[name]!r}, which is no number: damaged."
            )
    step.ledger.check_charged(state["charged_run"], state["steps"], state["ledger"])
    fresh = not step.ledger.last_step(state["run"]) and not isinstance(step.generator, SystemSource)
    charges = sum(step.ledger.counts.values())
    if fresh and charges > state["charges"]:
        raise CheckpointError(
            f"the state was kept before the first charge of its run, and {charges - state['charges']} "
            "charges were made to this ledger since: a run of the same seed may have drawn the same "
            "noise, and two releases under the same noise reveal the records' difference. Make a new "
            "step on this ledger instead."
        )


def _facts(step: "StepState") -> dict[str, Any]:
    """Settings that must be the same for a run to go on."""
    return {
        "plan": step.plan.digest,
        "records": step.records,
        "units": None if step.units is None else step.units.digest,
        "neighbours": str(step.adjacency.neighbours),
        "kind": type(step.optimizer).__name__,
        "secure": isinstance(step.generator, SystemSource),
        "exact": cryptographic(step.generator),
        "settings": step.optimizer_settings,
        "views": None if step.views is None else getattr(step.views, "__qualname__", "of a kind"),
    }


def _differing(theirs: Any, ours: list[dict[str, Any]]) -> tuple[Any, Any]:
    """The settings that differ between two lists of parameter groups, on either side."""
    try:
        pairs = list(zip(theirs, ours, strict=True))
        differ = [[name for name in {**a, **b} if a.get(name) != b.get(name)] for a, b in pairs]
        listed = [
            "; ".join(
                ", ".join(f"{name}={group.get(name)!r}" for name in names)
                for group, names in zip(side, differ, strict=True)
                if names
            )
            for side in (theirs, ours)
        ]
    except (TypeError, ValueError, AttributeError):  # another number of groups, or damaged
        return theirs, ours
    return listed[0], listed[1]


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings of each group of parameters, such as the learning rate; plain ones alone."""
    plain = (bool, int, float, str, tuple, type(None))
    return [
        {name: value for name, value in group.items() if isinstance(value, plain)}
        for group in optimizer.param_groups
    ]


def settings_digest(optimizer: torch.optim.Optimizer) -> str:
    """A hash of the settings of each group of parameters as of now, tensors among them."""
    values = [value for group in optimizer.param_groups for value in group.values()]
    tensors = [value.cpu() for value in values if isinstance(value, torch.Tensor)]
    text = repr((settings_of(optimizer), fingerprint(tensors)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
