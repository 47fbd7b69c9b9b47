"""Where to write a layer's per-example gradients out and where to keep their factors: the measurement.

Run: .venv/bin/python benchmarks/layers.py [--threads 1]

For each layer: the plain weight gradient; writing out, with norms and weighted sum; factors, with norms
from Gram matrices and weighted sum. The ratio is that of the numbers written out to those of the
factors, which is what `hush.gradients` decides by.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from hush.gradients.rules import convolution
from hush.gradients.rules.convolution import ConvolutionFactors, ConvolutionShape
from hush.gradients.rules.linear import OuterFactors
from hush.gradients.terms import Dense

REPEATS = 7
# records, positions, rows, columns
PRODUCTS = (
    (64, 128, 128, 128), (64, 128, 512, 128), (64, 128, 512, 512), (16, 128, 768, 768),
    (64, 64, 512, 512), (16, 128, 3072, 768), (16, 64, 768, 768), (64, 16, 256, 256),
)  # fmt: skip
# records, channels, size of the image, filters, kernel, stride, padding
CONVOLUTIONS = (
    (256, 1, 28, 16, 8, 2, 2), (256, 16, 12, 32, 4, 2, 0), (256, 3, 32, 32, 3, 1, 1),
    (256, 32, 32, 32, 3, 1, 1), (256, 32, 16, 64, 3, 1, 1), (256, 64, 16, 64, 3, 1, 1),
    (256, 64, 8, 64, 3, 1, 1), (256, 64, 8, 128, 3, 1, 1), (256, 128, 8, 128, 3, 1, 1),
    (256, 256, 4, 256, 3, 1, 1), (256, 128, 8, 256, 1, 1, 0),
)  # fmt: skip


def medians(variants: Sequence[Callable[[], object]]) -> list[float]:
    """Milliseconds of each, interleaved."""
    times: list[list[float]] = [[] for _ in variants]
    for variant in variants:
        variant()
    for _ in range(REPEATS):
        for variant, measured in zip(variants, times, strict=True):
            start = time.perf_counter()
            variant()
            measured.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(measured) for measured in times]


def of_product(records: int, positions: int, rows: int, columns: int) -> str:
    left, right = torch.randn(records, positions, rows), torch.randn(records, positions, columns)
    term, weights = OuterFactors(left, right, torch.Size((rows, columns))), torch.rand(records)

    def written() -> None:
        dense = Dense(term.dense())
        dense.norms(2.0)
        dense.weighted_sum(weights)

    def factors() -> None:
        term.norms(2.0)
        term.weighted_sum(weights)

    ratio = rows * columns / (positions * (rows + columns))
    plain, out, recorded = medians([lambda: term.weighted_sum(weights), written, factors])
    name = f"{records} x {positions} positions, {rows} x {columns}"
    return f"| {name} | {ratio:.2f} | {plain:.1f} | {out:.1f} | | {recorded:.1f} |"


def of_convolution(
    records: int, channels: int, size: int, filters: int, kernel: int, stride: int, padding: int
) -> str:
    shape = torch.Size((filters, channels, kernel, kernel))
    geometry = ConvolutionShape(shape, (stride, stride), (padding, padding), (1, 1), 1)
    x, weights = torch.randn(records, channels, size, size), torch.rand(records)
    grad = torch.randn_like(geometry.forward(x, torch.randn(shape), None))
    term = ConvolutionFactors(grad, x, geometry)

    def written(large: int) -> Callable[[], None]:
        def variant() -> None:
            convolution._LARGE, convolution._FEW_CHANNELS = large, 0
            dense = Dense(geometry.per_sample_weight_gradients(grad, x))
            dense.norms(2.0)
            dense.weighted_sum(weights)

        return variant

    def factors() -> None:
        term.norms(2.0)
        term.weighted_sum(weights)

    like = torch.zeros(shape)
    summed = lambda: geometry.backward(grad, x, like, 1, (False, True))  # noqa: E731
    variants = [summed, written(2**60), written(0)]
    gram = x[0, 0].numel() <= 512  # beyond, the Gram matrices of pixels are out of all proportion
    plain, grouped, unfolded, *recorded = medians([*variants, *([factors] if gram else [])])
    ratio = shape.numel() / (x[0].numel() + grad[0].numel())
    name = f"{records} x {channels} x {size}^2, {filters} filters of {kernel}^2, stride {stride}"
    last = f"{recorded[0]:.1f}" if recorded else "-"
    return f"| {name} | {ratio:.2f} | {plain:.1f} | {grouped:.1f} | {unfolded:.1f} | {last} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    print("| layer | ratio | plain | written out | written out, unfolded | factors |")
    print("|---|---|---|---|---|---|")
    for product in PRODUCTS:
        print(of_product(*product), flush=True)
    for shape in CONVOLUTIONS:
        print(of_convolution(*shape), flush=True)


if __name__ == "__main__":
    main()
