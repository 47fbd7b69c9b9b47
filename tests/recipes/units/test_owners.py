"""Made-up owners have the sizes and tastes that the recipe says."""

import numpy as np

from hush_recipes.units.owners import LARGEST, made_up_owners


def test_owners_have_zipf_sizes_and_preferred_classes() -> None:
    labels = np.random.default_rng(1).integers(0, 10, 6000)
    owners = made_up_owners(labels, seed=3)
    assert (owners == made_up_owners(labels, seed=3)).all()
    sizes = np.bincount(owners)
    assert sizes.min() == 1
    assert sizes.max() <= LARGEST
    # Zipf's law: half as many owners of two as of one, on average; 4 standard deviations
    ones, twos = (sizes == 1).sum(), (sizes == 2).sum()
    assert abs(ones - 2 * twos) < 4 * (ones + 4 * twos) ** 0.5
    # the most frequent class of owners of 20 records and more: by chance it would be a quarter
    large = np.flatnonzero(sizes >= 20)[:100]
    shares = [np.bincount(labels[owners == owner]).max() / sizes[owner] for owner in large]
    assert np.mean(shares) > 0.4
