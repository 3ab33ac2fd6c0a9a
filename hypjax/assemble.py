"""Assembles what runs: the one module that reads a configuration, from top to bottom.

`assemble_method` makes what is trained and scored whatever the images; `assemble` adds the images
and devices; `assemble_training` adds batches, sizes and the learner. The code below these objects
takes typed settings.
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from hypjax import parallel
from hypjax.config import flatten, set_fields
from hypjax.config.choices import IN_MEMORY, PARTS, freezes_encoder, is_captioned
from hypjax.config.custom import code_hash, custom_name
from hypjax.config.fitting import fit_to_features, fit_to_images
from hypjax.config.rules import refuse, validate_relations
from hypjax.config.settings import (
    loss_settings,
    model_settings,
    sampling_settings,
    schedule_settings,
    watch_settings,
)
from hypjax.data import opening, photos
from hypjax.data.captions import captioned_features, captioned_images, captioned_pairs
from hypjax.data.dataset import Dataset, Decoding
from hypjax.data.device_cache import plan_layout
from hypjax.data.repeats import validation_task
from hypjax.data.sentences import TextInputs
from hypjax.data.splits import HeldOutClasses, Splits, without_boxes
from hypjax.data.tables import write_table
from hypjax.data.views import TRAIN_VIEWS
from hypjax.errors import UserError
from hypjax.experiment import engines
from hypjax.experiment.captions import (
    caption_facts,
    caption_parents,
    caption_tokens,
    caption_vectors,
    with_phrases,
)
from hypjax.experiment.embedding import DatasetEmbedder, part_of
from hypjax.experiment.experiment import Experiment
from hypjax.experiment.method import Method
from hypjax.experiment.scoring import findable
from hypjax.geometry import Space
from hypjax.geometry.learned import CURVATURES, bounds, initial_scalars
from hypjax.geometry.registry import create_space
from hypjax.models import compute_dtype, create_embedder
from hypjax.models.colours import ColourChanges
from hypjax.models.custom import CUSTOM_ENCODERS, is_custom
from hypjax.models.embedder import pooled_by
from hypjax.models.text import TextTransformer
from hypjax.models.tokens import find_tokenizer
from hypjax.objectives import Group, SavedObjective, create_objective
from hypjax.objectives.create import BUILT_IN, declaration
from hypjax.objectives.matryoshka import trained_prefixes
from hypjax.runs.workdir import saved_config, saved_space
from hypjax.settings import Embedding, EncoderSettings, Pixels, Scoring, Start, Step
from hypjax.system.caches import cache_folder
from hypjax.training.learner import Learner
from hypjax.training.lora import Lora
from hypjax.training.optim import configured_optimizer, layer_rates, learning_rate
from hypjax.training.setup import (
    Training,
    check_paths,
    create_plans,
    highest_frozen_block,
    problem_sizes,
    without_single_images,
)
from hypjax.types import TEXTS


def assemble_method(
    config: ConfigDict, *, device: jax.Device | None = None, saved_space: Space | None = None
) -> Method:
    """Assembles a model and its objective, as a validated configuration describes them.

    Args:
        config: The configuration.
        device: The device that computes; by default JAX's.
        saved_space: The `score_space` of a saved run, whose custom loss may not be known here.
    """
    config = fit_to_features(config)
    fields, model, run = config.objective.to_dict(), config.model, config.run
    scoring = config.eval
    settings = model_settings(config, evaluating=True)
    assert isinstance(settings.encoder, EncoderSettings)  # Texts are a further tower.
    own_encoder = CUSTOM_ENCODERS.get(model.architecture)
    return Method(
        fields=flatten(config),
        model=create_embedder(settings, device=device),
        pixels=Pixels(settings.encoder.view, tuple(config.data.mean), tuple(config.data.std)),
        objective=SavedObjective(saved_space)
        if saved_space is not None and config.objective.name not in BUILT_IN
        else create_objective(loss_settings(config)),
        scalars=initial_scalars(fields),
        scalar_bounds=bounds(fields),
        initial_spaces=_spaces(scoring, fields),
        embedding=Embedding(
            tuple(map(float, scoring.scales)), run.eval_batch_size, run.workers, run.engine
        ),
        scoring=Scoring(
            metrics=scoring.metrics,
            ks=scoring.ks,
            pca=scoring.pca.to_dict(),
            whitens=scoring.whiten,
            expansion=scoring.expansion,
            expansion_alpha=scoring.expansion_alpha,
            reranks=scoring.rerank,
        ),
        start=Start(model.weights, model.load_head, model.head_init),
        code=code_hashes(config),
        own_encoder="" if own_encoder is None else custom_name(own_encoder),
    )


def code_hashes(config: ConfigDict) -> dict[str, str]:
    """Hashes of a user's "loss" and "encoder", if the configuration names such."""
    own_encoder = CUSTOM_ENCODERS.get(config.model.architecture)
    code = {"loss": declaration(config.objective.name).code, "encoder": own_encoder}
    return {name: code_hash(value) for name, value in code.items() if value is not None}


