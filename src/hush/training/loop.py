"""Training loop within a budget, with evaluation, checkpoints and resuming."""

import inspect
import os
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hush.accounting.ledger import Ledger, LedgerOrPath, opened
from hush.core.errors import CheckpointError, InvalidValue, Unsupported
from hush.core.guarantee import Budget, Guarantee, Neighbours, check_delta
from hush.core.plan import Plan
from hush.core.value import check_count, check_kind
from hush.training import checkpoint
from hush.training.checkpoint import Scheduler, resume_run
from hush.training.data import Data, prepare
from hush.training.disjoint import check_held_out
from hush.training.distributed.process_group import reducer_of
from hush.training.end import last_step
from hush.training.evaluate import check_evaluation, evaluate
from hush.training.metrics import StepMetrics
from hush.training.options import (
    Checkpoints,
    Distributed,
    Execution,
    Logging,
    Randomness,
    StepOptions,
    Units,
)
from hush.training.per_instance import PerInstance
from hush.training.progress import Progress
from hush.training.rehearsal import rehearsal
from hush.training.run_folder import RunFolder, metrics_of
from hush.training.step import PrivateStep

_CHECKPOINTS, _LOGGING, _RANDOMNESS, _DISTRIBUTED = Checkpoints(), Logging(), Randomness(), Distributed()
_HOLDERS = Checkpoints, Logging, Randomness, Distributed, Execution, Units


@dataclass(frozen=True, kw_only=True)
class Run:
    """Result of a training run: guarantee and metrics."""

    guarantee: Guarantee
    steps: int
    stopped: Literal["steps", "budget", "callback"]
    metrics: list[dict[str, Any]]
    skipped: int = field(repr=False)
    """Number of records skipped over all steps because of gradients that are not finite (sensitive)."""
    accepted: int | None = None
    """Number of accepted trials of a selective plan with per-trial accounting; None otherwise."""
    per_instance: PerInstance | None = field(default=None, repr=False)
    """Per-instance costs, if they were requested (sensitive)."""


