"""`hush audit`: one run with many canaries, or many runs with one canary."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hush.cli import options as opt
from hush.cli.experiment import Experiment, Settings, build_experiment
from hush.cli.output import counted, print_json
from hush.core.errors import InvalidValue, LedgerError, Unsupported
from hush.core.guarantee import DEFAULT_DELTA, at_least
from hush.core.plan import Plan, read_plan
from hush.core.value import check_count

if TYPE_CHECKING:
    from hush.audit.canaries import CanaryRun
    from hush.audit.lower_bound import CanaryBound

_audit = partial(opt.about, panel="Audit")
_CANARIES = 256
_FEW_RUNS = 32
_FEW_CANARIES = 8


@dataclass(frozen=True, kw_only=True)
class Audit:
    run_dir: Annotated[Path, typer.Argument(help="Folder of a finished run.")]
    canaries: Annotated[int | None, _audit("Number of canaries; by default at most 256.")] = None
    kind: Annotated[
        Literal["gradient", "input"], _audit("Canary gradients, or mislabelled test records.")
    ] = "gradient"
    others: Annotated[bool, _audit("Train with the run's records, or only on canaries.")] = True
    runs: Annotated[int, _audit("Number of runs. If several, every other run has one canary.")] = 1
    confidence: Annotated[float, _audit("Confidence level of the lower bound.")] = 0.95
    data_dir: opt.DataDir = None
    test_data: opt.TestData = None
    device: opt.Device = None
    seed: opt.Seed = None
    quiet: opt.Quiet = False
    as_json: opt.AsJson = False

    def __post_init__(self) -> None:
        from hush.audit.lower_bound import CONFIDENCE

        CONFIDENCE.check("--confidence", self.confidence)
        check_count("--runs", self.runs, "each trains a model", at_least=1)
        if self.canaries is not None:
            # with fewer canaries, random guesses are all right with probability above 1 - confidence
            smallest = 1 if self.runs > 1 else _FEW_CANARIES
            check_count("--canaries", self.canaries, "fewer cannot refute an epsilon", at_least=smallest)
        if 1 < self.runs < _FEW_RUNS or (self.runs > 1 and self.canaries not in (None, 1)):
            raise InvalidValue(
                f"--runs {self.runs} with --canaries {self.canaries or 1}: fewer than {_FEW_RUNS} runs "
                "cannot refute an epsilon, and canaries of one run are not independent trials. Pass "
                f"one run with many canaries, or at least {_FEW_RUNS} runs with one canary."
            )


@opt.takes(Audit)
def audit(asked: Audit) -> None:
    """Compute a lower bound on epsilon: repeat a run with canaries and try to detect them.

    The audit tests hush under the run's plan, not the released weights. A run of `hush.train` in Python
    has no settings, so its plan is audited on the bundled digits and a linear model. Do not publish the
    result: it depends on the records, and no ledger is charged. The exit status is 1 if the lower bound
    exceeds the epsilon of the run.

    Example: hush audit runs/digits-1 --no-others

    Many runs with one canary: hush audit runs/digits-1 --runs 64
    """
    from hush.accounting.ledger import Ledger
    from hush.training.progress import Progress
    from hush.training.run_folder import SETTINGS

    run_dir, kind, others, runs = asked.run_dir, asked.kind, asked.others, asked.runs
    ledger = run_dir / "ledger.jsonl"
    charged = Ledger(ledger, read_only=True) if ledger.is_file() else None
    stand_in = charged is not None and not (run_dir / SETTINGS).exists()
    if charged is not None and stand_in:
        delta, unit = charged.delta or DEFAULT_DELTA, charged.adjacency.per_unit
        per_unit = unit if unit is None or isinstance(unit, int) else 1
        settings = Settings(
            data="digits", model="logistic", delta=delta, learning_rate=1.0, per_unit=per_unit
        )
    else:
        settings = Settings.read(run_dir)
    plan = read_plan(run_dir / "plan.toml")
    if settings.per_unit is not None:
        raise Unsupported(
            f"{run_dir} has user-level privacy, but canaries are single records: their bound would not "
            "apply to users. Audit a run of the same plan without --units, which has the same cost."
        )
    steps = 0 if charged is None else charged.counts.get(plan, 0)
    if not steps:
        raise LedgerError(
            f"{run_dir} has no ledger.jsonl with a step of its plan.toml: its privacy cost is unknown. "
            "Pass the folder of a finished run."
        )
    device, test = opt.device_of(asked.device), asked.test_data
    experiment = build_experiment(settings, asked.data_dir, device, test_data=test)
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
    among = counted(experiment.slots, "other record") if others else "no other records"
    summary = f"{runs} runs, one {kind} canary in every other run; half of the runs chose the threshold"
    if runs == 1:
        right = f"; {guesses.right} of {guesses.made} guesses right" if guesses else ""
        summary = f"{count} {kind} canaries, each included by a fair coin{right}"
    print(
        f"audit of {run_dir}: trained again under its plan, {counted(steps, 'step')}, {among},\n"
        f"  {summary}\n"
        "  (the audit tests hush under this plan, not the released weights)"
    )
    if settings.relation is not charge.neighbours:
        print(
            f"  (the run is private under {settings.relation}; a canary is included or left out: the "
            f"charge and the bound below are under {charge.neighbours})"
        )
    if stand_in:
        print(
            "  (the folder has no settings.json: the plan was audited on the bundled digits and a "
            "linear model)"
        )
    verdict = "the bound is not above the charge: the audit found no violation"
    if exceeded:
        verdict = (
            "THE BOUND IS ABOVE THE CHARGE: the guarantee does not hold for the executed code, unless "
            f"this is chance (at most {1 - asked.confidence:.2g} of the audits of correct code). "
            "Repeat the audit"
        )
    elif bound.gaussian_epsilon > charge.epsilon.upper:
        verdict += (
            ". The estimate exceeds the charge, which happens by chance: repeat the audit, with more "
            "canaries or with --runs 200"
        )
    print(
        f"charge       {charge}\n"
        f"lower bound  epsilon >= {at_least(bound.epsilon)} at delta {settings.delta:g} "
        f"({charge.neighbours} {charge.unit}), for any mechanism, with confidence {asked.confidence:g}\n"
        f"             epsilon >= {at_least(bound.gaussian_epsilon)} if the trade-off is Gaussian, "
        f"an estimate if records are sampled\n{verdict}\n"
        "sensitive: the result depends on the records and no ledger is charged; do not publish it"
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
    x, y, *tests = experiment.tensors("hush audit")
    scores: dict[bool, list[float]] = {True: [], False: []}
    made: Any = None
    for number in range(asked.runs):
        model, optimizer = experiment.initialise()
        included = torch.tensor([number % 2 == 0])
        if asked.runs == 1:  # a fair coin for each canary
            weights = sum(value.numel() for value in model.parameters() if value.requires_grad)
            room = weights if asked.kind == "gradient" else len(tests[1])
            count = max(1, min(_CANARIES, room // 2)) if asked.canaries is None else asked.canaries
            included = torch.rand(count, generator=coins) < 0.5
        if made is None and asked.kind == "input":
            made = mislabelled(tests[0], tests[1], len(included), experiment.outputs, coins)
        elif made is None:
            each = torch.nn.CrossEntropyLoss(reduction="none")
            made = directions_for(plan, model, each, (x, y), len(included), coins)
        generator = None  # without a seed, the noise of an audit is secret
        if seed is not None:
            generator = torch.Generator(experiment.device).manual_seed(seed_from(coins))
        run = run_with_canaries(
            *(model, loss, optimizer, plan, (x, y), made, included),
            steps=steps,
            delta=delta,
            others=asked.others,
            generator=generator,
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
