"""What compiled programs move, compute and exchange, read from their HLO."""

import collections
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

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


_COLLECTIVE = re.compile(r"(all-reduce|all-gather|reduce-scatter|all-to-all)(?:-start)?")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_FULL = ("{highest,highest}", '["HIGHEST","HIGHEST"]')  # Precisions of true float32 products.


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


class Program(NamedTuple):
    """A compiled program: bytes on each device, and what it computes and exchanges."""

    run: jax.stages.Compiled  # Unless its devices are absent.
    arguments: int
    temporary: int
    text: str  # Its HLO.
    kernels: list[Kernel]  # Of a GPU, in the order of their starts; bodies of loops are repeated.
    collectives: list[str]  # Exchanges between devices by kind and dtype: 'all-reduce f32'.
    rounded: list[str]  # HLO of products outside the encoder without the highest precision.
    products: dict[str, int]  # Number of products in the encoder for each pair of dtypes.


class _Instruction(NamedTuple):
    result: str  # Its type, such as bf16[900,384]{1,0}.
    kind: str
    operands: list[str]  # Types.
    target: str  # Of a call to a library.
    rest: str

    @property
    def is_product(self) -> bool:
        """Whether it is a product or a convolution, of XLA or of a library."""
        library = self.target.startswith(("__cublas", "__cudnn$conv"))
        return library or self.kind in ("dot", "convolution")


def describe(program: jax.stages.Compiled) -> Program:
    """Analyses a compiled program."""
    text, memory = program.as_text(), program.memory_analysis()
    computations, entry = {}, ""
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            name, lines = found[1], []
            computations[name] = lines
            entry = name if line.startswith("ENTRY") else entry
        elif computations:
            lines.append(line)
    computations = {name: _instructions(lines) for name, lines in computations.items()}
    rounded, products, exchanges = [], collections.Counter(), {}
    for own in (own for computation in computations.values() for own in computation):
        if own.is_product and "/encoder/" in own.rest:
            dtypes = (_ARRAY.search(operand)[1] for operand in own.operands[:2])
            products[" × ".join(sorted(dtypes))] += 1
        elif own.is_product and not any(precision in own.rest for precision in _FULL):
            rounded.append(own.rest)
        if (kind := _COLLECTIVE.fullmatch(own.kind)) and (channel := _CHANNEL.search(own.rest)):
            dtypes = "+".join(sorted({dtype for dtype, _ in _ARRAY.findall(own.result)}))
            exchanges[channel[1]] = f"{kind[1]} {dtypes}"  # Each channel may occur several times.
    return Program(
        run=program,
        arguments=memory.argument_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        text=text,
        kernels=list(_started(entry, computations)),
        collectives=sorted(exchanges.values()),
        rounded=rounded,
        products=dict(products),
    )


def _instructions(lines: Sequence[str]) -> list[_Instruction]:
    types, instructions = {}, []
    for found in filter(None, map(_INSTRUCTION.match, lines)):
        name, types[found[1]], kind, rest = found.groups()
        operands = [types[name] for name in _NAME.findall(rest.split("), ")[0]) if name in types]
        target = _TARGET.search(rest)
        instructions.append(
            _Instruction(types[name], kind, operands, target[1] if target else "", rest)
        )
    return instructions


def _started(name: str, computations: dict[str, list[_Instruction]]) -> Iterator[Kernel]:
    for own in computations[name]:
        if own.kind in ("while", "call"):
            trips = _TRIPS.search(own.rest)
            for _ in range(int(trips[1]) if trips else 1):
                yield from _started(_BODY.search(own.rest)[1], computations)
        elif own.kind not in _NO_KERNELS:
            moved = sum(map(_bytes, (own.result, *own.operands)))
            half = own.operands[:1] != [] and own.operands[0].startswith(("bf16", "f16"))
            product = own.target != "" and own.is_product
            yield Kernel(moved, _operations(own), product, half)


def _bytes(type: str) -> int:
    """Size of an HLO type, such as (bf16[900,384]{1,0}, s8[4194304]{0})."""
    return sum(math.prod(_sides(sides)) * _itemsize(dtype) for dtype, sides in _ARRAY.findall(type))


def _sides(text: str) -> list[int]:
    return [int(side) for side in text.split(",") if side]


def _itemsize(dtype: str) -> int:
    bits = _BITS.search(dtype)  # None for a pred.
    return max(int(bits[0]) // 8, 1) if bits else 1


def _operations(call: _Instruction) -> int:
    """Operations of a call to a library; 0 for other kernels."""
    arrays = [_ARRAY.search(type) for type in (call.result, *call.operands)]
    sides = [_sides(array[2]) for array in arrays if array]
    if call.target.startswith("__cublas") and (contracted := _CONTRACTED.search(call.rest)):
        return 2 * sides[1][int(contracted[1])] * math.prod(sides[0])
    if call.target.startswith("__cudnn$conv"):
        # Which of the result and the two operands are the convolution's kernel and its output.
        backward = {"__cudnn$convBackwardFilter": (0, 2), "__cudnn$convBackwardInput": (2, 1)}
        kernel, output = backward.get(call.target, (2, 0))
        channels = sides[kernel][_KERNEL_LABELS.search(call.rest)[1].index("o")]
        return 2 * math.prod(sides[output]) * math.prod(sides[kernel]) // channels
    if call.target.startswith("__cudnn$fmha"):  # Two products, and five in the gradient.
        count = 5 if call.target.endswith("Backward") else 2
        return 2 * count * math.prod(sides[1]) * sides[2][1]
    return 0
