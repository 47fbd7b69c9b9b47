"""The same examples every time: a red build must mean that the code changed, not the dice."""

import pytest
from hypothesis import settings
from torch import Tensor

from hush.noise import Gaussian

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture
def without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gaussian noise of exactly zero, which no multiplier gives: what is left is the records' part."""

    def location_itself(self: Gaussian, location: Tensor, **_: object) -> Tensor:
        return location

    monkeypatch.setattr(Gaussian, "around", location_itself)
