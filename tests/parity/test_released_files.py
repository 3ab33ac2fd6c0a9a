"""Files of the code of Hyp-ViT, HypMix and HIER, scored as by that code, which is transcribed."""

import argparse
import json

import numpy as np
import pytest

from hypjax.assemble import assemble, assemble_method, assemble_training
from hypjax.errors import UserError
from hypjax.evaluate import evaluate_pretrained
from hypjax.galleries.embeddings import Embeddings
from hypjax.inference.pretrained import released_parameters, starting_parameters
from hypjax.training.states import first_state
from tests.helpers import commands, small_runs

torch = pytest.importorskip("torch", reason="needs the parity extra: torch")
timm = pytest.importorskip("timm", reason="needs the parity extra: timm")

C, CLIP_RADIUS, KS = 0.1, 2.3, (1, 2)
BALL = "--space=ball", f"--c={C}", f"--clip_radius={CLIP_RADIUS}"
NORM = torch.nn.functional.normalize


def to_poincare(x):
    norm = x.norm(dim=-1, keepdim=True) + 1e-5
    x = x * torch.minimum(torch.ones_like(norm), CLIP_RADIUS / norm)
    norm = C**0.5 * x.norm(dim=-1, keepdim=True)
    return torch.tanh(norm) * x / norm


def dist_matrix(x, y):
    x2, y2, xy = (x * x).sum(-1)[:, None], (y * y).sum(-1), -x @ y.T
    added = (1 + 2 * C * xy + C * y2)[..., None] * -x[:, None] + (1 - C * x2)[..., None] * y
    added = added / (1 + 2 * C * xy + C * C * x2 * y2 + 1e-5)[..., None]
    return 2 / C**0.5 * torch.atanh(C**0.5 * added.norm(dim=-1))


def get_recall(x, y, hyperbolic):
    similarity = -dist_matrix(x, x) if hyperbolic else x @ x.T
    nearest = y[similarity.topk(1 + max(KS))[1][:, 1:]]
    hits = nearest == y[:, None]
    return {f"recall@{k}": float(hits[:, :k].any(1).double().mean()) for k in KS}


class HeadSwitch(torch.nn.Module):
    """The model of all three, whose modules are named as in one of them."""

    def __init__(self, body, name, head):
        super().__init__()
        self.body = body
        self.add_module(name, head)


def head_of(code, dim):
    """Names of the head's modules, the head, and the embedding that is scored."""
    linear, norm = torch.nn.Linear(16, dim), torch.nn.LayerNorm(16, elementwise_affine=False)
    return {
        "hyp-vit": ("head", torch.nn.Sequential(linear), to_poincare),
        "sph-vit": ("head", torch.nn.Sequential(linear), NORM),
        "hypmix": ("head_linear", linear, NORM),
        "hier": ("last_layer", torch.nn.Sequential(norm, linear), to_poincare),
    }[code]


def write(code, path, dim=8):
    """Writes a file as the code does, and returns the model and how its head is scored."""
    torch.manual_seed(0)
    sizes = dict(img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=0)
    name, head, score = head_of(code, dim)
    model = HeadSwitch(timm.models.VisionTransformer(**sizes), name, head)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    content = model.state_dict()
    if code == "hier":
        optimizer = torch.optim.AdamW(model.parameters()).state_dict()
        proxies = {"lcas": torch.randn(30, dim)}
        content = {
            "stduent": {f"module.{key}": value for key, value in content.items()},
            **{"optimizer": optimizer, "epoch": 3, "loss": proxies},
            "args": argparse.Namespace(model="vit_small_patch16_224", lr=1e-5, scale=(0.2, 1.0)),
        }
    torch.save(content, path)
    return model.eval(), head.eval(), score


FIELDS = {
    "hyp-vit": ["objective.space=poincare"],
    "sph-vit": ["objective.space=sphere"],
    "hypmix": ["objective.name=hypmix", "eval.spaces.head=sphere,objective"],
    "hier": ["objective.name=hier+proxy_anchor", "model.head=norm_dense"]
    + ["objective.hier_proxies=30", "objective.hier_neighbors=5", "objective.space=poincare"],
}