def train(
    model: nn.Module,
    loss: Any,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    data: Data,
    *,
    budget: Budget,
    steps: int | None = None,
    scheduler: Scheduler | None = None,
    evaluation: Data | None = None,
    ledger: LedgerOrPath | None = None,
    checkpoints: Checkpoints = _CHECKPOINTS,
    logging: Logging = _LOGGING,
    randomness: Randomness = _RANDOMNESS,
    distributed: Distributed = _DISTRIBUTED,
    per_instance: PerInstance | None = None,
    **options: Unpack[StepOptions],
) -> Run:
    """Train a model with differential privacy, for a number of steps or until the budget is used.

    **Guarantee.** `Run.guarantee`, which never exceeds the budget: the cost of a step is computed before
    it runs. Loss and accuracy are computed on `evaluation`, which is not protected. No metric of
    the training records is reported.

    For a selective plan with per-trial accounting, a step is a trial, and the metrics include the number
    of accepted trials. With per-acceptance accounting, a step is an accepted update.

    Args:
        model: Module to train, in place.
        loss: Loss module or function of outputs and targets, with one value per record.
        optimizer: Optimizer of the model's parameters; it receives the noisy gradients.
        plan: Sampling, clipping, noise and release.
        data: Private records: inputs and targets with one row per slot, a data set, or a `hush.Source`.
            See docs/data.md.
        budget: Maximum privacy cost of all charges on the ledger.
        steps: Total number of steps; by default as many as the budget allows.
        scheduler: Learning-rate scheduler. It advances after each step that changes the model;
            `ReduceLROnPlateau` advances after each evaluation.
        evaluation: Records that need no protection, for loss and accuracy.
        ledger: Shared ledger, or its path, for several runs on the same model or records. The guarantee
            and the budget cover all charges on it. A run with a directory has its own ledger there.
        checkpoints: Folder of the run, and options for resuming.
        logging: Evaluation interval, callbacks and progress bar.
        randomness: Random source for sampling and noise.
        distributed: Process group whose ranks train together. Rank 0 evaluates and writes the
            directory; all ranks return the same result.
        per_instance: Accumulator of per-instance costs (sensitive). They are stored in the secret
            checkpoint and, at the end, in `private/per_instance.npz` of the directory. The guard of the
            accumulator decides which records take part.
        **options: `records`, `units`, `neighbours`, `views`, `public` and `execution` of
            `PrivateStep`. The default of `records` is the number of records, except under `ADD_REMOVE`.

    Returns:
        The guarantee, the stopping reason and the metrics.
    """
    check_kind("plan", plan, Plan)
    check_kind("budget", budget, Budget)
    check_kind("checkpoints", checkpoints, Checkpoints)
    check_kind("logging", logging, Logging)
    check_kind("randomness", randomness, Randomness)
    _check_arguments(options, checkpoints, ledger, scheduler, evaluation)
    relation = Neighbours(options.get("neighbours", Neighbours.ZERO_OUT))
    requested = None if steps is None else check_count("steps", steps, "steps are counted", 1)
    period = max(1, round(1 / plan.sampling.average_participation))
    if logging.every is not None:
        period = check_count("every", logging.every, "it is a number of steps", 1)
    directory = checkpoints.directory
    ranks = reducer_of(distributed)
    with ranks.propagate_errors(), ExitStack() as stack:
        passed = {"evaluation": evaluation, "directory": directory}
        facts = {name: "none" if value is None else "some" for name, value in passed.items()}
        facts |= {"budget": str(budget), "every": str(period), "scheduler": type(scheduler).__name__}
        ranks.agree("the arguments of hush.train", facts)
        data = prepare(data)
        evaluation = None if evaluation is None else prepare(evaluation)
        folder = None
        if directory is not None and not ranks.rank:
            folder = RunFolder(
                Path(directory), plan, resume=checkpoints.resume, settings=checkpoints.settings
            )
        if not isinstance(ledger, Ledger):
            path = folder.ledger if folder else None if ranks.rank else ledger
            ledger = stack.enter_context(opened(path))
        if folder:
            stack.enter_context(folder.cleanup_on_failure())
        if evaluation is not None:
            check_held_out(evaluation, data)
        by_slot = options.get("units") is None and relation is not Neighbours.ADD_REMOVE
        if by_slot and options.get("records") is None:  # the number of records is public
            options["records"] = ranks.slots(data)
        step = PrivateStep(
            model,
            loss,
            optimizer,
            plan,
            ledger=ledger,
            randomness=randomness,
            distributed=replace(distributed, processes=ranks.processes),
            **options,
        )
        step.reducer.check_whole("hush.train")  # rank 0 needs whole weights to evaluate and save
        check_delta(budget.delta, step.records, step.adjacency.unit)
        origin, metrics = dict[str, Any](), list[dict[str, Any]]()
        if directory is not None:
            origin, metrics = resume_run(
                folder, step, scheduler, data, randomness, per_instance, reseed=checkpoints.reseed
            )

        def save() -> None:
            """Write the checkpoint; every rank contributes to its state."""
            moving = None if scheduler is None else scheduler.state_dict()
            watched = None if per_instance is None else per_instance.state()
            state = {"step": step.state_dict(), "scheduler": moving, "per_instance": watched}
            if folder:
                checkpoint.save(folder.checkpoint, {**state, "origin": origin})

        if checkpoints.reseed:
            step.reseed()
        end, reason = last_step(step, budget, requested)
        stopped: Literal["steps", "budget", "callback"] = reason
        step.rule.check_possible(end)
        # check the data before creating the folder
        batches = step.batches(data, steps=max(0, end - step.steps))
        if evaluation is not None:
            with rehearsal(step):
                check_evaluation(model, loss, evaluation, data)
        if per_instance is not None:
            per_instance.check(step, ranks.slots(data))
        if folder and not folder.checkpoint.exists():
            folder.begin(plan, ledger)
            save()
        ledger.store_delta(budget.delta)
        visible = Progress.on_terminal() if logging.progress is None else logging.progress
        visible &= not ranks.rank
        stoppable = ranks.broadcast("the callbacks", lambda: bool(logging.callbacks), short=True)
        bar = Progress("training", end, done=step.steps, visible=visible)
        callbacks = () if ranks.rank else logging.callbacks

        def record(measured: StepMetrics) -> None:
            """Evaluate the model, and write metrics and a checkpoint."""
            newest = metrics_of(step.steps, step.spent(), **step.rule.describe())
            if evaluation is not None:
                # all ranks use the result of rank 0, so their schedulers agree
                held_out = partial(evaluate, model, loss, evaluation)
                scores = ranks.broadcast("evaluating", held_out)
                step.adopt_weights()  # evaluation on public records may change buffers
                newest |= scores
                measured.add({f"evaluation/{name}": value for name, value in scores.items()})
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(newest["loss"])
            bar.show(newest)
            metrics.append(newest)
            if folder:
                folder.add_metrics(newest)
            if directory is not None:
                save()
            # a resumed run does not repeat steps before the checkpoint
            ledger.compact(step.run, step.steps)

        with bar:
            for batch in batches:
                if per_instance is not None:
                    batch = per_instance.observe(step, batch)
                moved = step(batch)
                measured = StepMetrics(step)  # before the scheduler changes the learning rate
                bar.advance()
                if moved and not isinstance(scheduler, ReduceLROnPlateau | None):
                    scheduler.step()
                measured.add(dict(step.rule.describe()))
                recorded = step.steps % period == 0 or step.steps == end
                if recorded:
                    record(measured)
                verdicts = [on_step(step.steps, measured) for on_step in callbacks]
                if stoppable and ranks.broadcast("the callbacks", partial(_ended, verdicts), short=True):
                    step.stop()
                    stopped = stopped if step.steps == end else "callback"
                    if not recorded:
                        record(measured)
                    break
        if folder:
            checkpoint.save_weights(folder.weights, model)
            if per_instance is not None:
                folder.write_per_instance(per_instance.numbers(budget.delta))
        return Run(
            guarantee=step.spent(),
            steps=step.steps,
            stopped=stopped,
            metrics=metrics,
            skipped=step.skipped,
            accepted=step.rule.describe().get("accepted"),
            per_instance=per_instance,
        )


