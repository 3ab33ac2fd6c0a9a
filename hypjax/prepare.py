"""Downloads, checks and packs a dataset."""

from hypjax import command
from hypjax.catalogue import PREPARED

EXAMPLE = "python -m hypjax.prepare --dataset=scenes"
FLAGS = command.Flags(
    dataset=command.string(f"Name of the dataset: {', '.join(PREPARED)}."),
    manual_dir=command.string(
        "Folder with the published archives or their extracted contents. Default: download the "
        "dataset, where its publisher allows that."
    ),
    part=command.string(
        "Part of the dataset to prepare in its place; every result will say so. For cars196: train "
        "(cars_train and the devkit alone), or train_boxes (cut to the boxes as well)."
    ),
    data_dir=command.DATA_DIR,
    allow_partial=command.boolean("Accept an incomplete dataset; every result will say so."),
    skip_corrupt=command.boolean("Skip images that cannot be read."),
)


def main() -> None:
    """Prepares the dataset and prints a summary."""
    FLAGS.require("dataset")
    from hypjax.data.preparation import prepare

    names = ("data_dir", "manual_dir", "part", "allow_partial", "skip_corrupt")
    folder = prepare.prepare(FLAGS.dataset, **{name: FLAGS[name].value for name in names})
    print(prepare.summary(folder))


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
