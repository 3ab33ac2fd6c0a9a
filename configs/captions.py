"""Images and captions in one space, to search by words: heads on frozen encoders, or whole towers.

    python -m hypjax.main --config=configs/captions.py --config.data.path=photos.csv \
        --config.model.text.encoder=onnx:minilm/model.onnx

The table has the columns path and caption, and perhaps label and split; or name a folder of images
with a .txt beside each, a dataset with a column caption, a WebDataset, or images and a file of
their captions (`--config.data.captions`). Encoders of texts are onnx:FILE, with tokenizer.json
beside it, or st:NAME of sentence-transformers. Images and texts are encoded once; training the
heads takes a minute on a CPU. docs/texts.md says more.

Variants are spaces: `hyp`, the Poincaré ball (the default); `lorentz`, the hyperboloid; `sph`; and
`product` of a ball and a sphere; or `meru`, `hycoclip` and `phyclip`, whose losses and spaces are
as published; the last two also train on boxes of images (a column box). After a comma, such as
`hyp,grocery`, variants without boxes may name a source:

* `grocery`, the photographs and descriptions of groceries;
* `features`: the rows of a file are pairs, in the arrays features and text_features (or texts), and
  perhaps ids, equal for pairs of one image, and labels.

`towers=FOLDER` fine-tunes both towers of CLIP, SigLIP, MERU or the like in the model's own space,
`hyp,towers=FOLDER` in another; `--config.train.lora_rank=8` trains adapters alone. The folder is
one that `python -m hypjax.convert --format=hypjax` wrote, or that of a run.
"""

import pathlib

from ml_collections import ConfigDict

from hypjax.config import recipes, variant_error
from hypjax.errors import UserError
from hypjax.models.tokens import find_tokenizer
from hypjax.runs import files
from hypjax.runs.workdir import read_saved_config

SOURCES = ("", ",features", ",grocery")
VARIANTS = tuple(
    space + source
    for source in SOURCES
    for space in recipes.CAPTION_SPACES
    if not (source and space in recipes.BOXED or (space, source) == ("meru", ",features"))
)


def get_config(variant: str | None = None) -> ConfigDict:
    """Returns the configuration of a variant."""
    variant = variant or "hyp"
    before, towers, folder = variant.partition("towers=")
    space = before.removesuffix(",")
    if towers and space in ("", *recipes.CAPTION_SPACES):
        return _towers(space, folder)
    if variant not in VARIANTS:
        others = [f"{space},towers=FOLDER" for space in recipes.CAPTION_SPACES]
        raise variant_error(variant, [*VARIANTS, "towers=FOLDER", *others])
    space, _, source = variant.partition(",")
    config = recipes.captions(space)
    config.variant = variant
    if source == "grocery":
        config.data.update(name="grocery", test_classes=0.0, validation_classes=0.2)
    elif source:
        config.data.name = config.model.architecture = "features"
        config.model.weights = None
        config.model.width = config.model.head_dim = None  # The features' dimension.
        config.run.eval_batch_size = 4096
    return config


def _towers(space: str, folder: str) -> ConfigDict:
    path = pathlib.Path(folder).expanduser()
    if not folder or not (files.is_published(path) or (path / files.CHECKPOINTS).exists()):
        problem = f"towers={folder} names no folder of a model of hypjax"
        command = "python -m hypjax.convert --workdir=WEIGHTS --format=hypjax --output=FOLDER"
        raise UserError(f"{problem}; make one of its authors' weights: {command}")
    model = read_saved_config(path)
    if model.model.text.kind == "features" or not model.model.text.width:
        raise UserError(f"the model in {folder} has no tower of texts; name one that has")
    if "temperature" not in model.objective or find_tokenizer(path) is None:
        missing = "tokenizer" if "temperature" in model.objective else "temperature"
        advice = "convert its weights again, with --tokenizer=FILE"
        raise UserError(f"the model in {folder} has no {missing}; {advice}")
    config = recipes.caption_towers(model, space)
    config.variant = f"{space},towers".removeprefix(",")
    config.model.weights = folder
    return config
