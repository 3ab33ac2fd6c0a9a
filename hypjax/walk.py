"""Walks from an image to the root of a hierarchy, and shows the texts that it passes."""

from hypjax import command
from hypjax.errors import UserError, on_one_line


def main(
    *,
    workdir: str,
    tokenizer: str | None = None,
    image: str,
    texts: str,
    output: command.Figure | None = None,
) -> None:
    """Prints the texts that are nearest on the way from the image to the root, as MERU does.

    Args:
        workdir: Model of images and texts: a run, a file of weights, its folder or URL.
        tokenizer: File or folder of the tokenizer. Default: in the weights' folder.
        image: Image at which the walk begins.
        texts: File with a text on each line, or a table with a column of captions.
        output: Figure of the texts above the image to draw, such as walk.png.

    Example:
        python -m hypjax.walk --workdir=meru_vit_s.pth --image=photo.jpg --texts=words.txt
    """
    from hypjax.analysis.hit_grid import Picture, draw_rows
    from hypjax.data.pixels import read_image
    from hypjax.data.texts import read_texts
    from hypjax.inference.model import load
    from hypjax.retrieval.image_text import walk
    from hypjax.system import console

    names = read_texts(texts)
    opened = load(workdir, tokenizer=tokenizer)
    candidates = opened.embed_texts(names).vectors
    start = opened.gallery(image)
    if len(start) != 1:
        raise UserError(f"--image={image} must be one image that can be read; name another")
    point, space = start.vectors[0], opened.space
    root = point * 0 if space.ball() else opened.embed_texts([""]).vectors[0]
    rows = walk(point, candidates, root, space=space)
    passed = [on_one_line([*names, "[ROOT]"][row]) for row in dict.fromkeys(rows.tolist())]
    print("\n".join(passed))
    if output:
        # Titles stand above images: the walk leads upwards.
        picture = Picture(str(start.ids[0]), "\n".join(reversed(passed)), "black")
        draw_rows([[picture]], output, lambda path: read_image(path, 3))
        console.say(f"wrote {output}")


if __name__ == "__main__":
    command.run(main)
