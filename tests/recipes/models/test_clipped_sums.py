"""For every bundled model: the clipped sum against gradients computed one record at a time."""

import pytest
import torch
from torch import nn

import hush
from hush.gradients.recording import record
from hush.models import build, networks
from hush_recipes.data.imdb import VOCABULARY
from tests.gradients.oracle import flat, one_at_a_time

SHAPES = {
    "logistic": (1, 8, 8),
    "linear": (20,),
    "mlp": (104,),
    "cnn": (3, 16, 16),
    "mnist-cnn": (1, 28, 28),
    "cifar-cnn": (3, 32, 32),
    "resnet22": (3, 32, 32),
    "wrn-10-2": (3, 32, 32),
    "imdb-plain-lstm": (20,),
    "imdb-lstm": (20,),
    "scattering-linear": (81, 2, 2),
    "scattering-mnist": (81, 7, 7),
    "scattering-cifar": (243, 8, 8),
    "efficientnet-linear": (1280,),
}


def test_every_model_is_covered() -> None:
    assert set(SHAPES) == set(networks())


@pytest.mark.parametrize("name", SHAPES)
def test_clipped_sums_equal_one_record_at_a_time(name: str) -> None:
    torch.manual_seed(0)
    shape, records = SHAPES[name], 6
    is_text = name.startswith("imdb")
    classes = 2 if is_text else 10
    # in double precision: in single, norms are raised by what rounding may add
    model = build(name, classes=classes, shape=shape).double()
    words, numbers = torch.randint(0, VOCABULARY, (records, *shape)), torch.randn(records, *shape)
    inputs = words if is_text else numbers.double()
    targets = torch.randint(0, classes, (records,))

    rows = one_at_a_time(model, nn.CrossEntropyLoss(), inputs, targets, records).double()
    norms = rows.norm(dim=1)
    clip = float(norms.median())  # some are clipped and some are not
    expected = (clip / norms).clamp(max=1) @ rows

    tape = record(model, nn.CrossEntropyLoss(reduction="none"), inputs, targets)
    clipped = hush.L2(clip).clip(tape).total
    assert list(clipped) == [key for key, _ in model.named_parameters()]
    assert all(total.abs().sum() > 0 for total in clipped.values())
    torch.testing.assert_close(flat(clipped, 0), expected, rtol=1e-7, atol=1e-9)
