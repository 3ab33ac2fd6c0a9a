"""Reads the memory traffic, operations and collectives of compiled programs from their HLO."""

import collections
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from hypjax.system.targets import Gpu

# A computation's name, and the name, type, kind, and operands and attributes of an instruction.
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

    moved: int  # Bytes read and written; an operand that is read twice counts once.
    operations: int  # Multiplications and additions in products, also within attention.
    product: bool  # Whether the kernel is only a library's product or convolution.
    half: bool  # Whether the factors are in half precision.

    def seconds(self, gpu: Gpu) -> float:
        """The least time of the kernel on a card, by the roofline model."""
        peak = gpu.half if self.half else gpu.single
        return max(self.moved / gpu.bandwidth, self.operations / peak)


class Program(NamedTuple):
    """A compiled program: its memory on each device, kernels and collectives."""

    run: jax.stages.Compiled  # It can be called if its devices are present.
    arguments: int  # Bytes.
    temporary: int  # Bytes.
    text: str  # The HLO.
    kernels: list[Kernel]  # Of a GPU, in the order of their starts; bodies of loops are repeated.
    collectives: list[str]  # Kind and dtype of each, such as 'all-reduce f32'.
    rounded: list[str]  # HLO of products outside the encoder without the highest precision.
    products: dict[str, int]  # Number of products in the encoder for each pair of dtypes.


class _Instruction(NamedTuple):
    """An instruction of HLO."""

    result: str  # Type of the result, such as bf16[900,384]{1,0}.
    kind: str
    operands: list[str]  # Types of the operands.
    target: str  # Name of the library's function that a custom call calls; otherwise ''.
    rest: str  # Text after the opening parenthesis: operands and attributes.

    @property
    def is_product(self) -> bool:
        """Whether this is a product or a convolution, by XLA or by a library."""
        is_library_call = self.target.startswith(("__cublas", "__cudnn$conv"))
        return is_library_call or self.kind in ("dot", "convolution")


def describe(program: jax.stages.Compiled) -> Program:
    """Analyses a compiled program."""
    text, memory = program.as_text(), program.memory_analysis()
    computations, entry = {}, ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            name, lines = header[1], []
            computations[name] = lines
            entry = name if line.startswith("ENTRY") else entry
        elif computations:
            lines.append(line)
    computations = {name: _instructions(lines) for name, lines in computations.items()}
    rounded, products, collectives = [], collections.Counter(), {}
    for instruction in itertools.chain.from_iterable(computations.values()):
        if instruction.is_product and "/encoder/" in instruction.rest:
            dtypes = (_ARRAY.search(operand)[1] for operand in instruction.operands[:2])
            products[" × ".join(sorted(dtypes))] += 1
        elif instruction.is_product and not any(x in instruction.rest for x in _FULL):
            rounded.append(instruction.rest)
        kind = _COLLECTIVE.fullmatch(instruction.kind)
        channel = _CHANNEL.search(instruction.rest)
        if kind and channel:
            dtypes = "+".join(sorted({dtype for dtype, _ in _ARRAY.findall(instruction.result)}))
            collectives[channel[1]] = f"{kind[1]} {dtypes}"  # A channel may occur several times.
    return Program(
        run=program,
        arguments=memory.argument_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        text=text,
        kernels=list(_kernels(entry, computations)),
        collectives=sorted(collectives.values()),
        rounded=rounded,
        products=dict(products),
    )


def _instructions(lines: Sequence[str]) -> list[_Instruction]:
    types, instructions = {}, []  # Types of results by name.
    for match in filter(None, map(_INSTRUCTION.match, lines)):
        name, types[match[1]], kind, rest = match.groups()
        operands = [types[name] for name in _NAME.findall(rest.split("), ")[0]) if name in types]
        target = _TARGET.search(rest)
        instructions.append(
            _Instruction(types[name], kind, operands, target[1] if target else "", rest)
        )
    return instructions


def _kernels(name: str, computations: dict[str, list[_Instruction]]) -> Iterator[Kernel]:
    """The kernels that a computation starts, in order."""
    for instruction in computations[name]:
        if instruction.kind in ("while", "call"):
            trips = _TRIPS.search(instruction.rest)
            for _ in range(int(trips[1]) if trips else 1):
                yield from _kernels(_BODY.search(instruction.rest)[1], computations)
        elif instruction.kind not in _NO_KERNELS:
            operands = instruction.operands
            moved = _bytes(instruction.result) + sum(map(_bytes, operands))
            half = bool(operands) and operands[0].startswith(("bf16", "f16"))
            product = instruction.target != "" and instruction.is_product
            yield Kernel(moved, _operations(instruction), product, half)


def _bytes(type: str) -> int:
    """Size of an HLO type, such as (bf16[900,384]{1,0}, s8[4194304]{0})."""
    return sum(math.prod(_sides(sides)) * _itemsize(dtype) for dtype, sides in _ARRAY.findall(type))


def _sides(text: str) -> list[int]:
    return [int(side) for side in text.split(",") if side]


def _itemsize(dtype: str) -> int:
    bits = _BITS.search(dtype)  # None for a pred.
    return max(int(bits[0]) // 8, 1) if bits else 1


def _operations(call: _Instruction) -> int:
    """Multiplications and additions of a call to a library; 0 for other kernels."""
    arrays = [_ARRAY.search(type) for type in (call.result, *call.operands)]
    sides = [_sides(array[2]) for array in arrays if array]
    if call.target.startswith("__cublas") and (contracted := _CONTRACTED.search(call.rest)):
        return 2 * sides[1][int(contracted[1])] * math.prod(sides[0])
    if call.target.startswith("__cudnn$conv"):
        # Positions of the convolution's kernel and output among the result and the two operands.
        backward = {"__cudnn$convBackwardFilter": (0, 2), "__cudnn$convBackwardInput": (2, 1)}
        kernel, output = backward.get(call.target, (2, 0))
        channels = sides[kernel][_KERNEL_LABELS.search(call.rest)[1].index("o")]
        return 2 * math.prod(sides[output]) * math.prod(sides[kernel]) // channels
    if call.target.startswith("__cudnn$fmha"):  # Two products, and five in the gradient.
        count = 5 if call.target.endswith("Backward") else 2
        return 2 * count * math.prod(sides[1]) * sides[2][1]
    return 0
