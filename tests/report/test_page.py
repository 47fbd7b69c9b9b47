from pathlib import Path

from hush.report.page import write_page
from hush.report.table import Table


def test_the_page_needs_nothing_beside_it(tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    plot.write_bytes(b"picture")
    page = tmp_path / "report.html"
    table = Table(header=["a"], rows=[["<1>"]])
    write_page(page, title="A & B", lead="lead", table=table, plot=plot, notes=["x < y"])
    text = page.read_text()
    assert "<title>A &amp; B</title>" in text
    assert "<li>x &lt; y</li>" in text
    assert "data:image/png;base64,cGljdHVyZQ==" in text
    assert 'src="http' not in text