def _ended(verdicts: list[object]) -> bool:
    """Whether a callback returned True; return values of other types are ignored."""
    return any(isinstance(each, bool | np.bool_ | torch.Tensor) and bool(each) for each in verdicts)


def _check_arguments(
    options: StepOptions, checkpoints: Checkpoints, ledger: object, scheduler: Any, evaluation: Any
) -> None:
    """Raise if an argument is unknown, or needs another argument that was not passed."""
    for name in options.keys() - StepOptions.__annotations__.keys():
        known = [*inspect.signature(train).parameters, *StepOptions.__annotations__]
        holders = [kind.__name__ for kind in _HOLDERS if name in kind.__dataclass_fields__]
        ways = [f"Pass {holder.lower()}=hush.{holder}({name}=...)." for holder in holders]
        ways += [f"Did you mean {near!r}?" for near in get_close_matches(name, known, 1)]
        way = (*ways, "Its arguments are on the page docs/reference/training.md.")[0]
        raise InvalidValue(f"hush.train has no argument {name!r}. {way}", key=name)
    directory = checkpoints.directory
    if (checkpoints.resume and directory is None) or (checkpoints.reseed and not checkpoints.resume):
        raise CheckpointError(
            "resume=True needs a directory, and reseed=True needs resume=True. Pass "
            "checkpoints=hush.Checkpoints(directory=..., resume=True)."
        )
    if checkpoints.settings is not None and directory is None:
        raise InvalidValue(
            "settings are stored in the folder of the run. Also pass directory=, or leave them out.",
            key="settings",
        )
    if ledger is not None and directory is not None:
        raise InvalidValue(
            "ledger and directory were both passed, but a run with a directory has its own ledger. "
            "Pass only one of them; runs that share a ledger have no directory.",
            key="ledger",
        )
    if not isinstance(ledger, str | os.PathLike | None):
        check_kind("ledger", ledger, Ledger)
    if not isinstance(scheduler, Scheduler | None):
        raise InvalidValue(
            f"scheduler={scheduler!r} must be a scheduler of torch.optim.lr_scheduler. Pass e.g. "
            "torch.optim.lr_scheduler.StepLR(optimizer, 100)."
        )
    if isinstance(scheduler, ReduceLROnPlateau) and evaluation is None:
        raise Unsupported(
            "ReduceLROnPlateau needs a loss, but the training loss is not released. Pass evaluation "
            "data."
        )
