"""Registry of proofs: which parts are proved together, and on which page of docs/guarantees."""

from collections.abc import Iterator
from itertools import product

from hush.core.errors import Unproved
from hush.core.parts import Part, Proof
from hush.core.plan import STAGES, Plan

Combination = tuple[type[Part], ...]
"""Classes of a sampling, a clipping, a noise and a release."""


def declared() -> Iterator[tuple[type[Part], Proof]]:
    """Every proof there is, with the part that declares it."""
    for stage in STAGES.values():
        for kind in stage.originals.values():
            for proof in kind.proofs:
                yield kind, proof


def covered(kind: type[Part], proof: Proof) -> Iterator[Combination]:
    """The combinations that a proof declared by `kind` covers."""
    names = (proof.samplings, proof.clippings, proof.noises, proof.releases)
    return product(
        *(
            (kind,) if issubclass(kind, stage) else [stage.originals[name] for name in chosen]
            for stage, chosen in zip(STAGES.values(), names, strict=True)
        )
    )


def proof_note(plan: Plan) -> str:
    """The page of docs/guarantees that proves a plan's parts together.

    Raises:
        Unproved: where none does. It names the part to change, where one is enough.
    """
    # exact types, so that a subclass which changes what a part does is not charged as its parent
    chosen = combination(plan)
    for kind in chosen:
        for proof in kind.proofs:
            if chosen in covered(kind, proof):
                return proof.note
    proved = {each for kind, proof in declared() for each in covered(kind, proof)}
    ways = []
    for k, stage in enumerate(STAGES):
        others = chosen[:k] + chosen[k + 1 :]
        near = {each[k].__name__ for each in proved if each[:k] + each[k + 1 :] == others}
        ways += [f"the {stage} to {' or '.join(sorted(near))}"] if near else []
    way = f"Change {', or '.join(ways)}." if ways else "The README's table of parts leads to the proofs."
    raise Unproved(
        f"{names(plan)} has no proved guarantee.\n"
        f"A charge for parts that were not proved together would be a guess.\n{way}"
    )


def combination(plan: Plan) -> Combination:
    """The classes of a plan's four parts."""
    return tuple(type(getattr(plan, stage)) for stage in STAGES)


def names(plan: Plan) -> str:
    """A plan's parts by name: `Poisson x L2 x Gaussian x Always`."""
    return " x ".join(kind.__name__ for kind in combination(plan))
