"""Options of the benchmarks that name models and columns."""

import importlib
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("script", "option", "given", "known"),
    [
        ("models", "--models", "GPT-2;GPT-9", "BERT-base;"),
        ("models", "--precision", "float32;GPT-9", "float32,bf16"),
        ("rounding", "--models", "GPT-9", "BERT-base;"),
        ("step", "--methods", "plain;GPT-9", "plain;hush;"),
    ],
)
def test_a_name_that_is_not_there_is_refused_with_those_that_are(
    script: str,
    option: str,
    given: str,
    known: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", option, given])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(script).main()
    refused = capsys.readouterr().err.splitlines()[-1]
    assert option in refused
    assert "GPT-9' among" in refused
    assert known in refused
