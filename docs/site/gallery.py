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
        "dpsur-fig1": (
            "Path of the weights",
            "At learning rate 1, selective release ends nearer to the minimum than DP-SGD. DP-SGD at "
            "learning rate 0.2 is better than both.",
        ),
        "dpsur-fig4": (
            "Changes of the loss",
            "On the digits, 73% of the changes exceed the clipping bound of 0.001. The paper expects "
            "nearly all.",
        ),
        "dpsur-fig5": (
            "Laws of the noisy test",
            "At test noise 1 and threshold -1, the test accepts 50% of the helpful and 16% of the "
            "harmful proposals.",
        ),
        "dpsur-fig6": (
            "Acceptance by threshold",
            "For every noise, the two probabilities differ most at threshold 0. The paper uses -1.",
        ),
        "dpsur-algorithm1": (
            "Noise conditioned on acceptance",
            "At order 1.5 and test noise 1, a fixed number of trials costs 0.25, and a chosen model "
            "at least 0.88. The published charge is 0.75.",
        ),
    },
    ("Twice sampling and hybrid clipping", "mechanisms/twice-sampling.md"): {
        "twice-fig2": (
            "Geometry of records",
            "On Fashion-MNIST, the first 10 of 784 principal directions contain 91% of the length of a "
            "record on average.",
        ),
        "twice-fig3": (
            "Geometry of gradients",
            "For a CNN on Fashion-MNIST, the first 100 of 26,010 principal directions contain 96% of "
            "the length of a gradient on average.",
        ),
        "twice-fig4": (
            "Divergence of one step",
            "Sampling of coordinates reduces the cost from noise 0.35 on for d0 = 16, and from 0.11 on "
            "for d0 = 256 (order 8, q2 = 1/2).",
        ),
        "twice-fig5": (
            "Epsilon of 10,000 steps",
            "If twice sampling costs epsilon 8 (d0 = 64, q2 = 1/3), input sampling costs 73 by the "
            "paper's accounting and 39 by tight accounting.",
        ),
        "twice-section6": (
            "Shaped noise",
            "Isotropic noise has 5.53 times the variance of shaped noise for these two subspaces.",
        ),
        "twice-table1": (
            "Noise variance",
            "Twice sampling has 12% to 53% less noise variance than DP-SGD with as many sampled "
            "entries, and 3% to 12% more than DP-SGD with as many gradients.",
        ),
    },
    ("Generalized Gaussian mechanism", "mechanisms/generalized-gaussian.md"): {
        "gg-fig2": (
            "Epsilon by scale",
            "At epsilon 4, beta 1 needs scale 0.25, and beta 4 needs scale 5.0.",
        ),
        "gg-fig3": (
            "Accuracy of noisy votes",
            "At epsilon 0.1, beta 1 is best: 93.2% of the labels of MNIST are correct, and 91.4% on "
            "average for beta up to 2.5.",
        ),
        "gg-fig5": (
            "Outliers",
            "At epsilon 1, noise beyond 10 has probability 0.00005 for beta 1, 0.007 for beta 2 and "
            "0.33 for beta 4.",
        ),
        "gg-fig9": (
            "Utility of noisy argmax",
            "For a single vote, beta 1 is best: utility 0.96, and 0.91 for beta 2 (25 classes, "
            "epsilon 2, two counts).",
        ),
        "gg-fig10": (
            "Gaussian and Laplace votes",
            "Laplace noise is better at equal divergence of order 10 and 50. Gaussian noise is better "
            "at order 2 and epsilon 0.1.",
        ),
        "gg-dimension": (
            "Cost of the dimension",
            "For beta 4, a change spread over 1,000 coordinates costs 14.4 times a change of one; "
            "the paper states a factor of 1.",
        ),
    },
    ("Bounded-support noise", "mechanisms/bounded-support.md"): {
        "bounded-fig1": (
            "Fisher information and divergence",
            "Outside of the support the paper's charge is up to 41 times too low.",
        ),
        "bounded-fig2": (
            "Divergence and error",
            "At mu = 0 and sigma = 0.05, the corrected charge is 36% below that for Gaussian noise.",
        ),
        "bounded-sampling": (
            "Sampled coordinates",
            "Sampling of coordinates gains nothing: at equal noise on the mean, the divergence equals "
            "the one of the full batch.",
        ),
    },
}
"""Recipes by the paper whose figure they reproduce, the paper's page, short titles and findings."""

_INTRODUCTION = """# Gallery

Figures of four papers, computed by hush. Each card has the finding, the command, and the code.
A command prints a table, and writes it as CSV beside the figure (PNG):

    pip install ./recipes
    hush reproduce gg-fig2 --out runs/reproduce

`hush reproduce` lists all recipes. Some of them train on data sets that are not bundled.
[Results](results/README.md) discusses the numbers.
"""
_PAPER = """
## {paper}

[The method and its use]({link})

<div class="grid cards" markdown>
{cards}
</div>
"""
_CARD = """
- **{title}**

    [![{caption}](gallery/{name}.png)](gallery/{name}.png)

    {caption}

    {finding}

    `hush reproduce {name}` ([code](../{code}))
"""


def page() -> str:
    """The page, as Markdown."""
    recipes = all_recipes()
    parts = [_INTRODUCTION]
    for (paper, link), figures in PAPERS.items():
        cards = [
            _CARD.format(
                title=title,
                finding=finding,
                name=name,
                caption=(inspect.getdoc(recipes[name]) or "").partition("\n")[0],
                code=Path(inspect.getsourcefile(recipes[name]) or "").resolve().relative_to(ROOT),
            )
            for name, (title, finding) in figures.items()
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
