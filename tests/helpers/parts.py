"""Compiles a train step on eight devices that share the parameters, and prints JSON.

XLA_FLAGS must provide the devices. Memory is in bytes of each device; collectives are listed by
the shapes of their results.
"""

import json
import re

from hypjax.assemble import assemble_learner
from hypjax.config import load_config
from hypjax.training.lowering import assumed_sizes, lower_step

# Deep, so that a block's parameters are few beside all others, with images that take little memory.
DEEP = ("model.architecture=vit", "model.width=128", "model.depth=12", "model.num_heads=2")
DEEP += ("model.patch_size=8", "data.image_size=16", "data.resize=16", "train.batch_size=8")


def main():
    learner = assemble_learner(load_config("glyphs.py", (*DEEP, "run.sharding=fsdp")))
    compiled = lower_step(learner, assumed_sizes(learner, 8, 2)).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    kinds = ("all-gather", "all-reduce", "reduce-scatter")
    results = {kind: re.findall(rf" = (.*?) {kind}\(", text) for kind in kinds}
    found = {kind: re.findall(r"\w\[([\d,]*)\]", " ".join(x)) for kind, x in results.items()}
    found |= {"arguments": memory.argument_size_in_bytes, "temporary": memory.temp_size_in_bytes}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
