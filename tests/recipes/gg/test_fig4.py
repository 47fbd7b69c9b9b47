"""Figure 4 and Table 1: real data and few steps, or small data that is always there."""

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hush.data import public_order, tensors
from hush_recipes.gg import beta_sgd, fig4, table1
from hush_recipes.gg.beta_sgd import Run, Setting

SMALL = Setting(
    data="digits",
    title="digits",
    model="scattering-linear",
    features="scattering",
    batch=512,
    epochs=4,
    clips=(0.5,),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUSH_CACHE", str(tmp_path / "cache"))
    beta_sgd._tensors_on.cache_clear()


@pytest.mark.real_data("adult")
def test_a_run_learns_and_is_charged_soundly() -> None:
    noise = beta_sgd.enough((4.0, 4.0, 0.02, 30))
    assert noise.published < 0.7 * noise.budget.epsilon, "one dimension is not enough above beta 2"
    accuracy = beta_sgd.accuracy(Run(setting=fig4.ADULT, noise=noise, clip=2.0, seed=0))
    assert accuracy > 0.77, "more than always answering no, which is right for 76.4%"


def test_a_run_that_chooses_sees_no_test_record(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def kept(*arguments: Any, **named: Any) -> Any:
        seen.update(named, data=arguments[4])
        return SimpleNamespace(metrics=[{"accuracy": 0.5}])

    monkeypatch.setattr(beta_sgd, "train", kept)
    setting = replace(SMALL, held_out=300)
    noise = beta_sgd.enough((2.0, 4.0, 0.1, 8))
    beta_sgd.accuracy(Run(setting=setting, noise=noise, clip=0.5, seed=0, held_out=300))
    dataset = beta_sgd.inputs(setting)
    x, y, x_test, y_test = tensors(dataset)
    order = torch.from_numpy(public_order(len(y)))
    assert torch.equal(seen["evaluation"][0], x[order[:300]])
    assert torch.equal(seen["evaluation"][1], y[order[:300]])
    assert torch.equal(seen["data"][0], x[order[300:]])
    assert torch.equal(seen["data"][1], y[order[300:]])
    assert seen["steps"] == seen["logging"].every == 8, "a shorter run prefers larger norms"
    beta_sgd.accuracy(Run(setting=setting, noise=noise, clip=0.5, seed=1))
    assert torch.equal(seen["evaluation"][0], x_test)
    assert torch.equal(seen["evaluation"][1], y_test)
    assert torch.equal(seen["data"][0], x)
    assert seen["steps"] == 8


def test_the_table_says_what_published_noise_truly_costs(tmp_path: Path) -> None:
    figure = table1.gg_table1(SMALL, epsilons=(3.0,), seeds=1, processes=1)
    figure.save(tmp_path)
    with (tmp_path / "gg-table1.csv").open() as file:
        gaussian, sound, published = csv.DictReader(file)
    assert float(gaussian["true epsilon"]) == float(sound["true epsilon"]) == 3.0
    assert float(published["true epsilon"]) > 5, "thousands of coordinates, charged as one"
    assert float(published["scale"]) < float(sound["scale"])
    assert min(float(row["accuracy %"]) for row in (gaussian, sound, published)) > 50
    assert [row["paper %"] for row in (gaussian, sound, published)] == ["69.2", "", ""]


@pytest.mark.real_data("imdb")
@pytest.mark.slow
def test_the_recurrent_network_runs() -> None:
    setting = replace(fig4.IMDB, batch=25)
    noise = replace(beta_sgd.enough((2.0, 4.0, 1e-3, 2)), steps=2)
    assert 0.4 < beta_sgd.accuracy(Run(setting=setting, noise=noise, clip=0.1, seed=0)) < 0.6


def test_the_figure_at_another_learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(_: Any, setting: Setting, noises: Any) -> list[tuple[float, Any]]:
        return [(0.5, np.full(setting.seeds, setting.learning_rate)) for _ in noises]

    monkeypatch.setattr(fig4, "best_clips", kept)
    for given, used in ((None, SMALL.learning_rate), ([0.25], 0.25)):
        figure = fig4.gg_fig4(
            SMALL, betas=(2.0,), epsilons=(3.0,), seeds=1, learning_rates=given, processes=1
        )
        assert figure.rows[0][4] == used
        assert f"learning rate {used:g};" in figure.notes[0]
