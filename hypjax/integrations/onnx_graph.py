"""An ONNX graph that is being built, whose tensors know their shapes and perhaps their values."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from jaxtyping import Shaped
from onnx import helper, numpy_helper

from hypjax.errors import UserError

# Programs are traced for this number of images. It is a prime, so that only lengths which are
# multiples of the number of images are multiples of it.
BATCH = 1_000_003
OPSET = 18  # The first one whose Resize has antialiasing.
_IR_VERSION = 8  # The one of that time, so that older runtimes read the file.
_LARGEST_FILE = 2**31 - 1  # Bytes of a protocol buffer.
Shape = tuple[int, ...]


class Tensor(NamedTuple):
    """A tensor of the graph.

    Attributes:
        name: Its name or, of a known value, a proposal for one.
        shape: Its shape, for `BATCH` images. ONNX broadcasts axes of length 1 by itself, so they
            may stand for longer ones; see `Graph.expanded`.
        value: Its value if that is known; it enters the file if a node needs it.
    """

    name: str
    shape: Shape
    value: Shaped[np.ndarray, "..."] | None = None


def known(value: Any, name: str = "constant") -> Tensor:
    """A tensor of known value."""
    value = np.asarray(value)
    return Tensor(name, value.shape, value)


def integers(*values: int) -> Tensor:
    """A known vector of int64, as ONNX takes shapes and axes."""
    return known(np.array(values, np.int64), "integers")


def counts_images(number: float) -> bool:
    """Whether a length, or another number, is a multiple of the number of images."""
    return number != 0 and number % BATCH == 0


def lengths(shape: Shape) -> Tensor:
    """A shape as Reshape takes it: −1 stands for the length that depends on the images."""
    return integers(*(-1 if counts_images(length) else length for length in shape))


def _depends_on_number(value: Shaped[np.ndarray, "..."]) -> bool:
    """Whether a constant was made from the number of images."""
    # Of longer ones, integers alone: others are weights.
    exact = value.dtype.kind in "iu" or (value.dtype.kind == "f" and value.size == 1)
    return any(map(counts_images, (*value.shape, *(value.ravel().tolist() if exact else ()))))


class Graph:
    """Nodes and the constants that they read.

    Attributes:
        scope: Where the nodes that are added belong, such as 'encoder/block_0', or ''.
        batch: The number of images, a vector of one int64.
    """

    def __init__(self) -> None:
        self.scope = ""
        self.batch: Tensor | None = None
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}  # By hashes of their contents.
        self._names: Counter[str] = Counter()

    def mixing(self, what: str) -> UserError:
        """The error for an operation whose result depends on the other images of a batch."""
        return UserError(
            f"{self.scope or 'the model'} computes {what}, but in an ONNX file the point of an "
            "image must not depend on the others of its batch; write it for each image alone"
        )

    def add(
        self, op: str, inputs: Sequence[Tensor | None], shape: Shape, **attributes: Any
    ) -> Tensor:
        """Adds a node of one output; inputs that are None are left out."""
        (found,) = self.add_several(op, inputs, [shape], **attributes)
        return found

    def add_several(
        self, op: str, inputs: Sequence[Tensor | None], shapes: Sequence[Shape], **attributes: Any
    ) -> list[Tensor]:
        """Adds a node with an output of each shape."""
        name = self._unique(f"{self.scope}/{op}".lstrip("/"))
        outputs = [f"{name}:{i}" for i in range(len(shapes))]
        references = ["" if each is None else self._reference(each) for each in inputs]
        self._nodes.append(helper.make_node(op, references, outputs, name, **attributes))
        return [Tensor(output, shape) for output, shape in zip(outputs, shapes, strict=True)]

    def expanded(self, tensor: Tensor, shape: Shape) -> Tensor:
        """Repeats a tensor of the same rank along axes of length 1, up to a shape."""
        if tensor.shape == shape:
            return tensor
        sizes = [1 if own == n else n for own, n in zip(tensor.shape, shape, strict=True)]
        places = [i for i, n in enumerate(sizes) if counts_images(n)]
        if not places and tensor.value is not None:
            return known(np.broadcast_to(tensor.value, shape), tensor.name)
        if not places:
            return self.add("Expand", [tensor, integers(*sizes)], shape)
        (place,) = places
        times = integers(sizes[place] // BATCH)
        number = self.add("Mul", [self.batch, times], (1,))
        parts = [integers(*sizes[:place]), number, integers(*sizes[place + 1 :])]
        whole = self.add("Concat", parts, (len(sizes),), axis=0)
        return self.add("Expand", [tensor, whole], shape)

    def _reference(self, tensor: Tensor) -> str:
        """The name by which a node reads a tensor; equal constants are stored once."""
        if tensor.value is None:
            return tensor.name
        if _depends_on_number(tensor.value):
            raise self.mixing("with the number of images")
        value = np.ascontiguousarray(tensor.value).reshape(tensor.shape)
        content = f"{value.dtype}{value.shape}".encode() + hashlib.sha256(value).digest()
        if content not in self._constants:
            name = self._unique(tensor.name)
            self._constants[content] = numpy_helper.from_array(value, name)
        return self._constants[content].name

    def _unique(self, name: str) -> str:
        self._names[name] += 1
        times = self._names[name]
        return name if times == 1 else f"{name}_{times}"

    def model(
        self,
        inputs: Sequence[onnx.ValueInfoProto],
        output: Tensor,
        metadata: Mapping[str, str],
    ) -> onnx.ModelProto:
        """The model with one output of float32, [batch, dim], named 'points'.

        Raises:
            ValueError: It does not fit into one file.
        """
        size = sum(len(each.raw_data) for each in self._constants.values())
        if size > _LARGEST_FILE:
            raise ValueError(f"{size / 1e9:.1f} GB of weights")
        last = helper.make_node("Identity", [self._reference(output)], ["points"], "points")
        shape = ["batch", *output.shape[1:]]
        outputs = [helper.make_tensor_value_info("points", onnx.TensorProto.FLOAT, shape)]
        constants = list(self._constants.values())
        graph = helper.make_graph([*self._nodes, last], "hypjax", inputs, outputs, constants)
        opsets = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(
            graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="hypjax"
        )
        helper.set_model_props(model, dict(metadata))
        return model
