import pytest
import torch
from torch import Tensor

from hush.gradients.rules import convolution
from hush.gradients.rules.convolution import ConvolutionFactors, ConvolutionShape
from tests.gradients.oracle import ORDERS

SHAPES = [
    (ConvolutionShape(torch.Size((3, 2, 3)), (1,), (1,), (1,), 1), (9,)),
    (ConvolutionShape(torch.Size((3, 2, 3, 2)), (2, 1), (1, 2), (1, 2), 1), (7, 6)),
    (ConvolutionShape(torch.Size((4, 2, 1, 1)), (2, 2), (0, 0), (1, 1), 1), (5, 5)),
    (ConvolutionShape(torch.Size((3, 2, 2, 2, 3)), (1, 2, 1), (1, 0, 1), (2, 1, 1), 1), (3, 4, 5)),
]


def example(geometry: ConvolutionShape, x: Tensor) -> tuple[ConvolutionFactors, Tensor]:
    """A convolution's factors, and its weight gradients by autograd, image by image."""
    weight = torch.randn(geometry.shape, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(geometry.forward(x, weight, None))
    gradients = [
        torch.autograd.grad(geometry.forward(x[i : i + 1], weight, None), weight, grad[i : i + 1])[0]
        for i in range(5)
    ]
    return ConvolutionFactors(grad, x, geometry), torch.stack(gradients)


@pytest.mark.parametrize(("geometry", "sizes"), SHAPES)
def test_factors_answer_as_if_materialised(geometry: ConvolutionShape, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    term, gradients = example(geometry, torch.randn(5, 2, *sizes, dtype=torch.float64))
    weights = torch.rand(5, dtype=torch.float64)
    torch.testing.assert_close(term.weighted_sum(weights), torch.tensordot(weights, gradients, dims=1))
    for order in ORDERS:
        expected = torch.linalg.vector_norm(gradients.flatten(1), ord=order, dim=1)
        # never understated
        assert (term.norms(order) >= (1 - 1e-14) * expected).all()
        torch.testing.assert_close(term.norms(order), expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("large", [0, 2**30])
@pytest.mark.parametrize(("geometry", "sizes"), SHAPES)
def test_both_ways_to_materialise_agree(
    geometry: ConvolutionShape, sizes: tuple[int, ...], large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolution, "_LARGE", large)
    monkeypatch.setattr(convolution, "_FEW_CHANNELS", 0)
    torch.manual_seed(0)
    term, gradients = example(geometry, torch.randn(5, 2, *sizes, dtype=torch.float64))
    torch.testing.assert_close(term.dense(), gradients)
    assert term.take(slice(0, 0)).weighted_sum(torch.ones(0)).shape == geometry.shape


@pytest.mark.parametrize(
    "images", [torch.randn(5, 1, 6).mT, torch.randn(5, 1, 1, 6).permute(0, 3, 1, 2)]
)
def test_one_position_with_its_channels_last_is_written_out(images: Tensor) -> None:
    """torch's own kernel for double precision takes such strides for another layout of the weight."""
    sizes = images.dim() - 2
    geometry = ConvolutionShape(
        torch.Size((6, 6, *[3] * sizes)), (1,) * sizes, (1,) * sizes, (1,) * sizes, 1
    )
    term, gradients = example(geometry, images.double())
    torch.testing.assert_close(term.dense(), gradients)
