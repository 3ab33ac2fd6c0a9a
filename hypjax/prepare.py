"""Downloads, checks and packs a dataset."""

from hypjax import command
from hypjax.catalogue import DatasetName


def main(
    *,
    dataset: DatasetName,
    manual_dir: str | None = None,
    part: str | None = None,
    data_dir: str | None = None,
    allow_partial: bool = False,
    skip_corrupt: bool = False,
) -> None:
    """Prepares the dataset and prints a summary.

    Args:
        dataset: Name of the dataset.
        manual_dir: Folder with the published archives or their extracted contents. Default:
            download the dataset, where its publisher allows that.
        part: Part of the dataset to prepare in its place; every result will say so. For cars196:
            train (only cars_train and the devkit), or train_boxes (also cut to their boxes).
        data_dir: Folder of prepared datasets. Default: ~/tensorflow_datasets.
        allow_partial: Accept an incomplete dataset; every result will say so.
        skip_corrupt: Skip images that cannot be read.

    Example:
        python -m hypjax.prepare --dataset=scenes
    """
    from hypjax.data.preparation import prepare

    folder = prepare.prepare(
        dataset,
        data_dir=data_dir,
        manual_dir=manual_dir,
        part=part,
        allow_partial=allow_partial,
        skip_corrupt=skip_corrupt,
    )
    print(prepare.summary(folder))


if __name__ == "__main__":
    command.run(main)
