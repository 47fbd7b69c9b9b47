"""Published privacy statements that do not hold, and what is charged instead.

Every number here is recomputed by the test it names.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A published statement, a case in which it fails, and the true value."""

    source: str
    statement: str
    case: str
    printed: float
    """Value by the statement in that case."""
    true: float
    """True value in that case."""
    charged: str
    test: str
    at_least: bool = False
    """`true` is a lower bound on the true value."""


CLAIMS = (
    Claim(
        source="Bounded-support Gaussian, Eq. 4",
        statement="Fisher information of the rectified Gaussian",
        case="location 0, scale 1, support [-1, 1]",
        printed=-0.4286,
        true=0.9368,
        charged="the term Phi((theta-b)/s) - Phi((theta-a)/s) with its sign reversed, as in Appendix F",
        test="test_claims.py::test_rectified_fisher_information",
    ),
    Claim(
        source="Bounded-support Gaussian, Eq. 6",
        statement="Rényi divergence of the truncated Gaussian",
        case="order 4, location .7, shift .5, scale .8, support [-1, 1]",
        printed=21.31,
        true=0.3002,
        charged="the formula of its Appendix B",
        test="test_claims.py::test_truncated_divergence",
    ),
    Claim(
        source="Bounded-support Gaussian, Algorithm 1",
        statement="a step costs D_a(theta || theta + C)",
        case="rectified, order 4, location -2, shift .5, scale .8: the reverse direction",
        printed=0.1623,
        true=0.7514,
        charged="both directions and both signs, the worst per coordinate (Section 4 of the paper names "
        "both directions; Algorithm 1 and Proposition 5.1 use one)",
        test="test_claims.py::test_one_direction_is_not_enough",
    ),
    Claim(
        source="DPSUR, Theorem 5.5 (validation test) and Section 5",
        statement="the test of an accepted update costs the Rényi divergence of a sampled Gaussian of "
        "multiplier sigma_v: at rate 1 and integer orders a, a/(2 sigma_v^2)",
        case="rate 1, order 2, sigma_v .8, a training step that leaks nothing: a record that flips the "
        "verdict on part of the proposals",
        printed=1.5625,
        true=1.810,
        at_least=True,
        charged="per trial, by the corner bound, or per acceptance with the chosen model's law",
        test="test_claims.py::test_selection_costs_more_than_its_test",
    ),
    Claim(
        source="DPSUR, Theorem 4.1",
        statement="noise N(0, (mu sigma)^2), drawn until the sum is below b, costs a mu^2/(2 sigma^2)",
        case="order 1.5, sigma 1, mu .002, b 0 (clip .001, threshold -1); the true value does not "
        "depend on mu, so the statement is false below mu = .58",
        printed=3e-6,
        true=0.2505,
        charged="a / (2 sigma^2), with which its proof ends, bounds a fixed number; the chosen model is "
        "charged by the corner bound",
        test="test_claims.py::test_conditioned_noise_costs_the_same_in_any_unit",
    ),
    Claim(
        source="DPSUR, Lemma 2.7",
        statement="RDP of order a converts to epsilon R + ln(1/(a-1)) - (ln delta + ln a)/(a-1)",
        case="Gaussian, deviation 1, order 5, delta 1e-5: epsilon; Eq. 26 of the paper contradicts it",
        printed=3.590,
        true=4.377,
        charged="ln((a-1)/a) in place of ln(1/(a-1)), as in Eq. 26 (Canonne, Kamath and Steinke 2020)",
        test="test_claims.py::test_a_conversion_without_its_numerator",
    ),
    Claim(
        source="Generalized Gaussian, Appendix B.2",
        statement="the cost under l_beta sensitivity does not depend on the dimension",
        case="beta 4, scale 3, order 2, a change of norm 1 spread over 1000 coordinates: factor",
        printed=1.0,
        true=14.4,
        charged="the allocation lemma: dimension-dependent under l_beta, one-hot under l2 clipping",
        test="test_claims.py::test_spreading_a_change_costs_more",
    ),
    Claim(
        source="Generalized Gaussian, Theorem 2 (GGNMax)",
        statement="a noisy argmax costs what one noisy count costs",
        case="Gaussian, deviation 1, two classes, one vote replaced, epsilon 1: delta",
        printed=0.1269,
        true=0.2862,
        charged="the noisy histogram: two counts for a replaced vote. For an added vote the statement "
        "is what hush charges",
        test="test_claims.py::test_a_replaced_vote_moves_two_counts",
    ),
    Claim(
        source="Generalized Gaussian, Theorem 6",
        statement="with probability 1 - 2 exp(-2 n h^2), a histogram of n sampled privacy losses bounds "
        "delta at epsilon by its own delta at epsilon - a - epsilon_error, plus delta_error + eta",
        case="Gaussian, deviation 1, one step, n = 100,000, h .01, delta_error = eta = 1e-9 (Eq. 10: "
        "epsilon_error .034, a .069), epsilon 5.5: the bound is 2e-9 with probability .95",
        printed=2e-9,
        true=4.524e-8,
        charged="the analytic cdf, discretised pessimistically",
        test="test_claims.py::test_sampled_histograms_miss_the_tail",
    ),
    Claim(
        source="Generalized Gaussian, Theorem 11",
        statement="noise of density proportional to exp(-c|x|^beta) on a number of sensitivity 1 is "
        "(epsilon, delta)-private with delta = exp(-c a^beta)/(c a^(beta-1)), a = r/(1-s), "
        "s = (g0^q+1)^(-1/q), r = g0 (epsilon/c)^(1/beta) s, q = beta/(beta-1), any g0",
        case="beta 2, c 1/2 (Gaussian, deviation 1), epsilon 1, g0 = 1: delta; g0 near 0 gives delta 0",
        printed=0.001724,
        true=0.1269,
        charged="the analytic cdf; if r > 1, the formula with a = (r-1)/(1-s), times the density's "
        "constant c^(1/beta)/(2 Gamma(1+1/beta)), is a bound",
        test="test_claims.py::test_the_analytic_bound_forgets_the_change",
    ),
    Claim(
        source="Approximations used as bounds, central limit theorem (Bu, Dong, Long and Su, 2020)",
        statement="T steps of rate q cost about as much as a Gaussian of "
        "mu = q sqrt(T (exp(1/sigma^2) - 1)); published as a limit, not as a bound",
        case="sigma .6, rate .001, 100,000 steps, delta 1e-5: epsilon",
        printed=5.563,
        true=6.113,
        charged="the privacy loss distribution, bounded from both sides",
        test="test_claims.py::test_the_central_limit_is_not_a_bound",
    ),
)
