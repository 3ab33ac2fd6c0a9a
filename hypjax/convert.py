"""Writes a trained run's model under timm's names, for PyTorch.

python -m hypjax.convert --workdir=runs/a --output=model.safetensors
"""

import pathlib

from absl import flags

from hypjax import command
from hypjax.errors import UserError

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a trained run, or its URL.")
_OUTPUT = flags.DEFINE_string("output", None, "File to write, such as model.safetensors.")


def main(overrides: list[str]) -> None:
    """Converts the run's best model, or its last."""
    command.require("workdir", "output")
    command.refuse_overrides(overrides)
    output = pathlib.Path(_OUTPUT.value).expanduser()
    if output.suffix != ".safetensors":
        raise UserError(f"--output is {output}; its name must end in .safetensors")
    if output.exists():
        raise UserError(f"{output} exists already; name another file, or remove it")
    from hypjax.inference.weights import restore_best
    from hypjax.models.pretrained import pools_as_timm, save_timm, timm_constructor
    from hypjax.runs.cloud_read import reading

    with reading(_WORKDIR.value) as folder:
        model, params = restore_best(folder)
    save_timm(output, params, model)
    print(f"{output} holds the encoder, and the head as classifier; in PyTorch:")
    print(f"  model = {timm_constructor(params, model)}")
    print(f'  model.load_state_dict(safetensors.torch.load_file("{output}"))')
    if not pools_as_timm(model.encoder):
        print(f"this run pools tokens by {model.encoder.pooling}, which timm's model does not:")
        print("  pool those of model.forward_features(images), and apply the classifier, yourself")


if __name__ == "__main__":
    command.run(main)