def _spaces(scoring: ConfigDict, fields: Mapping[str, Any]) -> dict[str, Space | None]:
    """The spaces of `eval.spaces` by name, see `Method`, with prefixes of evaluation and loss."""
    prefix_dims, names_of = sorted({*scoring.prefixes, *trained_prefixes(fields)}), scoring.spaces
    spaces: dict[str, Space | None] = {}
    for part in ("head", *(f"head@{dim}" for dim in prefix_dims), "encoder"):
        for i, name in enumerate(names_of[part_of(part)]):
            space = None if name == "objective" else create_space({**fields, "space": name})
            spaces[part if i == 0 else f"{part}:{name}"] = space
    return spaces


def saved_method(folder: pathlib.Path) -> Method:
    """Assembles the method of a run in a local folder."""
    return assemble_method(saved_config(folder), saved_space=saved_space(folder))


def assemble(
    config: ConfigDict,
    images: Dataset | None = None,
    *,
    method: Method | None = None,
    parts: Sequence[str] = PARTS,
    name: str = "",
    workdir: str = "",
    folder: pathlib.Path | None = None,
) -> Experiment:
    """Assembles an experiment: a method on the images and devices of a validated configuration.

    Args:
        config: The configuration.
        images: Images in memory, if the configuration names such.
        method: The method of this configuration, if it is assembled already.
        parts: Parts of the model to score, "head" and "encoder".
        name: Name in reports.
        workdir: Folder or URL of a trained run.
        folder: The run's local folder, which has the tokenizer of a tower of texts once the run has
            begun; before, `model.weights` has it.
    """
    config = fit_to_features(config)
    method = method or assemble_method(config)
    splits, mesh = open_splits(config, images), _mesh(config)
    _check_depth(config, splits)
    provenance = {
        **method.code,
        **splits.provenance,
        "precision": compute_dtype(config.model.precision).name,
    }
    engines.choose(method.embedding.engine, mesh)  # Refuses one that is missing.
    embedder = _embedder(config, method, splits, mesh)
    texts = parents = None
    if _is_captioned(config):
        texts, parents, facts = _captions(config, splits, method, folder)
        provenance |= facts
    return Experiment(
        method, splits, mesh, embedder, provenance, name, workdir, parts, texts, parents
    )


def saved_experiment(
    folder: pathlib.Path, overrides: Sequence[str] = (), *, name: str = "", workdir: str = ""
) -> Experiment:
    """Assembles the experiment of a run in a local folder.

    `hypjax.runs.cloud_copy.reading` copies a remote folder. Overrides may say where images are now.
    """
    config = saved_config(folder, overrides)
    method = assemble_method(config, saved_space=saved_space(folder))
    return assemble(config, method=method, name=name, workdir=workdir, folder=folder)


def _is_captioned(config: ConfigDict) -> bool:
    return is_captioned(config.objective.name)


