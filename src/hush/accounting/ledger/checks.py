"""Checks of what a ledger is asked to charge, or to answer for."""

from dataclasses import replace

from hush.accounting.mechanism import grows_with_dimension
from hush.core.errors import InvalidValue, LedgerError, Unproved
from hush.core.guarantee import Adjacency, Neighbours, advised_delta, check_neighbours
from hush.core.plan import Plan
from hush.core.value import check_count, check_kind


def check_choice(name: str, value: str, *choices: str) -> None:
    """Raise unless a value is one of two."""
    if value not in choices:
        first, second = choices
        raise InvalidValue(f'{name}={value!r} must be "{first}" or "{second}": a guarantee says which.')


def check_adjacency(adjacency: Adjacency, stored: Adjacency | None, title: str) -> None:
    """Raise unless a charge is for the neighbours that a ledger has charges for.

    Args:
        adjacency: of the charge.
        stored: of the charges before; None: there are none.
        title: the ledger, as messages name it.
    """
    if check_kind("adjacency", adjacency, Adjacency).group != 1:
        raise InvalidValue(
            f"adjacency with group={adjacency.group} is no charge's: a step is charged for one unit, "
            "and what a group of them costs is asked of the ledger. Charge group=1, and call "
            f"ledger.epsilon(group={adjacency.group}).",
            key="adjacency",
        )
    if stored is None or adjacency == stored:
        return
    if replace(adjacency, owners=None) == replace(stored, owners=None):
        raise LedgerError(
            f"{title} protects {stored} and this charge is for another table of owners: one person "
            "may be several users there, and the sum would be no user's cost. Pass units with the "
            "same owner of each record, or use a ledger of its own, and quote both guarantees."
        )
    counted = isinstance(stored.per_unit, int) and isinstance(adjacency.per_unit, int)
    if counted and replace(adjacency, per_unit=stored.per_unit) == stored:
        raise LedgerError(
            f"{title} protects {stored} and this charge is for {adjacency}: its guarantee names "
            f"one number of records a step. Pass per_unit={stored.per_unit}, or use a ledger of its "
            "own, and quote both guarantees."
        )
    raise LedgerError(
        f"{title} protects {stored} and this charge is for {adjacency}: costs of one and of the other "
        "do not add up to a guarantee for either. Use a ledger of its own, and quote both guarantees."
    )


def check_charges(
    title: str, run: str, steps: int, last: int, recorded: str | None, digest: str | None
) -> None:
    """Raise unless all charges up to a checkpoint are on a ledger, as they were when it was written.

    Args:
        title: the ledger, as messages name it.
        run: the checkpoint's.
        steps: that it has taken.
        last: step of the run on the ledger.
        recorded: digest of the chain at the checkpoint's last step, on the ledger.
        digest: the same as the checkpoint has it.
    """
    if last < steps:
        raise LedgerError(
            f"the checkpoint has taken {steps} steps of run {run} and {title} knows of {last}: charges "
            "are missing. Use the ledger that was written beside the checkpoint."
        )
    if recorded is not None and digest is not None and recorded != digest:
        raise LedgerError(
            f"{title} is not the one that the checkpoint was charged to: at step {steps} of run {run} "
            f"its digest is {recorded} and was {digest}. A charge may be missing. Use the ledger that "
            "was written beside the checkpoint."
        )


def adjacency_or_stored(
    group: int, neighbours: Neighbours | None, stored: Adjacency, records: int | None
) -> Adjacency:
    """What neighbours of an answer differ in; raises where the steps do not satisfy that relation.

    Args:
        group: units of privacy that change together.
        neighbours: the relation asked for; None: the one that was charged.
        stored: of the charges.
        records: number of units of privacy, where known: no group is larger.
    """
    relation = stored.neighbours if neighbours is None else check_neighbours(neighbours)
    if relation is Neighbours.ADD_REMOVE is not stored.neighbours:
        raise Unproved(
            "neighbours=add/remove is not what ran: the number of slots is public here, as sums are "
            "divided by it, and a record more or less would show in it. Ask for zero-out, where an "
            "absent record leaves its slot empty, or run with neighbours=ADD_REMOVE."
        )
    adjacency = replace(stored, group=group, neighbours=relation)
    adjacency.check_records(records)
    return adjacency


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
