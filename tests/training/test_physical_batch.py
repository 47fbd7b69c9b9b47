import pytest
import torch
from torch import nn

import hush
from hush.gradients.recording import record
from hush.training import physical_batch as sizing
from hush.training.physical_batch import activations, records_that_fit

LOSS = nn.CrossEntropyLoss(reduction="none")


def test_what_a_forward_pass_keeps_is_counted_once_and_without_the_weights() -> None:
    model = nn.Sequential(nn.Linear(100, 50), nn.Tanh(), nn.Linear(50, 10))
    inputs, targets = torch.randn(2, 100), torch.zeros(2, dtype=torch.long)
    kept = activations(model, LOSS, inputs, targets)
    # the input, the output of tanh, the log of the softmax and what the loss itself keeps
    assert 4 * 2 * (100 + 50 + 10) <= kept <= 4 * 2 * (100 + 50 + 10) + 64


def test_more_memory_for_each_record_means_fewer_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "_HOST_MEMORY", 10**6)
    sizes = []
    for width in (10, 1000, 10**6):
        model = nn.Sequential(nn.Linear(width, 2), nn.Tanh(), nn.Linear(2, 3))
        inputs, targets = torch.randn(2, width), torch.zeros(2, dtype=torch.long)
        sizes.append(
            records_that_fit(model, LOSS, inputs, targets, record(model, LOSS, inputs, targets))
        )
    assert sizes[0] > 10 * sizes[1] > 10 * sizes[2]
    assert sizes[2] == 1


def test_the_size_is_found_once_the_data_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "_HOST_MEMORY", 1)
    plan = hush.Plan(
        sampling=hush.FullBatch(), clipping=hush.L2(norm=1.0), noise=hush.Gaussian(multiplier=1.0)
    )
    for given, expected in ((None, 1), (3, 3)):
        model = nn.Linear(4, 3)
        step = hush.PrivateStep(
            model, LOSS, torch.optim.SGD(model.parameters()), plan, records=5, physical_batch=given
        )
        batch = next(step.batches((torch.randn(5, 4), torch.zeros(5, dtype=torch.long))))
        assert batch.physical == expected


def test_a_process_that_shares_a_gpu_keeps_to_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    share = 1.0
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (800, 1000))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: share)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 40)
    assert sizing.memory_limit(device) == 200
    share = 0.1
    assert sizing.memory_limit(device) == 15
    assert sizing.memory_limit(torch.device("cpu")) == 2**27
