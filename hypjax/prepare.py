"""Downloads, checks and packs a dataset."""

from hypjax import command

EXAMPLE = "python -m hypjax.prepare --dataset=scenes"
FLAGS = command.Flags()
_DATASET = FLAGS.string(
    "dataset",
    "Name of the dataset: grocery, grocery_icons, cub200, cars196, sop, inshop, omniglot, sfm120k, "
    "roxford5k, rparis6k, revisitop1m, glyphs or scenes.",
)
_MANUAL_DIR = FLAGS.string(
    "manual_dir",
    "Folder with the published archives or their extracted contents. Default: download the "
    "dataset, where its publisher allows that.",
)
_PART = FLAGS.string(
    "part",
    "Part of the dataset to prepare in its place; every result will say so. For cars196: train "
    "(cars_train and the devkit alone), or train_boxes (cut to the boxes as well).",
)
_DATA_DIR = FLAGS.string("data_dir", "Folder of prepared datasets. Default: that of TFDS.")
_ALLOW_PARTIAL = FLAGS.boolean(
    "allow_partial", "Accept an incomplete dataset; every result will say so."
)
_SKIP_CORRUPT = FLAGS.boolean("skip_corrupt", "Skip images that cannot be read.")


def main() -> None:
    """Prepares the dataset and prints a summary."""
    command.require(_DATASET)
    from hypjax.data.preparation import prepare

    builder = prepare.prepare(
        _DATASET.value,
        data_dir=_DATA_DIR.value,
        manual_dir=_MANUAL_DIR.value,
        part=_PART.value,
        allow_partial=_ALLOW_PARTIAL.value,
        skip_corrupt=_SKIP_CORRUPT.value,
    )
    print(prepare.summary(builder))


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
