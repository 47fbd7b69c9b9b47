"""Objects that must not exist twice."""

from typing import NoReturn, SupportsIndex

from hush.core.errors import Unsupported
from hush.core.kind import with_article


class SingleOwner:
    """Refuses to be copied or pickled: `copy.copy`, `copy.deepcopy` and `pickle` all ask here."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise Unsupported(
            f"{with_article(type(self).__name__)} cannot be copied or pickled: it holds a ledger's open "
            "file and a run's randomness, and two owners would charge, or close, the same one. Copy the "
            "model alone and make a new PrivateStep for the copy with ledger=step.ledger, so that both "
            "charges add up; or load state_dict() into a new PrivateStep with that ledger."
        )
