"""Training loop around a private step, within a budget: evaluation, checkpoints, resuming."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hush.accounting.ledger import Ledger
from hush.core.errors import Unsupported
from hush.core.guarantee import Budget, Guarantee, Neighbours, check_delta, check_neighbours
from hush.core.plan import Plan
from hush.core.release import Selective
from hush.core.value import as_path, check_count, check_kind
from hush.gradients.tree import Views
from hush.training import checkpoint
from hush.training.checkpoint import Scheduler, resume_run, save_run
from hush.training.checks.arguments import check_directory, check_scheduler, check_self_test
from hush.training.checks.disjoint import check_held_out
from hush.training.checks.rehearsal import rehearsal
from hush.training.data import Data, Source, count, pair_of, prepare
from hush.training.distributed.group import propagate_errors
from hush.training.distributed.handshake import check_same_run
from hush.training.distributed.process_group import process_group
from hush.training.distributed.shares import all_slots
from hush.training.evaluate import check_evaluation, evaluate
from hush.training.methods.selective import check_possible
from hush.training.metrics import OnStep, StepMetrics, check_callbacks
from hush.training.options import Distributed, Execution, Randomness, Units
from hush.training.progress import Progress
from hush.training.run_folder import RunFolder, last_step, metrics_of
from hush.training.step import PrivateStep

_RANDOMNESS, _EXECUTION, _DISTRIBUTED = Randomness(), Execution(), Distributed()


@dataclass(frozen=True, kw_only=True)
class Run:
    """Guarantee and metrics of a training run."""

    guarantee: Guarantee
    steps: int
    stopped: Literal["steps", "budget"]
    metrics: list[dict[str, Any]]
    skipped: int = field(repr=False)
    """Records left out because their gradient was not finite, over all steps (sensitive)."""
    accepted: int | None = None
    """How many trials were accepted, where that is public: under a selective plan charged per trial."""


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
    evaluate_every: int | None = None,
    ledger: Ledger | None = None,
    directory: str | os.PathLike[str] | None = None,
    resume: bool = False,
    reseed: bool = False,
    present: Tensor | None = None,
    records: int | None = None,
    units: Units | None = None,
    neighbours: Neighbours = Neighbours.ZERO_OUT,
    views: Views | None = None,
    public: Data | None = None,
    randomness: Randomness = _RANDOMNESS,
    execution: Execution = _EXECUTION,
    distributed: Distributed = _DISTRIBUTED,
    settings: dict[str, Any] | None = None,
    self_test: Callable[[PrivateStep, Data], None] | None = None,
    callbacks: Sequence[OnStep] = (),
    progress: bool = False,
) -> Run:
    """Differentially private training until `steps` are done or the budget is used.

    **Guarantee.** `Run.guarantee`, never above the budget: whether a step fits is known before it
    is taken. The loss and accuracy are of `evaluation`, which is not protected; nothing is
    reported of the training records.

    Under a selective plan charged per trial a step is a trial, and the metrics say how many were
    accepted; if charged per acceptance it is an accepted update, and nothing is said of the others.

    Args:
        model: module to train, in place.
        loss: loss module or function of outputs and targets, one value a record.
        optimizer: takes the noisy gradients.
        plan: sampling, clipping, noise and release.
        data: the private records, inputs and targets, a row a slot, a data set, or a `hush.Source` that
            says how records are read: docs/data.md.
        budget: most that everything on the ledger may cost.
        steps: steps to take in all; None: as many as the budget allows.
        scheduler: moves once a step that moved the model, or once an evaluation if it wants a metric.
        evaluation: records that need no protection, for loss and accuracy.
        evaluate_every: steps between evaluations and checkpoints; None: about an epoch.
        ledger: for runs that add up, on one model or on the same records: the guarantee, and the budget,
            are then of everything charged to it. A run with a directory has a ledger of its own there.
        directory: where the run leaves its plan, ledger, metrics, checkpoint and weights.
        resume: go on from the checkpoint in the directory as if nothing had happened.
        reseed: go on with new randomness, and pay again for the steps since the checkpoint.
        present: which slots of the data hold a record; None: all do.
        records: as in `PrivateStep`; None: as many as there are, unless under `ADD_REMOVE`.
        units: owners of the records, to protect owners instead of records.
        neighbours: relation that is charged.
        views: several views of each record, whose mean gradient is clipped.
        public: records that need no protection, for clipping in public bases.
        randomness: source of sampling and noise. A run with `secure=True` is always reseeded when it is
            resumed.
        execution: size of physical batches and use of CUDA graphs.
        distributed: process group whose ranks train together. Rank 0 writes the directory and evaluates;
            all return the same.
        settings: choices that are in no plan, as plain data (e.g. the name of the data set), kept in
            settings.json in the directory; a run is resumed with the same ones. Publishable: no seed.
        self_test: called with the step and the data before the first batch is drawn; what it raises
            stops the run with nothing charged. hush.audit.self_test tests whether the step does what is
            charged.
        callbacks: functions on_step(step, metrics), called after each step, by rank 0 of several.
            Metrics are public or charged; a sensitive one is asked for by name: `StepMetrics`,
            docs/logging.md. A resumed run calls again for the steps that it repeats.
        progress: show a progress bar.

    Returns:
        The guarantee, what ended the run, and its metrics.
    """
    check_kind("plan", plan, Plan)
    check_kind("budget", budget, Budget)
    relation = check_neighbours(neighbours)
    for name, flag in (("resume", resume), ("reseed", reseed), ("progress", progress)):
        check_kind(name, flag, bool)  # "no" would be taken for yes
    requested = None if steps is None else check_count("steps", steps, "steps are counted", 1)
    period = max(1, round(1 / plan.sampling.participation))
    if evaluate_every is not None:
        period = check_count("evaluate_every", evaluate_every, "it is a number of steps", 1)
    check_scheduler(scheduler, evaluation)
    check_self_test(self_test)
    check_directory(directory, ledger, settings, resume=resume, reseed=reseed)
    callbacks = check_callbacks(callbacks)
    length_public = units is None and relation is not Neighbours.ADD_REMOVE
    verdicts = isinstance(plan.release, Selective) and plan.release.accounting == "per-trial"
    ranks = process_group(check_kind("distributed", distributed, Distributed).processes)
    check_kind("randomness", randomness, Randomness)
    with propagate_errors(ranks), ExitStack() as opened:
        if ranks is not None:
            check_same_run(
                ranks,
                budget=str(budget),
                evaluation="some" if evaluation is not None else "none",
                evaluate_every=period,
                directory="some" if directory is not None else "none",
                scheduler=type(scheduler).__name__,
                self_test="some" if self_test is not None else "none",
            )
        data = prepare(data, present)
        if evaluation is not None and not isinstance(evaluation, Source) and pair_of(evaluation) is None:
            evaluation = prepare(evaluation)
        folder = None
        if directory is not None and (ranks is None or ranks.rank == 0):
            folder = RunFolder(as_path("directory", directory), plan, resume=resume, settings=settings)
        if ledger is None:
            ledger = opened.enter_context(Ledger(folder.ledger if folder else None))
        if folder:
            opened.enter_context(folder.cleanup_on_failure())
        if evaluation is not None:
            check_held_out(evaluation, data)
        if records is None and length_public:
            records = count(data) if ranks is None else all_slots(data, ranks, shard=distributed.shard)
        step = PrivateStep(
            model,
            loss,
            optimizer,
            plan,
            records=records,
            units=units,
            neighbours=relation,
            ledger=ledger,
            views=views,
            public=public,
            randomness=randomness,
            execution=execution,
            distributed=replace(distributed, processes=False if ranks is None else ranks),
        )
        if step.sharded is not None:
            raise Unsupported(
                "the model has fully_shard applied to it: evaluation and the run's folder are of rank "
                "0, which holds a part of the weights. Loop `for batch in step.batches(data): "
                "step(batch)` with hush.PrivateStep, and save with "
                "hush.training.distributed.sharded_checkpoint."
            )
        check_delta(budget.delta, step.records, step.adjacency.unit)
        origin, metrics = dict[str, Any](), list[dict[str, Any]]()
        if directory is not None:
            origin, metrics = resume_run(folder, step, scheduler, data, randomness)
        if reseed:
            step.reseed()
        end, stopped = last_step(step, budget, requested)
        if isinstance(plan.release, Selective):
            check_possible(plan.release, step.records, end)
        # before the folder says that a run exists: refused data must leave the name free
        batches = step.batches(data, steps=max(0, end - step.steps), present=present)
        if evaluation is not None:
            with rehearsal(step):
                check_evaluation(model, loss, evaluation, data)
        if self_test is not None:
            self_test(step, data)
        if folder and not folder.checkpoint.exists():
            folder.begin(plan, ledger)
            save_run(folder, step, scheduler, origin)
        ledger.store_delta(budget.delta)

        def notify(metrics: StepMetrics) -> None:
            for on_step in callbacks if ranks is None or ranks.rank == 0 else ():
                on_step(step.steps, metrics)

        visible = progress and (ranks is None or not ranks.rank)
        with Progress("training", end, done=step.steps, visible=visible) as bar:
            for batch in batches:
                moved = step(batch)
                measured = StepMetrics(step, batch)  # before the schedule moves the learning rate
                bar.advance()
                stepwise = not isinstance(scheduler, ReduceLROnPlateau)
                if moved and stepwise and isinstance(scheduler, LRScheduler):
                    scheduler.step()
                if verdicts:
                    measured.add({"accepted": step.accepted})
                if step.steps % period and step.steps != end:
                    notify(measured)
                    continue
                newest = metrics_of(step.steps, step.spent())
                newest |= {"accepted": step.accepted} if verdicts else {}
                if evaluation is not None:
                    # one number for a scheduler to follow, or the ranks' models would part
                    held_out = partial(evaluate, model, loss, evaluation)
                    scores = (
                        held_out() if ranks is None else ranks.broadcast_object("evaluating", held_out)
                    )
                    newest |= scores
                    measured.add({f"evaluation/{name}": value for name, value in scores.items()})
                if isinstance(scheduler, ReduceLROnPlateau):
                    scheduler.step(newest["loss"])
                bar.show(newest)
                metrics.append(newest)
                if folder:
                    folder.add_metrics(newest)
                    save_run(folder, step, scheduler, origin)
                ledger.compact(step.run, step.steps)  # no resumed run goes back before the checkpoint
                notify(measured)
        if folder:
            checkpoint.save_weights(folder.weights, model)
        return Run(
            guarantee=step.spent(),
            steps=step.steps,
            stopped=stopped,
            metrics=metrics,
            skipped=step.skipped,
            accepted=step.accepted if verdicts else None,
        )
