"""Training loop around a private step, within a budget: evaluation, checkpoints, resuming."""

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hush.accounting.calibrate import max_steps
from hush.accounting.epsilon import compose
from hush.accounting.ledger import Ledger
from hush.accounting.mechanism import grows_with_dimension
from hush.core.errors import BudgetExceeded, CheckpointError, InvalidValue, Unsupported
from hush.core.guarantee import Budget, Guarantee, Neighbours, check_delta
from hush.core.plan import Plan
from hush.core.value import check_count, check_kind
from hush.training import checkpoint
from hush.training.checkpoint import Scheduler, resume_run
from hush.training.data import Data, prepare
from hush.training.disjoint import check_held_out
from hush.training.distributed.process_group import reducer_of
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
    """Guarantee and metrics of a training run."""

    guarantee: Guarantee
    steps: int
    stopped: Literal["steps", "budget"]
    metrics: list[dict[str, Any]]
    skipped: int = field(repr=False)
    """Records left out because their gradient was not finite, over all steps (sensitive)."""
    accepted: int | None = None
    """Number of accepted trials of a selective plan charged per trial; None otherwise."""
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
    ledger: Ledger | None = None,
    checkpoints: Checkpoints = _CHECKPOINTS,
    logging: Logging = _LOGGING,
    randomness: Randomness = _RANDOMNESS,
    distributed: Distributed = _DISTRIBUTED,
    self_test: Callable[[PrivateStep, Data], None] | None = None,
    per_instance: PerInstance | None = None,
    **options: Unpack[StepOptions],
) -> Run:
    """Differentially private training until `steps` are done or the budget is used.

    **Guarantee.** `Run.guarantee`, never above the budget: whether a step fits is known before it
    is taken. Loss and accuracy are computed on `evaluation`, which is not protected; no metric
    of the training records is reported.

    Under a selective plan charged per trial, a step is a trial, and the metrics contain the number of
    accepted ones. Charged per acceptance, a step is an accepted update.

    Args:
        model: module to train, in place.
        loss: loss module or function of outputs and targets, with one value per record.
        optimizer: optimizer of the model's parameters, which receives the noisy gradients.
        plan: sampling, clipping, noise and release.
        data: private records: inputs and targets with a row per slot, a data set, or a `hush.Source`:
            docs/data.md.
        budget: maximum cost of all charges on the ledger.
        steps: total number of steps; None: as many as the budget allows.
        scheduler: learning-rate schedule. It moves after a step that moved the model, or after an
            evaluation if it follows a metric.
        evaluation: records that need no protection, for loss and accuracy.
        ledger: ledger of several runs on one model or on the same records: the guarantee and the budget
            cover all its charges. A run with a directory has its own ledger there.
        checkpoints: folder of the run, and how it resumes.
        logging: how often the model is evaluated, callbacks and progress.
        randomness: source of sampling and noise. A resumed run with `secure=True` is reseeded.
        distributed: process group that trains together. Rank 0 writes the directory and evaluates;
            all return the same.
        self_test: function of the step and the data, called before the first draw; an error stops the
            run with no charge. hush.audit.self_test tests the step against its charge.
        per_instance: accumulates the per-instance costs of every step (sensitive), kept in the secret
            checkpoint and, at the end, in `per_instance.npz` of a directory, which only its owner may
            read. Its guard decides which records take part.
        **options: `records`, `units`, `neighbours`, `views`, `public` and `execution` of
            `PrivateStep`. Without `records` it is the number of records, except under `ADD_REMOVE`.

    Returns:
        The guarantee, the reason of the end, and the metrics.
    """
    check_kind("plan", plan, Plan)
    check_kind("budget", budget, Budget)
    check_kind("checkpoints", checkpoints, Checkpoints)
    check_kind("logging", logging, Logging)
    check_kind("randomness", randomness, Randomness)
    _check_arguments(options, checkpoints, ledger, scheduler, evaluation)
    relation = Neighbours(options.get("neighbours", Neighbours.ZERO_OUT))
    requested = None if steps is None else check_count("steps", steps, "steps are counted", 1)
    period = max(1, round(1 / plan.sampling.participation))
    if logging.every is not None:
        period = check_count("every", logging.every, "it is a number of steps", 1)
    directory = checkpoints.directory
    ranks = reducer_of(distributed)
    with ranks.propagate_errors(), ExitStack() as opened:
        passed = {"evaluation": evaluation, "directory": directory, "self_test": self_test}
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
        if ledger is None:
            ledger = opened.enter_context(Ledger(folder.ledger if folder else None))
        if folder:
            opened.enter_context(folder.cleanup_on_failure())
        if evaluation is not None:
            check_held_out(evaluation, data)
        by_slot = options.get("units") is None and relation is not Neighbours.ADD_REMOVE
        if by_slot and options.get("records") is None:  # their number is public
            options["records"] = ranks.place(data).slots
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
        step.reducer.check_whole("hush.train")  # rank 0 alone evaluates, and writes the folder
        check_delta(budget.delta, step.records, step.adjacency.unit)
        origin, metrics = dict[str, Any](), list[dict[str, Any]]()
        if directory is not None:
            origin, metrics = resume_run(
                folder, step, scheduler, data, randomness, per_instance, reseed=checkpoints.reseed
            )

        def save() -> None:
            assert folder is not None
            moving = None if scheduler is None else scheduler.state_dict()
            watched = None if per_instance is None else per_instance.state()
            state = {"step": step.state_dict(), "scheduler": moving, "per_instance": watched}
            checkpoint.save(folder.checkpoint, {**state, "origin": origin})

        if checkpoints.reseed:
            step.reseed()
        end, stopped = last_step(step, budget, requested)
        step.rule.check_possible(end)
        # before the folder exists: an error in the data must not use up its name
        batches = step.batches(data, steps=max(0, end - step.steps))
        if evaluation is not None:
            with rehearsal(step):
                check_evaluation(model, loss, evaluation, data)
        if self_test is not None:
            self_test(step, data)
        if per_instance is not None:
            per_instance.check(step, ranks.place(data).slots)
        if folder and not folder.checkpoint.exists():
            folder.begin(plan, ledger)
            save()
        ledger.store_delta(budget.delta)
        visible = logging.progress and not ranks.rank
        with Progress("training", end, done=step.steps, visible=visible) as bar:
            for batch in batches:
                if per_instance is not None:
                    batch = per_instance.observe(step, batch)
                moved = step(batch)
                measured = StepMetrics(step, batch)  # before the schedule moves the learning rate
                bar.advance()
                if moved and not isinstance(scheduler, ReduceLROnPlateau | None):
                    scheduler.step()
                measured.add(dict(step.rule.describe()))
                if step.steps % period == 0 or step.steps == end:
                    newest = metrics_of(step.steps, step.spent(), **step.rule.describe())
                    if evaluation is not None:
                        # one number for a scheduler to follow, or the ranks' models would part
                        held_out = partial(evaluate, model, loss, evaluation)
                        scores = ranks.broadcast("evaluating", held_out)
                        step.adopt_weights()  # buffers that evaluation on public records has changed
                        newest |= scores
                        measured.add({f"evaluation/{name}": value for name, value in scores.items()})
                    if isinstance(scheduler, ReduceLROnPlateau):
                        scheduler.step(newest["loss"])
                    bar.show(newest)
                    metrics.append(newest)
                    if folder:
                        folder.add_metrics(newest)
                        save()
                    ledger.compact(step.run, step.steps)  # no resumed run begins before the checkpoint
                for on_step in () if ranks.rank else logging.callbacks:
                    on_step(step.steps, measured)
        if folder:
            checkpoint.save_weights(folder.weights, model)
            if per_instance is not None:
                folder.write_per_instance(per_instance.state())
        return Run(
            guarantee=step.spent(),
            steps=step.steps,
            stopped=stopped,
            metrics=metrics,
            skipped=step.skipped,
            accepted=step.rule.describe().get("accepted"),
            per_instance=per_instance,
        )


