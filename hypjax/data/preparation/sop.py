"""Stanford Online Products: photos of things for sale (Oh Song et al., CVPR 2016)."""

from collections.abc import Iterator

from hypjax.data.preparation.official import (
    Count,
    Entry,
    OfficialDataset,
    damaged_list,
    match_row,
    read_rows,
)
from hypjax.data.preparation.sources import Archive, FileTree, Source


def _list_images(tree: FileTree) -> Iterator[Entry]:
    """Lists images in the order of the lists; the super-class is the folder."""
    columns = "image_id class_id super_class_id path"
    for split in DATASET.counts:
        file = f"Ebay_{split}.txt"
        rows = read_rows(tree, file)
        if not rows or rows[0].text.split() != columns.split():
            raise damaged_list(str(tree.root / file), f"it does not begin with {columns!r}")
        for row in rows[1:]:
            pattern = r"\d+\s+(\d+)\s+\d+\s+(([^/\s]+)_final/[^/]+)"
            number, name, group = match_row(pattern, row, "1 1 1 bicycle_final/1_0.JPG").groups()
            yield Entry(split, name, f"{group}/{number}", group, row.place)


DATASET = OfficialDataset(
    name="sop",
    description="Stanford Online Products, with its own split by class.",
    counts={"train": Count(59551, 11318), "test": Count(60502, 11316)},
    source=Source(
        folders=("Stanford_Online_Products",),
        entries=("Ebay_train.txt", "Ebay_test.txt", "*_final"),
        archives=(Archive("Stanford_Online_Products.zip", unpacked="*_final"),),
        required="Stanford_Online_Products.zip",
        origin="https://cvgl.stanford.edu/projects/lifted_struct/",
    ),
    list_images=_list_images,
)
