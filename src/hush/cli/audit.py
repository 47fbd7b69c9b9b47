"""`hush audit`: training with canaries, one run with many or many runs with one."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hush.cli import options as opt
from hush.cli.experiment import Experiment, Settings, build_experiment
from hush.cli.options import about
from hush.cli.output import counted, print_json
from hush.core.errors import InvalidValue, LedgerError, Unsupported
from hush.core.guarantee import at_least
from hush.core.plan import Plan, read_plan
from hush.core.value import check_count

if TYPE_CHECKING:
    from hush.audit.canaries import CanaryRun
    from hush.audit.lower_bound import CanaryBound

_CANARIES = 256
_FEW_RUNS = 32
_FEW_CANARIES = 8


@dataclass(frozen=True, kw_only=True)
class Audit:
    run_dir: Annotated[Path, typer.Argument(help="Folder of a finished run of `hush train`.")]
    canaries: Annotated[int | None, about("Number of canaries; at most 256 by default.")] = None
    kind: Annotated[
        Literal["gradient", "input"], about("Seen in every update, or mislabelled records, by loss.")
    ] = "gradient"
    others: Annotated[bool, about("With the run's own records, or canaries alone.")] = True
    runs: Annotated[int, about("1, or many with a canary in every other one.")] = 1
    confidence: Annotated[float, about("Confidence of the bound.")] = 0.95
    data_dir: opt.DataDir = None
    device: opt.Device = None
    seed: opt.Seed = None
    quiet: opt.Quiet = False
    as_json: opt.AsJson = False

    def __post_init__(self) -> None:
        from hush.audit.lower_bound import CONFIDENCE

        CONFIDENCE.check("--confidence", self.confidence)
        check_count("--runs", self.runs, "each trains a model", at_least=1)
        if self.canaries is not None:
            # all right by chance must be rarer than a share of 1 - confidence
            smallest = 1 if self.runs > 1 else _FEW_CANARIES
            check_count("--canaries", self.canaries, "fewer refute no charge", at_least=smallest)
        if 1 < self.runs < _FEW_RUNS or (self.runs > 1 and self.canaries not in (None, 1)):
            raise InvalidValue(
                f"--runs {self.runs} with --canaries {self.canaries or 1}: pass one run with many "
                f"canaries, or at least {_FEW_RUNS} runs with one: fewer refute no charge, and canaries "
                "of one run are no independent trials."
            )


@opt.takes(Audit)
def audit(asked: Audit) -> None:
    """Lower bound on epsilon: train again as a run did, with canaries, and try to detect them.

    This audits hush under the run's plan, not the released weights. The result depends on the records
    and is not charged: do not publish it. Exits with 1 if the bound is above the charge.

    Example: hush audit runs/digits-1 --no-others
    """
    from hush.accounting.ledger import Ledger
    from hush.training.progress import Progress

    run_dir, kind, others, runs = asked.run_dir, asked.kind, asked.others, asked.runs
    settings, plan = Settings.read(run_dir), read_plan(run_dir / "plan.toml")
    if settings.per_unit is not None:
        raise Unsupported(
            f"{run_dir} protects users, and the canaries are single records: their bound is on another "
            "guarantee. Audit a run of the same plan without --units, where a record costs as much."
        )
    ledger = run_dir / "ledger.jsonl"
    steps = Ledger(ledger, read_only=True).counts.get(plan, 0) if ledger.is_file() else 0
    if not steps:
        raise LedgerError(
            f"{run_dir} has no ledger.jsonl with a step of its plan.toml: the charge is unknown. Name "
            "the folder of a finished run of `hush train`."
        )
    experiment = build_experiment(settings, asked.data_dir, opt.device_of(asked.device))
    with Progress("training with canaries", runs * steps, visible=not asked.quiet) as progress:
        bound, run, count = _lower_bound(asked, experiment, plan, steps, progress.advance)
    charge, guesses = run.charge, bound.guesses
    exceeded = bound.epsilon > charge.epsilon.upper
    if asked.as_json:
        facts: dict[str, Any] = {"charge": charge.to_plain(), "plan": plan.to_plain(), "sensitive": True}
        facts |= {"lower_bound": bound.epsilon, "confidence": asked.confidence, "exceeded": exceeded}
        facts |= {"run_neighbours": str(settings.relation), "kind": kind, "canaries": count}
        facts |= {"guesses": guesses and {"made": guesses.made, "right": guesses.right}}
        facts |= {"gaussian": {"separation": bound.separation, "epsilon": bound.gaussian_epsilon}}
        print_json({**facts, "runs": runs, "steps": steps, "others": others})
        raise typer.Exit(int(exceeded))
    among = counted(len(experiment.train[1]), "other record") if others else "no other records"
    summary = f"{runs} runs, one {kind} canary in every other; half of them chose the threshold"
    if runs == 1:
        right = f"; {guesses.right} of {guesses.made} guesses right" if guesses else ""
        summary = f"{count} {kind} canaries, each in by a fair coin{right}"
    print(
        f"audit of {run_dir}: trained again under its plan, {counted(steps, 'step')}, {among},\n"
        f"  {summary}\n"
        "  (this audits the library under this plan, not the weights that were released)"
    )
    if settings.relation is not charge.neighbours:
        print(
            f"  (the run promises {settings.relation}; a canary is there or not, so the charge and "
            f"the bound below are of its plan under {charge.neighbours})"
        )
    verdict = "the bound is not above the charge: no violation was found"
    if exceeded:
        verdict = "THE BOUND IS ABOVE THE CHARGE: the guarantee does not hold for the code that runs"
    print(
        f"charge       {charge}\n"
        f"lower bound  epsilon >= {at_least(bound.epsilon)} at delta {settings.delta:g} "
        f"({charge.neighbours} {charge.unit}), for any mechanism, with confidence {asked.confidence:g}\n"
        f"             epsilon >= {at_least(bound.gaussian_epsilon)} if the trade-off is a Gaussian's, "
        f"an estimate if records are sampled\n{verdict}\n"
        "sensitive: this used the records again and is not charged to a ledger; do not publish it"
    )
    raise typer.Exit(int(exceeded))


def _lower_bound(
    asked: Audit, experiment: Experiment, plan: Plan, steps: int, done: Callable[[], None]
) -> "tuple[CanaryBound, CanaryRun, int]":
    import torch

    from hush.audit.canaries import directions_for, mislabelled, run_with_canaries
    from hush.audit.lower_bound import many_runs, one_run
    from hush.core.randomness import fresh_generator, seed_from

    settings, coins, seed = experiment.settings, fresh_generator(), asked.seed
    if seed is not None:
        torch.manual_seed(seed)
        coins = torch.Generator().manual_seed(seed)
    delta, loss = settings.delta, torch.nn.CrossEntropyLoss()
    scores: dict[bool, list[float]] = {True: [], False: []}
    made: Any = None
    for number in range(asked.runs):
        model, optimizer = experiment.initialise()
        included = torch.tensor([number % 2 == 0])
        if asked.runs == 1:  # a fair coin for each canary
            weights = sum(value.numel() for value in model.parameters() if value.requires_grad)
            room = weights if asked.kind == "gradient" else len(experiment.test[1])
            count = max(1, min(_CANARIES, room // 2)) if asked.canaries is None else asked.canaries
            included = torch.rand(count, generator=coins) < 0.5
        if made is None and asked.kind == "input":
            made = mislabelled(*experiment.test, len(included), experiment.classes, coins)
        elif made is None:
            each = torch.nn.CrossEntropyLoss(reduction="none")
            made = directions_for(plan, model, each, experiment.train, len(included), coins)
        generator = None  # without a seed, the noise of an audit is secret
        if seed is not None and not settings.secure:
            generator = torch.Generator(experiment.train[0].device).manual_seed(seed_from(coins))
        run = run_with_canaries(
            *(model, loss, optimizer, plan, experiment.train, made, included),
            steps=steps,
            delta=delta,
            others=asked.others,
            generator=generator,
            secure=settings.secure,
            views=experiment.views,
            public=experiment.public,
            done=done,
        )
        scores[bool(included[0])].append(float(run.scores[0]))
    confidence = asked.confidence
    if asked.runs > 1:
        bound = many_runs(scores[True], scores[False], delta=delta, confidence=confidence)
    else:
        found = run.scores.numpy(), included.numpy()
        bound = one_run(*found, delta=delta, confidence=confidence)
    return bound, run, len(included)