def last_step(
    step: PrivateStep, budget: Budget, requested: int | None
) -> tuple[int, Literal["steps", "budget"]]:
    """Last step of a run, and whether the requested steps or the budget end it.

    Charged steps after the checkpoint are repeated without a charge. Warns if the budget covers fewer.
    """
    adjacency, plan = step.adjacency, step.plan
    charged = max(step.ledger.last_step(step.run), step.steps)
    before, sizes = step.ledger.counts, dict(step.ledger.dimensions)
    limits = f"the budget of epsilon={budget.epsilon:g} at delta={budget.delta:g}"

    def cost(counts: Mapping[Plan, int]) -> float:
        return compose(counts, budget.delta, sizes, adjacency).epsilon.upper

    once = step.ledger.counts_repeating(plan, step.run, charged + 1)
    continues = requested is None or requested > charged
    if once != before and continues and max_steps(plan, budget, once, sizes, adjacency):
        before = once  # the next step is charged together with the one that was cut short
    if (spent := cost(before)) > budget.epsilon:
        raise BudgetExceeded(
            f"the ledger holds charges of epsilon={spent:.4g}, more than {limits}. Pass the budget of "
            "the whole run."
        )
    if grows_with_dimension(plan):
        sizes[plan] = max(step.dimension, sizes.get(plan, 0))
    paid = before.get(plan, 0)
    if requested is not None:
        whole = {**before, plan: paid + max(0, requested - charged)}
        if cost(whole) <= budget.epsilon:
            return requested, "steps"
    limit = charged + max_steps(plan, budget, before, sizes, adjacency)
    if limit == 0:
        one, together = cost({**before, plan: paid + 1}), " with what is on the ledger" * bool(before)
        raise BudgetExceeded(
            f"{limits} is below the cost of one step{together} ({one:.4g}). Add noise (hush.calibrate "
            "finds how much), lower the sampling rate, resume the run that was charged, or raise it."
        )
    if requested is not None:
        warnings.warn(
            f"steps={requested} were asked for and the run ends after {limit}: one more would cost more "
            f"than {limits} ({adjacency}). hush.calibrate finds noise for all of them.",
            UserWarning,
            stacklevel=3,
        )
    return limit, "budget"


def _check_arguments(
    options: StepOptions, checkpoints: Checkpoints, ledger: object, scheduler: Any, evaluation: Any
) -> None:
    """Raise for arguments that are unknown, or need another one."""
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
            "settings are stored in the folder of the run. Pass directory= too, or leave them out.",
            key="settings",
        )
    if ledger is not None and directory is not None:
        raise InvalidValue(
            "ledger and directory were both passed: a run with a directory has its own ledger. Pass "
            "one; runs that add up share a ledger without a directory.",
            key="ledger",
        )
    if ledger is not None:
        check_kind("ledger", ledger, Ledger)
    if not isinstance(scheduler, Scheduler | None):
        raise InvalidValue(
            f"scheduler={scheduler!r} must be a scheduler of torch.optim.lr_scheduler. Pass e.g. "
            "torch.optim.lr_scheduler.StepLR(optimizer, 100)."
        )
    if isinstance(scheduler, ReduceLROnPlateau) and evaluation is None:
        raise Unsupported(
            "ReduceLROnPlateau follows a loss, and that of the training records is not released. Pass "
            "evaluation data."
        )
