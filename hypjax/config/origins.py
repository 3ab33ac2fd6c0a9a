"""Where the values of a configuration come from."""

from collections.abc import Sequence

from ml_collections import ConfigDict

from hypjax.config.defaults import default_config
from hypjax.config.identity import flatten


def show_origins(
    config: ConfigDict, source: str, named: ConfigDict, overrides: Sequence[str]
) -> str:
    """Lists all fields with their values, and where each value comes from.

    Args:
        config: The configuration as it is run.
        source: What the configuration was loaded from: a file with its variant, or a run's folder.
        named: What the source holds.
        overrides: Fields that were set on the command line, as 'FIELD=VALUE'.

    Returns:
        One line for each field, in the order of `docs/configuration.md`. The origin is the command
        line, the source, or empty for a default.
    """
    given = {override.partition("=")[0] for override in overrides}
    defaults, held = flatten(default_config(config.objective.name)), flatten(named)
    rows = []
    for field, value in flatten(config).items():
        origin = "command line" if field in given else ""
        if not origin and field in held and held[field] == value != defaults.get(field):
            origin = source
        elif not origin and value != defaults.get(field):
            origin = "follows another field"
        rows.append((f"config.{field}", repr(value), origin))
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    widths[1] = min(widths[1], 44)
    lines = (
        f"{field:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for field, value, origin in rows
    )
    return "\n".join(line.rstrip() for line in lines)
