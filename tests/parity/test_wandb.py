"""Weights & Biases itself, offline: what it recorded of a run."""

import json
import struct

import pytest

from hypjax.monitoring.telemetry import Telemetry
from tests.helpers import small_runs

wandb = pytest.importorskip("wandb")


def log_records(log):
    """The records of a log in LevelDB's format, as long as it is shorter than a block."""
    place = 7  # After the file's header.
    while place < len(log):
        length, kind = struct.unpack("<HB", log[place + 4 : place + 7])
        assert kind == 1  # A whole record.
        yield log[place + 7 : place + 7 + length]
        place += 7 + length


def test_wandb_records_the_numbers_and_the_configuration(tmp_path, monkeypatch):
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    config = small_runs.load("pictures", "run.wandb_project=birds", "seed=7")
    telemetry = Telemetry(tmp_path, 0, config)
    telemetry.write(3, {"loss": 0.5, "validation": {"head": {"recall@1": 0.25}}})
    telemetry.close()
    wandb.teardown()  # Its service writes the log, and may do so after the run has finished.

    (recorded,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = [Record.FromString(data) for data in log_records(recorded.read_bytes())]
    (run,) = (record.run for record in records if record.HasField("run"))
    assert run.project == "birds" and run.display_name == tmp_path.name
    configured = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert configured["seed"] == 7
    (history,) = (record.history for record in records if record.HasField("history"))
    logged = {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in history.item}
    assert logged["train/loss"] == 0.5 and logged["validation/head/recall@1"] == 0.25
    assert logged["_step"] == 3
