"""`hush audit`: a lower bound on epsilon from training again with canaries."""

from pathlib import Path
from typing import Annotated

import typer

from hush.cli.options import AsJson, DataDir, Device, Quiet, Seed, device_of, one_of
from hush.cli.output import counted, print_json
from hush.core.errors import InvalidValue, LedgerError, Unsupported
from hush.core.plan import read_plan
from hush.core.value import check_count

_FEW_RUNS = 32
_FEW_CANARIES = 8


def audit(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run that `hush train` has finished.")],
    canaries: Annotated[
        int | None, typer.Option(help="How many; 256 by default, or half of what there is room for.")
    ] = None,
    kind: Annotated[
        str,
        typer.Option(
            help="gradient: seen in every update; input: mislabelled records, by loss.",
            callback=one_of("--kind", "gradient", "input", why="canaries are made in these two ways"),
        ),
    ] = "gradient",
    others: Annotated[
        bool, typer.Option(help="With the run's own records, or the canaries alone, which tell more.")
    ] = True,
    runs: Annotated[
        int, typer.Option(help="1: many canaries in one run. More: one canary, in every other run.")
    ] = 1,
    confidence: Annotated[float, typer.Option(help="How often the bound is right.")] = 0.95,
    data_dir: DataDir = None,
    device: Device = None,
    seed: Seed = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Lower bound on epsilon: train again as a run did, with canaries, and try to detect them.

    This audits what hush does under the run's plan, not the weights that were released. The result is
    computed from the records and charged nowhere: keep it to yourself. Exits with 1 if the bound is
    above the charge.

    Example: hush audit runs/digits-1 --no-others
    """
    from hush.accounting.ledger import Ledger
    from hush.audit.lower_bound import CONFIDENCE
    from hush.cli.runs.audit_runner import AuditRunner
    from hush.cli.runs.experiment import Settings, build_experiment
    from hush.training.progress import Progress

    CONFIDENCE.check("--confidence", confidence)
    check_count("--runs", runs, "they are counted", at_least=1)
    if canaries is not None:
        # all right by chance must be rarer than what a share of 1 - confidence allows
        smallest = 1 if runs > 1 else _FEW_CANARIES
        check_count("--canaries", canaries, "fewer refute nothing", at_least=smallest)
    if 1 < runs < _FEW_RUNS:
        raise InvalidValue(
            f"--runs {runs} must be 1 or at least {_FEW_RUNS}: fewer refute nothing. One run with many "
            "canaries is the cheaper way."
        )
    if runs > 1 and canaries not in (None, 1):
        raise InvalidValue(
            f"--runs {runs} and --canaries {canaries}: canaries of one run are no independent trials, "
            "so that many runs have one each. Leave one of the two out."
        )
    settings = Settings.read(run_dir)
    plan = read_plan(run_dir / "plan.toml")
    if settings.per_unit is not None:
        raise Unsupported(
            f"{run_dir} protects one user with up to {settings.per_unit} records a step, and canaries "
            "of this command are single records: their bound would be on another guarantee. Audit a run "
            "of the same plan without --units, in which one record costs what one user costs here."
        )
    if not (run_dir / "ledger.jsonl").is_file():
        raise LedgerError(
            f"{run_dir} has no ledger.jsonl: what was trained and charged is not known. Name the folder "
            "of a run that `hush train` has finished."
        )
    steps = Ledger(run_dir / "ledger.jsonl", read_only=True).counts.get(plan, 0)
    if not steps:
        raise LedgerError(
            f"the ledger of {run_dir} has no step of its plan.toml: nothing was trained, or it has "
            "changed. Name the folder of a run as `hush train` left it."
        )
    experiment = build_experiment(settings, data_dir, device_of(device))
    with Progress("training with canaries", runs * steps, visible=not quiet) as progress:
        runner = AuditRunner(
            experiment=experiment,
            plan=plan,
            steps=steps,
            kind=kind,
            others=others,
            seed=seed,
            done=progress.advance,
        )
        result = (
            runner.one_run(canaries, confidence) if runs == 1 else runner.many_runs(runs, confidence)
        )
    bound, guesses = result.bound, result.guesses
    exceeded = bound.epsilon > result.charge.epsilon.upper
    if as_json:
        print_json(
            {
                "lower_bound": bound.epsilon,
                "charge": result.charge.to_plain(),
                "run_neighbours": str(settings.relation),
                "exceeded": exceeded,
                "sensitive": True,
                "confidence": confidence,
                "gaussian": {"separation": bound.separation, "epsilon": bound.gaussian_epsilon},
                "kind": kind,
                "canaries": result.canaries,
                "guesses": None if guesses is None else {"made": guesses.made, "right": guesses.right},
                "runs": runs,
                "steps": steps,
                "others": others,
                "plan": plan.to_plain(),
            }
        )
    else:
        records = counted(len(experiment.train[1]), "other record") if others else "no other records"
        print(f"audit of {run_dir}: trained again under its plan, {counted(steps, 'step')}, {records},")
        print(f"  {result.summary}")
        print("  (what is audited is the library under this plan, not the weights that were released)")
        if settings.relation is not result.charge.neighbours:
            print(
                f"  (the run promises {settings.relation}; a canary is there or not, so that charge and "
                f"bound below are of its plan under {result.charge.neighbours})"
            )
        print(f"charge       {result.charge}")
        print(
            f"lower bound  epsilon >= {bound.epsilon:.4g} at delta {settings.delta:g} "
            f"({result.charge.neighbours} {result.charge.unit}), whatever the mechanism, with "
            f"confidence {confidence:g}"
        )
        print(
            f"             epsilon >= {bound.gaussian_epsilon:.4g} if the trade-off is a Gaussian's, an "
            "estimate where records are sampled"
        )
        if exceeded:
            print("THE BOUND IS ABOVE THE CHARGE: the guarantee does not hold for what runs")
        else:
            print("the bound is not above the charge: nothing was found")
        print(
            "sensitive: this used the records again, and no ledger is charged for it; do not publish it"
        )
    if exceeded:
        raise typer.Exit(1)
