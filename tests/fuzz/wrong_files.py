"""Plans as data, plan files, ledgers and checkpoints that were damaged."""

from dataclasses import replace
from pathlib import Path
from random import Random

import hush
from hush.core.plan import plan_text, read_plan
from hush.training import checkpoint
from hush.training.checkpoint import NEWER
from tests.fuzz.mistake import Mistake
from tests.fuzz.plans import legal


def plain(pick: Random, folder: Path) -> Mistake:
    """A plan as plain data, damaged."""
    data = legal(pick.randrange(10**6), quick=True).plan.to_plain()
    part = pick.choice(["sampling", "clipping", "noise"])
    wrong: object = pick.choice([3, "text", None, [], [1], 0.5, True])
    match pick.randrange(5):
        case 0:
            data[part], named = wrong, repr(part)
        case 1:
            data[part], named = {**data[part], "kind": wrong}, repr(wrong)
        case 2:
            data[part], named = {**data[part], "colour": 1}, "'colour'"
        case 3:
            del data[part]
            named = repr(part)
        case _:
            data["colour"], named = {"kind": "Poisson"}, "'colour'"
    return Mistake(f"plain data {data}", lambda: hush.Plan.from_plain(data), named)


def file(pick: Random, folder: Path) -> Mistake:
    """A plan file or a ledger with a damaged line."""
    plan = legal(pick.randrange(10**6), quick=True).plan
    if pick.random() < 0.5:
        path = folder / "plan.toml"
        lines = plan_text(plan).splitlines()
        bad = pick.choice(["[", "norm = ", '"', "rate = 1", "colour = 1", "kind = 3", "\x00", "= 3"])
        place = pick.randrange(len(lines) + 1)
        path.write_text("\n".join([*lines[:place], bad, *lines[place:]]))
        return Mistake(f"{bad!r} at line {place + 1} of a plan file", lambda: read_plan(path), str(path))
    path = folder / "ledger.jsonl"
    with hush.Ledger(path) as ledger:
        for step in range(1, 4):
            ledger.charge(plan, run="r", step=step, release=str(step), dimension=8)
    lines = path.read_text().splitlines()
    place = pick.randrange(len(lines) - 1)  # the last may be torn: it counts as charged
    bad = pick.choice(["", "{}", "null", "[1]", "{", '{"charge": 3}', '{"plan": "x", "value": {}}'])
    path.write_text("\n".join([*lines[:place], bad, *lines[place + 1 :], ""]))
    return Mistake(f"{bad!r} in line {place + 1} of a ledger", lambda: hush.Ledger(path), str(path))


def resumed(pick: Random, folder: Path) -> Mistake:
    """A checkpoint that does not fit, or is damaged."""
    case = legal(pick.randrange(10**6), quick=True)
    step = case.step()
    path = folder / "checkpoint"
    checkpoint.save(path, {"step": step.state_dict()})
    content = path.read_bytes()
    match pick.randrange(4):
        case 0:
            path.write_bytes(content[: pick.randrange(len(content))])
            return Mistake("a checkpoint cut short", lambda: checkpoint.load(path), str(path))
        case 1:
            lost = pick.choice(sorted(step.state_dict().keys() - NEWER))
            state = {k: v for k, v in step.state_dict().items() if k != lost}
            return Mistake(f"a state without {lost}", lambda: step.load_state_dict(state), lost)
        case 2:
            state_ahead = {**step.state_dict(), "steps": 5}
            return Mistake(
                "a state ahead of its ledger", lambda: step.load_state_dict(state_ahead), "5 steps"
            )
        case _:
            resumed_step = replace(case, records=case.records + 1).step()
            return Mistake(
                "a state of other records",
                lambda: resumed_step.load_state_dict(step.state_dict()),
                "records",
            )
