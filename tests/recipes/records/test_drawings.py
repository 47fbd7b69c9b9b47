"""Images that a formula draws: values in range, repeated by their seed, pairs that are alike."""

import pytest
import torch

from hush_recipes.records.drawings import Draw, shapes, strokes
from hush_recipes.records.leaves import leaves


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("draw", "shape"), [(shapes, (1, 28, 28)), (strokes, (1, 28, 28)), (leaves, (3, 32, 32))]
)
def test_drawings_are_images_that_a_seed_repeats(draw: Draw, shape: tuple[int, ...]) -> None:
    drawn = torch.stack(draw(20, seeded()))
    assert drawn.shape == (2, 20, *shape)
    assert float(drawn.min()) >= 0
    assert float(drawn.max()) <= 1
    assert bool((drawn.flatten(2).std(2) > 0.05).all())  # none is empty
    assert torch.equal(drawn, torch.stack(draw(20, seeded())))
    assert not torch.equal(drawn, torch.stack(draw(20, seeded(1))))
    first, second = drawn
    # one thing twice: closer than two things, and not the same
    assert (
        0 < float((first - second).square().mean()) < float((first - second.roll(1, 0)).square().mean())
    )
