"""`hush tune-selective`: the test of a selective run that needs the least training noise."""

from typing import Annotated

import typer

from hush.cli.options import AsJson, Delta, Epsilon, plan_of, sampling_of
from hush.cli.output import print_json
from hush.core.guarantee import Budget
from hush.core.plan import plan_text


def tune_selective(
    records: Annotated[int, typer.Option(help="Number of records in the data set.")],
    batch_size: Annotated[int, typer.Option(help="Expected batch size of the training.")],
    updates: Annotated[int, typer.Option(help="Accepted updates wanted.")],
    epsilon: Epsilon,
    delta: Delta = 1e-5,
    acceptance: Annotated[float, typer.Option(help="Share of trials to be accepted.")] = 0.5,
    signal: Annotated[
        float,
        typer.Option(help="Mean change of a record's loss, in standard deviations: a public guess."),
    ] = 0.1,
    contrast: Annotated[
        float, typer.Option(help="How much more often helpful proposals must be accepted.")
    ] = 2.0,
    clip: Annotated[float, typer.Option(help="Largest Euclidean norm of a gradient.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """The least training noise for a number of accepted updates: both tests, and the better one's plan.

    Example: hush tune-selective --records 60000 --batch-size 2048 --updates 646 --epsilon 1
    """
    from hush.accounting.selective.tune import tune_selective as tune
    from hush.core.errors import HushError
    from hush.noise import Gaussian

    start = plan_of(sampling_of(None, records, batch_size), 1.0, clip)
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
        test: each.plan.noise.multiplier
        for test, each in tuned.items()
        if isinstance(each.plan.noise, Gaussian)
    }
    best = min(noise, key=noise.__getitem__)
    if as_json:
        tests = {
            test: {
                "plan": each.plan.to_plain(),
                "trials": each.trials,
                "epsilon": each.guarantee.epsilon.to_plain(),
                "helpful": each.helpful,
                "harmful": each.harmful,
            }
            for test, each in tuned.items()
        }
        reasons = {test: str(error) for test, error in failed.items()}
        print_json({"best": best, "tests": tests, "failed": reasons})
        return
    for test, each in tuned.items():
        print(
            f"# {test}: training noise {noise[test]:.4g} for {each.trials} trials; accepts "
            f"{each.helpful:.0%} of helpful and {each.harmful:.0%} of harmful proposals"
        )
    for test, reason in failed.items():
        print(f"# {test}: {reason}")
    print(f"# {best} test, {tuned[best].guarantee}\n")
    print(plan_text(tuned[best].plan), end="")
