"""Stanford Online Products: photos of things for sale (Oh Song et al., CVPR 2016)."""

from collections.abc import Iterator

from hypjax.data.preparation.official import Archive, Count, Entry, FileTree, OfficialDataset


def _list_images(tree: FileTree) -> Iterator[Entry]:
    """Lists images in the published order; the folder names the super-class."""
    pattern = r"\d+\s+(\d+)\s+\d+\s+(([^/\s]+)_final/[^/]+)"
    for split in DATASET.counts:
        for match in tree.rows(f"Ebay_{split}.txt", pattern, skip=1):
            class_number, name, super_class = match.groups()
            yield Entry(split, name, f"{super_class}/{class_number}", super_class)


DATASET = OfficialDataset(
    name="sop",
    counts={"train": Count(59551, 11318), "test": Count(60502, 11316)},
    folders=("Stanford_Online_Products",),
    entries=("Ebay_train.txt", "Ebay_test.txt", "*_final"),
    archives=(Archive("Stanford_Online_Products.zip", unpacked="*_final"),),
    source="Stanford_Online_Products.zip from https://cvgl.stanford.edu/projects/lifted_struct/",
    list_images=_list_images,
)
