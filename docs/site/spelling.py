"""Words of the pages that hunspell's British dictionary and `words.txt` do not have.

`python docs/site/spelling.py` prints them; correct each one, or add it to `words.txt`.
"""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
ACCEPTED = Path(__file__).with_name("words.txt")
_NOT_PROSE = re.compile(
    r"```.*?```|^    [^\n]*$|`[^`]*`|\$\$.*?\$\$|\$[^$\n]*\$|\]\([^)]*\)|https?://\S+",
    re.DOTALL | re.MULTILINE,
)


def words(markdown: str) -> set[str]:
    """Words of at least three letters, outside of code, formulas and addresses."""
    return set(re.findall(r"[^\W\d_]{3,}", _NOT_PROSE.sub(" ", markdown)))


def unknown() -> dict[str, str]:
    """Each unknown word, and a page that has it."""
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    found = {word: page.name for page in pages for word in words(page.read_text())}
    found = {word: page for word, page in found.items() if word not in ACCEPTED.read_text().split()}
    checked = subprocess.run(
        ["hunspell", "-d", "en_GB", "-i", "utf-8", "-l"],
        input="\n".join(sorted(found)),
        capture_output=True,
        text=True,
        check=True,
    )
    return {word: found[word] for word in checked.stdout.split() if word in found}


if __name__ == "__main__":
    for word, page in unknown().items():
        print(f"{word}  ({page})")
