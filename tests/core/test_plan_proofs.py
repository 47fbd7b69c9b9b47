"""The registry of proofs: complete, unambiguous, and not to be had by deriving from what is proved."""

from collections import Counter
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

import pytest

import hush
from hush.accounting.mechanism import mechanism
from hush.accounting.steps import SampledGaussian
from hush.core.errors import Unproved
from hush.core.parts import Noise, Part, Proof
from hush.core.plan import STAGES, covered, declared, proof_note
from hush.core.randomness import RandomSource
from hush.plans import NAMES
from tests.core.proof_tables import GUARANTEES, ROOT, TABLES, ours, updated

PLAN = hush.Plan(sampling=hush.Poisson(0.1), clipping=hush.L2(2.0), noise=hush.Gaussian(3.0))
OURS = [(kind, proof) for kind, proof in declared() if ours(kind)]


def test_each_combination_is_proved_on_one_page_that_is_there_and_names_its_parts() -> None:
    proofs = Counter(each for kind, proof in OURS for each in covered(kind, proof))
    assert set(proofs.values()) == {1}
    for kind, proof in OURS:
        assert kind.__name__ in (GUARANTEES / proof.note).read_text(), f"{proof.note}: {kind}"


def test_every_part_is_proved_with_others() -> None:
    proved = {part for kind, proof in OURS for each in covered(kind, proof) for part in each}
    assert proved == {kind for stage in STAGES.values() for kind in stage.kinds.values() if ours(kind)}


@pytest.mark.parametrize("page", TABLES, ids=lambda page: str(page.parent.name))
def test_the_tables_say_what_the_parts_declare(page: Path) -> None:
    assert updated(page) == page.read_text(), "run python -m tests.core.proof_tables"


def test_the_page_of_plans_has_every_part_and_every_named_plan() -> None:
    page = (ROOT / "docs" / "plans.md").read_text()
    for stage in STAGES.values():
        for kind in filter(ours, stage.kinds.values()):
            arguments = (
                each.name if each.default is MISSING else f"{each.name}={each.default!r}"
                for each in fields(kind)
            )
            assert f"| `{kind.__name__}({', '.join(arguments)})` |" in page
    assert all(f"`{name}`" in page for name in NAMES)


def test_a_page_is_listed_in_the_index() -> None:
    index = (GUARANTEES / "README.md").read_text()
    for page in GUARANTEES.glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index, page.name


def test_a_part_derived_under_the_same_name_is_not_the_one_that_is_proved() -> None:
    for part in (PLAN.sampling, PLAN.clipping, PLAN.noise):
        kind = type(part)
        taken: type[Part] = dataclass(frozen=True, kw_only=True)(type(kind.__name__, (kind,), {}))
        stage = next(name for name, base in STAGES.items() if issubclass(kind, base))
        derived = taken(**vars(part))
        with pytest.raises(Unproved, match="no proved guarantee"):
            mechanism(replace(PLAN, **{stage: derived}))  # type: ignore[arg-type]
        assert type(taken.kinds[kind.__name__].from_plain(part.to_plain())) is kind
        assert proof_note(PLAN) == "poisson-gaussian.md"


@dataclass(frozen=True, kw_only=True)
class _Declared(Noise):
    """Declares a proof and says nothing of its law."""

    proofs: ClassVar[tuple[Proof, ...]] = (
        Proof(samplings=("Poisson", "Coordinate"), clippings=("L2",), note="bounded.md"),
    )

    def privatize(self, location: object, *, norm: float, generator: RandomSource) -> object:  # type: ignore[override]
        return location


@dataclass(frozen=True, kw_only=True)
class _Dominated(_Declared):
    proofs: ClassVar[tuple[Proof, ...]] = _Declared.proofs

    def dominating_noise(self, reference_norm: float) -> Noise:
        return hush.Gaussian(5.0 / reference_norm)


@dataclass(frozen=True, kw_only=True)
class _Power(_Declared):
    proofs: ClassVar[tuple[Proof, ...]] = _Declared.proofs

    def exponential_power(self, norm: float) -> tuple[float, float]:
        return 2.0, 3.0 * norm


@dataclass(frozen=True, kw_only=True)
class _Derived(_Dominated):
    """Declares nothing itself."""


def test_a_noise_is_charged_as_the_one_that_it_names() -> None:
    assert mechanism(replace(PLAN, noise=_Dominated())) == SampledGaussian(0.1, 2.5)
    assert mechanism(replace(PLAN, noise=_Power())) == SampledGaussian(0.1, 3.0 / 2**0.5)


def test_a_declared_proof_is_no_charge() -> None:
    """A proof that the accountant cannot carry out is refused, not charged as something near."""
    coordinates = hush.Coordinate(rate=0.5)
    for wrong in (replace(PLAN, noise=_Declared()), replace(PLAN, noise=_Power(), sampling=coordinates)):
        with pytest.raises(Unproved, match=r"no accountant computes its cost.*Define"):
            mechanism(wrong)
    with pytest.raises(Unproved, match="no proved guarantee"):
        mechanism(replace(PLAN, noise=_Derived()))
    with pytest.raises(Unproved, match="no proved guarantee"):
        mechanism(replace(PLAN, noise=_Dominated(), clipping=hush.Importance(1.0)))
