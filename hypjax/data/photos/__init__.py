"""Users' own images: found in folders, tables and lists, checked once, and split by class."""

from hypjax.data.photos.finding import find_photos
from hypjax.data.photos.measuring import fingerprint
from hypjax.data.photos.photo import Files, Photo, files_of
from hypjax.data.photos.splitting import open_photos

__all__ = ["Files", "Photo", "files_of", "find_photos", "fingerprint", "open_photos"]
