"""Users' own images: found in folders, tables and lists, checked once, and split by class."""

from hypjax.data.photos.finding import find_photos
from hypjax.data.photos.from_python import Given, given_photos
from hypjax.data.photos.measuring import fingerprint
from hypjax.data.photos.photo import Files, Photo, files_of
from hypjax.data.photos.splitting import open_photos

__all__ = [
    "Files",
    "Given",
    "Photo",
    "files_of",
    "find_photos",
    "fingerprint",
    "given_photos",
    "open_photos",
]
