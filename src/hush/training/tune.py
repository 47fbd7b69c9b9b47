"""Private hyperparameter tuning: random search with one charge for the whole selection."""

import hashlib
import json
import multiprocessing
import os
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
from hush.accounting.ledger import LedgerOrPath, opened
from hush.accounting.mechanism import mechanism
from hush.accounting.selection import draw_trials, trial_count
from hush.core.atomic_files import check_folder, replace_file
from hush.core.errors import CheckpointError, EarlierRun, LedgerError, Unproved
from hush.core.guarantee import Budget, Guarantee, check_delta
from hush.core.parts import Always
from hush.core.plan import Plan
from hush.core.release import BestOf, TrialLaw
from hush.core.value import check_count, check_kind, finite_or_none
from hush.training import checkpoint
from hush.training.fingerprint import fingerprint
from hush.training.progress import Progress
from hush.training.run_folder import TUNED, RunFolder
from hush.training.trial import Outcome, Settings, TuningTrial, check_space, draw_settings, outcome

_CHECKED = 20  # number of additional draws of settings for which the mechanisms are compared

TrainingFunction = Callable[[Settings, TuningTrial], tuple[Any, float]]
PlanOf = Callable[[Settings], Plan]


@dataclass(frozen=True, kw_only=True, eq=False)
class Tuned:
    """Best trial of a selection; may be published with its guarantee."""

    model: Any
    settings: Settings
    score: float
    plan: Plan
    """Charged plan of the whole selection."""
    guarantee: Guarantee


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
    ledger: LedgerOrPath | None = None,
    directory: str | os.PathLike[str] | None = None,
    workers: int = 1,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Tuned:
    """Private random search: the best of a random number of private trials, within one budget.

    **Guarantee.** `Tuned.guarantee`, never above the budget: docs/guarantees/tuning.md. It covers the
    best trial's model, settings and score. The number of trials, their run times and the other scores
    must not be published; they are not stored.

    Args:
        fit: function `fit(settings, trial)` that runs `trial.steps` steps of `trial.plan` on
            `trial.ledger` and returns (model, score). It must not print or store any result.
        space: dictionary from names to ranges (`hush.Uniform`, `hush.LogUniform`, `hush.Choice`).
        plan: plan, or a function from settings to a plan; its noise is calibrated. All settings must
            give the same mechanism: clipping norms may differ, sampling rates may not.
        steps: number of training steps of a trial.
        budget: maximum cost of the selection and all other charges on the ledger.
        mean: expected number of trials.
        law: law of the number of trials, as in `hush.BestOf`.
        shape: shape of the negative binomial law: 1 is geometric.
        score_noise: noise multiplier of scores on held-out private records, in units of one record;
            `fit` then returns `trial.score(...)`. None for scores on records that need no protection.
        ledger: ledger for the charge of the selection, or its path.
        directory: new folder for the plan, ledger, best settings and weights, written at the end.
        workers: number of parallel trials, each in a process; `fit` must then be importable.
        generator: seed of the number of trials, the settings and `trial.generator`, for tests.
        progress: show the number of finished trials (sensitive) on standard error.

    Returns:
        The best trial and the guarantee of the whole selection.
    """
    ranges = check_space(space)
    check_kind("budget", budget, Budget)
    check_count("workers", workers, "it is a number of processes", at_least=1, example=2)
    folder = None if directory is None else Path(directory)
    if folder is not None and ledger is not None:
        raise CheckpointError(
            "a selection with a directory has its ledger there. Pass directory= alone, or ledger= alone."
        )
    if folder is not None:
        if folder.exists() and any(folder.iterdir()):
            raise CheckpointError(
                f"{folder} already holds a selection or something else: starting over would spend its "
                "budget a second time. Name another directory (--run-dir)."
            )
        check_folder("directory", next(path for path in (folder, *folder.parents) if path.exists()))
    release = BestOf(steps=steps, mean=mean, law=law, shape=shape, score=score_noise)
    reference = _plan_of(plan, {name: each.first for name, each in ranges.items()})
    with nullcontext() if ledger is None else opened(ledger) as earlier:
        spent = {} if earlier is None else dict(earlier.counts)
    selection = calibrate(replace(reference, release=release), budget, steps=1, spent=spent)
    seed = None if generator is None else int(torch.randint(2**62, (), generator=generator))
    pick = SystemRandom() if seed is None else Random(seed)
    number = draw_trials(trial_count(release), secrets.randbelow if seed is None else pick.randrange)
    # additional draws, so that the check does not depend on the trials' draws
    picks = [*[pick] * number, *map(Random, range(_CHECKED))]
    drawn = [draw_settings(ranges, each) for each in picks]
    for settings in drawn:
        if mechanism(_plan_of(plan, settings)) != mechanism(reference):
            raise Unproved(
                "two settings give plans with different mechanisms, and all trials share one "
                "calibration. Search settings that do not change the privacy cost (learning rates, "
                "clipping norms, models), with one sampling rate."
            )
    seeds = [None if seed is None else pick.randrange(2**62) for _ in range(number)]
    trials = list(zip(drawn[:number], seeds, strict=True))
    cost = upper_epsilon({replace(selection, release=Always()): release.steps}, budget.delta)
    alone = Budget(epsilon=cost * (1 + 1e-9), delta=budget.delta)
    single = partial(_run_trial, fit, plan, selection, alone)
    # a fork would copy locks that torch's threads hold
    spawn = multiprocessing.get_context("spawn")
    several = nullcontext() if workers == 1 else ProcessPoolExecutor(workers, spawn)
    task = "tuning (do not publish: the number of trials is secret)"
    best: Outcome | None = None
    with Progress(task, unit="trials done", visible=progress) as bar, several as pool:
        for done in (pool.map if pool else map)(single, trials):
            # the first of equal scores: tuning.md, ties
            best = done if best is None or done.score > best.score else best
            bar.advance()
    assert best is not None
    return _release(best, selection, budget, ledger, folder)


