from hush.report.table import Table

TABLE = Table(header=["a", "bee"], rows=[["1", "<2>"], ["three", "4"]])


def test_markdown_is_aligned() -> None:
    assert TABLE.markdown().split("\n") == [
        "| a     | bee |",
        "| ----- | --- |",
        "| 1     | <2> |",
        "| three | 4   |",
    ]


def test_html_is_escaped() -> None:
    assert "<td>&lt;2&gt;</td>" in TABLE.html()
    assert TABLE.html().count("<tr>") == 3