def _captions(
    config: ConfigDict, splits: Splits, method: Method, folder: pathlib.Path | None
) -> tuple[TextInputs, Mapping[str, Sequence[str]] | None, Mapping[str, str]]:
    """What a tower takes of all captions, more general texts of the training ones, and hashes."""
    encoder, dataset = config.model.text.encoder, config.data.name
    parents = caption_parents(splits.training_images()) if config.objective.phrases else None
    tower = method.model.towers[TEXTS].encoder
    if isinstance(tower, TextTransformer):
        weights = config.model.weights
        if weights is None:
            refuse("model.weights", weights, "a folder with the tokenizer of the texts")
        vocabulary = folder and find_tokenizer(folder)
        vocabulary = vocabulary or pathlib.Path(weights).expanduser()
        tokens = caption_tokens(splits, dataset, parents or {}, vocabulary, tower.settings)
        return tokens, parents, caption_facts(splits, None, tokens)
    vectors = caption_vectors(splits, dataset, encoder)
    if parents is not None:
        vectors = with_phrases(vectors, parents, encoder)
    dim, width = len(next(iter(vectors.values()))), config.model.text.width
    if dim != width:
        refuse("model.text.width", width, f"{dim}, the dimension of the texts' vectors")
    return vectors, parents, caption_facts(splits, encoder)


def _embedder(config: ConfigDict, method: Method, splits: Splits, mesh: Mesh) -> DatasetEmbedder:
    """Embeds datasets; caches the embeddings of a frozen encoder."""
    features = programs = None
    if not is_custom(method.model.encoder):
        folder = pathlib.Path(config.run.cache_dir or cache_folder()).expanduser()
        features, programs = folder / "features", folder / "programs"
    return DatasetEmbedder(
        method.model,
        method.pixels,
        mesh,
        method.embedding,
        _cached_images(config, method, splits),
        features,
        programs,
        is_final=freezes_encoder(config.optim.frozen),
    )


def _cached_images(config: ConfigDict, method: Method, splits: Splits) -> list[Dataset]:
    """The datasets that a frozen encoder embeds once."""
    if not (freezes_encoder(config.optim.frozen) and method.model.encoder.takes_pixels):
        return []
    images = [splits.test, splits.gallery, splits.validation]
    needs_train = config.train.cached_features or config.train.sampling == "tuples"
    if needs_train or any(method.scoring.pca.values()) or method.start.head_init == "pca":
        images.append(splits.train)
    return [*filter(None, images)]


def assemble_training(
    config: ConfigDict,
    images: Dataset | None = None,
    *,
    method: Method | None = None,
    name: str = "",
    workdir: str = "",
) -> Training:
    """Assembles a training: an experiment, with sizes fitted to its images, and a learner.

    Computes no parameters. `workdir` is a local folder; other arguments are as for `assemble`.
    """
    if (width := config.model.text.width) and not _is_captioned(config):
        refuse("model.text.width", width, "0 unless objective.name is captions")
    folder = pathlib.Path(workdir) if workdir else None
    experiment = assemble(config, images, method=method, name=name, workdir=workdir, folder=folder)
    training = _training(config, experiment)
    if config.run.cache != "device":
        return training
    layout = plan_layout(training.plans.sizes, training.learner.mesh, config.data.channels)
    return dataclasses.replace(training, layout=layout)


def saved_training(folder: pathlib.Path, experiment: Experiment) -> Training:
    """Assembles the training of a run in a local folder, whose experiment is assembled already.

    It is for reading states, not for training: it has no layout of a device cache.
    """
    config = saved_config(folder)
    set_fields(config, experiment.method.fields)  # With its overrides.
    return _training(config, experiment)


