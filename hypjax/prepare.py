"""Downloads, checks and packs a dataset."""

from absl import flags

from hypjax import command

EXAMPLE = "python -m hypjax.prepare --dataset=scenes"
FLAGS = flags.FlagValues()
_DATASET = flags.DEFINE_string(
    "dataset",
    None,
    "Name of the dataset: cub200, cars196, sop, inshop, omniglot, sfm120k, roxford5k, "
    "rparis6k, revisitop1m, glyphs or scenes.",
    flag_values=FLAGS,
)
_MANUAL_DIR = flags.DEFINE_string(
    "manual_dir",
    None,
    "Folder with the published archives or their extracted contents. Default: download the "
    "dataset, where its publisher allows that.",
    flag_values=FLAGS,
)
_DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Folder of prepared datasets. Default: that of TFDS.", flag_values=FLAGS
)
_ALLOW_PARTIAL = flags.DEFINE_bool(
    "allow_partial",
    False,
    "Accept an incomplete dataset; every result will say so.",
    flag_values=FLAGS,
)
_SKIP_CORRUPT = flags.DEFINE_bool(
    "skip_corrupt", False, "Skip images that cannot be read.", flag_values=FLAGS
)


def main(overrides: list[str]) -> None:
    """Prepares the dataset and prints a summary."""
    command.refuse_overrides(overrides)
    command.require(_DATASET)
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
    command.run(main, FLAGS, EXAMPLE)
