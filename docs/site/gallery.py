"""The gallery: thumbnails of figures that `hush reproduce` has written, and their page.

    hush reproduce gg-fig2 ... --out runs/reproduce
    python docs/site/gallery.py runs/reproduce

Figures that the folder does not have keep their thumbnails.
"""

import inspect
import sys
from pathlib import Path

from hush_recipes.registry import all_recipes

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gallery.md"
WIDTH = 640
"""Of a thumbnail, in pixels."""

PAPERS = {
    ("DPSUR: selective update and release", "mechanisms/dpsur.md"): {
        "dpsur-fig1": "Path of the weights",
        "dpsur-fig4": "Changes of the loss",
        "dpsur-fig5": "Laws of the noisy test",
        "dpsur-fig6": "Acceptance by threshold",
        "dpsur-algorithm1": "Noise conditioned on acceptance",
    },
    ("Twice sampling and hybrid clipping", "mechanisms/twice-sampling.md"): {
        "twice-fig2": "Geometry of records",
        "twice-fig3": "Geometry of gradients",
        "twice-fig4": "Divergence of one step",
        "twice-fig5": "Epsilon of 10,000 steps",
        "twice-section6": "Shaped noise",
        "twice-table1": "Noise variance",
    },
    ("Generalized Gaussian mechanism", "mechanisms/generalized-gaussian.md"): {
        "gg-fig2": "Epsilon by scale",
        "gg-fig3": "Accuracy of noisy votes",
        "gg-fig5": "Outliers",
        "gg-fig9": "Utility of noisy argmax",
        "gg-fig10": "Gaussian and Laplace votes",
        "gg-dimension": "Cost of the dimension",
    },
    ("Bounded-support noise", "mechanisms/bounded-support.md"): {
        "bounded-fig1": "Fisher information and divergence",
        "bounded-fig2": "Divergence and error",
        "bounded-sampling": "Sampled coordinates",
    },
}
"""Recipes by the paper whose figure they reproduce, with the paper's page and short titles."""

_INTRODUCTION = """# Gallery

Figures of four papers, computed again by hush. Each card has the command that writes the figure and
its numbers, and the code of the recipe. The commands need `pip install ./recipes`. They write a PNG
and a CSV file and print the table:

    hush reproduce gg-fig2 --out runs/reproduce

`hush reproduce` lists all recipes. Some of them train on data sets that are not bundled.
[Results](results/README.md) discusses the numbers.
"""
_PAPER = """
## {paper}

[The method, its use and the claims of the paper]({link})

<div class="grid cards" markdown>
{cards}
</div>
"""
_CARD = """
- **{title}**

    ![{caption}](gallery/{name}.png)

    {caption}

    `hush reproduce {name}`

    [code](../{code})
"""


def page() -> str:
    """The page, as Markdown."""
    recipes = all_recipes()
    parts = [_INTRODUCTION]
    for (paper, link), figures in PAPERS.items():
        cards = [
            _CARD.format(
                title=title,
                name=name,
                caption=(inspect.getdoc(recipes[name]) or "").partition("\n")[0],
                code=Path(inspect.getsourcefile(recipes[name]) or "").resolve().relative_to(ROOT),
            )
            for name, title in figures.items()
        ]
        parts.append(_PAPER.format(paper=paper, link=link, cards="".join(cards)))
    return "".join(parts)


def shrink(picture: Path, thumbnail: Path) -> None:
    """Write a small copy with a palette of colours."""
    from PIL import Image

    with Image.open(picture) as image:
        height = round(image.height * WIDTH / image.width)
        small = image.convert("RGB").resize((WIDTH, height), Image.Resampling.LANCZOS)
        small.quantize(255, dither=Image.Dither.NONE).save(thumbnail, optimize=True)


if __name__ == "__main__":
    PAGE.with_suffix("").mkdir(exist_ok=True)
    for name in (name for figures in PAPERS.values() for name in figures):
        if (picture := Path(sys.argv[1]) / f"{name}.png").is_file():
            shrink(picture, PAGE.with_suffix("") / f"{name}.png")
    PAGE.write_text(page())
