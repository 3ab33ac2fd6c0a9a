"""Scores retrieval between images and their captions: Recall@K and HierarCaps."""

from hypjax import command
from hypjax.errors import UserError, counted


def main(
    *,
    workdir: str,
    tokenizer: str | None = None,
    pairs: str,
    images: str | None = None,
    squash: bool = False,
    output: command.Numbers | None = None,
) -> None:
    """Prints recalls of images that search captions, and of captions that search images.

    Args:
        workdir: Model of images and texts: a run, a file of weights, its folder or URL.
        tokenizer: File or folder of the tokenizer. Default: in the weights' folder.
        pairs: Table with columns path and caption, or HierarCaps' hierarcaps_test.csv. Of chains of
            captions, such as 'bird => blue bird', precision, recall and d_corr are printed as well.
        images: Folder of the images. Default: the table's.
        squash: Squash images to squares, as papers do for these scores. Default: the model's view.
        output: File to write the scores to, such as scores.json.

    Example:
        python -m hypjax.captions --workdir=meru_vit_s.pth --pairs=captions.csv
    """
    import numpy as np

    from hypjax.data.captions import read_captions
    from hypjax.experiment.scoring import findable
    from hypjax.inference.model import load
    from hypjax.retrieval.image_text import hierarcaps_scores
    from hypjax.retrieval.metrics import recall_at_k
    from hypjax.runs.tables import aligned

    captions = read_captions(pairs, images)
    chains, owners = captions.chains, captions.owners
    opened = load(workdir, tokenizer=tokenizer)
    if squash:
        opened = opened.squashing()
    texts = opened.embed_texts(captions.texts).vectors
    embedded = opened.embed_images(captions.images)
    for name, reason in embedded.unreadable.items():
        raise UserError(f"cannot read {name} ({reason}); mend the image, or leave out its rows")
    points, space = embedded.vectors, opened.space
    # An image's captions have its row as their label: any of them is a hit.
    rows, text_rows = np.arange(len(points)), np.repeat(owners, chains.shape[1])
    listed, ks = texts[chains.ravel()], findable((1, 5, 10), len(points), "K")
    recalls = {
        "image_to_text": recall_at_k(points, rows, listed, text_rows, ks=ks, space=space),
        "text_to_image": recall_at_k(listed, text_rows, points, rows, ks=ks, space=space),
    }
    scores = {kind: {f"recall@{k}": x for k, x in of_k.items()} for kind, of_k in recalls.items()}
    if chains.shape[1] > 1:
        root = texts[0] * 0 if space.ball() else opened.embed_texts([""]).vectors[0]
        scores["hierarcaps"] = hierarcaps_scores(points, texts, chains, owners, root, space=space)
    print(f"{counted(len(points), 'image')}, {counted(chains.size, 'caption')}, {space}:")
    lines = [(x, y, f"{score:.4f}") for x, of_x in scores.items() for y, score in of_x.items()]
    print(aligned(lines))
    if output:
        command.write_numbers(output, scores | {"images": len(points), "captions": chains.size})


if __name__ == "__main__":
    command.run(main)
