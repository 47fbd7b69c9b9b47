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


def test_features_are_of_one_image_each_and_of_its_mirror_image(drawn: torch.Tensor) -> None:
    responses = SMALL.fit(drawn)
    torch.testing.assert_close(responses(drawn[:9].flip(3)), responses(drawn[:9]))
    torch.testing.assert_close(responses(drawn[:20])[17:18], responses(drawn[17:18]))


def test_patches_are_compared_in_white_coordinates(drawn: torch.Tensor) -> None:
    """Responses of a filter on the drawn patches have about one variance, whichever was taken."""
    responses = Patches(count=40, side=4).fit(drawn)
    rows = SMALL.normalised(drawn)
    rows = rows[torch.linalg.vector_norm(rows, dim=2) > 0.3 * SMALL.side]
    white = (rows @ responses.filters + responses.offset).std(0)
    plain = (rows @ torch.nn.functional.normalize(responses.filters, dim=0)).std(0)
    assert float(white.max() / white.min()) < 0.5 * float(plain.max() / plain.min())
    assert not torch.equal(Patches(count=5, side=4, seed=1).fit(drawn).filters, SMALL.fit(drawn).filters)
