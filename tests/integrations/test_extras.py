"""Libraries that are optional: a name for what is missing, and the way to install it."""

import sys

import pytest

from hush.integrations import require


@pytest.mark.parametrize(
    ("module", "extra"), [("lightning.pytorch", "lightning"), ("peft", "transformers")]
)
def test_what_is_missing_is_named(module: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"{module} is not installed.*'hush\[{extra}\]'"):
        require(module, extra)
