"""The devices and the processes of one run."""

from hypjax.parallel.mesh import (
    AXES,
    EVERY_DEVICE,
    Slices,
    create_mesh,
    gather,
    local_rows,
    map_images,
    map_local_images,
    parameter_shardings,
    place,
    replicated,
    shard,
    sharded,
    slices,
)

__all__ = [
    "AXES",
    "EVERY_DEVICE",
    "Slices",
    "sharded",
    "create_mesh",
    "replicated",
    "map_images",
    "map_local_images",
    "local_rows",
    "parameter_shardings",
    "place",
    "shard",
    "slices",
    "gather",
]
