"""Prepares a dataset: python -m hypjax.prepare --dataset=cub200 --manual_dir=~/Downloads."""

from absl import flags

from hypjax import command

_DATASET = flags.DEFINE_string(
    "dataset", None, "Name of the dataset: cub200, cars196, sop, inshop, omniglot, or glyphs."
)
_MANUAL_DIR = flags.DEFINE_string(
    "manual_dir",
    None,
    "Folder with the published archives, or with what they hold; where it is not named, what can "
    "be downloaded is.",
)
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Where datasets lie; TFDS's default otherwise.")
_ALLOW_PARTIAL = flags.DEFINE_bool(
    "allow_partial", False, "Take fewer images than the dataset has; every result will say so."
)
_SKIP_CORRUPT = flags.DEFINE_bool("skip_corrupt", False, "Leave out images that cannot be read.")


def main(overrides: list[str]) -> None:
    """Prepares it, and tells what it holds."""
    command.refuse_overrides(overrides)
    command.require("dataset")
    from hypjax.data.preparation import prepare

    builder = prepare.prepare(
        _DATASET.value,
        data_dir=_DATA_DIR.value,
        manual_dir=_MANUAL_DIR.value,
        allow_partial=_ALLOW_PARTIAL.value,
        skip_corrupt=_SKIP_CORRUPT.value,
    )
    print(prepare.summary(builder))


if __name__ == "__main__":
    command.run(main)
