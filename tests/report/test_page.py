from pathlib import Path

from hush.report.page import write_page
from hush.report.table import Table


def test_the_page_needs_nothing_beside_it(tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    plot.write_bytes(b"picture")
    page = tmp_path / "report.html"
    table = Table(header=["a"], rows=[["<1>"]])
    settings = Table(header=["setting", "value"], rows=[["rate", "<.25>"]])
    given = {"lead": "lead", "table": table, "plot": plot, "settings": settings}
    write_page(page, title="A & B", notes=["x < y"], **given)  # type: ignore[arg-type]
    text = page.read_text()
    assert "<title>A &amp; B</title>" in text
    assert "<li>x &lt; y</li>" in text
    assert "data:image/png;base64,cGljdHVyZQ==" in text
    assert "<td>rate</td><td>&lt;.25&gt;</td>" in text
    assert 'src="http' not in text
