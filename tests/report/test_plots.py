from pathlib import Path

import numpy as np
from matplotlib.image import imread

from hush.report.plots import plot_accuracy

CURVES = {"epsilon 1": [(0.3, 0.5), (1.0, 0.8)], "epsilon 8": [(2.0, 0.7), (8.0, 0.9)]}


def test_a_picture_with_a_curve_for_each_run(tmp_path: Path) -> None:
    pictures = []
    for curves in (CURVES, {"epsilon 1": CURVES["epsilon 1"]}):
        path = tmp_path / f"{len(curves)}.png"
        plot_accuracy(path, curves, ceiling=("no privacy", 0.95), title="a title")
        pictures.append(imread(path)[..., :3])
    colours = [len(np.unique(picture.reshape(-1, 3), axis=0)) for picture in pictures]
    assert pictures[0].shape == (630, 1050, 3)
    assert colours[0] > colours[1] > 10
