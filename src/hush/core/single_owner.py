"""Objects that must not exist twice."""

from typing import NoReturn, SupportsIndex

from hush.core.errors import Unsupported


class SingleOwner:
    """Refuses to be copied or pickled: `copy.copy`, `copy.deepcopy` and `pickle` all ask here."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise Unsupported(
            f"a {type(self).__name__} cannot be copied or pickled: it holds a ledger's open file and "
            "a run's randomness, and two owners would charge, or close, the same one. Copy the model, "
            "or keep state_dict() and load it into a new PrivateStep."
        )