def _training(config: ConfigDict, experiment: Experiment) -> Training:
    config, method, splits = fit_to_features(config), experiment.method, experiment.splits
    encoder_dim, head_dim = method.model.encoder.dim, method.model.head_dim
    if method.start.head_init == "pca" and head_dim > encoder_dim:
        rule = f"at most {encoder_dim}, the encoder's dimension, if model.head_init is pca"
        refuse("model.head_dim", head_dim, rule)
    sampling, is_cached = sampling_settings(config), config.train.cached_features
    train = without_single_images(splits.training_images(), sampling, cached=is_cached)
    if config.train.patience and splits.validation is None:
        refuse("train.patience", config.train.patience, f"0: {splits.no_validation}")
    splits = splits._replace(train=train)
    fitted = fit_to_images(config, train.labels, len(train.whole()))
    if fitted is not config:
        validate_relations(fitted)
        # An objective may depend on the sizes of batches.
        config, objective = fitted, create_objective(loss_settings(fitted))
        sampling = sampling_settings(config)
        method = dataclasses.replace(method, fields=flatten(config), objective=objective)
    cached = _cached_images(config, method, splits)
    embedder = dataclasses.replace(experiment.embedder, cached=cached)
    experiment = dataclasses.replace(experiment, method=method, splits=splits, embedder=embedder)
    crop = TRAIN_VIEWS[config.data.train_view](config.data.to_dict())
    plans = create_plans(train, sampling, crop, name=config.data.name)
    sizes = problem_sizes(method.model, train, sampling, plans)
    # Lets the objective reject sizes that do not suit it, before the run has a folder.
    jax.eval_shape(lambda: method.objective.init(jax.random.key(0), sizes))
    learner = _learner(config, method, experiment.mesh)
    check_paths(learner, sizes, [group for group, *_ in config.optim.groups])
    if is_cached and not freezes_encoder(config.optim.frozen):
        learner = dataclasses.replace(learner, cached_block=highest_frozen_block(learner, sizes))
    return Training(
        experiment=experiment,
        images=train,
        learner=learner,
        sizes=sizes,
        plans=plans,
        layout=None,
        schedule=schedule_settings(config),
        watch=watch_settings(config, sampling),
    )


def assemble_learner(config: ConfigDict, mesh: Mesh | None = None) -> Learner:
    """Assembles what a train step is compiled from, without images."""
    device = None if mesh is None else mesh.devices.flat[0]
    return _learner(config, assemble_method(config, device=device), mesh or _mesh(config))


def _mesh(config: ConfigDict) -> Mesh:
    return parallel.create_mesh(config.run.mesh, sharding=config.run.sharding)


def _learner(config: ConfigDict, method: Method, mesh: Mesh) -> Learner:
    """The learner of a method, whose model pools as in training."""
    data, optim, train, fields = config.data, config.optim, config.train, config.optim.to_dict()
    model, objective = pooled_by(method.model, config.model.pooling), method.objective
    rates = [config.objective.c_rate if name in CURVATURES else 1.0 for name in method.scalars]
    groups = [
        Group((f"log_{name}",), rate, weight_decay=0.0)
        for name, rate in zip(method.scalars, rates, strict=True)
    ]
    # By the code of Radenović et al.: at SfM-120k's rate alone, the exponent would hardly move.
    gem = [Group(("gem_exponent",), 10.0, weight_decay=0.0)] if config.model.learn_gem else []
    layer_rate = None
    if optim.layer_decay != 1:
        layer_rate = layer_rates(model.encoder.layers, optim.layer_decay, model.head_kind != "none")
    schedule = learning_rate(fields, train.total_steps)
    colours = ColourChanges(data.colour_jitter, data.grey, data.blur)
    return Learner(
        model=model,
        objective=objective,
        optimizer=configured_optimizer(
            fields,
            schedule,
            objective.groups,
            groups,
            gem,
            layer_rate=layer_rate,
            head_warmup_steps=train.head_warmup_steps,
        ),
        schedule=schedule,
        frozen=tuple(optim.frozen),
        lora=Lora(train.lora_rank, train.lora_alpha, tuple(train.lora_targets))
        if train.lora_rank
        else None,
        pixels=method.pixels,
        colour_changes=colours if any((*data.colour_jitter, data.grey, data.blur)) else None,
        scalars=method.scalars,
        scalar_bounds=method.scalar_bounds,
        step=Step(
            seed=config.seed,
            microbatch=config.run.microbatch,
            drop_path=config.model.drop_path,
            ema_decay=train.ema_decay,
            skips_nonfinite=train.on_nonfinite == "skip",
            gradient_covariance=config.run.gradient_covariance,
            takes_features=train.cached_features,
        ),
        mesh=mesh,
    )


