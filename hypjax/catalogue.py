"""What flags and fields name: the datasets that hypjax prepares, a row for each, and engines."""

from typing import TYPE_CHECKING, Literal, NamedTuple

# What runs encoders whose weights stay as they are on a CPU, and in which precision.
ENGINES = ("auto", "jax", "jax:bfloat16", "openvino", "openvino:bfloat16", "onnxruntime")


class Prepared(NamedTuple):
    """A dataset's declaration, and facts about it that packages other than `data` need."""

    declaration: str  # 'MODULE.NAME' in `hypjax/data/preparation/`.
    role: str = "training"  # Or 'judged': only searched, with ground truth; or 'distractors'.
    # Levels of coarse classes, coarsest first. With several, a coarse class is named by a path.
    levels: tuple[str, ...] = ("super-class",)
    mteb: str = ""  # mteb's task that has classes of the training split, if any.


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
if TYPE_CHECKING:
    DatasetName = str
    Engine = str
else:  # The values of flags.
    DatasetName = Literal[*PREPARED]
    Engine = Literal[*ENGINES]
