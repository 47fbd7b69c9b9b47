import math

import pytest
import torch
from torch import Tensor

from hush.gradients.precision import full_precision
from hush.gradients.products import gram
from hush.gradients.rules.convolution import ConvolutionFactors, ConvolutionShape, convolution_term
from hush.gradients.rules.linear import OuterFactors
from tests.gradients.oracle import ORDERS

SHAPES = [
    (ConvolutionShape(torch.Size((3, 2, 3)), (1,), (1,), (1,), 1), (9,)),
    (ConvolutionShape(torch.Size((3, 2, 3, 2)), (2, 1), (1, 2), (1, 2), 1), (7, 6)),
    (ConvolutionShape(torch.Size((4, 2, 1, 1)), (2, 2), (0, 0), (1, 1), 1), (5, 5)),
    (ConvolutionShape(torch.Size((4, 2, 1, 1)), (1, 1), (0, 0), (1, 1), 1), (5, 3)),
    (ConvolutionShape(torch.Size((9, 2, 3, 2)), (3, 2), (0, 0), (1, 1), 1), (11, 6)),
    (ConvolutionShape(torch.Size((3, 2, 5, 5)), (4, 4), (2, 2), (1, 1), 1), (13, 13)),
    (ConvolutionShape(torch.Size((3, 2, 2, 2, 3)), (1, 2, 1), (1, 0, 1), (2, 1, 1), 1), (3, 4, 5)),
]

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels are compiled for a GPU")
ON_A_GPU = [
    *(case for case in SHAPES if len(case[1]) < 3),
    (ConvolutionShape(torch.Size((130, 2, 3, 3)), (1, 1), (1, 1), (1, 1), 1), (14, 14)),
    (ConvolutionShape(torch.Size((5, 2, 9)), (2,), (4,), (3,), 1), (5001,)),
    (ConvolutionShape(torch.Size((65, 2, 7, 7)), (2, 2), (3, 3), (1, 1), 1), (30, 31)),
]
PRECISIONS = {
    (torch.float32, True): 2.0**-9,
    (torch.float32, False): 2.0**-17,
    (torch.bfloat16, True): 2.0**-17,
    (torch.float16, True): 2.0**-17,
}
"""How far a gradient may be off, as a share of its length, by dtype and whether TensorFloat-32 is on."""


