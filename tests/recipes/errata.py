r"""The page of errata, from the claims of the recipes; `python -m tests.recipes.errata` writes it.

`hush claims` prints plain text. The page has the same statements in LaTeX, by the test of a claim.
"""

import re
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from hush_recipes.claims import CLAIMS, Claim

PAGE = Path(__file__).parents[2] / "docs" / "guarantees" / "errata.md"
_INTRODUCTION = """# Errata

Ten published statements do not hold as printed, and one published approximation is not a bound. Each
has a case in which it fails, and a test that recomputes both numbers. hush charges the corrected
statements. `hush claims` (with `pip install ./recipes`) prints this list, and the
[bibliography](bibliography.md) has the papers.
"""
_PAPERS = {
    "Bounded-support Gaussian": "Hu et al., 2024",
    "DPSUR": "Fu et al., 2024",
    "Generalized Gaussian": "Rinberg et al., 2025, version 1",
    "Approximations used as bounds": "Bu et al., 2020",
}


class Text(NamedTuple):
    """A claim in LaTeX."""

    place: str
    title: str
    printed: str
    case: str
    quantity: str
    correction: str


TEXT = {
    "test_rectified_fisher_information": Text(
        "Eq. 4",
        "Fisher information of the rectified Gaussian",
        r"With $u = (A - \theta)/\sigma$ and $v = (\theta - B)/\sigma$, $\sigma^2 \eta^2 ="
        r" \frac{\varphi(u)^2}{\Phi(u)} + \frac{\varphi(v)^2}{\Phi(v)} + \Phi(v) - \Phi(u)"
        r" + u\, \varphi(u) + v\, \varphi(v)$.",
        r"$\theta = 0$, $\sigma = 1$, support $[A, B] = [-1, 1]$.",
        r"$\eta^2$",
        r"The sign of $\Phi(v) - \Phi(u)$ is reversed, as in the paper's Appendix F.",
    ),
    "test_truncated_divergence": Text(
        "Eq. 6",
        "divergence of the truncated Gaussian",
        r"With $Z(x) = \Phi\left(\frac{B - x}{\sigma}\right) - \Phi\left(\frac{A - x}{\sigma}\right)$,"
        r" $D_\alpha = \frac{\alpha c^2}{2\sigma^2} + \log\left[ \frac{Z(\theta + c)}{Z(\theta)}"
        r" \left( \frac{Z((1-\alpha)(\theta + c))}{Z(\theta)} \right)^{1-\alpha} \right]$.",
        r"$\alpha = 4$, $\theta = .7$, shift $c = .5$, $\sigma = .8$, support $[-1, 1]$.",
        r"$D_\alpha$",
        r"The paper's Appendix B: $D_\alpha = \frac{\alpha c^2}{2\sigma^2} + \log\frac{Z(\theta + c)}"
        r"{Z(\theta)} + \frac{1}{\alpha - 1} \log\frac{Z(\theta + (1-\alpha) c)}{Z(\theta)}$.",
    ),
    "test_one_direction_is_not_enough": Text(
        "Algorithm 1",
        "one direction of the per-instance divergence",
        r"A step costs $D_\alpha(P_\theta \Vert P_{\theta + C})$.",
        r"Rectified, $\alpha = 4$, $\theta = -2$, shift $.5$, $\sigma = .8$, support $[-1, 1]$: the"
        r" reverse direction.",
        r"$D_\alpha$",
        "Both directions and both signs, the worst for each coordinate. (Section 4 of the paper names"
        " both directions; Algorithm 1 and Proposition 5.1 use one.)",
    ),
    "test_selection_costs_more_than_its_test": Text(
        "Theorem 5.5 and Section 5",
        "cost of an accepted update",
        "The test of an accepted update costs the Rényi divergence of a sampled Gaussian with multiplier"
        r" $\sigma_v$: at rate 1 and integer orders, $\alpha / (2 \sigma_v^2)$.",
        r"Rate 1, $\alpha = 2$, $\sigma_v = .8$, a training step that reveals no information, and a"
        " record that flips the verdict on part of the proposals.",
        r"$D_\alpha$",
        "Every trial is charged by the corner bound, or every accepted update by the law of the chosen"
        " model ([selective release](selective.md)).",
    ),
    "test_conditioned_noise_costs_the_same_in_any_unit": Text(
        "Theorem 4.1",
        "noise conditioned on acceptance",
        r"Noise $N(0, (\mu\sigma)^2)$, drawn until the sum is below $b$, costs"
        r" $\alpha \mu^2 / (2\sigma^2)$.",
        r"$\alpha = 1.5$, $\sigma = 1$, $\mu = .002$, $b = 0$ (clip .001, threshold -1). The true value"
        r" does not depend on $\mu$, so the statement is false below $\mu = .58$.",
        r"$D_\alpha$",
        r"$\alpha / (2\sigma^2)$, with which the proof ends, bounds a fixed number. The chosen model is"
        " charged by the corner bound"
        " ([Algorithm 1 on its own](selective.md#algorithm-1-on-its-own)).",
    ),
    "test_a_conversion_without_its_numerator": Text(
        "Lemma 2.7",
        "conversion from RDP",
        r"RDP $(\alpha, R)$ implies $\varepsilon = R + \ln\frac{1}{\alpha - 1}"
        r" - \frac{\ln\delta + \ln\alpha}{\alpha - 1}$. Eq. 26 of the paper contradicts it.",
        r"Gaussian noise of deviation 1, $\alpha = 5$, $\delta = 10^{-5}$.",
        r"$\varepsilon$",
        r"$\ln\frac{\alpha - 1}{\alpha}$ in place of $\ln\frac{1}{\alpha - 1}$, as in Eq. 26 (Canonne,"
        " Kamath and Steinke, 2020).",
    ),
    "test_spreading_a_change_costs_more": Text(
        "Appendix B.2",
        "independence of the dimension",
        r"The cost under $\ell_\beta$ sensitivity does not depend on the dimension.",
        r"$\beta = 4$, scale 3, $\alpha = 2$, a change of $\ell_4$ norm 1 over 1,000 coordinates:"
        " its cost over the cost in one coordinate.",
        "Cost ratio",
        r"The [allocation lemma](coordinate-wise.md#allocation-lemma): dimension-dependent under"
        r" $\ell_\beta$ clipping for $\beta > 2$, one coordinate under $\ell_2$ clipping.",
    ),
    "test_a_replaced_vote_moves_two_counts": Text(
        "Theorem 2",
        "cost of a noisy argmax (GGNMax)",
        "A noisy argmax costs as much as one noisy count.",
        r"Gaussian noise of deviation 1, two classes, one vote replaced, $\varepsilon = 1$.",
        r"$\delta$",
        "The noisy histogram: two counts for a replaced vote. For an added vote, the statement holds.",
    ),
    "test_sampled_histograms_miss_the_tail": Text(
        "Theorem 6",
        "histogram of sampled privacy losses",
        r"With probability $1 - 2 e^{-2nh^2}$, a histogram of $n$ sampled losses bounds"
        r" $\delta(\varepsilon)$ by its own $\delta(\varepsilon - a - \varepsilon_{\text{error}})$ plus"
        r" $\delta_{\text{error}} + \eta$.",
        r"Gaussian noise of deviation 1, one step, $n = 100{,}000$, $h = .01$, $\delta_{\text{error}} ="
        r" \eta = 10^{-9}$ (so $\varepsilon_{\text{error}} = .034$, $a = .069$ by Eq. 10),"
        r" $\varepsilon = 5.5$. The bound has the printed value with probability .95.",
        r"$\delta$",
        "The analytic cdf, discretised with outward rounding ([scalar noise](scalar-noise.md)).",
    ),
    "test_the_analytic_bound_forgets_the_change": Text(
        "Theorem 11",
        "analytic bound on delta",
        r"Noise of density $\propto e^{-c \lvert x \rvert^\beta}$ on a number of sensitivity 1 has"
        r" $\delta = \frac{e^{-c a^\beta}}{c\, a^{\beta - 1}}$ for any $g_0$, with $q = \frac{\beta}"
        r"{\beta - 1}$, $s = (g_0^q + 1)^{-1/q}$, $r = g_0 (\varepsilon / c)^{1/\beta} s$ and"
        r" $a = \frac{r}{1 - s}$.",
        r"$\beta = 2$, $c = 1/2$ (Gaussian noise of deviation 1), $\varepsilon = 1$, $g_0 = 1$. As"
        r" $g_0 \to 0$, the printed value tends to 0.",
        r"$\delta$",
        r"The analytic cdf. If $r > 1$, the formula is a bound with $a = \frac{r - 1}{1 - s}$ and the"
        r" density's constant $\frac{c^{1/\beta}}{2\,\Gamma(1 + 1/\beta)}$ as a factor.",
    ),
    "test_the_central_limit_is_not_a_bound": Text(
        "Approximation",
        "central limit theorem of sampled steps",
        r"$T$ steps of rate $q$ cost about as much as one Gaussian release with"
        r" $\mu = q \sqrt{T (e^{1/\sigma^2} - 1)}$. It is published as a limit, not as a bound.",
        r"$\sigma = .6$, $q = .001$, $T = 100{,}000$, $\delta = 10^{-5}$.",
        r"$\varepsilon$",
        "The privacy loss distribution, bounded from both sides"
        " ([Poisson sampling](poisson-gaussian.md)).",
    ),
}


