"""Terms taken together, as on a GPU, against one parameter at a time."""

import torch
from torch import nn

from hush.gradients.recording import record
from hush.gradients.tape import GradientTape, joint_norms, joint_sums

LOSS = nn.CrossEntropyLoss(reduction="none")


def recorded(dtype: torch.dtype) -> GradientTape:
    """Factored and materialised gradients, small ones and one that is not."""
    torch.manual_seed(0)
    layers = nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 200), nn.Flatten(), nn.Linear(1000, 30)
    model = nn.Sequential(nn.Embedding(9, 40), *layers).to(dtype)
    tape = record(model, LOSS, torch.randint(0, 9, (7, 5)), torch.randint(0, 30, (7,)))
    assert isinstance(tape, GradientTape)
    return tape


def test_norms_of_all_terms_are_those_of_each() -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        tape = recorded(dtype)
        joint = joint_norms(list(tape.terms.values()))
        torch.testing.assert_close(joint, tape.norms(2.0), rtol=tolerance, atol=0)
        fewer = joint_norms(list(tape.terms.values())[1:])
        assert (fewer < joint).all(), "a term that is left out is noticed"


def test_sums_of_small_terms_are_those_of_each() -> None:
    tape, weights = recorded(torch.float64), torch.rand(7, dtype=torch.float64)
    weights[2] = 0
    expected = tape.weighted_sum(weights)
    sums = joint_sums(tape.terms, weights != 0, weights)
    assert set(sums) >= {name for name in tape.terms if name.endswith("bias")}
    for name, total in sums.items():
        torch.testing.assert_close(total, expected[name], rtol=1e-12, atol=1e-14)
