"""Where the values of a configuration come from."""

from hypjax.config import flatten, override, read_config, show_origins


def rows(spec, *overrides):
    config = override(read_config(spec), overrides)
    lines = show_origins(config, spec, read_config(spec), overrides).splitlines()
    assert len(lines) == len(flatten(config))
    return {line.split()[0]: line for line in lines}


def test_each_field_has_its_value_and_origin(repository):
    spec = str(repository / "configs/glyphs.py:sph")
    found = rows(spec, "train.total_steps=70", "objective.temperature=0.3")
    assert found["config.train.total_steps"].split()[1:] == ["70", "command", "line"]
    assert found["config.objective.temperature"].split()[1:] == ["0.3", "command", "line"]
    assert found["config.data.image_size"].split()[1:] == ["32", spec]
    assert found["config.optim.clip_norm"].endswith("3.0")  # A default.
    assert "'sphere'" in found["config.objective.space"]


def test_another_loss_on_the_command_line(repository):
    found = rows(str(repository / "configs/glyphs.py:hyp"), "objective.name=triplet")
    assert found["config.objective.name"].endswith("command line")
    assert "config.objective.temperature" not in found
