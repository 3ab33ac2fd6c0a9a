"""Converts a trained model for use in other programs."""

import pathlib

from hypjax import command
from hypjax.errors import UserError
from hypjax.system import integrations

EXAMPLE = "python -m hypjax.convert --workdir=runs/glyphs-hyp --output=letters.safetensors"
FLAGS = command.Flags(
    workdir=command.RUN,
    output=command.string("File or folder to write, such as model.safetensors."),
    format=command.enum(
        "What to write: weights under timm's names; an ONNX model, from pixels to points; or a "
        "folder for sentence-transformers.",
        "timm",
        enum_values=["timm", "onnx", "sentence-transformers"],
    ),
    embedding=command.string(
        "onnx: output of the trained head, of the encoder, or of a prefix.", "head"
    ),
    precision=command.enum(
        "onnx: dtype of the encoder's weights and products.",
        "float32",
        enum_values=["float32", "float16", "int8"],
    ),
    images=command.string(
        "sentence-transformers: images that show whether cosine ranks as the run's distance does; "
        "by default the run's test images."
    ),
    features=command.boolean(
        "sentence-transformers: write features as they are, and their distance as a function."
    ),
)
# Flags of one format.
_ONLY = {"onnx": ("embedding", "precision"), "sentence-transformers": ("images", "features")}


def main() -> None:
    """Converts the run's best checkpoint or, without validation, its last."""
    FLAGS.require("workdir", "output")
    output = pathlib.Path(FLAGS.output).expanduser()
    if output.exists():
        raise UserError(f"{output} already exists; name another file or remove it")
    for name, flags in _ONLY.items():
        for flag in flags:
            if name != FLAGS.format and FLAGS[flag].present:
                raise UserError(f"--{flag} is for --format={name} alone; leave it out")
    if FLAGS.format == "timm":
        _write_timm(output)
    elif FLAGS.format == "onnx":
        FLAGS.output_file("output", ".onnx")
        from hypjax.inference.model import load

        agreement = load(FLAGS.workdir, FLAGS.embedding).to_onnx(output, FLAGS.precision)
        print(f"wrote the model, {output.stat().st_size / 1e6:.1f} MB, to {output}\n{agreement}")
    else:
        write = integrations.find("convert", FLAGS.format)
        print(write(FLAGS.workdir, output, images=FLAGS.images, features=FLAGS.features))


def _write_timm(output: pathlib.Path) -> None:
    """Writes the weights under timm's names, and says how PyTorch loads them."""
    FLAGS.output_file("output", ".safetensors")
    from hypjax.inference.run import Run
    from hypjax.models.pretrained import pools_as_timm, save_timm, timm_constructor
    from hypjax.runs.cloud_copy import reading

    with reading(FLAGS.workdir) as folder:
        _, model, params, _ = Run.saved(folder).restore_best(folder)
    save_timm(output, params, model)
    head = ", with the head as classifier," if model.head_kind == "dense" else ""
    print(f"wrote the encoder{head} to {output}; in PyTorch:")
    print(f"  model = {timm_constructor(params, model)}")
    print(f'  model.load_state_dict(safetensors.torch.load_file("{output}"))')
    if not pools_as_timm(model.encoder):
        print(f"this run uses {model.encoder.pooling} pooling, which timm's model lacks:")
        print("  pool the tokens of model.forward_features(images), then apply the classifier")


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