def choose_dataset(config: ConfigDict, dataset: Any) -> Dataset | None:
    """Chooses a dataset from Python in a configuration; returns its images if they are in memory.

    A dataset of paths becomes a table in a file, which any process can read.
    """
    if isinstance(dataset, str | os.PathLike):
        name, path, images = "folder", os.fspath(dataset), None
    else:
        read = captioned_pairs if _is_captioned(config) else photos.labelled_images
        images = read(dataset)
        name, path = IN_MEMORY, None
        if images.path(0):  # Then all images are files, not only the first.
            name, path, images = "folder", str(write_table(images)), None
        else:
            images = opening.measured(images, skip_corrupt=config.data.skip_corrupt)
    with config.ignore_type():
        config.data.update(name=name, path=path)
    return images


def open_splits(config: ConfigDict, images: Dataset | None = None) -> Splits:
    """Opens a run's dataset and the datasets of `eval.benchmarks`.

    `images` are those in memory, if the configuration names such. Raises `UserError` if a dataset
    is unknown, not prepared, not readable, or has too few classes.
    """
    data, run = config.data, config.run
    cache_dir = None
    if run.cache == "host":
        cache_dir = pathlib.Path(run.cache_dir or cache_folder() / "decoded").expanduser()
    decoding = Decoding(data.channels, fast=data.decoder == "fast", cache_dir=cache_dir)
    held_out = HeldOutClasses(
        data.test_classes, data.validation_classes, data.split_seed, data.split
    )
    if data.name == IN_MEMORY:
        if images is None:
            raise UserError("this run's images were in memory; pass them again as dataset=")
        opened = opening.open_images("the dataset", images, decoding, held_out)
    elif data.name == "folder":
        list_images = photos.list_images
        if _is_captioned(config):
            list_images = functools.partial(captioned_images, captions=data.captions)
        opened = opening.open_photos(
            data.path,
            decoding,
            held_out,
            data.exclude,
            skip_corrupt=data.skip_corrupt,
            list_images=list_images,
        )
    elif data.name == "features":
        read = captioned_features if _is_captioned(config) else photos.read_vectors
        opened = opening.open_features(data.path, data.labels, held_out, read=read)
    else:
        opened = opening.open_prepared(
            data.name,
            run.data_dir,
            decoding,
            held_out,
            data.captions,
            captioned=_is_captioned(config),
        )
    benchmarks, distractors = config.eval.benchmarks, config.eval.distractors
    opened = opening.with_benchmarks(opened, benchmarks, decoding, run.data_dir, distractors)
    notes = list(opened.notes)
    if decoding.fast:
        notes.append("decoded by the fast option: pixels differ a little from the protocol's")
    if data.stored_side is not None:
        scaled = f"training images' shorter sides are scaled down to {data.stored_side} pixels"
        notes.append(f"{scaled} before they are cropped: crops are blurrier than the protocol's")
    if opened.train is not None and config.train.sampling != "boxes":
        opened = opened._replace(train=without_boxes(opened.train))
    return opened._replace(notes=tuple(notes))


def _check_depth(config: ConfigDict, splits: Splits) -> None:
    """Raises a `UserError` if searches need more neighbours than there are images to find."""
    tasks = [*splits.tasks.values(), *map(validation_task, filter(None, [splits.validation]))]
    if not tasks:
        return
    num_items = min(task.num_items for task in tasks)
    depths = {"config.eval.expansion is": config.eval.expansion}
    if "precision" in config.eval.metrics:
        depths["for precision, config.eval.ks holds"] = max(config.eval.ks)
    for setting, depth in depths.items():
        if depth > num_items:
            raise UserError(f"{setting} {depth}, but there are only {num_items} images to find")
    findable(config.eval.ks, num_items, "config.eval.ks")  # Prints which K are left out.
