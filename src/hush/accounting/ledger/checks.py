"""Checks of what a ledger is asked to charge, or to answer for."""

from hush.accounting.mechanism import grows_with_dimension
from hush.core.errors import InvalidValue, LedgerError
from hush.core.guarantee import Adjacency, advised_delta
from hush.core.plan import Plan
from hush.core.ranges import check_count


def check_choice(name: str, value: str, *choices: str) -> None:
    """Raise unless a value is one of two."""
    if value not in choices:
        first, second = choices
        raise InvalidValue(f'{name}={value!r} must be "{first}" or "{second}": a guarantee says which.')


def check_adjacency(adjacency: Adjacency, stored: Adjacency, title: str) -> None:
    """Raise unless a charge is for the neighbours that a ledger has charges for.

    Args:
        adjacency: of the charge.
        stored: of the charges before.
        title: the ledger, as messages name it.
    """
    if adjacency != stored:
        raise LedgerError(
            f"{title} protects {stored.unit} ({stored.neighbours}) and this charge is for "
            f"{adjacency.unit} ({adjacency.neighbours}): costs of one and of the other do not add up to "
            "a guarantee for either. Use a ledger of its own, and quote both guarantees."
        )


def delta_or_stored(delta: float | None, stored: float | None, records: int | None, title: str) -> float:
    """The delta to answer for: the one that was passed, or else the one on the ledger.

    Args:
        delta: that was passed.
        stored: on the ledger.
        records: number of units of privacy, where known: the advice follows it.
        title: the ledger, as messages name it.
    """
    chosen = stored if delta is None else delta
    if chosen is None:
        advised = 1e-5 if records is None else advised_delta(records)
        raise LedgerError(
            f"{title} keeps no delta, and none was passed: an epsilon without the probability that it "
            f"fails promises nothing. Pass e.g. delta={advised:g}."
        )
    return chosen


def dimension_to_store(plan: Plan, dimension: int | None) -> int:
    """The dimension to store with a plan: 0 where the cost is bounded without it."""
    if not grows_with_dimension(plan):
        return 0
    if dimension is None:
        raise LedgerError(
            f"dimension=None does not say how many parameters are trained, and {plan} costs more "
            "the more there are: the charge would be a guess. Pass dimension=, their number."
        )
    return check_count("dimension", dimension, "parameters are counted", 1)
