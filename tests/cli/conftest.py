"""A plan file for the commands that take one."""

from pathlib import Path

import pytest

from hush.core.plan import EXAMPLE


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    """The example plan, written down."""
    path = tmp_path / "plan.toml"
    path.write_text(EXAMPLE)
    return path
