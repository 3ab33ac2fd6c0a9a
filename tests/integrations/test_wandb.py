"""Weights & Biases, offline: what it receives of a run."""

import pytest

from hypjax.monitoring.telemetry import Telemetry

wandb = pytest.importorskip("wandb")


def test_wandb_receives_the_numbers_and_the_configuration(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged = {}
    monkeypatch.setattr(wandb.Run, "log", lambda _, *values, **step: logged.update(*values, **step))
    telemetry = Telemetry(tmp_path, 0, "birds", {"seed": 7})
    run = wandb.run
    telemetry.write(3, {"loss": 0.5, "validation": {"head": {"recall@1": 0.25}}})
    telemetry.close()
    assert (run.project, run.name, run.config["seed"]) == ("birds", tmp_path.name, 7)
    assert logged == {"train/loss": 0.5, "validation/head/recall@1": 0.25, "step": 3}
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
