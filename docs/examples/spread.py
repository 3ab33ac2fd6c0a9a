"""Compares distances within classes with those between classes."""

from hypjax import command


def main(*, workdir: list[str], output: command.Figure | None = None) -> None:
    """Prints the mean distance of two test images of one class, and of different classes.

    Args:
        workdir: Folder of a trained run, or its URL; repeat the flag to compare runs.
        output: Figure of the distances to draw, such as spread.png.

    Example:
        python -m hypjax.analysis.spread --workdir=runs/glyphs-hyp
    """
    import numpy as np
    from matplotlib.figure import Figure

    from hypjax.analysis.hit_grid import save
    from hypjax.analysis.run_embeddings import open_runs, scored_head

    figure = Figure(layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="distance", ylabel="density")
    for run in open_runs(workdir):
        head, test = scored_head(run), run.splits.test
        points = head.embed(test)
        distances = np.asarray(head.space.distance_matrix(points, points))
        alike = test.labels[:, None] == test.labels
        within, between = distances[alike & ~np.eye(len(test), dtype=bool)], distances[~alike]
        print(f"{run.name}: {within.mean():.3f}, between classes {between.mean():.3f}")
        for pairs, name in ((within, "one class"), (between, "two classes")):
            axes.hist(pairs, 50, density=True, histtype="step", label=f"{run.name}, {name}")
    axes.legend()
    if output:
        save(figure, output)


if __name__ == "__main__":
    command.run(main)
