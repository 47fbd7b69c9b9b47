"""How much the rounding that a record's norm counts for raises it, on models that people train.

    .venv/bin/python benchmarks/rounding.py [--records 32] [--models "BERT-base;GPT-2"] [--small]

For each model and precision: lengths (the sum over positions of the factors' norms) over norms, layer by
layer, and the norm by which records are clipped over the norm of their gradients in double precision,
over the whole model: mean and largest. Clipping to `C` by a norm that is raised by a share s is clipping
to `C / (1 + s)`.
"""

import argparse
import warnings

import torch
from torch import Tensor

from architectures import ARCHITECTURES, Architecture, Options
from hush.gradients.losses import per_sample_loss
from hush.gradients.recording import record
from hush.gradients.rules.linear import OuterFactors
from hush.gradients.tape import GradientTape
from hush.gradients.terms import product_bound
from named import names_among

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def recorded(architecture: Architecture, options: Options, records: int, half: bool) -> GradientTape:
    torch.manual_seed(0)
    model = architecture.network(options).to(DEVICE).train()
    inputs, targets = (part.to(DEVICE) for part in architecture.batch(records, options.small))
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=half):
        tape = record(model, per_sample_loss(architecture.loss), inputs, targets)
    assert isinstance(tape, GradientTape)
    return tape


def exact_norms(tape: GradientTape) -> Tensor:
    """The norms of the gradients in double precision, a record and a parameter at a time."""
    squares = torch.zeros(tape.records, dtype=torch.float64, device=DEVICE)
    for term in tape.terms.values():
        for row in range(tape.records):
            own = term.take(slice(row, row + 1))
            if isinstance(own, OuterFactors):
                gradient = own.left[0].double().mT @ own.right[0].double()
            else:
                gradient = own.dense().double()
            squares[row] += gradient.square().sum()
    return squares.sqrt()


def main() -> None:
    parser = argparse.ArgumentParser(description="What counting rounding costs.")
    parser.add_argument("--records", type=int, default=32)
    usual = ["BERT-base", "ViT-B/16", "ResNet-18", "GPT-2"]
    parser.add_argument("--models", type=names_among(ARCHITECTURES), default=usual)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| model | precision | length / norm, mean, largest layer | norm raised by, mean, largest |")
    print("|---|---|---|---|")
    for name in arguments.models:
        for half in (False, True):
            options = Options(small=arguments.small)
            tape = recorded(ARCHITECTURES[name], options, arguments.records, half)
            layers = torch.stack(
                [
                    (product_bound(term.left, term.right) / term.norms(2.0)).mean()
                    for term in tape.terms.values()
                    if isinstance(term, OuterFactors) and term.left.shape[1] > 1
                ]
                or [torch.ones(())]
            )
            raised = tape.norms(2.0).double() / exact_norms(tape) - 1
            precision = "bf16" if half else "float32"
            print(
                f"| {name} | {precision} | {layers.mean():.1f}, {layers.max():.1f} | "
                f"{100 * raised.mean():.3f}%, {100 * raised.max():.3f}% |",
                flush=True,
            )
            del tape


if __name__ == "__main__":
    main()