def _plan_of(plan: Plan | PlanOf, settings: Settings) -> Plan:
    """The plan of these settings, before its noise is calibrated."""
    made = check_kind("plan", plan(settings) if callable(plan) else plan, Plan)
    if type(made.release) is not Always:
        raise Unproved(
            f"release={made.release} is not proved in a selection, which is itself a release rule. "
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
    """Outcome of one trial; raise if it continues the training of another trial."""
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
            with Progress("trial", visible=False):  # run times and the number of trials are secret
                returned = fit(dict(settings), trial)
        except EarlierRun:
            raise LedgerError(
                "a trial started with weights from another private run, e.g. a body that trials share: "
                "the steps of the other run would not be charged. Copy the model at the start of fit, "
                "e.g. body = copy.deepcopy(pretrained)."
            ) from None
    return outcome(settings, trial, returned)


def _release(
    best: Outcome, selection: Plan, budget: Budget, ledger: LedgerOrPath | None, folder: Path | None
) -> Tuned:
    """Charge the selection, write and return its best trial."""
    module = best.model if isinstance(best.model, nn.Module) else None
    facts = [best.settings, best.score, fingerprint(module.state_dict().values() if module else ())]
    release = hashlib.sha256(json.dumps(facts, default=repr).encode()).hexdigest()[:32]
    with opened(folder / "ledger.jsonl" if folder else ledger) as charged:
        run = f"tune-{secrets.token_hex(8)}"
        charged.charge(selection, run=run, step=1, release=release, **best.charged)
        charged.store_delta(budget.delta)
        guarantee = charged.epsilon(budget.delta)
    if best.charged["records"] is not None:
        check_delta(budget.delta, best.charged["records"], best.charged["adjacency"].unit)
    if folder is not None:
        RunFolder(folder, selection, resume=True).begin(selection, charged)
        result = {"settings": best.settings, "score": best.score, "guarantee": guarantee.to_plain()}
        replace_file(folder / TUNED, (json.dumps(finite_or_none(result)) + "\n").encode())
        if module is not None:
            checkpoint.save_weights(folder / "model.safetensors", module)
    found = {"model": best.model, "settings": best.settings, "score": best.score}
    return Tuned(**found, plan=selection, guarantee=guarantee)
