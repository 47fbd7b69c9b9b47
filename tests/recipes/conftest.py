import pytest

from hush_recipes.workers import CACHE


@pytest.fixture(autouse=True)
def _uncached(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads results of another run, or leaves some."""
    monkeypatch.delenv(CACHE, raising=False)
