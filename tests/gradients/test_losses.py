"""Losses of one value a record."""

from typing import Any

import pytest
import torch
from torch import nn

from hush.core.errors import DataError
from hush.gradients.losses import per_sample_loss


@pytest.mark.parametrize("kind", [nn.MSELoss, nn.BCEWithLogitsLoss, nn.L1Loss])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_outputs_and_targets_that_would_broadcast_over_records_are_refused(
    kind: Any, reduction: str
) -> None:
    with pytest.raises(DataError, match=r"\(4, 1\) and targets of shape \(4,\).*unsqueeze\(1\)"):
        per_sample_loss(kind(reduction=reduction))(torch.zeros(4, 1), torch.zeros(4))


@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_labels_are_one_class_for_each_vector_of_scores(kind: Any) -> None:
    loss, wide = per_sample_loss(kind()), torch.zeros(4, 3, 5)
    with pytest.raises(DataError, match=r"scores of shape \(3,\) and labels of shape \(1,\).*squeeze"):
        loss(torch.zeros(4, 3), torch.zeros(4, 1, dtype=torch.int64))
    with pytest.raises(DataError, match=r"labels of shape \(5,\)\. Pass targets of that shape"):
        loss(wide, torch.zeros(4, dtype=torch.int64))
    assert loss(wide, torch.zeros(4, 5, dtype=torch.int64)).shape == (4,)


def test_a_loss_that_says_how_it_reduces_is_taken_apart() -> None:
    outputs, targets = torch.randn(5, 3), torch.randint(0, 3, (5,))
    expected = nn.functional.cross_entropy(outputs, targets, reduction="none")
    for reduction in ("none", "mean", "sum"):
        loss = nn.CrossEntropyLoss(reduction=reduction)
        torch.testing.assert_close(per_sample_loss(loss)(outputs, targets), expected)
        assert loss.reduction == reduction, "the caller's loss stays as it was"
    wide = torch.randn(5, 3)
    torch.testing.assert_close(
        per_sample_loss(nn.MSELoss())(outputs, wide), (outputs - wide).square().mean(1)
    )
    torch.testing.assert_close(
        per_sample_loss(nn.MSELoss(reduction="sum"))(outputs, wide), (outputs - wide).square().sum(1)
    )
