"""Data parallelism over the devices and processes of one run."""

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
    "create_mesh",
    "gather",
    "local_rows",
    "map_images",
    "map_local_images",
    "parameter_shardings",
    "place",
    "replicated",
    "shard",
    "sharded",
    "slices",
]
