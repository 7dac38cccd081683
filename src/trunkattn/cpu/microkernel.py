"""The register tile: the innermost loop of the CPU executor, emitted as LLVM vector code.

Neither a compiled loop nor the BLAS behind torch keeps enough accumulators in registers here, so the loop is written
out: `rows × vectors` accumulators, one broadcast and `vectors` loads per step.
"""

from typing import Any, Final, NamedTuple

import llvmlite.binding as llvm
import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from trunkattn.cpu.tuning import REGISTER_TILES

_FLOAT: Final = ir.FloatType()
_INT: Final = ir.IntType(64)
_PAGE_BYTES: Final = 4096


def _host_lanes() -> int:
    features = llvm.get_host_cpu_features()
    return 16 if features.get("avx512f") else 8 if features.get("avx2") else 4


TILES: Final = REGISTER_TILES[_host_lanes()]
LANES: Final = TILES.lanes
_VECTOR: Final = ir.VectorType(_FLOAT, LANES)


class TileShape(NamedTuple):
    """A register tile: rows × vectors of the output."""

    rows: int
    vectors: int
    accumulates: bool = False  # adds to the output; else overwrites it
    prefetches: bool = False  # asks for a cache line per step


# `multiply_add_tile` names a shape by its place here: Numba keeps single integers literal, not tuples of them.
TILE_SHAPES: Final = (
    TileShape(TILES.score_keys, TILES.score_vectors),
    TileShape(TILES.score_keys, TILES.score_vectors, prefetches=True),
    TileShape(TILES.score_keys, 1),
    TileShape(TILES.score_keys, 1, prefetches=True),
    TileShape(TILES.output_rows, TILES.output_vectors, accumulates=True),
    TileShape(TILES.output_rows, 1, accumulates=True),
    TileShape(1, TILES.output_vectors, accumulates=True),
    TileShape(1, 1, accumulates=True),
    TileShape(TILES.score_keys, TILES.score_vectors, accumulates=True, prefetches=True),
    TileShape(1, TILES.score_vectors, prefetches=True),
    TileShape(1, TILES.score_vectors, accumulates=True, prefetches=True),
)
SCORES_WIDE, SCORES_WIDE_AHEAD, SCORES_NARROW, SCORES_NARROW_AHEAD = range(4)
OUTPUT_WIDE, OUTPUT_NARROW, OUTPUT_ROW_WIDE, OUTPUT_ROW_NARROW = range(4, 8)
LINEAR_FIRST, LINEAR_LATER, LINEAR_ROW_FIRST, LINEAR_ROW_LATER = SCORES_WIDE_AHEAD, 8, 9, 10


class OutputTile(NamedTuple):
    """C of `multiply_add_tile`: element (r, x) is array[at + r·step + x]."""

    array: Any
    at: int
    step: int


class LeftOperand(NamedTuple):
    """A of `multiply_add_tile`: element (r, k) is array[offsets[at + r] + k·step]."""

    array: Any
    offsets: Any
    at: int
    step: int


class RightOperand(NamedTuple):
    """B of `multiply_add_tile`: element (k, x) is array[offsets[k] + at + x]."""

    array: Any
    offsets: Any
    at: int


@intrinsic(prefer_literal=True)
def multiply_add_tile(typing_context, output, left, right, depth, lines, shape):
    """C(r, x) (+)= Σ_k A(r, k) · B(k, x), k < depth, for the rows and columns of one register tile.

    Arrays are flat float32, offsets and numbers int64; depth >= 1. `shape` is a literal place in TILE_SHAPES. A tile
    that prefetches asks in step k for the cache line at address lines[k]: one line per step is what memory delivers, a
    burst of them would stall the arithmetic.
    """
    if not isinstance(shape, types.Literal):
        return None
    tile = TILE_SHAPES[shape.literal_value]
    signature = types.void(output, left, right, types.int64, lines, shape)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def part(argument: int, field: str) -> Any:
            """A field of an operand; of an array, where its data begin."""
            kind = signature.args[argument]
            position = kind.instance_class._fields.index(field)
            value = builder.extract_value(args[argument], position)
            if isinstance(kind.types[position], types.Array):
                return context.make_array(kind.types[position])(context, builder, value).data
            return context.cast(builder, value, kind.types[position], types.int64)

        c_pointers = _c_pointers(builder, part(0, "array"), part(0, "at"), part(0, "step"), tile)
        a_base, a_offsets, a_at = part(1, "array"), part(1, "offsets"), part(1, "at")
        a_pointers = [
            builder.gep(a_base, [builder.load(builder.gep(a_offsets, [builder.add(a_at, _INT(r))]))])
            for r in range(tile.rows)
        ]
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        start = [[_load(builder, p) if tile.accumulates else zero for p in line] for line in c_pointers]
        operands = _LoopOperands(
            a_pointers=a_pointers,
            a_step=part(1, "step"),
            b_base=part(2, "array"),
            b_offsets=part(2, "offsets"),
            b_at=part(2, "at"),
            lines=context.make_array(signature.args[4])(context, builder, args[4]).data if tile.prefetches else None,
            depth=args[3],
        )
        sums = _loop(builder, start, operands)
        for line, pointers in zip(sums, c_pointers, strict=True):
            for value, pointer in zip(line, pointers, strict=True):
                builder.store(value, pointer).align = 4
        return context.get_dummy_value()

    return signature, codegen


