"""Can one noisy gradient be told from its neighbour's by the grid that its noise is on?

    python benchmarks/noise_grid.py [--trials 40] [--sigma 16]

torch draws normal numbers on a CPU in blocks of 16: the radius of entries i and i + 8 is
sqrt(-2 log(k / 2^b)), with k a whole number and b = 24 bits in single precision, 53 in double. An
attacker who knows every record but one subtracts the clipped sum under each hypothesis (the record
took part, or its slot is empty), and asks under which of the two the k of the far pairs are whole
numbers. One release is enough, however large the noise. Exact noise, rounded to a grid that does not
depend on it, has no such k: then half of the guesses are right. Opacus takes part where it is
installed.
"""

import argparse
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec

import torch
from torch import Tensor, nn

import hush

RECORDS, INPUTS, CLASSES = 100, 4000, 10
FAR = {24: 2.0e4, 53: 1.0e13}
"""Largest k that is looked at, by bits: beyond it rounding of the release hides whether it is whole."""
Release = tuple[Tensor, Tensor, Tensor]
"""What is published, scaled back to a noisy sum, and the clipped sums with and without the record."""


def data() -> tuple[Tensor, Tensor]:
    """Inputs and targets of all records; the first is the one in question."""
    seed = torch.Generator().manual_seed(7)
    inputs = torch.randn(RECORDS, INPUTS, generator=seed)
    return inputs, torch.randint(0, CLASSES, (RECORDS,), generator=seed)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(INPUTS, CLASSES, bias=False)


def of_hush(taking_part: bool, sigma: float, *, exact: bool) -> Release:
    """One step of hush; what is published is `step.update`, or its sum with torch's noise."""
    plan = hush.Plan(
        sampling=hush.FullBatch(), clipping=hush.L2(norm=1.0), noise=hush.Gaussian(multiplier=sigma)
    )
    empty = torch.arange(RECORDS) > 0

    def step_of() -> hush.PrivateStep:
        net = model()
        return hush.PrivateStep(
            net,
            nn.CrossEntropyLoss(),
            torch.optim.SGD(net.parameters(), lr=0.1),
            plan,
            records=RECORDS,
            execution=hush.Execution(physical_batch=RECORDS),
        )

    sums = []
    for present in (None, empty):
        own = step_of()
        sums.append(own.clipped_sum(next(own.batches(data(), present=present))).clone())
    step = step_of()
    step(next(step.batches(data(), present=None if taking_part else empty)))
    assert step.update is not None
    # the sum is scaled by a public number before noise, and back after it
    share = 1 - step.rounding
    released = step.update * (share * RECORDS)
    if not exact:
        released = sums[0 if taking_part else 1] * share
        released = released + sigma * torch.randn(released.shape).to(released.dtype)
    return released, sums[0] * share, sums[1] * share


def of_opacus(taking_part: bool, sigma: float) -> Release:
    """One step of Opacus; what is published is the noisy gradient."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    inputs, targets = data()

    def gradient(first: int) -> tuple[Tensor, Tensor]:
        net = GradSampleModule(model())
        optimizer = DPOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1),
            noise_multiplier=sigma,
            max_grad_norm=1.0,
            expected_batch_size=RECORDS,
        )
        nn.functional.cross_entropy(net(inputs[first:]), targets[first:]).backward()
        optimizer.pre_step()
        (weight,) = net.parameters()
        return weight.grad.flatten().double() * RECORDS, weight.summed_grad.flatten().double()

    return gradient(0 if taking_part else 1)[0], gradient(0)[1], gradient(1)[1]


def off(noise: Tensor, bits: int) -> float:
    """Mean distance of the k of far pairs from whole numbers: 1/4 if they are unrelated."""
    pairs = noise[: len(noise) // 16 * 16].view(-1, 2, 8)
    k = (pairs.square().sum(1) / -2).exp().flatten() * 2.0**bits
    k = k[(k > 1.5) & (k < FAR[bits])]
    return float((k - k.round()).abs().mean()) if len(k) else 0.25


def guess(release: Release, sigma: float) -> bool:
    """Whether the attacker says that the record took part."""
    noisy, *sums = release
    with_it, without = (min(off((noisy - total) / sigma, bits) for bits in FAR) for total in sums)
    return with_it < without


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--sigma", type=float, default=16.0)
    options = parser.parse_args()
    contenders: dict[str, Callable[[bool, float], Release]] = {
        "hush (default)": partial(of_hush, exact=True),
        "the same sum with torch.randn": partial(of_hush, exact=False),
    }
    if find_spec("opacus"):
        contenders[f"Opacus {version('opacus')} (default)"] = of_opacus
    print(f"one release each, noise multiplier {options.sigma:g}, {RECORDS} records")
    for name, released in contenders.items():
        right = sum(
            guess(released(trial % 2 == 0, options.sigma), options.sigma) == (trial % 2 == 0)
            for trial in range(options.trials)
        )
        print(f"{name:<32} right {right} of {options.trials}")


if __name__ == "__main__":
    main()
