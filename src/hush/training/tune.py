"""Private hyperparameter tuning by random search, with one charge for the whole selection."""

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

_CHECKED = 20  # number of additional draws of settings whose mechanisms are compared

TrainingFunction = Callable[[Settings, TuningTrial], tuple[Any, float]]
PlanOf = Callable[[Settings], Plan]


@dataclass(frozen=True, kw_only=True, eq=False)
class Tuned:
    """Best trial of a selection and its guarantee, which may be published."""

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
    """Private random search: release the best of a random number of trials, within one budget.

    **Guarantee.** `Tuned.guarantee`, which never exceeds the budget (docs/guarantees/tuning.md). It
    covers the model, settings and score of the best trial. The number of trials, their run times and the
    other scores are not stored, and must not be published.

    Args:
        fit: Function `fit(settings, trial)` that runs `trial.steps` steps of `trial.plan` on
            `trial.ledger` and returns (model, score). It must not print or store any result.
        space: Dictionary from names to ranges (`hush.Uniform`, `hush.LogUniform`, `hush.Choice`).
        plan: Plan, or a function from settings to a plan, whose noise is calibrated. All settings must
            give the same mechanism: clipping norms may differ, but sampling rates may not.
        steps: Number of training steps of a trial.
        budget: Maximum privacy cost of the selection and all other charges on the ledger.
        mean: Expected number of trials.
        law: Distribution of the number of trials, as in `hush.BestOf`.
        shape: Shape of the negative binomial distribution; 1 is geometric.
        score_noise: Noise multiplier of scores on held-out private records, in units of one record;
            `fit` then returns `trial.score(...)`. None for scores on records that need no protection.
        ledger: Ledger for the charge of the selection, or its path.
        directory: New folder for the plan, ledger, best settings and weights, written at the end.
        workers: Number of parallel trials, each in a process; `fit` must then be importable.
        generator: Seed of the number of trials, the settings and `trial.generator`, for tests.
        progress: Whether to show the number of finished trials (sensitive) on standard error.

    Returns:
        The best trial, and the guarantee of the whole selection.
    """
    ranges = check_space(space)
    check_kind("budget", budget, Budget)
    check_count("workers", workers, "it is a number of processes", at_least=1, example=2)
    folder = None if directory is None else Path(directory)
    if folder is not None and ledger is not None:
        raise CheckpointError(
            "a selection with a directory has its own ledger. Pass directory= or ledger=, not both."
        )
    if folder is not None:
        if folder.exists() and any(folder.iterdir()):
            raise CheckpointError(
                f"{folder} already holds a selection or other files: starting again would spend its "
                "budget a second time. Use another directory (--run-dir)."
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
    # also compare fixed draws, so the check depends less on the secret draws of the trials
    picks = [*[pick] * number, *map(Random, range(_CHECKED))]
    drawn = [draw_settings(ranges, each) for each in picks]
    for settings in drawn:
        if mechanism(_plan_of(plan, settings)) != mechanism(reference):
            raise Unproved(
                "two settings give plans with different mechanisms, but all trials share one "
                "calibration. Search only settings that do not change the privacy cost (learning rates, "
                "clipping norms, models), with one sampling rate."
            )
    seeds = [None if seed is None else pick.randrange(2**62) for _ in range(number)]
    trials = list(zip(drawn[:number], seeds, strict=True))
    cost = upper_epsilon({replace(selection, release=Always()): release.steps}, budget.delta)
    alone = Budget(epsilon=cost * (1 + 1e-9), delta=budget.delta)
    single = partial(_run_trial, fit, plan, selection, alone)
    # spawn, because a forked process would inherit locks that torch's threads have acquired
    spawn = multiprocessing.get_context("spawn")
    several = nullcontext() if workers == 1 else ProcessPoolExecutor(workers, spawn)
    task = "tuning (do not publish: the number of trials is secret)"
    best: Outcome | None = None
    with Progress(task, unit="trials done", visible=progress) as bar, several as pool:
        for done in (pool.map if pool else map)(single, trials):
            # prefer the first of equal scores: tuning.md, ties
            best = done if best is None or done.score > best.score else best
            bar.advance()
    assert best is not None
    return _release(best, selection, budget, ledger, folder)


def _plan_of(plan: Plan | PlanOf, settings: Settings) -> Plan:
    """Plan of these settings, before its noise is calibrated."""
    made = check_kind("plan", plan(settings) if callable(plan) else plan, Plan)
    if type(made.release) is not Always:
        raise Unproved(
            f"release={made.release} has no proof in a selection, which is a release rule itself. "
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
    """Run one trial; raise if it continues the training of another trial."""
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
                "a trial started with weights from another private run, e.g. a model that trials share: "
                "the steps of the other run would not be charged. Copy the model at the start of fit, "
                "e.g. model = copy.deepcopy(pretrained)."
            ) from None
    return outcome(settings, trial, returned)


def _release(
    best: Outcome, selection: Plan, budget: Budget, ledger: LedgerOrPath | None, folder: Path | None
) -> Tuned:
    """Charge the selection, then write and return its best trial."""
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
