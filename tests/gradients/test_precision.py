"""Norms and sums over records, against double precision."""

import math

import numpy as np
import pytest
import torch

from hush.gradients.precision import (
    SUM_BLOCK,
    blocked_product,
    double_norms,
    full_precision,
    vector_norms,
)


@pytest.mark.parametrize("width", [8, 2000])
@pytest.mark.parametrize("size", [1e18, 9e18, 1e19, 1e25, 1e35])
def test_norms_beyond_the_root_of_the_largest_number_are_finite(size: float, width: int) -> None:
    rows = torch.full((2, width), size)
    rows[1] = 1.0
    norms = vector_norms(rows, 2.0)
    assert norms.tolist() == pytest.approx([size * width**0.5, width**0.5], rel=1e-6)
    assert vector_norms(torch.full((1, width), torch.inf), 2.0).isinf()


@pytest.mark.parametrize("order", [1.0, 1.5, 2.0, 2.33, 4.0, 40.0, math.inf])
@pytest.mark.parametrize("width", [5, 1024, 300_001])
def test_norms_are_within_what_the_tape_allows_for(order: float, width: int) -> None:
    """docs/guarantees/tape.md, 5: a relative 2^-14 of the same norm in double precision."""
    values = torch.randn(4, width, generator=torch.Generator().manual_seed(0))
    values[1] = 1.0  # as many equal ones as there are
    values[2] *= 1e-42  # subnormal: it may count as nothing
    values[3] *= 1e37 / width
    norms = vector_norms(values, order)
    expected = np.abs(values.double().numpy())
    tops = expected.max(1)
    oracle = [top * np.linalg.norm(row / top, order) for row, top in zip(expected, tops, strict=True)]
    assert norms.tolist() == pytest.approx(oracle, rel=2**-14, abs=1e-36)
    assert vector_norms(torch.zeros(1, width), order).item() == 0
    assert not vector_norms(torch.full((1, width), torch.inf), order).isfinite()
    assert not vector_norms(torch.full((1, width), torch.nan), order).isfinite()


@pytest.mark.parametrize("order", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize(
    "shape", [(0, 2, 5), (3, 0, 5), (3, 2, 1), (90, 6, 2000), (2, 1, 600_000), (1_100_000,)]
)
def test_double_norms_equal_those_of_doubles(order: float, shape: tuple[int, ...]) -> None:
    sizes = 10.0 ** torch.linspace(
        -44, 38, max(1, math.prod(shape[:-1]))
    )  # subnormal, and near the largest
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).clamp(-3, 3)
    values = values * sizes[: math.prod(shape[:-1])].view(*shape[:-1], 1)
    for some in (values, values.movedim(-1, 0).contiguous().movedim(0, -1)):  # rows apart, too
        norms = double_norms(some, order)
        expected = some.double().numpy()
        assert norms.dtype == torch.float64
        with np.errstate(under="ignore"):
            largest = np.abs(expected).max(-1, initial=0.0, keepdims=True)
            scaled = np.divide(expected, largest, out=np.zeros_like(expected), where=largest > 0)
            oracle = (
                largest[..., 0] * np.linalg.norm(scaled, order, axis=-1)
                if scaled.size
                else scaled.sum(-1)
            )
        np.testing.assert_allclose(norms, oracle, rtol=shape[-1] * 2.0**-52, atol=0)


@pytest.mark.parametrize("records", [1, SUM_BLOCK - 1, SUM_BLOCK, 3 * SUM_BLOCK, 3 * SUM_BLOCK + 5])
def test_rounding_of_a_sum_is_that_of_one_block(records: int) -> None:
    """The bound of docs/guarantees/tape.md, for sums with one record and without it."""
    torch.manual_seed(0)
    rows = torch.nn.functional.normalize(torch.rand(records, 50), dim=1)
    weights = torch.ones(records, 1)
    exact = rows.double().sum(0)
    total = blocked_product(weights, rows)[0]
    block = min(records, SUM_BLOCK)
    assert total.dtype == torch.float64
    blocks = -(-records // SUM_BLOCK)
    assert float((total - exact).norm()) <= blocks * 2.0**-24 * (block**2 / 2 + block)
    # the blocks without the record that is left out are the same numbers
    without = weights.clone()
    without[0] = 0.0
    moved = total - blocked_product(without, rows)[0]
    assert float((moved - rows[0].double()).norm()) <= 2.0**-24 * (block**2 + 2 * block)


@pytest.mark.parametrize("records", [0, 1, SUM_BLOCK, 2 * SUM_BLOCK + 3])
@pytest.mark.parametrize(("high", "wide"), [(1, 1), (1, 50), (7, 5), (20, 3), (3, 20)])
def test_a_sum_has_every_tile_once_and_adds_blocks_in_double_precision(
    records: int, high: int, wide: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hush.gradients.precision._TILE", 16)
    torch.manual_seed(0)
    # small whole numbers: exact in single precision, in any order
    left, right = (torch.randint(-3, 4, (records, size)).float() for size in (high, wide))
    if records > SUM_BLOCK:
        # beside these the others' sum is lost in single precision, and in double precision is not
        left[0], right[0] = 2.0**15, 2.0**15
        left[1:SUM_BLOCK] = 0.0
    exact = (left.double()[:, :, None] * right.double()[:, None]).sum(0)
    total = blocked_product(left, right)
    assert total.dtype == torch.float64
    assert torch.equal(total, exact)


def test_products_on_a_cpu_are_not_made_in_lower_precision() -> None:
    """With "medium", oneDNN may multiply floats in bfloat16 where the processor can."""
    torch.set_float32_matmul_precision("medium")
    try:
        with full_precision(torch.device("cpu")):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
