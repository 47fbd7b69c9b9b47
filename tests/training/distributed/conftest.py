"""Where workers of one test run keep what processes that one of them started have found."""

import os

import pytest

from tests.training.distributed import spawned


@pytest.fixture(scope="session", autouse=True)
def results_shared_by_workers(tmp_path_factory: pytest.TempPathFactory) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        spawned.shared_folder = tmp_path_factory.getbasetemp().parent
