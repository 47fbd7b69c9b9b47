"""`python -m examples.federated`: federated averaging with noise at the server, on simulated clients.

`PrivateServer` is the server's part. One record is the update of one client, so the guarantee protects
all data of a client.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import Dataset

import hush
from hush.core.errors import DataError
from hush.data import load, tensors

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
AVERAGING: MakeOptimizer = partial(torch.optim.SGD, lr=1.0)
"""Server optimizer of federated averaging: the mean update is added to the weights."""


class _Weights(nn.Module):
    """Global weights. The gradient of a client's loss is minus its update."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.weights = nn.Parameter(weights.detach().clone())

    def forward(self, update: Tensor) -> Tensor:
        return -(update @ self.weights)


class _Updates(Dataset[tuple[Tensor, Tensor]]):
    """Updates of one round by client; zero for a client that did not answer."""

    def __init__(self, clients: int, size: int) -> None:
        self.clients, self.nothing = clients, torch.zeros(size)
        self.received: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, client: int) -> tuple[Tensor, Tensor]:
        return self.received.get(client, self.nothing), torch.zeros(())


class PrivateServer:
    """Server of federated averaging with private rounds.

    **Guarantee.** `spent(delta)` covers the weights of all rounds, for all data of one client
    (zero-out: the number of clients is public). The server is trusted, the drawn clients are not
    published, and an update is a function of the released weights and its client's data.

    Args:
        weights: Initial global weights, flat; public.
        clients: Public number of clients.
        plan: Sampling of clients, clipping of updates, noise and release.
        rounds: Number of rounds.
        optimizer: Server optimizer from its parameters.
        options: Options of `hush.PrivateStep`, such as `ledger=`.
    """

    def __init__(
        self,
        weights: Tensor,
        clients: int,
        plan: hush.Plan,
        rounds: int,
        *,
        optimizer: MakeOptimizer = AVERAGING,
        **options: Any,
    ) -> None:
        self._model = _Weights(weights)
        self._updates = _Updates(clients, weights.numel())
        self._step = hush.PrivateStep(
            self._model,
            lambda losses, _: losses,
            optimizer(list(self._model.parameters())),
            plan,
            units=hush.Units(owners=range(clients), per_unit=1),
            **options,
        )
        self._batches: Iterator[Any] = self._step.batches(self._updates, steps=rounds)
        self._batch: Any = None

    @property
    def weights(self) -> Tensor:
        """Global weights, which may be published."""
        return self._model.weights.detach().clone()

    def draw(self) -> list[int]:
        """Numbers of the clients of the next round (secret): possibly none.

        Each client takes part independently.
        """
        if self._batch is None:
            self._batch = next(self._batches)
        clients: list[int] = self._batch.indices.tolist()
        return clients

    def aggregate(self, updates: Mapping[int, Tensor]) -> Tensor:
        """Charge the round, and apply the noisy mean of the clipped updates.

        A drawn client without an update adds zero. The divisor is the expected number of clients. A
        round without clients adds noise alone, and is charged.

        Args:
            updates: By client, the local weights minus the global ones.

        Returns:
            New global weights.
        """
        strangers = set(updates) - set(self.draw())
        if strangers:
            raise DataError(
                f"{len(strangers)} of the clients were not drawn for this round: the charge is for "
                "independent draws. Pass updates of the clients of draw() alone."
            )
        self._updates.received = dict(updates)
        self._step(self._batch)
        self._updates.received, self._batch = {}, None
        return self.weights

    def spent(self, delta: float) -> hush.Guarantee:
        """Guarantee of all rounds for one client."""
        return self._step.spent(delta)


def local_update(
    model: nn.Module, weights: Tensor, data: tuple[Tensor, Tensor], steps: int = 5, lr: float = 0.5
) -> Tensor:
    """Update of one client: ordinary training from the global weights, on its own data."""
    parameters = list(model.parameters())
    vector_to_parameters(weights.clone(), parameters)
    optimizer = torch.optim.SGD(parameters, lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data[0]), data[1]).backward()
        optimizer.step()
    return parameters_to_vector(parameters).detach() - weights


def main(
    epsilon: float = 3.0,
    delta: float = 1e-4,
    rounds: int = 60,
    rate: float = 0.25,
    clip: float = 0.5,
    ledger: Path | None = None,
) -> None:
    """Train a linear model on the digits of 479 clients with three images each."""
    x, y, x_test, y_test = tensors(load("digits"))
    clients = len(x) // 3
    data = list(zip(x.split(3), y.split(3), strict=True))[:clients]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    plan = hush.Plan(
        sampling=hush.Poisson(rate), clipping=hush.L2(clip), noise=hush.Gaussian(multiplier=1.0)
    )
    plan = hush.calibrate(plan, hush.Budget(epsilon, delta), steps=rounds)
    first = parameters_to_vector(model.parameters()).detach()
    server = PrivateServer(first, clients, plan, rounds, ledger=ledger)
    for _ in range(rounds):
        weights = server.weights
        server.aggregate(
            {client: local_update(model, weights, data[client]) for client in server.draw()}
        )
    vector_to_parameters(server.weights, model.parameters())
    with torch.no_grad():
        accuracy = (model(x_test).argmax(1) == y_test).float().mean()
    print(f"accuracy {accuracy:.3f} after {rounds} rounds of about {rate * clients:.0f} clients")
    print(server.spent(delta))


if __name__ == "__main__":
    typer.run(main)
