"""One HTML page that needs nothing beside it."""

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from hush.report.table import Table

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 3rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1.5rem 0; }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid #ddd; }
img { max-width: 100%; }
code { background: #f3f3f3; padding: .1rem .3rem; }
"""


def write_page(
    path: Path, *, title: str, lead: str, table: Table, plot: Path, settings: Table, notes: Sequence[str]
) -> None:
    """Write a page with a sentence, a table of results, a plot, the settings of the runs and notes."""
    picture = base64.b64encode(plot.read_bytes()).decode()
    items = "\n".join(f"<li>{escape(note)}</li>" for note in notes)
    path.write_text(
        f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
<h1>{escape(title)}</h1>
<p>{escape(lead)}</p>
{table.html()}
<img alt="{escape(title)}" src="data:image/png;base64,{picture}">
{settings.html()}
<ul>
{items}
</ul>
</html>
""",
        encoding="utf-8",
    )
