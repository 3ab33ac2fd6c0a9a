"""Memory of the train step of ViT-S/16 for several batches, which is compiled but not run."""

from benchmarks import measure, programs
from benchmarks.programs import Case, table

__all__ = ["rows", "table"]


def _case(batch: int, side: int, microbatch: int = 0, remat: bool = False) -> Case:
    name = f"{batch} images of {side} pixels"
    name += f", microbatch {microbatch}" * bool(microbatch) + ", remat" * remat
    fields = ["model.weights=None", f"train.batch_size={batch}", f"data.image_size={side}"]
    fields += [f"data.resize={side}", f"run.microbatch={microbatch}", f"run.remat={remat}"]
    return Case(name, "sop.py:hyp-vit", tuple(fields))


CASES = (
    *(_case(900, 224), _case(900, 224, 300), _case(900, 224, 100)),
    *(_case(1600, 224), _case(1600, 224, 800)),
    *(_case(900, 384, 300), _case(900, 384, 300, remat=True)),
)


def rows(options: measure.Options) -> measure.Rows:
    """One row per batch, as of the suite `programs`; of glyphs alone if quick."""
    return programs.compiled_rows(CASES, options)
