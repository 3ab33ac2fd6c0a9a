"""The devices and the processes of one run."""

from hypjax.parallel.mesh import (
    AXES,
    EVERY_DEVICE,
    Slices,
    by_image,
    create_mesh,
    everywhere,
    over_images,
    over_own_images,
    own_rows,
    parted,
    place,
    share_out,
    slices,
    whole,
)

__all__ = [
    "AXES",
    "EVERY_DEVICE",
    "Slices",
    "by_image",
    "create_mesh",
    "everywhere",
    "over_images",
    "over_own_images",
    "own_rows",
    "parted",
    "place",
    "share_out",
    "slices",
    "whole",
]
