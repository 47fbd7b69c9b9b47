"""Private selection of hyperparameters: random search with one charge."""

import hashlib
import json
import multiprocessing
import os
import pickle
import secrets
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import torch
from torch import nn

from hush.accounting.calibrate import calibrate
from hush.accounting.epsilon import upper_epsilon
from hush.accounting.ledger import Ledger
from hush.accounting.mechanism import mechanism
from hush.accounting.selection import draw_trials, trial_count
from hush.core.atomic_files import check_folder, make_folder, replace_file
from hush.core.errors import CheckpointError, EarlierRun, LedgerError, Unproved
from hush.core.guarantee import Budget, Guarantee, check_delta
from hush.core.parts import Always
from hush.core.plan import Plan
from hush.core.release import BestOf, TrialLaw
from hush.core.value import check_count, check_kind, finite_or_none
from hush.training import checkpoint
from hush.training.fingerprint import fingerprint
from hush.training.progress import Progress
from hush.training.run_folder import RunFolder
from hush.training.trial import Outcome, Settings, TuningTrial, check_space, draw_settings, outcome

_CHECKED = 20  # settings whose mechanism is compared in addition to those of the trials
_STATE = "unfinished.secret"

TrainingFunction = Callable[[Settings, TuningTrial], tuple[Any, float]]
PlanOf = Callable[[Settings], Plan]


@dataclass(frozen=True, kw_only=True, eq=False)
class Tuned:
    """Best trial of a selection, publishable with its guarantee."""

    model: Any
    settings: Settings
    score: float
    plan: Plan
    """Plan of the whole selection, as charged."""
    guarantee: Guarantee


@dataclass(kw_only=True)
class Unfinished:
    """Selection in progress (secret); its file is removed at the end."""

    run: str
    """Name of the selection on its ledger."""
    identity: str
    """Space, plan and budget; a resumed selection has the same."""
    trials: list[tuple[Settings, int | None]]
    """Settings and seed of each trial."""
    finished: int = 0
    best: Outcome | None = None

    def save(self, path: Path) -> None:
        """Write the secret state for resuming."""
        try:
            content = pickle.dumps(self)
        except Exception as error:
            raise CheckpointError(
                f"the best model so far cannot be saved for resuming ({error}). Define its class in a "
                "module, or leave out directory=."
            ) from None
        replace_file(path, content, secret=True)


def _stored(folder: Path, asked: str, *, resume: bool) -> Unfinished | None:
    """Selection to resume in a folder; None for a new one. Files there are trusted."""
    if not resume:
        if folder.exists() and any(folder.iterdir()):
            raise CheckpointError(
                f"{folder} already holds a selection or something else: starting over would spend its "
                "budget a second time. Resume it (--resume), or name another directory (--run-dir)."
            )
        check_folder("directory", next(path for path in (folder, *folder.parents) if path.exists()))
        return None
    path = folder / _STATE
    if not path.exists():
        raise CheckpointError(
            f"there is no unfinished selection in {folder} to resume. Check the name, or start without "
            "resume."
        )
    state: Unfinished = pickle.loads(path.read_bytes())
    if state.identity != asked:
        raise CheckpointError(
            f"the selection in {folder} was begun with another space, plan or budget. Resume with the "
            "same ones, or name another directory."
        )
    return state


