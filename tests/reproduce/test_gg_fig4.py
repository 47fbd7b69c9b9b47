"""Figure 4: real data, few steps."""

import os

import numpy as np
import pytest

from hush.reproduce import gg_fig4

needs_data = pytest.mark.skipif("HUSH_DATA" not in os.environ, reason="HUSH_DATA is not set")


@needs_data
def test_a_run_learns_and_is_charged_soundly(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = gg_fig4.enough((4.0, 4.0, 0.02, 60))
    assert noise.published < 0.7 * noise.budget.epsilon, "one dimension is not enough above beta 2"
    accuracies = [gg_fig4.accuracy((noise, clip, 0)) for clip in (0.5, 2.0)]
    assert np.max(accuracies) > 0.77, "more than always answering no, which is right for 76.4%"


def test_the_figure_puts_the_best_clipping_norm_in_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Workers:
        def __init__(self, *args: object, **kwargs: object) -> None: ...

        def __enter__(self) -> "Workers":
            return self

        def __exit__(self, *args: object) -> None: ...

        map = staticmethod(map)

    monkeypatch.setattr(gg_fig4, "ProcessPoolExecutor", Workers)
    monkeypatch.setattr(gg_fig4, "DATA", "digits")
    monkeypatch.setattr(gg_fig4, "BETAS", (1.0, 2.0))
    monkeypatch.setattr(gg_fig4, "EPSILONS", (2.0,))
    monkeypatch.setattr(gg_fig4, "accuracy", lambda run: run[1] / 10 + run[2] / 100)
    figure = gg_fig4.gg_fig4()
    assert [row[1] for row in figure.rows] == [1.0, 2.0]
    for row in figure.rows:
        assert row[3] == 2.0
        assert row[4] == pytest.approx(0.21)
        assert row[6] == pytest.approx(2.0, rel=0.01), "up to beta 2 one dimension is nearly enough"
