"""`hush audit`: training with canaries, one run with many or many runs with one."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hush.cli import options as opt
from hush.cli.experiment import Experiment, Settings, build_experiment
from hush.cli.options import about
from hush.cli.output import counted, print_json
from hush.core.errors import InvalidValue, LedgerError, Unsupported
from hush.core.plan import Plan, read_plan
from hush.core.value import check_count

if TYPE_CHECKING:
    from torch import Generator

    from hush.audit.canaries import CanaryRun
    from hush.audit.lower_bound import CanaryBound

_CANARIES = 256
_FEW_RUNS = 32
_FEW_CANARIES = 8


def audit(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a finished run of `hush train`.")],
    canaries: Annotated[int | None, about("Number of canaries; at most 256 by default.")] = None,
    kind: Annotated[
        str,
        opt.chosen(
            "Seen in every update, or mislabelled records, by loss",
            *("gradient", "input"),
            why="canaries are made in these two ways",
        ),
    ] = "gradient",
    others: Annotated[bool, about("With the run's own records, or canaries alone.")] = True,
    runs: Annotated[int, about("1, or many with a canary in every other one.")] = 1,
    confidence: Annotated[float, about("Confidence of the bound.")] = 0.95,
    data_dir: opt.DataDir = None,
    device: opt.Device = None,
    seed: opt.Seed = None,
    quiet: opt.Quiet = False,
    as_json: opt.AsJson = False,
) -> None:
    """Lower bound on epsilon: train again as a run did, with canaries, and try to detect them.

    This audits hush under the run's plan, not the released weights. The result depends on the records
    and is not charged: do not publish it. Exits with 1 if the bound is above the charge.

    Example: hush audit runs/digits-1 --no-others
    """
    from hush.accounting.ledger import Ledger
    from hush.audit.lower_bound import CONFIDENCE
    from hush.training.progress import Progress

    CONFIDENCE.check("--confidence", confidence)
    check_count("--runs", runs, "each trains a model", at_least=1)
    if canaries is not None:
        # all right by chance must be rarer than a share of 1 - confidence
        smallest = 1 if runs > 1 else _FEW_CANARIES
        check_count("--canaries", canaries, "fewer refute nothing", at_least=smallest)
    if 1 < runs < _FEW_RUNS or (runs > 1 and canaries not in (None, 1)):
        raise InvalidValue(
            f"--runs {runs} with --canaries {canaries or 1}: pass one run with many canaries, or at "
            f"least {_FEW_RUNS} runs with one, because fewer refute nothing and canaries of one run are "
            "no independent trials. One run is cheaper."
        )
    settings, plan = Settings.read(run_dir), read_plan(run_dir / "plan.toml")
    if settings.per_unit is not None:
        raise Unsupported(
            f"{run_dir} protects one user with up to {settings.per_unit} records a step, and the "
            "canaries are single records: their bound would be on another guarantee. Audit a run of the "
            "same plan without --units, in which one record costs what one user costs here."
        )
    ledger = run_dir / "ledger.jsonl"
    steps = Ledger(ledger, read_only=True).counts.get(plan, 0) if ledger.is_file() else 0
    if not steps:
        raise LedgerError(
            f"{run_dir} has no ledger.jsonl with a step of its plan.toml: the charge is unknown. Name "
            "the folder of a finished run of `hush train`."
        )
    experiment = build_experiment(settings, data_dir, opt.device_of(device))
    with Progress("training with canaries", runs * steps, visible=not quiet) as progress:
        trainer = _Trainer(experiment, plan, steps, kind, others, seed, progress.advance)
        if runs == 1:
            bound, run, count = trainer.one_run(canaries, confidence)
            summary = f"{count} {kind} canaries, each in by a fair coin"
            if bound.guesses:
                summary += f"; {bound.guesses.right} of {bound.guesses.made} guesses right"
        else:
            count = 1
            bound, run = trainer.many_runs(runs, confidence)
            summary = f"{runs} runs, one {kind} canary in every other; half of them chose the threshold"
    charge, guesses = run.charge, bound.guesses
    exceeded = bound.epsilon > charge.epsilon.upper
    if as_json:
        print_json(
            {
                "lower_bound": bound.epsilon,
                "charge": charge.to_plain(),
                "run_neighbours": str(settings.relation),
                "exceeded": exceeded,
                "sensitive": True,
                "confidence": confidence,
                "gaussian": {"separation": bound.separation, "epsilon": bound.gaussian_epsilon},
                "kind": kind,
                "canaries": count,
                "guesses": guesses and {"made": guesses.made, "right": guesses.right},
                "runs": runs,
                "steps": steps,
                "others": others,
                "plan": plan.to_plain(),
            }
        )
    else:
        among = counted(len(experiment.train[1]), "other record") if others else "no other records"
        print(f"audit of {run_dir}: trained again under its plan, {counted(steps, 'step')}, {among},")
        print(f"  {summary}")
        print("  (this audits the library under this plan, not the weights that were released)")
        if settings.relation is not charge.neighbours:
            print(
                f"  (the run promises {settings.relation}; a canary is there or not, so the charge and "
                f"the bound below are of its plan under {charge.neighbours})"
            )
        print(f"charge       {charge}")
        print(
            f"lower bound  epsilon >= {bound.epsilon:.4g} at delta {settings.delta:g} "
            f"({charge.neighbours} {charge.unit}), for any mechanism, with confidence {confidence:g}"
        )
        print(
            f"             epsilon >= {bound.gaussian_epsilon:.4g} if the trade-off is a Gaussian's, an "
            "estimate if records are sampled"
        )
        if exceeded:
            print("THE BOUND IS ABOVE THE CHARGE: the guarantee does not hold for the code that runs")
        else:
            print("the bound is not above the charge: no violation was found")
        print("sensitive: this used the records again and is not charged to a ledger; do not publish it")
    if exceeded:
        raise typer.Exit(1)


@dataclass
class _Trainer:
    """Trains as a run did, with new coins, canaries and noise."""

    experiment: Experiment
    plan: Plan
    steps: int
    kind: str
    others: bool
    seed: int | None
    done: Callable[[], None]
    canaries: Any = None
    """Canaries of the first training, which all trainings share."""

    def one_run(self, count: int | None, confidence: float) -> "tuple[CanaryBound, CanaryRun, int]":
        """The bound from many canaries in one run, each included by a fair coin; their number."""
        import torch

        from hush.audit.lower_bound import one_run

        coins = self._coins()
        model, _ = trained = self.experiment.initialise()
        weights = sum(value.numel() for value in model.parameters() if value.requires_grad)
        room = weights if self.kind == "gradient" else len(self.experiment.test[1])
        number = max(1, min(_CANARIES, room // 2)) if count is None else count
        included = torch.rand(number, generator=coins) < 0.5
        run = self._train(trained, included, coins)
        delta = self.experiment.settings.delta
        bound = one_run(run.scores.numpy(), included.numpy(), delta=delta, confidence=confidence)
        return bound, run, number

    def many_runs(self, runs: int, confidence: float) -> "tuple[CanaryBound, CanaryRun]":
        """The bound from one canary, included in every other run."""
        import torch

        from hush.audit.lower_bound import many_runs

        coins = self._coins()
        scores: dict[bool, list[float]] = {True: [], False: []}
        for number in range(runs):
            included = number % 2 == 0
            run = self._train(self.experiment.initialise(), torch.tensor([included]), coins)
            scores[included].append(float(run.scores))
        delta = self.experiment.settings.delta
        return many_runs(scores[True], scores[False], delta=delta, confidence=confidence), run

    def _coins(self) -> "Generator":
        import torch

        from hush.core.randomness import fresh_generator

        if self.seed is None:
            return fresh_generator()
        torch.manual_seed(self.seed)
        return torch.Generator().manual_seed(self.seed)

    def _train(self, trained: Any, included: Any, coins: "Generator") -> "CanaryRun":
        import torch

        from hush.audit.canaries import directions_for, mislabelled, run_with_canaries
        from hush.core.randomness import seed_from

        experiment, secure = self.experiment, self.experiment.settings.secure
        (model, optimizer), loss = trained, torch.nn.CrossEntropyLoss(reduction="none")
        if self.canaries is None and self.kind == "input":
            self.canaries = mislabelled(*experiment.test, len(included), experiment.classes, coins)
        elif self.canaries is None:
            count = len(included)
            self.canaries = directions_for(self.plan, model, loss, experiment.train, count, coins)
        generator = None  # without a seed, the noise of an audit is secret
        if self.seed is not None and not secure:
            generator = torch.Generator(experiment.train[0].device).manual_seed(seed_from(coins))
        return run_with_canaries(
            model,
            torch.nn.CrossEntropyLoss(),
            optimizer,
            self.plan,
            experiment.train,
            self.canaries,
            included,
            steps=self.steps,
            delta=experiment.settings.delta,
            others=self.others,
            generator=generator,
            secure=secure,
            views=experiment.views,
            public=experiment.public,
            done=self.done,
        )