def example(geometry: ConvolutionShape, x: Tensor) -> tuple[ConvolutionFactors, Tensor]:
    """A convolution's factors, and its weight gradients by autograd, image by image."""
    weight = torch.randn(geometry.shape, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(geometry.forward(x, weight, None))
    gradients = [
        torch.autograd.grad(geometry.forward(x[i : i + 1], weight, None), weight, grad[i : i + 1])[0]
        for i in range(len(x))
    ]
    return ConvolutionFactors(grad, x, geometry), torch.stack(gradients)


DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize(("geometry", "sizes"), SHAPES)
def test_a_record_of_several_images_has_the_sum_of_their_gradients(
    geometry: ConvolutionShape, sizes: tuple[int, ...], where: str
) -> None:
    torch.manual_seed(0)
    images, by_image = example(geometry, torch.randn(6, 2, *sizes, dtype=torch.float64))
    gradients = by_image.unflatten(0, (2, 3)).sum(1).float()
    grad, x = images.grad.float().to(where), images.x.float().to(where)
    with full_precision(grad.device):
        term = convolution_term(grad, x, geometry, records=2)
        assert term.records == 2
        torch.testing.assert_close(term.dense().cpu(), gradients, rtol=1e-4, atol=1e-4)
        lengths = gradients.flatten(1).norm(dim=1)
        torch.testing.assert_close(term.norms(2.0).cpu(), lengths, rtol=1e-4, atol=0)
        only = torch.tensor([0.0, 1.0], device=where)
        torch.testing.assert_close(
            term.weighted_sum(only).float().cpu(), gradients[1], rtol=1e-4, atol=1e-4
        )


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


def test_patches_that_do_not_overlap_are_a_linear_layer() -> None:
    apart = ConvolutionShape(torch.Size((40, 3, 8, 8)), (8, 8), (0, 0), (1, 1), 1)
    x, grad = torch.randn(2, 3, 16, 16), torch.randn(2, 40, 2, 2)
    term = convolution_term(grad, x, apart, 2)
    assert isinstance(term, OuterFactors)
    assert term.right.numel() == x.numel()
    overlapping = ConvolutionShape(torch.Size((40, 3, 8, 8)), (8, 8), (4, 4), (1, 1), 1)
    other = convolution_term(torch.randn(2, 40, 3, 3), x, overlapping, 2)
    assert not isinstance(other, OuterFactors)


@pytest.mark.parametrize(("geometry", "sizes"), SHAPES)
def test_gram_matrices_of_pixels_and_of_patches_agree(
    geometry: ConvolutionShape, sizes: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 2, *sizes, dtype=torch.float64)
    outputs = geometry.forward(x, torch.zeros(geometry.shape, dtype=torch.float64), None).shape[2:]
    torch.testing.assert_close(geometry.patch_gram(x, outputs), gram(geometry.patches(x, outputs)))


def gpu_example(
    geometry: ConvolutionShape, sizes: tuple[int, ...], dtype: torch.dtype, tf32: bool
) -> tuple[ConvolutionFactors, Tensor]:
    """A term of the kernels, and its gradients in double precision."""
    torch.manual_seed(0)
    x = torch.randn(5, 2, *sizes).to("cuda", dtype)
    grad = torch.randn_like(geometry.forward(x, torch.zeros(geometry.shape).to(x), None))
    term = ConvolutionFactors(grad, x, geometry, tf32)
    assert geometry.has_kernel(x)
    pairs = zip(grad.double().split(1), x.double().split(1), strict=True)
    like = torch.zeros(geometry.shape).to(x.double())
    gradients = [geometry.backward(*pair, like, geometry.groups, (False, True))[1] for pair in pairs]
    return term, torch.stack(gradients)


@GPU
@pytest.mark.parametrize(("geometry", "sizes"), ON_A_GPU)
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_kernels_add_what_they_measure(
    geometry: ConvolutionShape, sizes: tuple[int, ...], precision: tuple[torch.dtype, bool]
) -> None:
    term, gradients = gpu_example(geometry, sizes, *precision)
    left = term.grad.double().flatten(2).norm(dim=1)
    right = geometry.patches(term.x.double(), term.grad.shape[2:]).norm(dim=2)
    off = (term.dense() - gradients).flatten(1).norm(dim=1)
    assert (off <= PRECISIONS[precision] * (left * right).sum(1)).all()
    for order in ORDERS:
        expected = torch.linalg.vector_norm(term.dense().double().flatten(1), ord=order, dim=1)
        torch.testing.assert_close(term.norms(order).double(), expected, rtol=2**-17, atol=0)
    for record in range(5):
        alone = (torch.arange(5, device="cuda") == record).float()
        assert torch.equal(term.weighted_sum(alone).float(), term.dense()[record])
    weights = torch.rand(5, device="cuda")
    expected = torch.tensordot(weights.double(), term.dense().double(), dims=1)
    torch.testing.assert_close(
        term.weighted_sum(weights), expected, rtol=0, atol=1e-6 * float(left.sum())
    )


@GPU
@pytest.mark.parametrize(("geometry", "sizes"), ON_A_GPU)
def test_a_record_that_is_not_finite_stays_by_itself(
    geometry: ConvolutionShape, sizes: tuple[int, ...]
) -> None:
    """Not in the sum at weight 0, and not in the gradients of those beside it."""
    term, _ = gpu_example(geometry, sizes, torch.float32, True)
    weights = torch.rand(5, device="cuda")
    weights[2] = 0
    before, dense, norms = term.weighted_sum(weights), term.dense(), term.norms(2.0)
    term.x[2], term.grad[2] = torch.inf, torch.nan
    others = torch.arange(5, device="cuda") != 2
    assert torch.equal(term.weighted_sum(weights), before)
    assert torch.equal(term.dense()[others], dense[others])
    assert torch.equal(term.norms(2.0)[others], norms[others])
    assert not bool(term.norms(2.0)[2].isfinite())


@GPU
def test_norms_of_gradients_whose_squares_overflow() -> None:
    term, _ = gpu_example(*ON_A_GPU[-1], torch.float32, True)
    large = ConvolutionFactors(term.grad * 2.0**90, term.x, term.geometry, True)
    torch.testing.assert_close(large.norms(2.0), term.norms(2.0) * 2.0**90)
    assert bool(large.norms(2.0).isfinite().all())
    assert math.isinf(float((large.norms(2.0) ** 2).sum()))
