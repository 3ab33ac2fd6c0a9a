"""One trained run for the tests of this folder."""

import pathlib

import pytest

from hypjax import train
from tests.helpers import small_runs

# Only the encoder's embeddings are projected.
RUN = ("run.eval_batch_size=16", "eval.pca.encoder=5")


@pytest.fixture(scope="session")
def run(photos_folder, tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("runs") / "a"
    train.train_and_evaluate(small_runs.load(photos_folder, *RUN), workdir)
    return workdir
