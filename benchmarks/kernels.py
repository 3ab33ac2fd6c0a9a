"""The kernels that a program starts on a GPU, from its HLO: what they move and compute."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.gpus import Gpu

# A computation's name, and the name, type, kind, operands and further words of its instructions.
_COMPUTATION = re.compile(r"(?:ENTRY )?%([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)")
_NAME = re.compile(r"%([\w.-]+)")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\["?(\d+)')
_BODY = re.compile(r"(?:body|to_apply)=%([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_KERNEL_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")
_NO_KERNELS = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"}


class Kernel(NamedTuple):
    """A kernel of a GPU's program."""

    moved: int  # Bytes that it reads and writes; an operand that it reads twice counts once.
    operations: int  # Multiplications and additions of products, also of those within attention.
    product: bool  # Whether it is a product or a convolution of a library, and nothing else.
    half: bool  # Whether the factors are in half precision.

    def seconds(self, gpu: Gpu) -> float:
        """The least time that it takes on a card."""
        peak = gpu.half if self.half else gpu.single
        return max(self.moved / gpu.bandwidth, self.operations / peak)


def kernels_of(text: str) -> list[Kernel]:
    """Kernels in the order in which a program starts them, with the bodies of its loops repeated.

    Args:
        text: HLO of a program that was compiled for a GPU.
    """
    computations, entry = {}, ""
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            name, lines = found[1], []
            computations[name] = lines
            entry = name if line.startswith("ENTRY") else entry
        elif computations:
            lines.append(line)
    return list(_started(entry, computations))


def _started(name: str, computations: dict[str, list[str]]) -> Iterator[Kernel]:
    types = {}
    for line in computations[name]:
        if not (found := _INSTRUCTION.match(line)):
            continue
        result, types[result], kind, rest = found.groups()
        if kind in _NO_KERNELS:
            continue
        if kind in ("while", "call"):
            trips = _TRIPS.search(rest)
            for _ in range(int(trips[1]) if trips else 1):
                yield from _started(_BODY.search(rest)[1], computations)
            continue
        operands = [types[each] for each in _NAME.findall(rest.split("), ")[0]) if each in types]
        moved = sum(map(_bytes, (types[result], *operands)))
        target = _TARGET.search(rest)
        target = target[1] if target else ""
        operations = _operations(target, rest, types[result], operands)
        product = target.startswith(("__cublas", "__cudnn$conv"))
        half = operands[:1] != [] and operands[0].startswith(("bf16", "f16"))
        yield Kernel(moved, operations, product, half)


def _bytes(type: str) -> int:
    """Size of an HLO type, such as (bf16[900,384]{1,0}, s8[4194304]{0})."""
    return sum(math.prod(_sides(sides)) * _itemsize(dtype) for dtype, sides in _ARRAY.findall(type))


def _sides(text: str) -> list[int]:
    return [int(side) for side in text.split(",") if side]


def _itemsize(dtype: str) -> int:
    bits = _BITS.search(dtype)  # None for a pred.
    return max(int(bits[0]) // 8, 1) if bits else 1


def _operations(target: str, rest: str, result: str, operands: Sequence[str]) -> int:
    """Operations of a call to a library; 0 for other kernels."""
    sides = [_sides(_ARRAY.search(each)[2]) for each in (result, *operands) if _ARRAY.search(each)]
    if target.startswith("__cublas") and (contracted := _CONTRACTED.search(rest)):
        return 2 * sides[1][int(contracted[1])] * math.prod(sides[0])
    if target.startswith("__cudnn$conv"):
        # Which of the result and the two operands are the convolution's kernel and its output.
        backward = {"__cudnn$convBackwardFilter": (0, 2), "__cudnn$convBackwardInput": (2, 1)}
        kernel, output = backward.get(target, (2, 0))
        channels = sides[kernel][_KERNEL_LABELS.search(rest)[1].index("o")]
        return 2 * math.prod(sides[output]) * math.prod(sides[kernel]) // channels
    if target.startswith("__cudnn$fmha"):  # Two products, and five in the gradient.
        keys = sides[2][1]
        return 2 * (5 if target.endswith("Backward") else 2) * math.prod(sides[1]) * keys
    return 0