class _LoopOperands(NamedTuple):
    """LLVM values that the loop over k reads."""

    a_pointers: list[Any]
    a_step: Any
    b_base: Any
    b_offsets: Any
    b_at: Any
    lines: Any  # None: no prefetch
    depth: Any


def _load(builder: Any, pointer: Any) -> Any:
    value = builder.load(pointer)
    value.align = 4
    return value


def _c_pointers(builder: Any, base: Any, at: Any, step: Any, tile: TileShape) -> list[list[Any]]:
    lines = []
    for r in range(tile.rows):
        line_at = builder.add(at, builder.mul(step, _INT(r)))
        elements = [builder.gep(base, [builder.add(line_at, _INT(w * LANES))]) for w in range(tile.vectors)]
        lines.append([builder.bitcast(p, _VECTOR.as_pointer()) for p in elements])
    return lines


def _loop(builder: Any, start: list[list[Any]], operands: _LoopOperands) -> Any:
    """The loop over k, with one phi per accumulator; returns the sums."""
    rows, vectors = len(start), len(start[0])
    entry, body, done = builder.block, builder.append_basic_block("k"), builder.append_basic_block("done")
    builder.branch(body)
    builder.position_at_end(body)
    k = builder.phi(_INT)
    k.add_incoming(_INT(0), entry)
    sums = [[builder.phi(_VECTOR) for _ in range(vectors)] for _ in range(rows)]
    b_at = builder.add(builder.load(builder.gep(operands.b_offsets, [k])), operands.b_at)
    b_vectors = []
    for w in range(vectors):
        pointer = builder.gep(operands.b_base, [builder.add(b_at, _INT(w * LANES))])
        b_vectors.append(_load(builder, builder.bitcast(pointer, _VECTOR.as_pointer())))
    fma = _fma(builder)
    a_at = builder.mul(k, operands.a_step)
    following = []
    for r in range(rows):
        broadcast = _broadcast(builder, builder.load(builder.gep(operands.a_pointers[r], [a_at])))
        following.append([builder.call(fma, [broadcast, b_vectors[w], sums[r][w]]) for w in range(vectors)])
    if operands.lines is not None:
        _prefetch(builder, builder.load(builder.gep(operands.lines, [k])))
    k_next = builder.add(k, _INT(1))
    k.add_incoming(k_next, body)
    for r in range(rows):
        for w in range(vectors):
            sums[r][w].add_incoming(start[r][w], entry)
            sums[r][w].add_incoming(following[r][w], body)
    branch = builder.cbranch(builder.icmp_signed("<", k_next, operands.depth), body, done)
    branch.set_metadata("llvm.loop", _never_unroll(builder.module))
    builder.position_at_end(done)
    return following


def _fma(builder: Any) -> Any:
    """The function a · b + c of vectors, rounded once."""
    fma_type = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return cgutils.get_or_insert_function(builder.module, fma_type, f"llvm.fma.v{LANES}f32")


def _broadcast(builder: Any, scalar: Any) -> Any:
    """A vector of one number."""
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.IntType(32)(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


def _prefetch(builder: Any, address: Any) -> None:
    """Never faults, whatever the address."""
    flag, byte = ir.IntType(32), ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.inttoptr(address, byte), flag(0), flag(3), flag(1)])


def _never_unroll(module: Any) -> Any:
    """Loop metadata: unrolled once, the loop needs more registers than there are, and the sums spill."""
    disable = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    loop = module.add_metadata([disable, disable])
    loop.operands = (loop, disable)  # a loop is identified by metadata that names itself
    return loop


