"""The pictures of the pages, as SVG that follows the reader's light or dark setting.

`python docs/pictures/draw.py` writes them beside this file; curves are computed by hush.
"""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import exp, gamma, log
from pathlib import Path

import hush
from hush.accounting.attacker import ApproximateDP

BUDGET = hush.Budget(epsilon=3.0, delta=1e-5)
STEPS = 200
PLAN = hush.calibrate(
    hush.Plan(
        sampling=hush.Poisson(rate=0.25),
        clipping=hush.L2(norm=1.0),
        noise=hush.Gaussian(multiplier=1.0),
    ),
    BUDGET,
    steps=STEPS,
)
"""The plan of the README."""
WIDTH = 440
"""Of every picture: at a phone's width letters are still large enough to read."""

_STYLE = """<style>
text { font: 14px system-ui, sans-serif; fill: #24292f }
.note { font-size: 12px; fill: #57606a }
.strong { font-weight: 600 }
.middle { text-anchor: middle }
.end { text-anchor: end }
.box { fill: #eef0fb; stroke: #3f51b5 }
.plain { fill: #f6f8fa; stroke: #8c959f }
.frame { fill: none; stroke: #3f51b5; stroke-dasharray: 5 4 }
.line { fill: none; stroke: #57606a; stroke-width: 1.5 }
.axis { fill: none; stroke: #8c959f }
.curve { fill: none; stroke: #3f51b5; stroke-width: 2.5 }
.other { fill: none; stroke: #bc4c00; stroke-width: 2; stroke-dasharray: 6 4 }
.green { fill: none; stroke: #1a7f37; stroke-width: 2.5 }
.curve-text { fill: #3f51b5 }
.green-text { fill: #1a7f37 }
.line-text { fill: #57606a }
.other-text { fill: #bc4c00 }
.a { fill: #3f51b5 } .b { fill: #bc4c00 } .c { fill: #1a7f37 }
.empty { fill: none; stroke: #8c959f; stroke-width: 1.5; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.note { fill: #a3acb6 }
.box { fill: #262b4d; stroke: #9fa8da }
.plain { fill: #2b2f3a; stroke: #8c959f }
.frame, .curve { stroke: #9fa8da }
.line { stroke: #a3acb6 }
.other { stroke: #f0a06a }
.green { stroke: #7ee787 }
.curve-text { fill: #9fa8da }
.green-text { fill: #7ee787 }
.line-text { fill: #a3acb6 }
.other-text { fill: #f0a06a }
.a { fill: #9fa8da } .b { fill: #f0a06a } .c { fill: #7ee787 }
}
</style>"""


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """A line of text whose baseline starts at (x, y)."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'


def box(x: float, y: float, width: float, height: float, kind: str = "box") -> str:
    """A rectangle with round corners."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" class="{kind}"/>'


def path(points: Sequence[tuple[float, float]], kind: str) -> str:
    """A line through points of the picture."""
    return f'<path d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in points)}" class="{kind}"/>'


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """A horizontal or vertical arrow."""
    dx, dy = (to_x > x) - (to_x < x), (to_y > y) - (to_y < y)
    wings = [(to_x - 6 * dx + s * 4 * dy, to_y - 6 * dy + s * 4 * dx) for s in (-1, 1)]
    head = path([wings[0], (to_x, to_y), wings[1]], "line")
    return path([(x, y), (to_x, to_y)], "line") + head


