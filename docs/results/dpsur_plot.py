"""The picture of dpsur.md, from its own tables: accuracy of each method by the epsilon that holds.

Run it after changing a table: `python docs/results/dpsur_plot.py`.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
LEFT_OUT = ("as published", "pixels", "DPAGD")
COLORS = plt.colormaps["tab20"].colors


def cells(line: str) -> list[str]:
    return [cell.strip(" *+") for cell in line.strip("| \n").split("|")]


def tables(text: str) -> dict[str, list[list[str]]]:
    """The tables that have a column for an epsilon, by the heading above them."""
    found: dict[str, list[list[str]]] = {}
    for part in text.split("\n## ")[1:]:
        lines = [cells(line) for line in part.splitlines() if line.startswith("| ")]
        if lines and lines[0][0] == "method":
            found[part.splitlines()[0].split(" at equal")[0]] = lines
    return found


def draw(axes: plt.Axes, name: str, lines: list[list[str]], colors: dict[str, int]) -> None:
    header, *methods = lines
    columns = [place for place, title in enumerate(header) if title.startswith("epsilon")]
    for line in methods:
        network = f", {line[1]}" if header[1] == "network" else ""
        if any(word in line[0] + network for word in LEFT_OUT):
            continue
        pairs = [(header[place], line[place]) for place in columns if line[place] not in ("-", "")]
        ours = [(float(title.split()[1]), float(value)) for title, value in pairs]
        style = "o-" if "whitened" in line[0] else "s--" if "DPSUR" in line[0] else ".:"
        label = line[0] + network
        color = COLORS[colors.setdefault(label, len(colors))]
        axes.plot(*zip(*ours, strict=True), style, ms=4, lw=1, color=color, label=label)
    said = next(line for line in methods if "as published" in line[0])
    printed = [(float(header[place].split()[1]), float(said[place + 1])) for place in columns]
    axes.plot(*zip(*printed, strict=True), "kx", label="DPSUR, printed (its epsilon does not hold)")
    axes.set(title=name, xlabel="epsilon at delta 1e-5", ylabel="test accuracy, %", xticks=(1, 2, 3, 4))
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.6 * (high - low), high)  # room for the legend
    axes.legend(frameon=False, fontsize=6, loc="lower right")


def main() -> None:
    found = tables((HERE / "dpsur.md").read_text())
    _, panels = plt.subplots(2, 2, figsize=(11, 9), layout="constrained")
    colors: dict[str, int] = {}  # a method has one in all panels
    for axes, (name, lines) in zip(panels.flat, found.items(), strict=True):
        draw(axes, name, lines, colors)
    plt.savefig(HERE / "dpsur.png", dpi=110)


if __name__ == "__main__":
    main()
