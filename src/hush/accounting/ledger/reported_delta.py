"""Delta at which a ledger's epsilon is reported."""

from hush.accounting.ledger.ledger import Ledger
from hush.core.guarantee import DEFAULT_DELTA


def reported_delta(ledger: Ledger, requested: float | None) -> tuple[float, str]:
    """Delta to report epsilon at: the one asked for, else the run's; and which of them it is, in words.

    Args:
        ledger: Of a run, which may have stored the delta of its budget.
        requested: None: none was asked for.
    """
    stored = ledger.delta
    if requested is None and stored is None:
        reason = "by default: the ledger does not say what the run was made for"
        return DEFAULT_DELTA, f"delta {DEFAULT_DELTA:g} {reason}"
    if requested is None or requested == stored:
        assert stored is not None
        return stored, f"delta {stored:g}, as the run was made for"
    own = "" if stored is None else f"; the run was made for delta {stored:g}"
    return requested, f"delta {requested:g}, as asked for{own}"
