"""Responses of patches against loops over images, patches and places."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hush_recipes.records.leaves import leaves
from hush_recipes.records.patches import Patches, PatchResponses

SMALL = Patches(count=5, side=4, grid=2)


@pytest.fixture(scope="module")
def drawn() -> torch.Tensor:
    return torch.cat(leaves(60, torch.Generator().manual_seed(0)))


def test_features_are_rectified_responses_averaged_by_place(drawn: torch.Tensor) -> None:
    responses, image = SMALL.fit(drawn), drawn[3].double().numpy()
    expected = (averages(responses, image) + averages(responses, image[:, :, ::-1])) / 2
    features = responses(drawn[:5])
    assert features.shape == (5, 10, 2, 2)
    assert float(features[3].sum()) > 0
    np.testing.assert_allclose(features[3].permute(1, 2, 0), expected, rtol=1e-4, atol=1e-6)
    one_way = replace(SMALL, mirrored=False).fit(drawn)(drawn[3:4])[0].permute(1, 2, 0)
    np.testing.assert_allclose(one_way, averages(responses, image), rtol=1e-4, atol=1e-6)


def averages(responses: PatchResponses, image: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rectified responses of one image, patch by patch: places x places x channels."""
    side = image.shape[1] - SMALL.side + 1
    maps = np.empty((2 * SMALL.count, side, side))
    for row in range(side):
        for column in range(side):
            patch = image[:, row : row + SMALL.side, column : column + SMALL.side].flatten()
            patch = patch - patch.mean()
            patch = patch / (np.linalg.norm(patch) / SMALL.side + 10 / 255 * np.sqrt(3))
            value = patch @ responses.filters.double().numpy() + responses.offset.double().numpy()
            maps[:, row, column] = np.maximum(np.concatenate([value, -value]) - responses.least, 0)
    # 29 places: the two halves share the one in the middle
    halves = (slice(0, 15), slice(14, 29))
    return np.array([[maps[:, rows, columns].mean((1, 2)) for columns in halves] for rows in halves])
