import pytest
import torch
from torch import Tensor

from hush.gradients.rules.embedding import _ROW_CHUNK, RowFactors, TiedFactors, merge_terms
from hush.gradients.rules.linear import OuterFactors
from hush.gradients.tape import GradientTape
from hush.gradients.terms import Dense, Term
from tests.gradients.oracle import ORDERS


def outer(records: int, positions: int, rows: int, columns: int) -> OuterFactors:
    left, right = torch.randn(records, positions, rows), torch.randn(records, positions, columns)
    return OuterFactors(left.double(), right.double(), torch.Size((rows, columns)))


def table(records: int, positions: int, rows: int, columns: int) -> RowFactors:
    index = torch.randint(0, rows, (records, positions))
    return RowFactors(
        index, torch.randn(records, positions, columns).double(), torch.Size((rows, columns))
    )


def materialised(term: Term) -> Tensor:
    """The oracle: one position after the other."""
    total = torch.zeros(term.records, *term.shape, dtype=torch.float64)
    for part in (term.rows, term.outer) if isinstance(term, TiedFactors) else (term,):
        for b in range(term.records):
            if isinstance(part, OuterFactors):
                for left, right in zip(part.left[b], part.right[b], strict=True):
                    total[b] += torch.outer(left, right)
            if isinstance(part, RowFactors):
                for row, right in zip(part.index[b], part.right[b], strict=True):
                    total[b, row] += right
    return total


@pytest.mark.parametrize(
    "make",
    [
        lambda: outer(5, 1, 4, 6),
        lambda: outer(5, 3, 4, 6),
        lambda: table(5, 9, 4, 6),
        lambda: table(5, 1, 4, 6),
        lambda: TiedFactors(table(5, 9, 4, 6), outer(5, 3, 4, 6)),
    ],
)
def test_every_form_answers_as_if_materialised(make: object) -> None:
    torch.manual_seed(0)
    term: Term = make()  # type: ignore[operator]
    gradients = materialised(term)
    weights = torch.rand(5).double()
    torch.testing.assert_close(term.dense(), gradients)
    torch.testing.assert_close(term.weighted_sum(weights), torch.einsum("b,bij->ij", weights, gradients))
    for order in ORDERS:
        expected = torch.linalg.vector_norm(gradients.flatten(1), ord=order, dim=1)
        torch.testing.assert_close(term.norms(order), expected, rtol=1e-12, atol=0)
    some = torch.tensor([True, False, True, True, False])
    torch.testing.assert_close(term.take(some).dense(), gradients[some])


def test_the_memory_of_a_tied_table_counts_both_uses() -> None:
    rows, product = table(5, 9, 4, 6), outer(5, 3, 4, 6)
    tape = GradientTape({"words": TiedFactors(rows, product)}, torch.device("cpu"))
    held = {id(value) for value in tape.tensors()}
    assert held == {id(rows.index), id(rows.right), id(product.left), id(product.right)}


def test_uses_of_one_parameter_become_one_term() -> None:
    torch.manual_seed(0)
    first, second, rows = outer(5, 3, 4, 6), outer(5, 2, 4, 6), table(5, 9, 4, 6)
    dense = Dense(torch.randn(5, 4, 6).double())
    uses: list[tuple[list[Term], type]] = [
        ([first], OuterFactors),
        ([first, second], OuterFactors),
        ([rows, rows], RowFactors),
        ([first, rows, second], TiedFactors),
        ([dense, first, rows], Dense),
    ]
    for terms, kind in uses:
        term = merge_terms(terms)
        assert isinstance(term, kind)
        torch.testing.assert_close(term.dense(), sum(part.dense() for part in terms))


def test_a_norm_is_not_understated_where_almost_all_cancels() -> None:
    """Two positions of length 1e4 whose gradients cancel up to 1: Gram matrices alone see nothing."""
    torch.manual_seed(0)
    left = torch.randn(1, 1, 300)
    right = torch.randn(1, 1, 300)
    left, right = 1e2 * left / left.norm(), 1e2 * right / right.norm()
    rest = torch.zeros(1, 1, 300)
    rest[..., 0] = 1e-2
    term = OuterFactors(
        torch.cat([left, -left], 1), torch.cat([right, right + rest], 1), torch.Size((300, 300))
    )
    exact = OuterFactors(term.left.double(), term.right.double(), term.shape).dense().norm()
    gram = ((term.left @ term.left.mT) * (term.right @ term.right.mT)).sum()
    assert abs(gram.clamp(min=0).sqrt() / exact - 1) > 0.1, "the plain formula would be fooled"
    assert -1e-6 < term.norms(2.0)[0] / exact - 1 < 1e-2


@pytest.mark.parametrize("added", [1, 40, 10**6])
def test_a_table_adds_every_record_however_many_at_once(
    added: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_ROW_CHUNK, "cpu", added)
    torch.manual_seed(0)
    term, weights = table(7, 4, 3, 5), torch.rand(7)
    exact = torch.tensordot(weights.double(), materialised(term), dims=1)
    torch.testing.assert_close(term.weighted_sum(weights), exact)
    assert term.take(slice(0, 0)).weighted_sum(weights[:0]).eq(0).all()


@pytest.mark.parametrize("positions", [700, 20_000])
def test_a_record_whose_positions_cancel_counts_by_the_norm_of_what_it_adds(positions: int) -> None:
    """Half an ulp is lost at every position of a sum in single precision, and is in the sum itself."""
    right = torch.full((1, positions, 1), 2.0**-16 * 0.999)
    right[0, 0, 0], right[0, -2, 0], right[0, -1, 0] = 400.0, -400.0, 1.0
    term = RowFactors(torch.zeros(1, positions, dtype=torch.long), right, torch.Size((2, 1)))
    weights = 1 / term.norms(2.0)
    for added in (term.weighted_sum(weights), term.dense()[0].double() * weights):
        assert float(added.norm()) <= 1 + 2**-14
    place = torch.zeros(positions, dtype=torch.long)
    in_single_precision = torch.zeros(1).index_add_(0, place, right[0, :, 0])
    assert float(right.double().sum() / in_single_precision) > 1.0024, "more than is paid for"
