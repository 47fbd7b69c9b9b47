"""Accuracy at an equal epsilon: hush and Opacus train the same model with the same hyperparameters.

Run: python benchmarks/accuracy.py [--data fashion-mnist] [--seeds 5]

Without Opacus, its row is left out. To install it:
     .venv/bin/pip install --no-deps opacus opt-einsum
"""

import argparse
import statistics
import warnings
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hush
from hush.data import load, tensors

EPSILON, DELTA, CLIP, EPOCHS = 3.0, 1e-5, 1.0, 10
SETTINGS = {"digits": (256, 2.0), "fashion-mnist": (2048, 2.0)}
"""Batch size and learning rate of each data set."""


def network(x: Tensor) -> nn.Sequential:
    """A linear classifier of ten classes."""
    return nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 10))


def train_hush(x: Tensor, y: Tensor, batch: int, rate: float) -> tuple[nn.Module, float, float]:
    """A model, its noise multiplier, and its epsilon."""
    model, batches = network(x), -(-len(x) // batch)  # Opacus draws at one over the number of batches
    steps = EPOCHS * batches
    plan = hush.calibrate(
        hush.Plan(sampling=hush.Poisson(1 / batches), clipping=hush.L2(CLIP), noise=hush.Gaussian(1.0)),
        hush.Budget(EPSILON, DELTA),
        steps=steps,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    step = hush.PrivateStep(model, nn.CrossEntropyLoss(), optimizer, plan, records=len(x))
    for drawn in step.batches((x, y), steps=steps):
        step(drawn)
    assert isinstance(plan.noise, hush.Gaussian)
    return model, plan.noise.multiplier, float(step.spent(delta=DELTA))


def train_opacus(x: Tensor, y: Tensor, batch: int, rate: float) -> tuple[nn.Module, float, float]:
    """A model, its noise multiplier, and its epsilon."""
    from opacus import PrivacyEngine

    model, loss = network(x), nn.CrossEntropyLoss()
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=rate),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=batch),
        max_grad_norm=CLIP,
        target_epsilon=EPSILON,
        target_delta=DELTA,
        epochs=EPOCHS,
    )
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss(model(inputs), labels).backward()
            optimizer.step()
    return model, optimizer.noise_multiplier, engine.get_epsilon(DELTA)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", choices=SETTINGS, default="digits")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    x, y, x_test, y_test = tensors(load(options.data))
    ways = {"hush": train_hush} | ({"Opacus": train_opacus} if find_spec("opacus") else {})
    print(f"{options.data}: linear classifier, {EPOCHS} epochs, budget epsilon {EPSILON} at {DELTA:g}")
    for name, train in ways.items():
        scores = []
        for seed in range(options.seeds):
            torch.manual_seed(seed)
            model, noise, epsilon = train(x, y, *SETTINGS[options.data])
            with torch.no_grad():
                scores.append(100 * (model(x_test).argmax(1) == y_test).float().mean().item())
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        print(
            f"{name:7} accuracy {statistics.mean(scores):.2f} +- {spread:.2f}, "
            f"noise multiplier {noise:.3f}, epsilon {epsilon:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
