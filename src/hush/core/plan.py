"""Plans: immutable descriptions of a private step, their proofs, and plan files."""

import hashlib
import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from hush.core.atomic_files import replace_file
from hush.core.errors import HushError, InvalidPlan, Unproved
from hush.core.parts import Always, Clipping, Noise, Part, Proof, Release, Sampling
from hush.core.value import Value, nested


@dataclass(frozen=True, kw_only=True)
class Plan(Value):
    """The four parts of a private step: Sampling x Clipping x Noise x Release.

    Args:
        sampling: Subsampling of the records.
        clipping: Clipping rule, which bounds the sensitivity of the sum.
        noise: Noise distribution.
        release: Release rule for the noisy updates.

    >>> import hush
    >>> plan = hush.Plan(
    ...     sampling=hush.Poisson(rate=0.01),
    ...     clipping=hush.L2(norm=1.0),
    ...     noise=hush.Gaussian(multiplier=1.1),
    ... )
    >>> plan == hush.Plan.from_plain(plan.to_plain())
    True
    """

    sampling: Sampling = field(metadata=nested(Sampling))
    clipping: Clipping = field(metadata=nested(Clipping))
    noise: Noise = field(metadata=nested(Noise))
    release: Release = field(default=Always(), metadata=nested(Release))

    @cached_property
    def digest(self) -> str:
        """Hash of the plan's content: equal plans have equal digests."""
        text = json.dumps(self.to_plain(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


STAGES: dict[str, type[Part]] = {
    part.__name__.lower(): part for part in (Sampling, Clipping, Noise, Release)
}
Combination = tuple[type[Part], ...]
"""Classes of the four parts of a plan."""


def declared() -> Iterator[tuple[type[Part], Proof]]:
    """All proofs, each with the part that declares it."""
    for stage in STAGES.values():
        for kind in stage.kinds.values():
            for proof in kind.proofs:
                yield kind, proof


def covered(kind: type[Part], proof: Proof) -> Iterator[Combination]:
    """Combinations of parts that a proof declared by `kind` covers."""
    names = (proof.samplings, proof.clippings, proof.noises, proof.releases)
    stages = zip(STAGES.values(), names, strict=True)
    return product(
        *(
            [kind] if issubclass(kind, stage) else [stage.kinds[name] for name in chosen]
            for stage, chosen in stages
        )
    )


def proof_note(plan: Plan) -> str:
    """Page of docs/guarantees with the proof for a plan's combination of parts.

    Raises:
        Unproved: If there is no proof. The message suggests a single part to change, if that is enough.
    """
    # exact types: a subclass may behave differently, so the parent's proof does not cover it
    chosen: Combination = tuple(type(getattr(plan, stage)) for stage in STAGES)
    for kind in chosen:
        for proof in kind.proofs:
            if chosen in covered(kind, proof):
                return proof.note
    proved = {parts for kind, proof in declared() for parts in covered(kind, proof)}
    changes = []
    for k, stage in enumerate(STAGES):
        rest = chosen[:k] + chosen[k + 1 :]
        near = {parts[k].__name__ for parts in proved if parts[:k] + parts[k + 1 :] == rest}
        changes += [f"the {stage} to {' or '.join(sorted(near))}"] if near else []
    advice = "docs/guarantees/README.md lists the proved combinations."
    if changes:
        advice = f"Change {', or '.join(changes)}."
    raise Unproved(
        f"{names(plan)} has no proved guarantee.\n"
        f"Without a proof for this combination, an epsilon would be a guess.\n{advice}"
    )


def names(plan: Plan) -> str:
    """Class names of a plan's parts, e.g. `Poisson x L2 x Gaussian x Always`."""
    return " x ".join(type(getattr(plan, stage)).__name__ for stage in STAGES)


EXAMPLE = """\
[sampling]
kind = "Poisson"
rate = 0.01

[clipping]
kind = "L2"
norm = 1.0

[noise]
kind = "Gaussian"
multiplier = 1.0
"""


def read_plan(path: Path) -> Plan:
    """Read a plan from a TOML file; errors name the invalid key."""
    try:
        return Plan.from_plain(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidPlan(
            f"cannot read the plan file {path}: {error}. It should look like this:\n\n{EXAMPLE}"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidPlan(f"{path}: not a TOML file: {error}") from None
    except HushError as error:
        raise InvalidPlan(f"{path}, key {error.key}: {error}", key=error.key) from None


def write_plan(plan: Plan, path: Path) -> None:
    """Write the plan as TOML for `read_plan`, atomically."""
    replace_file(path, plan_text(plan).encode())


def plan_text(plan: Plan) -> str:
    tables = []
    for name, part in plan.to_plain().items():
        settings = (f"{key} = {_toml(value)}" for key, value in part.items())
        tables.append("\n".join([f"[{name}]", *settings, ""]))
    return "\n".join(tables)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_toml(item)}' for key, item in value.items())}}}"
    return f'"{value}"' if isinstance(value, str) else repr(value)
