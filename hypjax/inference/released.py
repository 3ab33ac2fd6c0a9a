"""Models of images and texts in files of their authors, as models of hypjax."""

import os
import pathlib
import re
import shutil
from typing import cast

from hypjax.assemble import assemble_method
from hypjax.config import default_config, validate
from hypjax.config.choices import IN_MEMORY
from hypjax.config.custom import custom_name, write_space
from hypjax.errors import UserError, explained
from hypjax.experiment.trained import TrainedModel
from hypjax.inference.save import describe, replacing_model, write_model
from hypjax.models.custom import SIZES
from hypjax.models.language_image import LanguageImage, read_language_image
from hypjax.models.tokens import MERGES, find_tokenizer, open_tokenizer
from hypjax.models.weight_files import weights_in
from hypjax.runs import files
from hypjax.settings import EncoderSettings, TextSettings
from hypjax.system import console, hub
from hypjax.system.caches import cache_folder
from hypjax.system.files import missing
from hypjax.types import TEXTS

_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")  # Of files of weights at URLs.
_IN_REPOSITORIES = ("config.json", "open_clip_config.json", "preprocessor_config.json")
_HUB_FILE = re.compile(rf"{hub.SCHEME}([\w.-]+/[\w.-]+)((?:@[^/]+)?)/(.+)")


def find_released(source: str | os.PathLike[str]) -> pathlib.Path | None:
    """Finds a file, or a folder, of weights that is no run of hypjax; None for anything else.

    `source` is a path, the URL of a file, hf://OWNER/NAME/FILE, or hf://OWNER/NAME without a model
    of hypjax. Files at URLs and on the hub are downloaded once.
    """
    location = str(source)
    if match := _HUB_FILE.fullmatch(location):
        repository, revision, name = match.groups()
        wanted = [name, *_IN_REPOSITORIES, *files.TOKENS]
        folder = hub.download(f"{hub.SCHEME}{repository}{revision}", wanted)
        if not (folder / name).is_file():
            raise UserError(f"the repository {repository} has no file {name}")
        return folder / name
    if hub.is_repository(location):
        folder = hub.download(location, ["*.safetensors*", *_IN_REPOSITORIES, *files.MODEL_FILES])
        return folder if weights_in(folder) and not files.is_published(folder) else None
    if location.startswith(("http://", "https://")) and location.endswith(_SUFFIXES):
        import pooch

        with explained(f"cannot fetch {location}", "; download it elsewhere, and give its path"):
            return pathlib.Path(pooch.retrieve(location, None, path=cache_folder() / "weights"))
    path = pathlib.Path(location).expanduser()
    if path.is_file():
        return path
    is_run = files.is_published(path) or (path / files.CHECKPOINTS).exists()
    return path if path.is_dir() and not is_run and weights_in(path) else None


def read_released(path: pathlib.Path) -> TrainedModel:
    """Reads a model of images and texts from a file or folder of weights by its authors."""
    return _trained_model(_read(path))


def _read(path: pathlib.Path) -> LanguageImage:
    if (released := read_language_image(path)) is None:
        problem = f"{path} is neither a run of hypjax nor a model of images and texts"
        raise UserError(f"{problem}; weights of images start a run: --config.model.weights={path}")
    return released


def save_released(source: str, folder: pathlib.Path, tokenizer: str | None = None) -> str:
    """Writes a released model, with its tokenizer, as a folder that `hypjax.load` reads.

    Returns a description of the model.
    """
    path = find_released(source)
    if path is None:
        here = pathlib.Path(source).expanduser()
        problem = f"{here} holds no weights" if here.exists() else missing(here)
        raise UserError(f"{problem}; name a file or folder of weights by its authors")
    released = _read(path)
    trained = _trained_model(released)
    folder_of_weights = path if path.is_dir() else path.parent
    beside = (
        pathlib.Path(tokenizer).expanduser() if tokenizer else find_tokenizer(folder_of_weights)
    )
    if beside is None:
        console.warn(f"{path} has no tokenizer beside it; name one by --tokenizer=FILE for texts")
    texts = cast(TextSettings, released.settings.towers[TEXTS].encoder)
    opened = open_tokenizer(beside, texts) if beside else None
    with replacing_model(folder) as staged:
        write_model(staged, trained, provenance={})
        for file in opened.files if opened else ():
            # The name by which `find_tokenizer` finds the file.
            usual_name = MERGES if file.suffix == ".gz" else "tokenizer.json"
            shutil.copyfile(file, staged / (file.name if file.name in files.TOKENS else usual_name))
    return describe(trained.method)


def _trained_model(released: LanguageImage) -> TrainedModel:
    """A method for a released model, whose configuration has its sizes, and the parameters."""
    settings, pixels = released.settings, released.pixels
    encoder, view = cast(EncoderSettings, settings.encoder), pixels.view
    texts = settings.towers[TEXTS]
    config = default_config(custom_name(released.kind))
    config.data.update(name=IN_MEMORY, image_size=view.side, resize=view.resize)
    config.data.update(test_view=view.test, channels=view.channels)
    config.data.update(mean=pixels.mean, std=pixels.std)
    config.optim.frozen = ()
    for name in ("architecture", *SIZES, "mlp_ratio", "norm_eps", "activation", "pooling"):
        config.model[name] = getattr(encoder, name)
    config.model.update(
        eval_pooling=encoder.pooling, head=settings.head, head_dim=settings.head_dim
    )
    for name in {*config.model.text} - {"encoder", "max_norm"}:  # For encoders of other libraries.
        config.model.text[name] = texts.head if name == "head" else getattr(texts.encoder, name)
    write_space(config, released.space)
    # Of the loss of captions, for fine-tuning: on the sphere, −d/τ is 2cos/τ and a constant.
    with config.objective.unlocked():
        config.objective.temperature = (2 if released.space.normalized else 1) / released.scale
    validate(config)
    return TrainedModel(assemble_method(config, saved_space=released.space), released.params)
