"""Scores retrieval between images and their captions: Recall@K and HierarCaps."""

from hypjax import command
from hypjax.errors import UserError, counted


def main(
    *, model: str, pairs: str, images: str | None = None, output: command.Numbers | None = None
) -> None:
    """Prints recalls of images that search captions, and of captions that search images.

    Args:
        model: Folder or URL of a model of images and texts, as for hypjax.load.
        pairs: Table with columns path and caption, or HierarCaps' hierarcaps_test.csv. Of chains of
            captions, such as 'bird => blue bird', precision, recall and d_corr are printed as well.
        images: Folder of the images. Default: the table's.
        output: File to write the scores to, such as scores.json.

    Example:
        python -m hypjax.captions --model=meru_vit_s.pth --pairs=captions.csv
    """
    import numpy as np

    from hypjax.data.captions import read_captions
    from hypjax.experiment.scoring import findable
    from hypjax.inference.model import load
    from hypjax.retrieval.image_text import caption_recalls, hierarcaps_scores
    from hypjax.runs.tables import aligned

    captions = read_captions(pairs, images)
    opened = load(model)
    embedded = opened.embed_images(captions.images)
    for name, reason in embedded.unreadable.items():
        raise UserError(f"cannot read {name} ({reason}); mend the image, or leave out its rows")
    texts = opened.embed_texts(captions.texts).vectors
    chains, image_of_chain, space = captions.chains, captions.image_of_chain, opened.space
    image_of_text = np.repeat(image_of_chain, chains.shape[1])
    ks = findable((1, 5, 10), len(embedded), "K")
    recalls = caption_recalls(
        embedded.vectors, texts[chains.ravel()], image_of_text, ks=ks, space=space
    )
    scores = {kind: {f"recall@{k}": x for k, x in of_k.items()} for kind, of_k in recalls.items()}
    if chains.shape[1] > 1:
        root = texts[0] * 0 if space.ball() else opened.embed_texts([""]).vectors[0]
        scores["hierarcaps"] = hierarcaps_scores(
            embedded.vectors, texts, chains, image_of_chain, root, space=space
        )
    print(f"{counted(len(embedded), 'image')}, {counted(chains.size, 'caption')}, {space}:")
    for kind, values in scores.items():
        print(aligned([(kind, name, f"{value:.4f}") for name, value in values.items()]))
    if output:
        command.write_numbers(output, scores | {"images": len(embedded), "captions": chains.size})


if __name__ == "__main__":
    command.run(main)
