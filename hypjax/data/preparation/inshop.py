"""DeepFashion's In-Shop Clothes Retrieval: photos of clothes (Liu et al., CVPR 2016)."""

from collections.abc import Iterator

from hypjax.data.preparation.official import Archive, Count, Entry, FileTree, OfficialDataset


def _list_images(tree: FileTree) -> Iterator[Entry]:
    """Lists images in the order of the list; the super-class is the category in the path."""
    pattern = r"(img/(\S+)/[^/\s]+/[^/\s]+)\s+(\S+)\s+(train|query|gallery)"
    file = "list_eval_partition.txt"
    file = file if file in tree.files else f"Eval/{file}"
    for match in tree.rows(file, pattern, skip=2):  # Their count, and the columns' names.
        name, group, item, status = match.groups()
        path = f"Img/{name}" if f"Img/{name}" in tree.files else name
        yield Entry(status, name, item, group, path)


DATASET = OfficialDataset(
    name="inshop",
    description="In-Shop Clothes Retrieval, with its own train, query and gallery.",
    counts={
        "train": Count(25882, 3997),
        "query": Count(14218, 3985),
        "gallery": Count(12612, 3985),
    },
    folders=("Inshop_Clothes", "In-shop Clothes Retrieval Benchmark"),
    entries=("Eval/list_eval_partition.txt", "list_eval_partition.txt", "Img/img", "img"),
    archives=(Archive("Img/img.zip", "Img/img/*"), Archive("img.zip", "img/*")),
    required="Eval/list_eval_partition.txt and Img/img.zip",
    origin=(
        "the 'In-shop Clothes Retrieval Benchmark', on request at "
        "https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion.html"
    ),
    list_images=_list_images,
)
