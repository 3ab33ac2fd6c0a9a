"""DeepFashion's In-Shop Clothes Retrieval: photos of clothes (Liu et al., CVPR 2016)."""

from collections.abc import Iterator

from hypjax.data.preparation.official import (
    Count,
    Entry,
    OfficialDataset,
    Row,
    damaged_list,
    match_row,
    read_rows,
)
from hypjax.data.preparation.sources import Archive, FileTree, Source


def _list_images(tree: FileTree) -> Iterator[Entry]:
    """Lists images in the order of the list; the super-class is the category in the path."""
    pattern = r"(img/(\S+)/[^/\s]+/[^/\s]+)\s+(\S+)\s+(\S+)"
    for row in _image_rows(tree):
        match = match_row(pattern, row, "img/WOMEN/Dresses/id_00000001/1.jpg id_00000001 train")
        name, group, item, status = match.groups()
        if status not in DATASET.counts:
            raise damaged_list(row.place, f"{status!r} is not one of {', '.join(DATASET.counts)}")
        file = f"Img/{name}" if f"Img/{name}" in tree.files else name
        yield Entry(status, name, item, group, row.place, file)


def _image_rows(tree: FileTree) -> list[Row]:
    """Reads the lines of the list after its header, whose count they must match."""
    file, columns = "list_eval_partition.txt", "image_name item_id evaluation_status"
    if f"Eval/{file}" in tree.files or file not in tree.files:
        file = f"Eval/{file}"
    rows = read_rows(tree, file)
    header = [row.text.split() for row in rows[:2]]
    if len(header) < 2 or not header[0][0].isdecimal() or header[1] != columns.split():
        place = str(tree.root / file)
        raise damaged_list(place, f"it does not begin with a count and {columns!r}")
    count, _, *rows = rows
    if int(count.text) != len(rows):
        raise damaged_list(count.place, f"it declares {count.text} images but lists {len(rows)}")
    return rows


DATASET = OfficialDataset(
    name="inshop",
    description="In-Shop Clothes Retrieval, with its own train, query and gallery.",
    counts={
        "train": Count(25882, 3997),
        "query": Count(14218, 3985),
        "gallery": Count(12612, 3985),
    },
    source=Source(
        folders=("Inshop_Clothes", "In-shop Clothes Retrieval Benchmark"),
        entries=("Eval/list_eval_partition.txt", "list_eval_partition.txt", "Img/img", "img"),
        archives=(Archive("Img/img.zip", "Img/img/*"), Archive("img.zip", "img/*")),
        required="Eval/list_eval_partition.txt and Img/img.zip",
        origin=(
            "the 'In-shop Clothes Retrieval Benchmark', on request at "
            "https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion.html"
        ),
    ),
    list_images=_list_images,
)
