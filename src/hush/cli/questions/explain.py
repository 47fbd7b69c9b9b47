"""`hush explain`: what a plan or a ledger means to someone who is in the data."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from hush.cli.option_group import options_of
from hush.cli.options import AsJson
from hush.cli.output import print_json
from hush.cli.questions.charges import Question, charges_of
from hush.report.figure import Table
from hush.report.rounding import percent

if TYPE_CHECKING:
    from hush.accounting.explanation import Explanation


@options_of(Question)
def explain(question: Question, as_json: AsJson = False) -> None:
    """What an epsilon means: how far the best attack gets, before anything is trained.

    Example: hush explain --noise 1.0 --records 60000 --batch-size 600 --epochs 20

    Of a plan that `hush calibrate` wrote: hush explain --plan plan.toml --steps 2000
    """
    from hush.accounting.explanation import FALSE_POSITIVE_RATES, MIN_ERROR_RATE
    from hush.accounting.explanation import explain as explanation_of

    asked = charges_of(replace(question, advise_delta=True))
    meaning = explanation_of(asked.guarantee, asked.counts, asked.dimensions, asked.adjacency)
    curve = meaning.trade_off
    gaussian = {"mu": curve.mu, "regret": curve.regret, "min_error_rate": MIN_ERROR_RATE}
    if as_json:
        rates = {"false_positive_rates": list(FALSE_POSITIVE_RATES)}
        attacks = {"attack": asdict(meaning.attack), "from_epsilon": asdict(meaning.from_epsilon)}
        print_json(
            {**asked.guarantee.to_plain(), **rates, **attacks, "gaussian": gaussian, **asked.to_plain()}
        )
        return
    from hush.accounting.attacker import membership

    print(asked.guarantee)
    print(
        f"\nAn attacker who sees all that is released, knows everything else and tests "
        f"{membership(asked.adjacency)}:\n\n{_table(meaning).markdown()}\n"
    )
    at_one = meaning.attack.true_positive_rates[1]
    print(
        f"  of any other secret of theirs: guesses that are right 1% of the time without the release "
        f"are right at most {percent(at_one)} of the time with it\n"
        f"  no easier to tell apart than two unit normals at distance mu = {curve.mu:.4g} (Gaussian DP, "
        f"for error rates of {MIN_ERROR_RATE:g} or more; regret at most {curve.regret:.2g})"
    )
    for line in asked.lines():
        print(f"  {line}")


def _table(meaning: "Explanation") -> Table:
    """The rates that hold, beside those that would follow from epsilon and delta alone."""
    from hush.accounting.explanation import FALSE_POSITIVE_RATES

    columns = (meaning.attack, meaning.from_epsilon)
    found = [
        [
            f"members found, at {100 * rate:g}% false alarms",
            *(percent(c.true_positive_rates[k]) for c in columns),
        ]
        for k, rate in enumerate(FALSE_POSITIVE_RATES)
    ]
    return Table(
        header=["the best attack", "at most", "by epsilon and delta alone"],
        rows=[
            ["guesses that are right, from even odds", *(percent(c.posterior) for c in columns)],
            ["advantage: found less false alarms", *(percent(c.advantage) for c in columns)],
            *found,
        ],
    )
