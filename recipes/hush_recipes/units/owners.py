"""Made-up owners of labelled records: a few have many, and most prefer some of the classes."""

import numpy as np
import numpy.typing as npt

LARGEST = 50
"""Records that an owner has at most."""
_PREFERENCE = 0.3
"""Of the Dirichlet distribution of an owner's classes: below 1, few classes make up most records."""


def made_up_owners(labels: npt.NDArray[np.int64], seed: int = 0) -> npt.NDArray[np.int64]:
    """The owner of each record: sizes follow Zipf's law, from 1 to 50 records each.

    An owner of s records is s times as rare as one of a single record, and draws the classes of its
    records from a Dirichlet distribution of its own. Where a class has run out, the record is of any
    class that has not.

    Args:
        labels: Class of each record, from 0 on.
        seed: Of the draw.
    """
    random = np.random.default_rng(seed)
    sizes = np.arange(1, LARGEST + 1)
    zipf = 1 / sizes / np.sum(1 / sizes)
    pools = [random.permutation(np.flatnonzero(labels == label)).tolist() for label in np.unique(labels)]
    owners = np.empty(len(labels), dtype=np.int64)
    remaining, owner = len(labels), 0
    while remaining:
        size = min(remaining, int(random.choice(sizes, p=zipf)))
        preference = random.dirichlet(np.full(len(pools), _PREFERENCE))
        for _ in range(size):
            available = np.array([bool(pool) for pool in pools])
            # an owner whose classes have all run out takes any
            weights = preference * available if (preference * available).sum() > 0 else available
            label = random.choice(len(pools), p=weights / weights.sum())
            owners[pools[label].pop()] = owner
        remaining -= size
        owner += 1
    return owners
