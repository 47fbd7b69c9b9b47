"""The tables of parts and of proofs in the documentation, from what the parts declare.

`python -m tests.core.proof_tables` writes them; `test_plan_proofs.py` fails where they are out of date.
"""

import re
from dataclasses import fields
from pathlib import Path

import hush
from hush.core.parts import Part
from hush.core.plan import STAGES, declared

ROOT = Path(__file__).parents[2]
GUARANTEES = ROOT / "docs" / "guarantees"
_QUESTIONS = {
    "sampling": ("which records take part?", hush.Poisson),
    "clipping": ("how much can one record contribute?", hush.L2),
    "noise": ("how is this contribution hidden?", hush.Gaussian),
    "release": ("which updates are published?", hush.Always),
}
"""Question that each part answers, and the part of plain DP-SGD."""


def ours(kind: type[Part]) -> bool:
    """Whether a part is of the library, not of a test."""
    return kind.__module__.startswith("hush.")


def parts_table() -> str:
    """The parts of plain DP-SGD with their settings."""
    lines = ["| part | question | plain DP-SGD |", "|---|---|---|"]
    for stage in STAGES:
        question, kind = _QUESTIONS[stage]
        call = f"`{kind.__name__}({', '.join(setting.name for setting in fields(kind))})`"
        lines.append(f"| {stage} | {question} | {call} |")
    return "\n".join(lines)


def proofs_table() -> str:
    """Every proved combination, with the page that proves it."""
    rows: dict[tuple[str, ...], dict[int, list[str]]] = {}
    for kind, proof in declared():
        if not ours(kind):
            continue
        names = [proof.samplings, proof.clippings, proof.noises, proof.releases]
        (own,) = (k for k, base in enumerate(STAGES.values()) if issubclass(kind, base))
        names[own] = ()
        row = (proof.note, *(", ".join(f"`{name}`" for name in chosen) for chosen in names))
        rows.setdefault(row, {}).setdefault(own, []).append(f"`{kind.__name__}`")
    lines = [f"| proof | {' | '.join(STAGES)} |", "|---" * (1 + len(STAGES)) + "|"]
    for (note, *cells), owners in sorted(rows.items()):
        for own, kinds in owners.items():
            full = [*cells[:own], ", ".join(kinds), *cells[own + 1 :]]
            title = (GUARANTEES / note).read_text().partition("\n")[0].removeprefix("# ")
            lines.append(f"| [{title}]({note}) | {' | '.join(full)} |")
    return "\n".join(lines)


TABLES = {
    ROOT / "README.md": (r"\| part \| question \|.*?(?=\n\n)", parts_table),
    GUARANTEES / "README.md": (r"\| proof \| sampling \|.*?(?=\n\n)", proofs_table),
}


def updated(path: Path) -> str:
    """A page with its table written anew."""
    pattern, table = TABLES[path]
    text, count = re.subn(pattern, lambda _: table(), path.read_text(), flags=re.DOTALL)
    assert count == 1, f"{path} has {count} tables, not one"
    return text


if __name__ == "__main__":
    assert hush.__all__, "importing the package declares its parts"
    for page in TABLES:
        page.write_text(updated(page))
