"""Products in low precision: a record's norm counts its rounding, and no record moves others'."""

import math

import pytest
import torch
from torch import Tensor

import hush
from hush.gradients.products import (
    gram,
    gram_error,
    gram_squares,
    product_error,
    record_gradients,
    weighted_products,
)
from hush.gradients.rules.embedding import RowFactors, TiedFactors
from hush.gradients.rules.linear import OuterFactors
from hush.gradients.tape import GradientTape
from hush.gradients.terms import ROUNDING, Term

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(5, 3, 7, 6), (3, 64, 32, 64), (140, 5, 20, 33), (4, 130, 129, 65), (2, 300, 16, 200)]
EVERYWHERE = pytest.mark.parametrize("where", DEVICES)
PRECISIONS = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def factors(
    shape: tuple[int, int, int, int], dtype: torch.dtype, where: str, shift: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Random factors; with a shift most of them point the same way, and long sums round one way."""
    records, positions, rows, columns = shape
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(records, positions, rows, generator=generator) + shift
    right = torch.randn(records, positions, columns, generator=generator) + shift
    return left.to(where, dtype), right.to(where, dtype)


def cancelling(dtype: torch.dtype, where: str, positions: int = 128) -> tuple[Tensor, Tensor]:
    """Records whose positions cancel by pairs, but for one that is small beside them."""
    left, right = factors((40, positions, 96, 64), dtype, where)
    left[:, 1::2], right[:, 1::2] = -left[:, ::2], right[:, ::2]
    left[:, -2:], right[:, -2:] = left[:, -2:] / 1024, right[:, -2:] / 512
    right[:, -1] = 0
    return left, right


def exact(left: Tensor, right: Tensor) -> Tensor:
    return left.double().mT @ right.double()


def lengths(left: Tensor, right: Tensor) -> Tensor:
    product: Tensor = left.double().norm(dim=2) * right.double().norm(dim=2)
    return product.sum(1)


@EVERYWHERE
@PRECISIONS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_products_round_within_their_bounds(
    shape: tuple[int, int, int, int], dtype: torch.dtype, where: str, shift: float
) -> None:
    left, right = factors(shape, dtype, where, shift)
    whole = exact(left, right)
    length = lengths(left, right)
    for record in range(shape[0]):
        one = slice(record, record + 1)
        computed = weighted_products(left[one], right[one], torch.ones(1, device=where))
        assert float((computed - whole[record]).norm()) <= product_error(left) * float(length[record])
    written = record_gradients(left, right)
    assert ((written - whole).flatten(1).norm(dim=1) <= product_error(left) * length).all()
    for factor in (left, right):
        norms = factor.double().norm(dim=2)
        off = (gram(factor).double() - factor.double() @ factor.double().mT).abs()
        assert (off <= gram_error(factor) * norms[:, :, None] * norms[:, None]).all()
    norms = gram_squares(left, right).norms(product_error(left))
    true = whole.flatten(1).norm(dim=1)
    assert (norms >= true + product_error(left) * length - 1e-13 * length).all()
    assert (norms <= true + 0.02 * length).all()


@EVERYWHERE
@PRECISIONS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_weighted_sum_is_that_of_its_records(
    shape: tuple[int, int, int, int], dtype: torch.dtype, where: str
) -> None:
    left, right = factors(shape, dtype, where)
    weights = torch.rand(shape[0], device=where)
    weights[1] = 0
    expected = torch.tensordot(weights.double(), exact(left, right), dims=1)
    left[1] = torch.nan  # nobody looks
    right[1, 0] = torch.inf
    sums = weighted_products(left, right, weights)
    assert sums.dtype == torch.float64
    bound = float((weights * lengths(left, right).nan_to_num(0)).sum()) * (
        product_error(left) + 2**-24 * shape[0]
    )
    assert float((sums - expected).norm()) <= bound


def terms(left: Tensor, right: Tensor) -> dict[str, Term]:
    shape = torch.Size((left.shape[2], right.shape[2]))
    index = torch.arange(right.shape[1], device=right.device) // 2 % len(left[0, 0])
    rows = RowFactors(index.expand(right.shape[:2]).contiguous(), right.clone(), shape)
    rows.right[:, 1::2] *= -1
    outer = OuterFactors(left, right, shape)
    return {"outer": outer, "rows": rows, "tied": TiedFactors(rows, outer)}


@EVERYWHERE
@PRECISIONS
@pytest.mark.parametrize("name", ["outer", "rows", "tied"])
def test_no_record_moves_a_clipped_sum_by_more_than_the_clipping_norm(
    name: str, dtype: torch.dtype, where: str
) -> None:
    """Records that nearly cancel, present or not, beside others that do; in any precision."""
    term = terms(*cancelling(dtype, where))[name]
    whole = term.dense().double().flatten(1).norm(dim=1)
    norm = 4 * float(whole.median())
    clipping = hush.L2(norm)
    tape = GradientTape({"w": term}, torch.device(where))
    together = clipping.clip(tape).total["w"]
    for record in (0, 17, 39):
        keep = torch.arange(term.records, device=where) != record
        without = clipping.clip(tape.mask_records(keep)).total["w"]
        assert float((together - without).norm()) <= (1 + ROUNDING) * norm
        assert float((together - without).norm()) > 0


@EVERYWHERE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_norm_without_its_rounding_lets_a_record_out(dtype: torch.dtype, where: str) -> None:
    """The naive way, everything in the precision of the factors: positions cancel, rounding does not."""
    left, right = cancelling(dtype, "cpu")
    left, right = 1e3 * left, 1e3 * right
    naive_norms = ((left @ left.mT).float() * (right @ right.mT).float()).sum((1, 2)).clamp(min=0).sqrt()
    norm = float(exact(left, right).flatten(1).norm(dim=1).median())
    weights = (norm / naive_norms.clamp(min=1e-30)).clamp(max=1.0)
    added = (left.float() * weights[:, None, None]).to(dtype)
    naive = torch.stack([(a.mT @ b).double() for a, b in zip(added, right, strict=True)])
    assert float(naive.flatten(1).norm(dim=1).max()) > 1.05 * norm

    shape = torch.Size((left.shape[2], right.shape[2]))
    term = OuterFactors(left.to(where), right.to(where), shape)
    weights = (norm / term.norms(2.0)).clamp(max=1.0)
    for record in range(len(left)):
        alone = weights.where(torch.arange(len(left), device=where) == record, 0.0)
        assert float(term.weighted_sum(alone).norm()) <= (1 + 2**-14) * norm


@EVERYWHERE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_underflows_in_a_gram_matrix_still_counts(dtype: torch.dtype, where: str) -> None:
    left = torch.full((2, 3, 40), 2.0**-66, dtype=dtype, device=where)
    right = torch.full((2, 3, 40), 2.0**60, dtype=dtype, device=where)
    term = OuterFactors(left, right, torch.Size((40, 40)))
    true = float(exact(left, right)[0].norm())
    assert (term.norms(2.0) >= (1 - 1e-6) * true).all()
    assert math.isclose(true, 3 * 40 * 2.0**-6)
