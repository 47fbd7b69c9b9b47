import pytest
import torch
from torch import Tensor, nn

from hush.core.errors import Unsupported
from hush.models import build, networks

SHAPES = {
    "digits": ((1, 8, 8), 10),
    "mnist": ((1, 28, 28), 10),
    "cifar10": ((3, 32, 32), 10),
    "adult": ((104,), 2),
    "imdb": ((20,), 2),
    "digits/scattering": ((81, 2, 2), 10),
    "mnist/scattering": ((81, 7, 7), 10),
    "cifar10/scattering": ((243, 8, 8), 10),
    "cifar10/efficientnet-lite0": ((1280,), 10),
}
PAIRS = [
    (model, data)
    for model, network in networks().items()
    for data, (shape, _) in SHAPES.items()
    if network.takes(shape, data == "imdb") and (network.features or "") == data.partition("/")[2]
]

# Counted by hand from the papers' tables: weights and biases, layer by layer.
COUNTS = {
    ("logistic", "digits"): 650,
    ("logistic", "mnist"): 7_850,
    ("mlp", "digits"): 64 * 32 + 32 + 330,
    ("mlp", "adult"): 104 * 32 + 32 + 66,
    ("mnist-cnn", "mnist"): 26_010,
    ("cifar-cnn", "cifar10"): 896 + 9_248 + 18_496 + 36_928 + 73_856 + 147_584 + 262_272 + 1_290,
    # three by three convolutions, shortcuts of one by one, a scale and a shift for each channel before
    ("wrn-10-2", "cifar10"): (
        9 * (3 * 16 + 16 * 32 + 32 * 32 + 32 * 64 + 64 * 64 + 64 * 128 + 128 * 128)
        + (16 * 32 + 32 * 64 + 64 * 128)
        + 2 * (16 + 32 + 32 + 64 + 64 + 128 + 128)
        + 1_290
    ),
    ("efficientnet-linear", "cifar10/efficientnet-lite0"): 12_810,
    ("imdb-plain-lstm", "imdb"): 1_081_002,
    ("scattering-mnist", "mnist/scattering"): 33_066,
    ("scattering-cifar", "cifar10/scattering"): 187_210,
    ("scattering-linear", "mnist/scattering"): 39_700,
    ("imdb-lstm", "imdb"): 1_000_000 + 3_232 + 2 * (2 * 4 * 32 * 32 + 2 * 4 * 32) + 1_040 + 34,
}


def network_and_inputs(model: str, data: str, records: int) -> tuple[nn.Module, Tensor, int]:
    torch.manual_seed(0)
    shape, classes = SHAPES[data]
    network = build(model, classes=classes, shape=shape)
    if data == "imdb":
        inputs = torch.randint(0, 10_000, (records, *shape))
        inputs[1:, 12:] = 0
    else:
        inputs = torch.rand(records, *shape)
    return network, inputs, classes


@pytest.mark.parametrize(("model", "data"), list(COUNTS))
def test_parameter_counts(model: str, data: str) -> None:
    network, _, _ = network_and_inputs(model, data, records=1)
    assert sum(map(Tensor.numel, network.parameters())) == COUNTS[model, data]


@pytest.mark.parametrize(("model", "data"), PAIRS)
def test_scores_of_each_record_alone_and_gradients_of_every_parameter(model: str, data: str) -> None:
    network, inputs, classes = network_and_inputs(model, data, records=5)
    assert not list(network.buffers())
    assert all(parameter.requires_grad for parameter in network.parameters())
    assert network(inputs[:0]).shape == (0, classes)
    # As many records of each class would leave a zero bias where it is.
    loss = nn.functional.cross_entropy(network(inputs[:3]), torch.arange(3) % classes)
    names, parameters = zip(*network.named_parameters(), strict=True)
    for name, gradient in zip(names, torch.autograd.grad(loss, parameters), strict=True):
        assert torch.isfinite(gradient).all(), name
        assert gradient.abs().max() > 0, name
    network = network.double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    together = network(inputs)
    assert together.shape == (5, classes)
    alone = torch.cat([network(record.unsqueeze(0)) for record in inputs])
    torch.testing.assert_close(together, alone, atol=1e-12, rtol=0)
    others = network(torch.cat([inputs[:1], inputs[1:].flip(0)]))
    torch.testing.assert_close(together[0], others[0], atol=1e-12, rtol=0)


def test_features_are_normalised_record_by_record() -> None:
    network, inputs, _ = network_and_inputs("scattering-mnist", "mnist/scattering", records=4)
    scale = torch.tensor([1.0, 3.0, 10.0, 0.5]).view(4, 1, 1, 1)
    torch.testing.assert_close(network(inputs * scale + scale), network(inputs), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("model", "shape", "dtype", "requirement"),
    [
        ("imdb-lstm", (105,), torch.float32, "of token ids, .*not 105 numbers.*: logistic, mlp"),
        ("logistic", (80,), torch.int64, "of numbers, of any shape, not 80 token ids.*: imdb-lstm"),
    ],
)
def test_a_network_takes_token_ids_or_numbers(
    model: str, shape: tuple[int, ...], dtype: torch.dtype, requirement: str
) -> None:
    with pytest.raises(Unsupported, match=f"{model} needs inputs {requirement}"):
        build(model, classes=2, shape=shape, dtype=dtype)
    supported_dtype = {torch.int64: torch.float32, torch.float32: torch.int64}[dtype]
    build(model, classes=2, shape=shape, dtype=supported_dtype)
