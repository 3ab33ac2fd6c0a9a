"""DeepFashion's In-Shop Clothes Retrieval: photos of clothes (Liu et al., CVPR 2016)."""

from collections.abc import Iterator

from hypjax.data.preparation.official import Archive, Count, Entry, FileTree, OfficialDataset


def _list_images(tree: FileTree) -> Iterator[Entry]:
    """Lists images in the published order; the coarse class is the category in the path."""
    folder = _photo_folder(tree)
    pattern = r"img(?:_highres)?/((\S+)/[^/\s]+/[^/\s]+)\s+(\S+)\s+(train|query|gallery)"
    file = "list_eval_partition.txt"
    file = file if file in tree.files else f"Eval/{file}"
    for match in tree.rows(file, pattern, skip=2):  # Skips the count, and the columns' names.
        name, category, item, split = match.groups()
        yield Entry(split, f"img/{name}", item, category, f"{folder}{name}")


def _photo_folder(tree: FileTree) -> str:
    folders = ("Img/img/", "img/", "Img/img_highres/", "img_highres/")
    return next((x for x in folders if any(name.startswith(x) for name in tree.files)), "img/")


def _note(tree: FileTree) -> str:
    note = "In-Shop with the larger photos of img_highres: not comparable with published Recall@K"
    return note if "highres" in _photo_folder(tree) else ""


DATASET = OfficialDataset(
    name="inshop",
    counts=dict(train=Count(25882, 3997), query=Count(14218, 3985), gallery=Count(12612, 3985)),
    folders=("Inshop_Clothes", "In-shop Clothes Retrieval Benchmark"),
    entries=(
        *("Eval/list_eval_partition.txt", "list_eval_partition.txt"),
        *("Img/img", "img", "Img/img_highres", "img_highres"),
    ),
    archives=(
        Archive("Img/img.zip", "Img/img/*"),
        Archive("img.zip", "img/*"),
        Archive("Img/img_highres.zip", "Img/img_highres/*|Img/img/*|Img/img.zip"),
        Archive("img_highres.zip", "img_highres/*|img/*|img.zip"),
    ),
    source=(
        "Eval/list_eval_partition.txt and Img/img.zip (or img_highres.zip) from the 'In-shop "
        "Clothes Retrieval Benchmark', on request at "
        "https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion.html"
    ),
    list_images=_list_images,
    note_of=_note,
)
