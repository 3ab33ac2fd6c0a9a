"""Memory of the train step for several batches, which is compiled but not run."""

import re
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks import measure
from benchmarks.programs import compiled_step, devices_of, step_config
from hypjax import parallel
from hypjax.system import console

# Batch size, image size, microbatch and remat.
STEPS = (
    (900, 224, 0, False),
    (900, 224, 300, False),
    (900, 224, 100, False),
    (1600, 224, 0, False),
    (1600, 224, 800, False),
    (900, 384, 300, False),
    (900, 384, 300, True),
)


def rows(options: measure.Options) -> measure.Rows:
    """Compiles the train step of ViT-S/16 in bfloat16 for several batches; if quick, a tiny one.

    Returns one row per batch: its settings and the fields of its `Program`, or why it does not fit.
    """
    chosen = devices_of(options.target)
    mesh = parallel.create_mesh((options.devices or len(chosen), 1), chosen)
    rows = []
    for batch, side, microbatch, remat in STEPS[:1] if options.quick else STEPS:
        console.say(f"batch {batch}, {side} pixels, microbatch {microbatch or 'none'}")
        case = {"batch": batch, "image_size": side, "microbatch": microbatch, "remat": remat}
        case["devices"] = mesh.size
        encoder = "vit" if options.quick else "vit_small_patch16_224"
        config = step_config(encoder, side, batch, samples=2)
        config.run.microbatch, config.run.remat = microbatch, remat
        try:
            program = compiled_step(config, mesh)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            used = re.search(r"Used (\S+) of (\S+) hbm", str(error))
            case["does_not_fit"] = f"{used[1]}B of {used[2]}B" if used else ""
        else:
            case |= {"arguments": program.arguments, "temporary": program.temporary}
            case |= {"collectives": program.collectives, "rounded": len(program.rounded)}
            case["products"] = program.products
        rows.append(case)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Formats a Markdown table with one row per batch."""
    titles = ("batch", "image size", "microbatch", "remat", "devices")
    lines = []
    for row in rows:
        cells = [str(row["batch"]), f"{row['image_size']} pixels", str(row["microbatch"] or "–")]
        cells += ["yes" if row["remat"] else "–", str(row["devices"])]
        if "does_not_fit" in row:
            cells += [f"does not fit: {row['does_not_fit']}", "–"]
        else:
            cells += [f"{row[kind] / 1e9:.2f} GB" for kind in ("temporary", "arguments")]
        lines.append(cells)
    return measure.markdown((*titles, "temporary memory", "arguments"), lines)
