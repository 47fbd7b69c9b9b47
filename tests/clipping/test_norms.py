import math
from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

import hush
from hush.core.sensitivity import SensitivitySet
from hush.core.tape import ClippedSum, CoordinateMask


class Rows:
    """A tape of rows."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def norms(self, order: float) -> torch.Tensor:
        norms: torch.Tensor = self.rows.norm(order, dim=1)
        return norms

    def weighted_sum(self, weights: torch.Tensor, most: float = math.inf) -> dict[str, torch.Tensor]:
        return {"rows": (weights[:, None] * self.rows)[weights != 0].sum(0)}

    def clip_entrywise(self, balls: Sequence[SensitivitySet], thin: CoordinateMask | None) -> ClippedSum:
        raise NotImplementedError


@given(
    entries=st.lists(st.floats(-1e50, 1e50), min_size=3, max_size=3),
    norm=st.floats(1e-12, 1e12),
    p=st.sampled_from([1.0, 1.5, 2.0, 3.0]),
)
def test_one_record_lands_in_the_ball_and_keeps_its_direction(
    entries: list[float], norm: float, p: float
) -> None:
    row = torch.tensor([entries], dtype=torch.float64)
    clipped = hush.Lp(p=p, norm=norm).clip(Rows(row)).total["rows"]
    assert clipped.norm(p) <= norm * (1 + 1e-12)
    if row.norm(p) < norm * (1 - 1e-12):
        assert torch.equal(clipped, row[0])


def test_records_that_are_not_finite_are_left_out_and_counted() -> None:
    rows = torch.tensor([[3.0, 4.0], [math.nan, 1.0], [math.inf, 0.0], [0.0, 0.0]])
    clipped = hush.Lp(p=2.0, norm=1.0).clip(Rows(rows))
    torch.testing.assert_close(clipped.total["rows"], torch.tensor([0.6, 0.8]))
    assert int(clipped.skipped) == 2
