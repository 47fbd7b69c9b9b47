"""Attacks on every mechanism x sampling x release: what each finds, beside what is charged."""

from typing import Any

from hush_recipes.audit.combinations import attacks, refused
from hush_recipes.figure import Figure

SIDE_BY_SIDE, WHOLE_STEPS = 10, 4
"""Multiple of the runs that the test suite makes: a run that is a whole step takes milliseconds."""
FAILURE = 0.05


def audit_mechanisms() -> Figure:
    """Audited lower bound on epsilon and charge of every proved combination."""
    listed = attacks()
    confidence = 1 - FAILURE / len(listed)
    rows: list[list[object]] = []
    for attack in listed:
        runs = attack.runs * (WHOLE_STEPS if attack.whole_steps else SIDE_BY_SIDE)
        audit = attack.attack(runs=runs, confidence=confidence)
        rows.append([attack.name, audit.runs, audit.lower, audit.charge, audit.tightness])
        print(f"  {attack.name}: {audit.lower:.3g} of {audit.charge:.3g}", flush=True)
    broken = [str(name) for name, _, lower, charge, _ in rows if float(str(lower)) > float(str(charge))]

    def draw(axes: Any) -> None:
        charges, lowers = ([float(str(row[column])) for row in rows] for column in (3, 2))
        axes.plot([0, max(charges)], [0, max(charges)], color="grey", label="all that is charged")
        axes.scatter(charges, lowers, s=12)
        axes.set(xlabel="epsilon charged at delta .01", ylabel="epsilon found")
        axes.legend()

    return Figure(
        name="audit-mechanisms",
        title="What attacks find of what is charged",
        header=["what is run", "runs counted, each way", "found >=", "charged", "share"],
        rows=rows,
        draw=draw,
        notes=[
            f"delta .01; {1 - FAILURE:.0%} confidence in all {len(rows)} together",
            f"above their charge: {', '.join(broken) or 'none'}",
            f"{len(refused())} other combinations of the same parts are refused",
        ],
    )
