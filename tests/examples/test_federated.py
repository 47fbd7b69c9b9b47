"""Federated averaging: influence of one client, draws and charges."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hush
from examples.federated import PrivateServer, local_update
from hush.core.errors import DataError
from tests.training.helpers import plan_of, randomness

CLIENTS, SIZE, NORM = 20, 6, 0.5
EXACT = plan_of(hush.FullBatch(), hush.L2(NORM), 1e-6)
SAMPLED = plan_of(hush.Poisson(0.5), hush.L2(NORM), 1e-6)


def server(plan: hush.Plan = EXACT, rounds: int = 3, first: float = 0.0) -> PrivateServer:
    return PrivateServer(torch.full((SIZE,), first), CLIENTS, plan, rounds, randomness=randomness())


def updates(scale: float = 1.0) -> dict[int, Tensor]:
    torch.manual_seed(0)
    return dict(enumerate(scale * torch.randn(CLIENTS, SIZE)))


def clipped(update: Tensor) -> Tensor:
    return update * min(1.0, NORM / float(update.norm()))


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_a_round_adds_the_mean_of_clipped_updates(scale: float) -> None:
    received = updates(scale)
    found = server(first=2.0).aggregate(received)
    mean = sum(map(clipped, received.values()), torch.zeros(SIZE)) / CLIENTS
    torch.testing.assert_close(found, 2.0 + mean, rtol=0, atol=1e-5)


def test_one_client_moves_the_weights_by_its_share_of_the_norm_and_an_average_by_more() -> None:
    received = updates() | {3: torch.full((SIZE,), 1e4)}
    whole, without = server(), server()
    missing = {client: update for client, update in received.items() if client != 3}
    change = whole.aggregate(received) - without.aggregate(missing)
    assert NORM / CLIENTS / 2 < float(change.norm()) <= NORM / CLIENTS * (1 + 1e-3)
    averages = [torch.stack(list(each.values())).mean(0) for each in (received, missing)]
    assert float((averages[0] - averages[1]).norm()) > 100 * NORM / CLIENTS


def test_clients_are_drawn_independently_and_others_are_refused() -> None:
    sampled, sizes = server(SAMPLED, rounds=60), []
    for _ in range(60):
        drawn = sampled.draw()
        assert sampled.draw() == drawn  # the same round until it is aggregated
        before = sampled.weights
        strangers = set(range(CLIENTS)) - set(drawn)
        if strangers:
            with pytest.raises(DataError, match="1 of the clients were not drawn for this round"):
                sampled.aggregate({min(strangers): torch.ones(SIZE)})
        assert torch.equal(sampled.weights, before)
        after = sampled.aggregate({client: torch.ones(SIZE) for client in drawn})
        # the divisor is the expected number of clients, not the drawn one
        step = len(drawn) * clipped(torch.ones(SIZE)) / (CLIENTS / 2)
        torch.testing.assert_close(after - before, step, rtol=0, atol=1e-5)
        sizes.append(len(drawn))
    assert abs(sum(sizes) - 600) < 5 * (60 * CLIENTS / 4) ** 0.5
    with pytest.raises(StopIteration):
        sampled.draw()


def test_every_round_is_charged_and_the_guarantee_is_for_a_client() -> None:
    plan = plan_of(hush.Poisson(0.1), hush.L2(NORM), 2.0)
    private = server(plan, rounds=8)
    for _ in range(8):  # some rounds without clients
        private.draw()
        private.aggregate({})
    spent = private.spent(1e-3)
    assert spent.epsilon == hush.epsilon(plan, 8, 1e-3).epsilon
    assert "zero-out one user" in str(spent)
    assert float(private.weights.norm()) > 0


def test_a_client_that_sends_no_number_adds_nothing() -> None:
    received = updates()
    broken = received | {2: torch.full((SIZE,), torch.nan)}
    missing = {client: update for client, update in received.items() if client != 2}
    assert torch.equal(server().aggregate(broken), server().aggregate(missing))


def test_a_local_update_is_that_of_ordinary_training() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    first = torch.cat([value.detach().flatten() for value in model.parameters()])
    moved = local_update(model, first, (x, y), steps=1, lr=0.1)
    model.weight.data, model.bias.data = first[:12].view(3, 4), first[12:]
    loss: Tensor = nn.functional.cross_entropy(model(x), y)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    gradient = torch.cat([part.flatten() for part in gradients])
    torch.testing.assert_close(moved, -0.1 * gradient)


@pytest.mark.slow
def test_the_command_prints_accuracy_and_guarantee() -> None:
    command = [sys.executable, "-m", "examples.federated"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert float(first.split()[1]) > 0.8
    assert second.startswith("epsilon <= 2.99")
