"""The picture of dpsur.md, from its own tables: the best line of each family by the proved epsilon.

Run it after changing a table: `python docs/results/dpsur_plot.py`.
"""

from pathlib import Path

from cycler import cycler
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hush_recipes.figure import COLORS, STYLE, label_lines

HERE = Path(__file__).parent
DATA = ("Fashion-MNIST", "MNIST", "IMDB", "CIFAR-10")
LEFT_OUT = ("as published", "pixels", "DPAGD")
FAMILIES = {
    "DP-SGD": ("DP-SGD", ("paid",)),
    "DP-SGD, private statistics": ("paid", ("DPSUR",)),
    "DPIS": ("DPIS", ()),
    "DPSUR, mean test": ("every trial charged", ()),
    "DPSUR, summed test": ("summed test", ("paid",)),
}
"""A part of the names of a family's lines, and parts that they do not have."""


def cells(line: str) -> list[str]:
    return [cell.strip(" *+") for cell in line.strip("| \n").split("|")]


def tables(text: str) -> dict[str, list[list[str]]]:
    """The tables of the data sets."""
    found: dict[str, list[list[str]]] = {}
    for part in text.split("\n## ")[1:]:
        lines = [cells(line) for line in part.splitlines() if line.startswith("| ")]
        data = part.splitlines()[0].partition(" at equal")[0]
        if data in DATA and lines and lines[0][0] == "method":
            found[data] = lines
    return found


def draw(axes: Axes, name: str, lines: list[list[str]]) -> None:
    """The best line of each family, and the paper's own numbers."""
    header, *methods = lines
    columns = [place for place, title in enumerate(header) if title.startswith("epsilon")]
    for color, (family, (part, without)) in enumerate(FAMILIES.items()):
        curves = []
        for line in methods:
            named = " ".join(line[:2])
            if part in named and not any(word in named for word in (*without, *LEFT_OUT)):
                pairs = [
                    (header[place], line[place]) for place in columns if line[place] not in ("-", "")
                ]
                curves.append([(float(title.split()[1]), float(value)) for title, value in pairs])
        if curves := [curve for curve in curves if curve]:
            best = max(curves, key=lambda curve: curve[-1])
            axes.plot(*zip(*best, strict=True), "o-", color=f"C{color}", label=family)
    said = next(line for line in methods if "as published" in line[0])
    printed = [(float(header[place].split()[1]), float(said[place + 1])) for place in columns]
    axes.plot(*zip(*printed, strict=True), "kx")
    axes.set(title=name, xlabel="epsilon at delta 1e-5", ylabel="test accuracy, %", xticks=(1, 2, 3, 4))
    axes.set_xlim(0.8, printed[-1][0] + 0.1)
    axes.legend(fontsize=8)
    label_lines(axes)


def main() -> None:
    found = tables((HERE / "dpsur.md").read_text())
    with rc_context({**STYLE, "axes.prop_cycle": cycler(color=COLORS)}):
        figure = Figure(figsize=(11, 7.5), layout="constrained")
        for axes, (name, lines) in zip(figure.subplots(2, 2).flat, found.items(), strict=True):
            draw(axes, name, lines)
        figure.savefig(HERE / "dpsur.png", dpi=100)


if __name__ == "__main__":
    main()
