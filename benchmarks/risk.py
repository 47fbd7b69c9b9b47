"""Noise that a risk needs, calibrated to itself and by way of the epsilon that implies it.

Run: .venv/bin/python benchmarks/risk.py
"""

import hush
from hush.report.text import Table

DELTA = 1e-5
TRAINING = {"60000 records, batch 600, 20 epochs": (0.01, 2000), "full batch, 100 steps": (1.0, 100)}
RISKS = (
    hush.Risk(tpr=0.05, fpr=0.01),
    hush.Risk(tpr=0.01, fpr=0.001),
    hush.Risk(advantage=0.1),
    hush.Risk(advantage=0.3),
    hush.Risk(posterior=0.6, prior=0.5),
)


def main() -> None:
    rows = []
    for training, (rate, steps) in TRAINING.items():
        start = hush.Plan(
            sampling=hush.FullBatch() if rate == 1 else hush.Poisson(rate=rate),
            clipping=hush.L2(norm=1.0),
            noise=hush.Gaussian(multiplier=1.0),
        )
        for risk in RISKS:
            budget = risk.budget(DELTA)
            plans = [hush.calibrate(start, limit, steps) for limit in (risk, budget)]
            direct, through = (float(plan.noise.to_plain()["multiplier"]) for plan in plans)
            spent = hush.epsilon(plans[0], steps, DELTA).epsilon.upper
            numbers = [f"{direct:.3f}", f"{through:.3f}", f"{through / direct:.2f}"]
            rows.append([training, str(risk), *numbers, f"{budget.epsilon:.2f}", f"{spent:.2f}"])
    header = ["training", "risk", "noise", "by epsilon", "ratio", "epsilon implying it", "epsilon spent"]
    print(Table(header=header, rows=rows).markdown())


if __name__ == "__main__":
    main()