def markdown() -> str:
    """The page."""
    table = ["| statement | quantity | as printed | true value |", "|---|---|---|---|"]
    sections = []
    for paper, claims in groupby(CLAIMS, key=lambda claim: claim.source.partition(",")[0]):
        sections.append(f"## {paper}\n\nPaper: {_PAPERS[paper]}.")
        for claim in claims:
            text = TEXT[claim.test.partition("::")[2]]
            heading = f"{text.place}: {text.title}"
            authors = _PAPERS[paper].partition(",")[0]
            cells = f"{authors}, [{heading}](#{_anchor(heading)})", text.quantity
            table.append(f"| {' | '.join(cells)} | {claim.printed:.4g} | {_true(claim)} |")
            sections.append(
                f"### {heading}\n\n- **Printed.** {text.printed}\n- **Case.** {text.case}\n"
                f"- **Values.** {text.quantity} is {claim.printed:.4g} as printed; the true value is"
                f" {_true(claim)} (`{claim.test}`).\n- **Correction.** {text.correction}"
            )
    return "\n\n".join([_INTRODUCTION.rstrip(), "\n".join(table), *sections]) + "\n"


def _true(claim: Claim) -> str:
    return f"{'at least ' * claim.at_least}{claim.true:.4g}"


def _anchor(heading: str) -> str:
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())


if __name__ == "__main__":
    PAGE.write_text(markdown())
