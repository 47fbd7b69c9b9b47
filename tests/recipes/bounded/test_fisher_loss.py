import numpy as np
import pytest

from hush.core.errors import InvalidValue
from hush_recipes.bounded.fisher_loss import FisherLoss


def test_squares_add_and_sampling_takes_its_share() -> None:
    loss = FisherLoss(records=3)
    loss.add([0.09, 0.0, 1.0])
    loss.add([0.07, 0.0, 3.0], rate=1.0)
    loss.add([0.0, 0.0, 100.0], rate=0.05)
    assert loss.eta() == pytest.approx([0.4, 0.0, 3.0])
    assert (loss.largest, loss.median) == pytest.approx((3.0, 0.4))
    assert loss.deviation() == pytest.approx([2.5, np.inf, 1 / 3])
    assert "0.4" not in repr(loss), "a loss is asked for by name"


@pytest.mark.parametrize("squared", [[1.0], [1.0, -1.0], [1.0, np.nan]])
def test_each_record_has_a_number(squared: list[float]) -> None:
    with pytest.raises(InvalidValue, match="squared of shape"):
        FisherLoss(records=2).add(squared)
