"""The datasets that hypjax prepares: one row each, from which names, builders and facts follow."""

from typing import NamedTuple


class Prepared(NamedTuple):
    """Facts of a dataset that other packages than its preparation need."""

    declaration: str  # Module in `hypjax/data/preparation/`, and the name there.
    role: str = "training"  # Or 'judged': only searched, with ground truth; or 'distractors'.
    # What its coarse classes are. Of several levels, the name of a coarse class is a path.
    levels: tuple[str, ...] = ("super-class",)
    mteb: str = ""  # Task of mteb with classes of its training split.


PREPARED = {
    "glyphs": Prepared("glyphs.contents", levels=("script",)),
    "scenes": Prepared("scenes.contents"),
    "cub200": Prepared("cub200.DATASET", levels=("order", "family"), mteb="CUB200I2IRetrieval"),
    "cars196": Prepared("cars196.DATASET", levels=("body type",), mteb="StanfordCarsI2IRetrieval"),
    "sop": Prepared("sop.DATASET", mteb="SOPI2IRetrieval"),
    "inshop": Prepared("inshop.DATASET", levels=("gender", "category")),
    "omniglot": Prepared("omniglot.DATASET", levels=("alphabet",)),
    "sfm120k": Prepared("sfm120k.DATASET"),
    "grocery": Prepared("grocery.PHOTOS", levels=("department", "coarse class")),
    "grocery_icons": Prepared("grocery.ICONS", levels=("department", "coarse class")),
    "roxford5k": Prepared("revisited.ROXFORD", role="judged"),
    "rparis6k": Prepared("revisited.RPARIS", role="judged"),
    "revisitop1m": Prepared("revisited.DISTRACTORS", role="distractors"),
}