@intrinsic
def widen_scaled(typing_context, target, values, at, scales, scales_at):
    """target[at + x] = values[at + x] · scales[scales_at + x] for the columns x of a panel.

    Arrays are flat float32, and values int8. The compiler could not know that they do not overlap, and would take one
    column at a time.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def vector(argument: int, element: Any, first: Any) -> Any:
            array = context.make_array(signature.args[argument])(context, builder, args[argument])
            return builder.bitcast(builder.gep(array.data, [first]), ir.VectorType(element, LANES).as_pointer())

        for w in range(TILES.score_vectors):
            first, scale = (builder.add(args[place], _INT(w * LANES)) for place in (2, 4))
            steps = builder.load(vector(1, ir.IntType(8), first))
            steps.align = 1
            wide = builder.sitofp(builder.sext(steps, ir.VectorType(ir.IntType(32), LANES)), _VECTOR)
            product = builder.fmul(wide, _load(builder, vector(3, _FLOAT, scale)))
            builder.store(product, vector(0, _FLOAT, first)).align = 4
        return context.get_dummy_value()

    return types.void(target, values, types.int64, scales, types.int64), codegen


@intrinsic
def multiply_add_scaled(typing_context, output, x, values, scales, depth):
    """output[c] += Σ_k x[k] · (values[k · width + c] · scales[c]), k < depth, for the width columns c of a panel.

    Arrays are flat: float32, and int8 values; depth >= 1. A value is widened in a register, to the bits that
    `widen_scaled` writes. Memory a page farther on is asked for: values lie in the order of use.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        columns = TILES.score_vectors * LANES

        def data(argument: int) -> Any:
            return context.make_array(signature.args[argument])(context, builder, args[argument]).data

        def vectors(base: Any, element: Any) -> list[Any]:
            first = [builder.gep(base, [_INT(w * LANES)]) for w in range(TILES.score_vectors)]
            return [builder.bitcast(each, ir.VectorType(element, LANES).as_pointer()) for each in first]

        out, x, values = vectors(data(0), _FLOAT), data(1), data(2)
        factors = [_load(builder, pointer) for pointer in vectors(data(3), _FLOAT)]
        start = [_load(builder, pointer) for pointer in out]
        entry, body, done = builder.block, builder.append_basic_block("k"), builder.append_basic_block("done")
        builder.branch(body)
        builder.position_at_end(body)
        k = builder.phi(_INT)
        k.add_incoming(_INT(0), entry)
        sums = [builder.phi(_VECTOR) for _ in start]
        here = builder.gep(values, [builder.mul(k, _INT(columns))])
        broadcast = _broadcast(builder, builder.load(builder.gep(x, [k])))
        following = []
        for pointer, factor, total in zip(vectors(here, ir.IntType(8)), factors, sums, strict=True):
            steps = builder.load(pointer)
            steps.align = 1
            wide = builder.sitofp(builder.sext(steps, ir.VectorType(ir.IntType(32), LANES)), _VECTOR)
            following.append(builder.call(_fma(builder), [broadcast, builder.fmul(wide, factor), total]))
        _prefetch(builder, builder.ptrtoint(builder.gep(here, [_INT(_PAGE_BYTES)]), _INT))
        k_next = builder.add(k, _INT(1))
        k.add_incoming(k_next, body)
        for total, first, following_one in zip(sums, start, following, strict=True):
            total.add_incoming(first, entry)
            total.add_incoming(following_one, body)
        builder.cbranch(builder.icmp_signed("<", k_next, args[4]), body, done)
        builder.position_at_end(done)
        for value, pointer in zip(following, out, strict=True):
            builder.store(value, pointer).align = 4
        return context.get_dummy_value()

    return types.void(output, x, values, scales, types.int64), codegen


@intrinsic
def bits_to_float(typing_context, bits):
    """float32 with the bit pattern of an int32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _FLOAT)

    return types.float32(types.int32), codegen


@intrinsic
def float_to_bits(typing_context, value):
    """int32 with the bit pattern of a float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@intrinsic
def call_kernel(typing_context, kernel, arguments, thread):
    """Calls the C function `void kernel(int64 arguments, int64 thread)` at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.VoidType(), [_INT, _INT]).as_pointer()
        builder.call(builder.inttoptr(args[0], function), args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def add_to(typing_context, address, number):
    """Adds a number to the int64 at an address, atomically; returns the value before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _INT.as_pointer()), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen
