"""The published votes of 250 teachers."""

from pathlib import Path

import pytest

from hush.core.errors import DataError
from hush.data import load
from recipes.gg.votes import TEACHERS, read_votes


@pytest.mark.real_data("pate-votes", "mnist")
def test_the_votes_are_those_of_250_teachers() -> None:
    mnist, svhn = read_votes()
    assert mnist.shape == (9000, 10)
    assert svhn.shape == (26032, 10)
    for votes in (mnist, svhn):
        assert (votes.sum(1) == TEACHERS).all()
    assert (mnist.argmax(1) == load("mnist").y_test[:9000]).mean() == pytest.approx(0.9437, abs=1e-4)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pate_votes").mkdir()
    (tmp_path / "pate_votes" / "mnist_250_teachers.npy").write_bytes(b"something else")
    with pytest.raises(DataError, match="damaged or not the published one"):
        read_votes(tmp_path)
