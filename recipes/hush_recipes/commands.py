"""`hush demo`, `hush claims` and `hush tune-selective`: commands about published methods."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from hush.cli import options as opt
from hush.cli.output import print_json
from hush.core.atomic_files import check_folder
from hush.core.errors import HushError
from hush.core.guarantee import Budget
from hush.core.plan import plan_text
from hush.noise import Gaussian


def demo(
    out: Annotated[Path, opt.running("Folder for the runs and their reports.")] = Path("runs/demo"),
) -> None:
    """Run the methods of four papers on bundled data at epsilon 3: table, figure and report.

    Example: hush demo --out runs/demo
    """
    check_folder("--out", out)
    from hush_recipes.demo import demo as run_demo

    run_demo(out)


def claims(as_json: opt.AsJson = False) -> None:
    """List published privacy claims that are wrong, with the error and the bound that hush uses.

    Example: hush claims --json
    """
    from hush_recipes.claims import CLAIMS

    if as_json:
        print_json({"claims": [asdict(claim) for claim in CLAIMS]})
        return
    for claim in CLAIMS:
        print(
            f"{claim.source}: {claim.statement}\n"
            f"  case     {claim.case}\n"
            f"  printed  {claim.printed:g}\n"
            f"  true     {'at least ' * claim.at_least}{claim.true:g}\n"
            f"  charged  {claim.charged}\n"
            f"  test     tests/recipes/{claim.test}\n"
        )


def tune_selective(
    records: Annotated[int, opt.privacy("Number of records in the data set.")],
    batch_size: Annotated[int, opt.privacy("Expected batch size of training steps.")],
    updates: Annotated[int, opt.training("Number of accepted updates.")],
    epsilon: opt.Epsilon,
    delta: opt.Delta = 1e-5,
    acceptance: Annotated[float, opt.testing("Acceptance rate.")] = 0.5,
    signal: Annotated[float, opt.testing("Mean change of a loss, in standard deviations.")] = 0.1,
    contrast: Annotated[float, opt.testing("Acceptance of helpful / of harmful proposals.")] = 2.0,
    clip: Annotated[float, opt.privacy("Clipping norm.")] = 1.0,
    as_json: opt.AsJson = False,
) -> None:
    """Tune the acceptance test of selective release for the least training noise.

    Example: hush tune-selective --records 60000 --batch-size 2048 --updates 646 --epsilon 1
    """
    from hush_recipes.dpsur.tuning import tune_selective as tune

    start = opt.plan_of(opt.sampling_of(None, records, batch_size), 1.0, clip)
    budget = Budget(epsilon=epsilon, delta=delta)
    tuned, failed = {}, {}
    for test in ("summed", "mean"):
        try:
            tuned[test] = tune(
                start,
                records=records,
                budget=budget,
                updates=updates,
                test=test,
                acceptance=acceptance,
                signal=signal,
                contrast=contrast,
            )
        except HushError as error:
            failed[test] = error
    if not tuned:
        raise failed["summed"]
    noise = {
        test: choice.plan.noise.multiplier
        for test, choice in tuned.items()
        if isinstance(choice.plan.noise, Gaussian)
    }
    best = min(noise, key=noise.__getitem__)
    if as_json:
        tests = {
            test: {
                "plan": choice.plan.to_plain(),
                "trials": choice.trials,
                "guarantee": choice.guarantee.to_plain(),
                "helpful": choice.helpful,
                "harmful": choice.harmful,
            }
            for test, choice in tuned.items()
        }
        reasons = {test: str(error) for test, error in failed.items()}
        print_json({"best": best, "tests": tests, "failed": reasons})
        return
    for test, choice in tuned.items():
        print(
            f"# {test}: training noise {noise[test]:.4g} for {choice.trials} trials; accepts "
            f"{choice.helpful:.0%} of helpful and {choice.harmful:.0%} of harmful proposals"
        )
    for test, reason in failed.items():
        print(f"# {test}: {reason}")
    print(f"# {best} test, {tuned[best].guarantee}\n")
    print(plan_text(tuned[best].plan), end="")
