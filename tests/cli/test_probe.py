import json
from pathlib import Path
from typing import Any

import pytest

from hush.cli.probe import probe
from hush.core.errors import HushError
from tests.cli.command import answer


def test_probe_measures_and_leaves_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("probe", "--model", "logistic", "--records", "50", "--steps", "2", "--out", tmp_path)
    report = answer(*asked)
    assert report["dimension"] == 650
    assert report["records"] == 50
    assert 0 < report["split"]["variance_ratio"] <= 1
    assert report["notes"][0].startswith("no privacy")
    files = report.pop("files")
    assert [Path(file).name for file in files] == ["probe.csv", "probe.png", "probe.json"]
    assert json.loads((tmp_path / "probe.json").read_text()) == report
    probe(model="logistic", records=50, steps=2, out=tmp_path / "again", device="cpu")
    text = capsys.readouterr().out
    assert "must be public" in text
    assert f"--dimension 650 --linf-ratio {report['linf_cap']:.3g}" in text


def test_probe_of_noise_needs_no_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_up: dict[str, Any] = {"data": "synthetic", "shape": "1,5,5", "records": 20, "steps": 0}
    probe(**made_up, device="cpu", out=tmp_path, as_json=True)
    assert json.loads(capsys.readouterr().out)["dimension"] == 25 * 32 + 32 + 330


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"records": 1000}, "at most --records 718"),
        ({"data": "synthetic", "shape": "3,x"}, "sizes with commas"),
        ({"model": "cifar-cnn"}, "takes records of"),
        ({"learning_rate": 0.0}, "must be a finite number > 0"),
        ({"device": "nowhere"}, "--device"),
    ],
)
def test_what_cannot_be_probed_is_refused(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(HushError, match=reason):
        probe(**{"device": "cpu", "out": tmp_path / "none", **options})
    assert not (tmp_path / "none").exists()