@pytest.mark.parametrize("code", FIELDS)
def test_files_have_the_scores_of_their_code(code, photos_folder, tmp_path):
    model, head, score = write(code, tmp_path / "a.pth")
    fields = [*FIELDS[code], f"model.weights={tmp_path}/a.pth", "optim.frozen=()"]
    config = small_runs.load(photos_folder, *fields)
    results = evaluate_pretrained(config)["pretrained"]
    run = assemble(config)
    mean, std = np.float32(config.data.mean), np.float32(config.data.std)
    pixels = np.asarray(run.embedder.mapped(lambda x: x, run.splits.test))
    images = torch.tensor(((pixels / np.float32(255) - mean) / std).transpose(0, 3, 1, 2))
    labels = torch.tensor(run.splits.test.labels.astype(int))
    with torch.no_grad():
        features = model.body(images)
        points = score(head(features))
    expected = {"encoder": get_recall(NORM(features), labels, False)}
    expected["head"] = get_recall(points, labels, score is to_poincare)
    for part, recalls in expected.items():
        assert {k: results[part][k] for k in recalls} == pytest.approx(recalls), part
    assert 0 < results["head"]["recall@1"] < 1


def test_training_starts_from_the_head_and_the_proxies(photos_folder, tmp_path):
    write("hier", tmp_path / "a.pth")
    loaded = [f"model.weights={tmp_path}/a.pth", "model.load_head=True", "optim.frozen=()"]
    config = small_runs.load(photos_folder, *FIELDS["hier"], *loaded)
    built = assemble_training(config)
    pretrained = starting_parameters(built.experiment.method)
    params = first_state(built.learner, built.sizes, pretrained).params
    content = torch.load(tmp_path / "a.pth", weights_only=False)
    kernel = content["stduent"]["module.last_layer.1.weight"].numpy().T
    np.testing.assert_array_equal(params["model"]["head"]["kernel"], kernel)
    proxies = params["objective"]["hierarchy"]
    np.testing.assert_array_equal(proxies, content["loss"]["lcas"].numpy())


@pytest.mark.parametrize(
    ("code", "fields", "message"),
    [
        ("hier", ["model.head=dense"], "--config.model.head=norm_dense"),
        ("hyp-vit", ["model.head_dim=4"], "--config.model.head_dim=8"),
        ("hier", [*FIELDS["hier"], "objective.hier_proxies=40"], r"lcas has the shape \[30, 8\]"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(code, fields, message, photos_folder, tmp_path):
    write(code, tmp_path / "a.pth")
    fields = [*fields, f"model.weights={tmp_path}/a.pth", "optim.frozen=()"]
    config = small_runs.load(photos_folder, *fields)
    with pytest.raises(UserError, match=message):
        released_parameters(assemble_method(config))


@pytest.mark.parametrize(("space", "flags"), [(to_poincare, BALL), (NORM, ())])
@pytest.mark.parametrize("indexed", [False, True])
def test_saved_embeddings_have_the_scores_of_their_code(space, flags, indexed, tmp_path):
    torch.manual_seed(0)
    y = torch.arange(8).repeat_interleave(8)
    x = space(torch.randn(8, 6)[y] + torch.randn(64, 6))
    content = x, y
    if indexed:  # In the order of several processes, which fill their last batches.
        order = torch.cat([torch.randperm(64), torch.arange(6)])
        content = x[order], y[order], order
    torch.save(content, tmp_path / "e.pt")
    output = tmp_path / "s.json"
    files = f"--embeddings={tmp_path}/e.pt", f"--output={output}"
    commands.call("score", *files, *flags, "--ks=1,2", "--metrics=recall")
    scores, expected = json.loads(output.read_text()), get_recall(x, y, space is to_poincare)
    assert {k: scores[k] for k in expected} == pytest.approx(expected) and scores["queries"] == 64
    vectors = Embeddings.load(tmp_path / "e.pt").raw_features
    np.testing.assert_array_equal(vectors, x.numpy())
