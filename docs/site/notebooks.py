"""Pages of the notebooks, from the outputs that they were committed with.

With nbclient and ipykernel, `python docs/site/notebooks.py docs/notebooks/*.ipynb` runs them again.
"""

import base64
import json
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File


def on_files(files: Any, config: Any) -> Any:
    """All pages, with one for each notebook and its pictures."""
    for path in sorted((Path(config.docs_dir) / "notebooks").glob("*.ipynb")):
        text, pictures = page(path)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page, with links to the pages of notebooks; a notebook's own page links to the file."""
    if page.file.src_uri.startswith("notebooks/"):
        return markdown
    return re.sub(r"(\]\([\w./-]*notebooks/[\w-]+)\.ipynb\)", r"\1.md)", markdown)


def page(path: Path) -> tuple[str, dict[str, bytes]]:
    """Markdown of a notebook, and its pictures by their names."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        outputs = cell["outputs"]
        printed = "".join("".join(output.get("text", [])) for output in outputs)
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
        for output in outputs:
            if "image/png" in output.get("data", {}):
                name = f"{path.stem}-{len(pictures)}.png"
                pictures[name] = base64.b64decode(output["data"]["image/png"])
                parts.append(f"![Output of the cell above]({name})")
    title, rest = parts[0].split("\n", 1)
    download = f"This page is a notebook: [{path.name}]({path.name}), with the outputs of one run."
    return "\n\n".join([title, rest.strip(), download, *parts[1:]]), pictures


def run(path: Path) -> None:
    """Run a notebook in its folder and store what it prints, without progress and warnings."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, resources={"metadata": {"path": str(path.parent)}}, record_timing=False
    )
    client.execute()
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        run(Path(argument))
