"""Classifies images by the nearest text of a class (zero-shot)."""

from hypjax import command
from hypjax.errors import UserError, counted


def main(
    *,
    workdir: str,
    tokenizer: str | None = None,
    images: str,
    template: list[str] | None = None,
    classes: str | None = None,
    tree: str | None = None,
    output: command.Numbers | None = None,
) -> None:
    """Prints accuracies and, for classes in a tree, how far off predictions are.

    Args:
        workdir: Model of images and texts: a run, a file of weights, its folder or URL.
        tokenizer: File or folder of the tokenizer. Default: in the weights' folder.
        images: Images with classes, as for --images of python -m hypjax.embed.
        template: Prompt, such as 'a photo of a {}.'; repeat the flag to average several.
        classes: File with a class on each line and, after tabs, texts that describe it. Default:
            the images' classes, with a space for each _.
        tree: File with a node and, after a tab, its parent on each line. Default: coarse classes.
        output: File to write the scores to, such as scores.json.

    Example:
        python -m hypjax.zero_shot --workdir=meru_vit_s.pth --images=letters/test
        --template='the letter {}'
    """
    import numpy as np

    from hypjax.data.captions import class_texts, class_tree
    from hypjax.data.photos import find_images
    from hypjax.inference.model import load
    from hypjax.retrieval.image_text import zero_shot_scores
    from hypjax.retrieval.label_trees import LabelTree, tree_scores
    from hypjax.runs.tables import aligned
    from hypjax.types import composed

    table = find_images(images)
    texts = class_texts(classes, table.class_names)
    edges = class_tree(tree, table)
    label_tree = LabelTree.of([*texts], edges) if edges else None
    opened = load(workdir, tokenizer=tokenizer)
    points = np.array(opened.embed_texts([x[0] for x in texts.values()], template or ()).vectors)
    embedded = opened.embed_images(table)
    if not len(embedded):
        name, reason = next(iter(embedded.unreadable.items()))
        raise UserError(f"no image can be read: {name} ({reason})")
    row_of = {name: row for row, name in enumerate(texts)}
    labels = np.array([row_of[composed(name)] for name in embedded.labels.tolist()])
    for row, several in enumerate(texts.values()):
        if len(several) > 1:  # The empty text completes their prompts, which are averaged.
            prompts = [x.replace("{}", text) + "{}" for text in several for x in template or ["{}"]]
            points[row] = opened.embed_texts([""], prompts).vectors[0]
    scores, predicted = zero_shot_scores(embedded.vectors, labels, points, space=opened.space)
    scores |= tree_scores(predicted, labels, label_tree) if label_tree else {}
    counts = {"images": len(labels), "classes": len(texts), "unreadable": len(embedded.unreadable)}
    print(f"{counted(len(labels), 'image')} among {counted(len(texts), 'class')}, {opened.space}:")
    print(aligned([(name, f"{score:.4f}") for name, score in scores.items()], left=1))
    if output:
        command.write_numbers(output, scores | counts)


if __name__ == "__main__":
    command.run(main)
