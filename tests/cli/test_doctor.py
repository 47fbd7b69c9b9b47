"""`hush doctor` and `hush --version`, with and without optional packages."""

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import hush
from hush.cli import doctor
from tests.cli.command import answer, call

ROOT = Path(__file__).parents[2]


def checks() -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in answer("doctor")["checks"]}


def test_the_oldest_versions_are_those_of_the_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    declared = {name: dict(each.split(">=") for each in extras[name]) for name in doctor.EXTRAS}
    assert declared == doctor.EXTRAS
    assert extras.keys() - doctor.EXTRAS.keys() == {"dev", "docs"}


def test_version_names_torch_and_the_extras() -> None:
    lines = call("--version").stdout.splitlines()
    assert lines[0] == f"hush {hush.__version__}"
    assert f"torch {torch.__version__}" in lines
    for extra in doctor.EXTRAS.values():
        assert all(any(line.startswith(f"{name} ") for line in lines) for name in extra)


def test_a_private_step_runs_and_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HUSH_DATA", raising=False)
    found = checks()
    assert found["private step on cpu"]["state"] == "ok"
    assert re.match(r"[\d.]+ ms", found["private step on cpu"]["text"])
    assert found["data directory"]["state"] == "missing"
    text = call("doctor")
    assert text.returncode == 0
    assert all(f"{check['state']:8}{name}: " in text.stdout for name, check in found.items())


def test_extras_that_are_missing_or_too_old_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    have = {"scikit-learn": "1.5.2", "lightning": "2.10.0", "accelerate": "1.20", "peft": "0.21.2"}
    monkeypatch.setattr(doctor, "installed", have.get)
    found = {name: doctor._extra(name) for name in doctor.EXTRAS}
    assert found["sklearn"].state == "failed"
    assert "scikit-learn must be 1.6 or later" in found["sklearn"].text
    assert found["lightning"].state == "ok", "2.10 is later than 2.6"
    assert found["transformers"].state == "missing"
    assert "transformers not installed" in found["transformers"].text
    assert "pip install '.[transformers]'" in found["transformers"].text


def test_what_does_not_work_fails_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU that torch finds and cannot use, and a data directory that was moved."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(doctor, "has_triton", lambda: False)

    def private_step(device: str) -> str:
        if device == "cpu":
            return "1 ms"
        raise RuntimeError("CUDA error: no kernel image is available\nmore lines")

    monkeypatch.setattr(doctor, "_private_step", private_step)
    monkeypatch.setenv("HUSH_DATA", str(tmp_path / "moved"))
    result = call("doctor")
    assert result.returncode == 1
    expected = "failed  private step on cuda:0: RuntimeError: CUDA error: no kernel image is available\n"
    assert expected in result.stdout
    assert "missing Triton: not found" in result.stdout
    assert re.search(
        r"^failed  data directory: .*moved is not a directory$", result.stdout, re.MULTILINE
    )


def test_a_missing_dependency_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    result = call("doctor", "--json")
    assert result.returncode == 1
    states = {check["name"]: check["state"] for check in json.loads(result.stdout)["checks"]}
    assert states["private step on cpu"] == "failed"
    assert states["transformers"] == "ok"


def test_files_of_the_data_directory_are_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "adult").mkdir()
    monkeypatch.setenv("HUSH_DATA", str(tmp_path))
    assert doctor._data() == doctor.Check("data directory", "ok", f"{tmp_path}: adult")
