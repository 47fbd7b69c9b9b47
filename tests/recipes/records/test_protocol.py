import pytest

from hush.core.errors import BudgetExceeded, InvalidValue
from hush_recipes.records.protocol import FIRST_FINAL_SEED, Job, Outcome, final, search


def told(job: Job[float]) -> Outcome:
    """Accuracy as the settings say; what the run was given is in the others."""
    return Outcome(accuracy=job.settings, epsilon=job.seed / 1000, multiplier=float(job.held_out))


def test_a_search_scores_held_out_records_and_final_runs_have_seeds_of_their_own() -> None:
    candidates = {1.0: {"worse": 0.5, "better": 0.75}, 3.0: {"only": 0.25}}
    found = search("s", told, "digits", candidates, held_out=9, seeds=2, device="cpu", processes=1)
    assert [row[:3] for row in found.rows] == [
        [1.0, "better", 75],
        [1.0, "worse", 50],
        [3.0, "only", 25],
    ]
    assert {row[-1] for row in found.rows} == {9.0}
    assert {row[-2] for row in found.rows} == {0.001}  # the larger of the seeds 0 and 1
    last = final("f", told, "digits", {3.0: ("only", 0.25)}, seeds=3, device="cpu", processes=1)
    assert last.rows == [
        [3.0, "only", 25.0, 0.0, "25.00, 25.00, 25.00", (FIRST_FINAL_SEED + 2) / 1000, 0.0]
    ]


def test_a_run_above_its_epsilon_is_no_record_and_searches_leave_final_seeds_alone() -> None:
    with pytest.raises(BudgetExceeded, match=r"cost 0\.102"):
        final("f", told, "digits", {0.101: ("dear", 0.5)}, seeds=3, device="cpu", processes=1)
    with pytest.raises(InvalidValue, match="at most 100"):
        search("s", told, "digits", {}, held_out=9, seeds=101, device="cpu", processes=1)