def picture(height: float, title: str, *shapes: str) -> str:
    """A whole SVG file."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" '
        f'viewBox="0 0 {WIDTH} {height:g}" role="img">\n'
        f"<title>{title}</title>\n{_STYLE}\n" + "\n".join(shapes) + "\n</svg>\n"
    )


def plan() -> str:
    """The four parts of a plan between the records and the model, and the ledger that prices it."""
    parts = (
        ("Sampling", "draws the records", "Poisson(rate=0.25)"),
        ("Clipping", "bounds each contribution", "L2(norm=1.0)"),
        ("Noise", "hides one contribution", f"Gaussian(multiplier={PLAN.noise.multiplier:.2f})"),
        ("Release", "updates the model", "Always()"),
    )
    shapes = [box(62, 8, 150, 30, "plain"), text(137, 28, "records", "middle")]
    for number, (name, question, example) in enumerate(parts):
        top = 66 + 74 * number
        shapes += [
            arrow(137, top - (28 if number == 0 else 18), 137, top),
            box(24, top, 226, 56),
            text(34, top + 18, name, "strong"),
            text(34, top + 34, question, "note"),
            text(34, top + 49, example, "note"),
        ]
    bottom = 66 + 74 * 4
    shapes += [
        box(12, 54, 250, 74 * 4 + 4, "frame"),
        text(272, 70, "Plan", "strong"),
        text(272, 88, "one immutable value:", "note"),
        text(272, 104, "the step runs it,", "note"),
        text(272, 120, "the ledger charges it", "note"),
        arrow(262, 214, 296, 214),
        box(296, 176, 136, 76, "plain"),
        text(306, 196, "Ledger", "strong"),
        text(306, 214, "one line per step,", "note"),
        text(306, 230, "on disk before the", "note"),
        text(306, 246, "model changes", "note"),
        arrow(137, bottom - 18, 137, bottom + 16),
        box(62, bottom + 16, 150, 30, "plain"),
        text(137, bottom + 36, "model", "middle"),
    ]
    return picture(
        bottom + 54, "From the records through the four parts of a plan to the model", *shapes
    )


def units() -> str:
    """Neighbouring data sets where the unit of privacy is a record, and where it is a user."""
    owners = "aabbbcca"

    def row(y: float, empty: Callable[[int], bool]) -> list[str]:
        kinds = ["empty" if empty(slot) else owner for slot, owner in enumerate(owners)]
        return [
            f'<circle cx="{150 + 34 * slot}" cy="{y:g}" r="12" class="{kind}"/>'
            for slot, kind in enumerate(kinds)
        ]

    return picture(
        206,
        "Neighbours differ in one record, or in all records of one user",
        text(8, 25, "data set", "strong"),
        *row(20, lambda slot: False),
        text(8, 42, "colours: owners", "note"),
        text(8, 87, "one record", "strong"),
        text(8, 104, "its slot is empty", "note"),
        *row(90, lambda slot: slot == 3),
        text(8, 157, "one user", "strong"),
        text(8, 174, "all slots are empty", "note"),
        *row(160, lambda slot: owners[slot] == "b"),
        path([(8, 56), (432, 56)], "axis"),
        path([(8, 126), (432, 126)], "axis"),
    )


def _axes(left: float, top: float, right: float, bottom: float, x: str, y: str) -> list[str]:
    return [
        path([(left, top), (left, bottom), (right, bottom)], "axis"),
        text((left + right) / 2, bottom + 34, x, "note middle"),
        text(left, top - 8, y, "note"),
    ]


def spending() -> str:
    """Epsilon of the steps taken so far, against the budget."""
    left, top, right, bottom, last, most = 44, 34, 420, 230, 300, 4.0

    def at(step: float, epsilon: float) -> tuple[float, float]:
        return left + (right - left) * step / last, bottom - (bottom - top) * epsilon / most

    taken = [1, *range(25, last + 1, 25)]
    curve = [at(n, float(hush.epsilon(PLAN, steps=n, delta=BUDGET.delta))) for n in taken]
    within = taken.index(STEPS) + 1
    limit = [at(0, BUDGET.epsilon), at(last, BUDGET.epsilon)]
    return picture(
        270,
        "Epsilon grows with every step, and the run ends at the budget",
        *_axes(left, top, right, bottom, "steps", f"epsilon spent, at delta {BUDGET.delta:g}"),
        *(text(at(n, 0)[0], bottom + 16, f"{n}", "note middle") for n in range(0, last + 1, 100)),
        *(text(left - 8, at(0, e)[1] + 4, f"{e}", "note end") for e in range(5)),
        path(limit, "other"),
        text(left + 6, limit[0][1] - 8, "budget: epsilon 3", "other-text"),
        path(curve[:within], "curve"),
        path(curve[within - 1 :], "axis"),
        f'<circle cx="{curve[within - 1][0]:.1f}" cy="{curve[within - 1][1]:.1f}" r="5" class="a"/>',
        text(
            curve[within - 1][0] + 8, curve[within - 1][1] + 20, f"step {STEPS}: the end", "curve-text"
        ),
    )


def trade_off() -> str:
    """True against false positive rate of the best membership test, and of blind guessing."""
    left, top, right, bottom = 44, 34, 364, 354

    def at(false: float, true: float) -> tuple[float, float]:
        return left + (right - left) * false, bottom - (bottom - top) * true

    rates = [0.0, 0.005, 0.01, 0.02, 0.05, *(n / 20 for n in range(2, 21))]
    ours, implied = hush.Attacker({PLAN: STEPS}), ApproximateDP([(BUDGET.epsilon, BUDGET.delta)])
    curves = [[at(x, each.true_positive_rate(x)) for x in rates] for each in (ours, implied)]
    assert all(a[1] >= b[1] for a, b in pairwise(curves[0]))  # a curve, not a zigzag
    return picture(
        400,
        "The best membership attack on this run, beside what epsilon alone allows",
        *_axes(left, top, right, bottom, "false positive rate", "true positive rate"),
        *(text(at(n / 2, 0)[0], bottom + 16, f"{n / 2:g}", "note middle") for n in range(3)),
        *(text(left - 8, at(0, n / 2)[1] + 4, f"{n / 2:g}", "note end") for n in (1, 2)),
        path([at(0, 0), at(1, 1)], "axis"),
        path(curves[1], "other"),
        path(curves[0], "curve"),
        text(at(0.08, 0.9)[0], at(0, 0.9)[1], "implied by epsilon 3", "other-text"),
        text(at(0.08, 0.78)[0], at(0, 0.78)[1], "best attack", "curve-text"),
        text(at(0.08, 0.72)[0], at(0, 0.72)[1], "on this plan", "curve-text"),
        text(at(0.54, 0.44)[0], at(0, 0.44)[1], "guessing blindly", "note"),
    )


def _labelled(
    curves: Sequence[tuple[str, str, Sequence[tuple[float, float]]]],
    *,
    title: str,
    x: tuple[str, Sequence[float]],
    y: tuple[str, Sequence[float]],
    height: float = 300,
) -> str:
    """Curves over linear axes, each labelled at its last point.

    Args:
        curves: Label, style and points of each curve.
        title: Title of the picture, for screen readers.
        x: Label and ticks of the horizontal axis, whose ends are the first and last tick.
        y: Label and ticks of the vertical axis.
        height: Height of the picture.
    """
    left, top, right, bottom = 44, 34, 330, height - 44

    def at(horizontal: float, vertical: float) -> tuple[float, float]:
        across = (horizontal - x[1][0]) / (x[1][-1] - x[1][0])
        up = (vertical - y[1][0]) / (y[1][-1] - y[1][0])
        return left + (right - left) * across, bottom - (bottom - top) * up

    shapes = _axes(left, top, right, bottom, x[0], y[0])
    shapes += [text(at(tick, 0)[0], bottom + 16, f"{tick:g}", "note middle") for tick in x[1]]
    shapes += [text(left - 8, at(x[1][0], tick)[1] + 4, f"{tick:g}", "note end") for tick in y[1]]
    for label, style, points in curves:
        placed = [at(*point) for point in points]
        shapes += [path(placed, style), text(right + 6, placed[-1][1] + 4, label, f"note {style}-text")]
    return picture(height, title, *shapes)


def accuracy() -> str:
    """Test accuracy against epsilon, from the table of docs/results/records.md."""
    table = (Path(__file__).parents[1] / "results" / "records.md").read_text()
    left, top, right, bottom = 44, 34, 330, 266
    epsilons = (1, 3, 8)

    def at(epsilon: float, percent: float) -> tuple[float, float]:
        return left + 12 + (right - left - 24) * log(epsilon) / log(8), bottom - (bottom - top) * (
            percent - 70
        ) / 30

    shapes = _axes(left, top, right, bottom, "epsilon, at delta 1e-05", "test accuracy, %")
    shapes += [text(at(e, 70)[0], bottom + 16, f"{e}", "note middle") for e in epsilons]
    shapes += [text(left - 8, at(1, y)[1] + 4, f"{y}", "note end") for y in range(70, 101, 10)]
    header = next(line for line in table.splitlines() if line.startswith("| data |")).split("|")
    columns = [next(k for k, title in enumerate(header) if f"epsilon {e} " in title) for e in epsilons]
    for name, kind, below in (
        ("MNIST", "line", 0),
        ("Fashion-MNIST", "curve", -7),
        ("IMDB", "other", 9),
        ("CIFAR-10", "green", 0),
    ):
        row = next(line for line in table.splitlines() if line.startswith(f"| {name} | none |"))
        cells = [re.match(r"\W*(\d+\.\d+)", row.split("|")[k]) for k in columns]
        points = [at(e, float(cell[1])) for e, cell in zip(epsilons, cells, strict=True) if cell]
        x, y = points[-1]
        shapes += [path(points, kind), text(x + 8, y + 4 + below, name, f"note {kind}-text")]
        shapes += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" class="{kind}-text"/>' for x, y in points]
    return picture(310, "Test accuracy against epsilon on four data sets", *shapes)


def selective() -> str:
    """Epsilon of 646 accepted updates of DPSUR, by the share of trials that is accepted."""
    release = hush.Selective(rate=256 / 60000, clip=0.001, multiplier=1.3, test="mean")
    plan = hush.Plan(
        sampling=hush.Poisson(rate=2048 / 60000),
        clipping=hush.L2(norm=0.1),
        noise=hush.Gaussian(multiplier=4.0),
        release=release,
    )
    updates, shares = 646, [n / 100 for n in range(25, 51)]  # at most half: the threshold is -1
    proved = [float(hush.epsilon(plan, steps=round(updates / share), delta=1e-5)) for share in shares]
    published = hush.Plan(
        sampling=plan.sampling,
        clipping=plan.clipping,
        noise=plan.noise,
        release=hush.Selective(
            rate=release.rate, clip=0.001, multiplier=1.3, test="mean", accounting="published"
        ),
    )
    claimed = float(hush.epsilon(published, steps=updates, delta=1e-5))
    percent = [100 * share for share in shares]
    return _labelled(
        [
            ("every trial", "curve", list(zip(percent, proved, strict=True))),
            ("as published", "other", [(percent[0], claimed), (percent[-1], claimed)]),
        ],
        title="Epsilon of 646 accepted updates, by the share of trials that is accepted",
        x=("accepted trials, %; at most half for threshold -1", (25, 30, 35, 40, 45, 50)),
        y=("epsilon of 646 accepted updates, at delta 1e-05", (0, 0.5, 1, 1.5, 2)),
    )


def generalized_gaussian() -> str:
    """Densities of generalized Gaussian noise whose scale gives epsilon 1 for one number."""
    curves = []
    for beta, style in ((1.0, "curve"), (2.0, "other"), (4.0, "line")):
        plan = hush.Plan(
            sampling=hush.FullBatch(),
            clipping=hush.L2(norm=1.0),
            noise=hush.GeneralizedGaussian(beta=beta, multiplier=1.0),
        )
        if beta < 2:
            plan = hush.Plan(
                sampling=plan.sampling, clipping=hush.Lp(p=beta, norm=1.0), noise=plan.noise
            )
        fitted = hush.calibrate(plan, hush.Budget(epsilon=1.0, delta=1e-5), steps=1, dimension=1)
        scale = float(fitted.noise.to_plain()["multiplier"])
        peak = beta / (2 * scale * gamma(1 / beta))
        points = [n / 10 for n in range(-120, 121)]
        curves.append(
            (f"beta {beta:g}", style, [(x, peak * exp(-((abs(x) / scale) ** beta))) for x in points])
        )
    # the labels of three curves that end at zero would lie on each other
    labelled = _labelled(
        [("", style, points) for _, style, points in curves],
        title="Densities of generalized Gaussian noise at epsilon 1 for one number",
        x=("noise on a number of sensitivity 1", (-12, -6, 0, 6, 12)),
        y=("density, at epsilon 1 and delta 1e-05", (0, 0.1, 0.2, 0.3, 0.4, 0.5)),
    )
    notes = [
        text(340, 60 + 22 * n, name, f"{style}-text" if style != "line" else "")
        for n, (name, style, _) in enumerate(curves)
    ]
    return labelled.replace("</svg>", "\n".join([*notes, "</svg>"]))


def bounded_support() -> str:
    """Rényi divergence of order 2 for a shift of 1, by the location of the sum."""
    locations = [n / 20 for n in range(-80, 81)]
    curves = [("Gaussian", "line", [(-4.0, 1.0), (4.0, 1.0)])]
    for name, style, noise in (
        ("rectified", "curve", hush.Rectified(scale=1.0, bound=1.0)),
        ("truncated", "other", hush.Truncated(scale=1.0, bound=1.0)),
    ):
        plan = hush.Plan(sampling=hush.FullBatch(), clipping=hush.Linf(norm=1.0), noise=noise)
        charges = [float(hush.individual_rdp(plan, [at], orders=[2.0])[0]) for at in locations]
        curves.append((name, style, list(zip(locations, charges, strict=True))))
    return _labelled(
        curves,
        title="Per-instance Rényi divergence of bounded-support noise, by the location of the sum",
        x=("location of the sum, in standard deviations; support [-1, 1]", (-4, -2, 0, 2, 4)),
        y=("Rényi divergence of order 2 for a change of 1", (0, 0.25, 0.5, 0.75, 1)),
    )


def subspaces() -> str:
    """A sensitivity set of two unequal directions, with isotropic and with optimal Gaussian noise."""
    clip, ranks = (2.5, 1.0), (1.0, 4.0)  # four coordinates of the short direction, one of the long
    cost = sum(c**2 for c in clip) ** 0.5
    total = sum(c * r**0.5 for c, r in zip(clip, ranks, strict=True))
    fitted = [(c / r**0.5 * total) ** 0.5 for c, r in zip(clip, ranks, strict=True)]
    variances = cost**2 * sum(ranks), sum(r * s**2 for r, s in zip(ranks, fitted, strict=True))
    unit = 24.0

    def panel(centre: float, deviations: tuple[float, float], name: str, variance: float) -> list[str]:
        wide, high = (2 * c * unit for c in clip)
        return [
            f'<ellipse cx="{centre:g}" cy="120" rx="{deviations[0] * unit:.1f}" '
            f'ry="{deviations[1] * unit:.1f}" class="frame"/>',
            box(centre - wide / 2, 120 - high / 2, wide, high),
            text(centre, 124, "one record", "note middle"),
            text(centre, 222, name, "strong middle"),
            text(centre, 240, f"total variance {variance:.1f}", "note middle"),
        ]

    return picture(
        254,
        "A clipping region of two norms under isotropic and under optimal Gaussian noise",
        *panel(112, (cost, cost), "isotropic noise", variances[0]),
        *panel(328, (fitted[0], fitted[1]), "optimal noise", variances[1]),
        text(
            220,
            22,
            "equal privacy; solid: clipping region, dashed: one deviation of the noise",
            "note middle",
        ),
    )


def pate() -> str:
    """Private records, disjoint teachers, noisy votes, and a student on public inputs."""
    shapes = [text(8, 20, "private records, disjoint parts", "note")]
    for teacher, kind in enumerate("abc"):
        top = 34 + 58 * teacher
        shapes += [
            *(f'<circle cx="{18 + 20 * n}" cy="{top + 20}" r="7" class="{kind}"/>' for n in range(3)),
            arrow(74, top + 20, 96, top + 20),
            box(96, top + 4, 78, 32),
            text(135, top + 25, f"teacher {teacher + 1}", "note middle"),
            arrow(174, top + 20, 204, top + 20),
        ]
    return picture(
        262,
        "PATE: teachers on disjoint records vote, and a student learns from noisy answers",
        *shapes,
        box(204, 38, 96, 148),
        text(252, 88, "votes", "strong middle"),
        text(252, 108, "+ noise", "middle"),
        text(252, 128, "argmax", "middle"),
        arrow(300, 112, 332, 112),
        box(332, 88, 96, 48),
        text(380, 108, "student", "strong middle"),
        text(380, 126, "published", "note middle"),
        box(204, 212, 96, 32, "plain"),
        text(252, 233, "public inputs", "note middle"),
        arrow(252, 212, 252, 186),
        path([(8, 202), (188, 202)], "frame"),
        text(8, 222, "a record reaches one teacher:", "note"),
        text(8, 238, "it changes one vote", "note"),
    )


def exact_noise() -> str:
    """A sum with a draw of noise, rounded once to a public grid."""
    left, right, base, spacing = 20.0, 420.0, 128.0, 25.0

    def density(x: float, centre: float) -> float:
        return base - 84 * exp(-(((x - centre) / 70) ** 2))

    curves = [
        path([(x, density(x, centre)) for x in range(20, 421, 4)], kind)
        for centre, kind in ((208.0, "curve"), (222.0, "other"))
    ]
    grid = [path([(x, base), (x, base + 8)], "axis") for x in _places(left, right, spacing)]
    return picture(
        210,
        "Noise is drawn exactly and the noisy sum is rounded once to a public grid",
        text(8, 20, "noisy sums of two neighbouring data sets", "note"),
        *curves,
        path([(left, base), (right, base)], "axis"),
        *grid,
        text(220, base + 26, "public grid: every point is possible for both", "note middle"),
        arrow(262, base - 46, 270, base - 46),
        f'<circle cx="262" cy="{base:g}" r="4" class="a"/>',
        f'<circle cx="270" cy="{base:g}" r="4" class="c"/>',
        text(8, base + 52, "exact draw", "curve-text"),
        text(88, base + 52, "is rounded to the", "note"),
        text(196, base + 52, "nearest point", "green-text"),
        text(
            8, base + 70, "rounding after an exact draw is post-processing: it costs no privacy", "note"
        ),
    )


def _places(first: float, last: float, spacing: float) -> list[float]:
    return [first + spacing * n for n in range(round((last - first) / spacing) + 1)]


def tape() -> str:
    """Per-sample gradients of a linear layer as factors, and what is computed from them."""
    rows = (
        ("norms", "|input| x |gradient|, one per record"),
        ("weighted sum", "one matrix product with clipping factors"),
        ("chunks", "full gradients of a few records at a time"),
    )
    shapes = [
        box(12, 30, 120, 54, "plain"),
        text(72, 52, "inputs", "strong middle"),
        text(72, 70, "of the layer, B x m", "note middle"),
        box(12, 104, 120, 54, "plain"),
        text(72, 126, "gradients", "strong middle"),
        text(72, 144, "of its outputs, B x n", "note middle"),
        text(12, 18, "one pass of a linear layer", "note"),
        text(172, 18, "gradient of a record: product of its two rows", "note"),
        box(6, 24, 132, 140, "frame"),
    ]
    for number, (name, note) in enumerate(rows):
        top = 30 + 46 * number
        shapes += [
            arrow(138, top + 18, 172, top + 18),
            box(172, top, 262, 38),
            text(182, top + 17, name, "strong"),
            text(182, top + 32, note, "note"),
        ]
    return picture(
        196,
        "The gradient tape keeps two factors of each layer in place of per-sample gradients",
        *shapes,
        text(12, 186, "no matrix of B gradients with m x n entries is stored", "note"),
    )


PICTURES = {
    "pate": pate,
    "exact-noise": exact_noise,
    "tape": tape,
    "accuracy": accuracy,
    "selective": selective,
    "subspaces": subspaces,
    "generalized-gaussian": generalized_gaussian,
    "bounded-support": bounded_support,
    "plan": plan,
    "units": units,
    "spending": spending,
    "trade-off": trade_off,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (Path(__file__).parent / f"{name}.svg").write_text(draw())