def tune(
    fit: TrainingFunction,
    space: Any,
    *,
    plan: Plan | PlanOf,
    steps: int,
    budget: Budget,
    mean: float = 10.0,
    law: TrialLaw = "negative-binomial",
    shape: float = 1.0,
    score_noise: float | None = None,
    ledger: Ledger | None = None,
    directory: str | os.PathLike[str] | None = None,
    resume: bool = False,
    workers: int = 1,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Tuned:
    """Best of a random number of private trials, with settings drawn from a space, for one budget.

    **Guarantee.** `Tuned.guarantee`, never above the budget: docs/guarantees/tuning.md. It covers the
    best trial's model, settings and score. The number of trials, their duration and the other scores
    must not be published, and are not kept.

    Args:
        fit: function that trains one trial: called with its settings and a trial, it trains
            `trial.steps` steps under `trial.plan` charged to `trial.ledger` and returns (model, score).
            It must not print or store anything of its trial.
        space: a range (`hush.Uniform`, `hush.LogUniform`, `hush.Choice`) for each setting, by name.
        plan: plan of a step, or a function of the settings that returns one; the noise is calibrated.
            All settings must give the same mechanism: clipping norms may differ, sampling rates may not.
        steps: training steps of one trial.
        budget: maximum cost of the whole selection and all other charges on the ledger.
        mean: expected number of trials.
        law: law of the number of trials, as in `hush.BestOf`.
        shape: shape of the negative binomial law: 1 is geometric.
        score_noise: noise multiplier of scores on held-out private records, in units of one record;
            `fit` then returns `trial.score(...)`. None: scores are of records that need no protection.
        ledger: ledger that the selection is charged to, with one entry.
        directory: folder for the plan, ledger, best settings and weights, and the secret state.
        resume: continue the selection in the directory; an interrupted trial is run again.
        workers: number of trials to run at once, each in a process; `fit` must be importable then.
        generator: seed of the number of trials, the settings and `trial.generator`, for tests.
        progress: show the number of finished trials on standard error. It is sensitive.

    Returns:
        The best trial and the guarantee of the whole selection.
    """
    ranges = check_space(space)
    check_kind("budget", budget, Budget)
    check_count("workers", workers, "trials are run in so many processes", at_least=1, example=2)
    if (directory is not None and ledger is not None) or (resume and directory is None):
        raise CheckpointError(
            "a selection with a directory has its ledger there, and only one with a directory can be "
            "resumed. Pass directory= alone, or ledger= alone."
        )
    release = BestOf(steps=steps, mean=mean, law=law, shape=shape, score=score_noise)
    reference = _plan_of(plan, {name: each.first for name, each in ranges.items()})
    wanted = replace(reference, release=release)
    folder = None if directory is None else Path(directory)
    described = {name: repr(dimension) for name, dimension in ranges.items()}
    asked = json.dumps([described, wanted.to_plain(), budget.to_plain()], sort_keys=True)
    state = None if folder is None else _stored(folder, asked, resume=resume)
    spent = {} if ledger is None else ledger.counts
    selection = calibrate(wanted, budget, steps=1, spent=spent)
    if state is None:
        seed = None if generator is None else int(torch.randint(2**62, (), generator=generator))
        pick = SystemRandom() if seed is None else Random(seed)
        number = draw_trials(trial_count(release), secrets.randbelow if seed is None else pick.randrange)
        # more than the trials, so the check does not depend on their draws
        picks = [*[pick] * number, *map(Random, range(_CHECKED))]
        drawn = [draw_settings(ranges, each) for each in picks]
        for settings in drawn:
            if mechanism(_plan_of(plan, settings)) != mechanism(reference):
                raise Unproved(
                    "the plans of two settings are different mechanisms, and one noise is calibrated "
                    "for all trials. Search settings that are not charged (learning rates, clipping "
                    "norms, models), with one sampling rate and one noise multiplier."
                )
        seeds = [None if seed is None else pick.randrange(2**62) for _ in range(number)]
        trials = list(zip(drawn[:number], seeds, strict=True))
        state = Unfinished(run=f"tune-{secrets.token_hex(8)}", identity=asked, trials=trials)
        if folder is not None:
            make_folder(folder)
            state.save(folder / _STATE)
    cost = upper_epsilon({replace(selection, release=Always()): release.steps}, budget.delta)
    alone = Budget(epsilon=cost * (1 + 1e-9), delta=budget.delta)
    single = partial(_run_trial, fit, plan, selection, alone)
    # a fork would copy the threads' locks of torch
    spawn = multiprocessing.get_context("spawn")
    several = nullcontext() if workers == 1 else ProcessPoolExecutor(workers, spawn)
    task = "tuning (do not publish: the number of trials is secret)"
    with (
        Progress(task, done=state.finished, unit="trials done", visible=progress) as bar,
        several as pool,
    ):
        for done in (pool.map if pool else map)(single, state.trials[state.finished :]):
            # of equals the first: tuning.md, ties
            state.best = done if state.best is None or done.score > state.best.score else state.best
            state.finished += 1
            if folder is not None:
                state.save(folder / _STATE)
            bar.advance()
    return _release(state, selection, budget, ledger, folder)


def _plan_of(plan: Plan | PlanOf, settings: Settings) -> Plan:
    """The plan of these settings, before its noise is calibrated."""
    made = check_kind("plan", plan(settings) if callable(plan) else plan, Plan)
    if type(made.release) is not Always:
        raise Unproved(
            f"release={made.release} is not proved within a selection, which is itself a release rule. "
            "Leave release out: hush.tune adds BestOf."
        )
    return made


def _run_trial(
    fit: TrainingFunction,
    plan: Plan | PlanOf,
    selection: Plan,
    budget: Budget,
    drawn: tuple[Settings, int | None],
) -> Outcome:
    """Outcome of one trial; raise if it continues the training of another one."""
    settings, seed = drawn
    release = selection.release
    assert isinstance(release, BestOf)
    trial = TuningTrial(
        plan=replace(_plan_of(plan, settings), noise=selection.noise),
        steps=release.steps,
        budget=budget,
        score_noise=release.score,
        generator=None if seed is None else torch.Generator().manual_seed(seed),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", EarlierRun)
        try:
            returned = fit(dict(settings), trial)
        except EarlierRun:
            raise LedgerError(
                "a trial began with weights that an earlier private run has trained, such as a body "
                "that trials share: its model would contain the steps of both, and only its own are "
                "charged. Copy the model at the start of fit, e.g. body = copy.deepcopy(pretrained)."
            ) from None
    return outcome(settings, trial, returned)


def _release(
    state: Unfinished, selection: Plan, budget: Budget, ledger: Ledger | None, folder: Path | None
) -> Tuned:
    """Charge the selection, write and return its best trial, and delete the state of the others."""
    best = state.best
    assert best is not None
    module = best.model if isinstance(best.model, nn.Module) else None
    facts = [best.settings, best.score, fingerprint(module.state_dict().values() if module else ())]
    release = hashlib.sha256(json.dumps(facts, default=repr).encode()).hexdigest()[:32]
    opened = nullcontext(ledger) if ledger else Ledger(folder / "ledger.jsonl" if folder else None)
    with opened as charged:
        charged.charge(selection, run=state.run, step=1, release=release, **best.charged)
        charged.store_delta(budget.delta)
        guarantee = charged.epsilon(budget.delta)
    if best.charged["records"] is not None:
        check_delta(budget.delta, best.charged["records"], best.charged["adjacency"].unit)
    if folder is not None:
        RunFolder(folder, selection, resume=True).begin(selection, charged)
        result = {"settings": best.settings, "score": best.score, "guarantee": guarantee.to_plain()}
        replace_file(folder / "tuned.json", (json.dumps(finite_or_none(result)) + "\n").encode())
        if module is not None:
            checkpoint.save_weights(folder / "model.safetensors", module)
        (folder / _STATE).unlink(missing_ok=True)
    found = {"model": best.model, "settings": best.settings, "score": best.score}
    return Tuned(**found, plan=selection, guarantee=guarantee)
