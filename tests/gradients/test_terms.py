"""Records of which large positions cancel, or overflow: what one of them does to the others' sum."""

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.parts import Clipping
from hush.gradients.recording import record
from hush.gradients.rules.convolution import ConvolutionFactors, ConvolutionShape
from hush.gradients.rules.embedding import RowFactors, TiedFactors
from hush.gradients.rules.linear import OuterFactors
from hush.gradients.tape import GradientTape
from hush.gradients.terms import Term

OTHERS = 50
CLIPPINGS: list[Clipping] = [hush.L2(1.0), hush.L2Linf(l2=1.0, linf=1.0), hush.Lp(p=1.5, norm=1.0)]


def pixels(grad: Tensor, x: Tensor) -> ConvolutionFactors:
    """A convolution that looks at one pixel at a time."""
    grad, x = (part.transpose(1, 2).unsqueeze(-1) for part in (grad, x))
    shape = torch.Size((grad.shape[1], x.shape[1], 1, 1))
    return ConvolutionFactors(grad, x, ConvolutionShape(shape, (1, 1), (0, 0), (1, 1), 1))


def terms(size: float) -> dict[str, Term]:
    """Ordinary records, and one at the place 20 whose two positions are large and cancel."""
    torch.manual_seed(0)
    left, right = torch.randn(OTHERS + 1, 2, 16) + 1, torch.randn(OTHERS + 1, 2, 12) + 1
    left[20, 1], right[20, 1] = -left[20, 0], right[20, 0]
    left[20] *= size
    index = torch.zeros(OTHERS + 1, 2, dtype=torch.long)
    cancelling = right.clone()
    cancelling[20] = size * torch.stack([right[20, 0], -right[20, 0]])
    shape = torch.Size((16, 12))
    # what is looked up against what is multiplied with, in the first row
    only = torch.zeros(OTHERS + 1, 1, 16)
    only[:, 0, 0] = 1.0
    only[20] *= -size
    looked = right[:, :1].clone()
    looked[20] *= size
    return {
        "outer": OuterFactors(left, right, shape),
        "rows": RowFactors(index, cancelling, shape),
        "tied": TiedFactors(
            RowFactors(index[:, :1], looked, shape), OuterFactors(only, right[:, :1], shape)
        ),
        "patches": pixels(left, right),
    }


@pytest.mark.parametrize("name", ["outer", "rows", "tied", "patches"])
@pytest.mark.parametrize("clipping", CLIPPINGS, ids=str)
@pytest.mark.parametrize("size", [2.0**24, 2.0**26, 2.0**40])
def test_a_record_that_cancels_leaves_the_others_as_they_are(
    name: str, clipping: Clipping, size: float
) -> None:
    tape = GradientTape({"w": terms(size)[name]}, torch.device("cpu"))
    others = torch.arange(OTHERS + 1) != 20
    with_it, without = (clipping.clip(t).total["w"].double() for t in (tape, tape.take(others)))
    assert float((with_it - without).norm()) <= 1.01
    # at the weight of its true norm, added up position by position, it takes the others with it
    if size == 2.0**40 and name == "outer":
        term = tape.terms["w"]
        assert isinstance(term, OuterFactors)
        left, right = term.left, term.right
        norms = (left.double().mT @ right.double()).flatten(1).norm(dim=1)
        weights = (1 / norms).clamp(max=1.0).float()[:, None, None]
        bare = (left * weights).flatten(0, 1).mT @ right.flatten(0, 1)
        assert float((bare.double() - without).norm()) > 3


@pytest.mark.parametrize(
    "clipping",
    [
        hush.L2(10.0),
        hush.L2Linf(l2=10.0, linf=10.0),
        hush.Linf(10.0),
        hush.Subspaces(ranks=(2048, 2048), l2=(10.0, 10.0)),
    ],
    ids=str,
)
def test_what_may_overflow_on_the_way_is_left_out(clipping: Clipping) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    model.weight.data.zero_()
    z = torch.randn(1, 2, 64)
    inputs, targets = torch.cat([z, -0.99 * z], 1) * 1e19, torch.full((1, 4, 64), 2e19)
    tape = record(model, lambda out, to: (out * to).flatten(1).sum(1), inputs, targets)
    for mask in (None, lambda values: values):
        clipped = clipping.clip(tape, mask)
        assert int(clipped.skipped) == 1
        assert float(clipped.total["weight"].norm()) == 0


@pytest.mark.parametrize("norm", [1e-3, 1e-6])
def test_a_factor_too_small_to_be_squared_is_measured(norm: float) -> None:
    left, right = torch.full((1, 1, 50), 1.2e-23), torch.full((1, 1, 1000), 5e17)
    tape = GradientTape({"w": OuterFactors(left, right, torch.Size((50, 1000)))}, torch.device("cpu"))
    for order in (1.0, 1.5, 2.0):
        exact = float(torch.linalg.vector_norm((left.double().mT @ right.double()).flatten(), ord=order))
        assert float(tape.norms(order)) == pytest.approx(exact, rel=1e-5)
    assert float(hush.L2(norm).clip(tape).total["w"].double().norm()) <= norm * (1 + 1e-5)


@pytest.mark.parametrize("positions", [1, 2])
def test_a_factor_too_small_to_be_squared_in_double_precision_is_measured(positions: int) -> None:
    left = torch.full((1, positions, 256), 2.0**-538, dtype=torch.float64)
    right = torch.full((1, positions, 256), 2.0**500, dtype=torch.float64)
    exact = positions * 256 * 2.0**-38
    term = OuterFactors(left, right, torch.Size((256, 256)))
    landed = float(hush.L2(1e-11).clip(GradientTape({"w": term}, left.device)).total["w"].norm())
    assert exact > 90e-11  # what it adds unless it is measured
    assert landed <= 1e-11 * (1 + 1e-5)
