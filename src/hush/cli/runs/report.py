"""`hush report`: what a run promises, as a page and as JSON."""

from pathlib import Path
from typing import Annotated

import typer

from hush.cli.options import AsJson, Quiet, ReportedDelta
from hush.cli.output import print_json
from hush.core.errors import InvalidValue


def report(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run, or a ledger.")],
    out: Annotated[
        Path | None,
        typer.Option(help="The page; report.html in the run's folder by default. JSON goes beside it."),
    ] = None,
    delta: ReportedDelta = None,
    baseline: Annotated[
        float | None, typer.Option(help="Accuracy without privacy, where it is known, as 0.95.")
    ] = None,
    audit: Annotated[
        Path | None,
        typer.Option(
            help="What `hush audit --json` printed for this run. It makes the report sensitive."
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """What a run promises, what it risks and what that rests on: one HTML page, and JSON of the same.

    With --json the facts are printed, and a page is written only where --out names it.

    Example: hush report runs/digits-1
    """
    from hush.report.facts import run_facts
    from hush.report.page import report_json, write_report
    from hush.training.progress import Progress

    if out is not None and out.suffix not in (".html", ".htm"):
        raise InvalidValue(
            f"--out {out} must end in .html: the page goes there, and JSON of the same name beside it. "
            "To print the facts, pass --json.",
            key="out",
        )
    with Progress("computing the curves", visible=not quiet):
        facts = run_facts(run_dir, delta=delta, baseline=baseline, audit=audit)
    page = out
    if page is None and not as_json:
        page = (run_dir if run_dir.is_dir() else run_dir.parent) / "report.html"
    plain = None if page is None else write_report(page, facts)
    if as_json:
        print_json(report_json(facts))
        return
    print(facts.guarantee)
    print(f"report: {page}; the same facts as JSON: {plain}")
    if facts.audit is not None:
        print("sensitive: it holds what an audit of the records found; do not publish it")
