"""The register tile: the innermost loop of the CPU executor, emitted as LLVM vector code.

Neither a compiled loop nor the BLAS behind torch keeps enough accumulators in registers here (tile_table.py has the
figures), so the loop is written out: `rows × vectors` accumulators, one broadcast and `vectors` loads per step.
"""

from typing import Any, Final

import llvmlite.binding as llvm
import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from trunkattn.kernels.tile_table import REGISTER_TILES

_FLOAT: Final = ir.FloatType()
_INT: Final = ir.IntType(64)


def _host_lanes() -> int:
    features = llvm.get_host_cpu_features()
    return 16 if features.get("avx512f") else 8 if features.get("avx2") else 4


TILES: Final = REGISTER_TILES[_host_lanes()]
LANES: Final = TILES.lanes
OVERWRITE, ACCUMULATE, OVERWRITE_AHEAD, ACCUMULATE_AHEAD = range(4)  # modes of the tile
_VECTOR: Final = ir.VectorType(_FLOAT, LANES)


@intrinsic(prefer_literal=True)
def multiply_add_tile(typing_context, c, a, b, depth, ahead, shape):
    """C[at + r·step + x] (+)= Σ_k A[rows[at + r] + k·step] · B[rows[k] + at + x], k < depth.

    c = (C, at, step), a = (A, rows, at, step), b = (B, rows, at): flat float32 arrays, arrays of their row offsets, and
    int64 numbers. r < rows, x < vectors·LANES; depth >= 1. `shape` is the literal rows·10000 + vectors·100 + mode:
    OVERWRITE or ACCUMULATE; with _AHEAD, step k also asks for the cache line at address ahead[k]: one line per step is
    what memory delivers, a burst of them would stall the arithmetic.
    """
    if not isinstance(shape, types.Literal):
        return None
    rows, vectors, mode = (
        shape.literal_value // 10000,
        shape.literal_value // 100 % 100,
        shape.literal_value % 100,
    )
    index = types.int64
    c_type, a_type = types.Tuple((c[0], index, index)), types.Tuple((a[0], a[1], index, index))
    signature = types.void(c_type, a_type, types.Tuple((b[0], b[1], index)), index, ahead, shape)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def part(argument: int, position: int) -> Any:
            """An element of a tuple; of an array, where its data begin."""
            value, kind = builder.extract_value(args[argument], position), signature.args[argument][position]
            return context.make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else value

        offsets = {"c_at": part(0, 1), "c_step": part(0, 2), "a_at": part(1, 2), "a_step": part(1, 3)}
        offsets |= {"b_at": part(2, 2), "depth": args[3]}
        c_pointers = _c_pointers(builder, part(0, 0), offsets, rows, vectors)
        a_base, a_rows = part(1, 0), part(1, 1)
        a_pointers = [
            builder.gep(a_base, [builder.load(builder.gep(a_rows, [builder.add(offsets["a_at"], _INT(r))]))])
            for r in range(rows)
        ]
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        start = [
            [_load(builder, p) if mode in (ACCUMULATE, ACCUMULATE_AHEAD) else zero for p in line] for line in c_pointers
        ]
        lines = context.make_array(signature.args[4])(context, builder, args[4]).data
        fetched = lines if mode in (OVERWRITE_AHEAD, ACCUMULATE_AHEAD) else None
        sums = _loop(builder, start, a_pointers, (part(2, 0), part(2, 1), fetched), offsets)
        for line, pointers in zip(sums, c_pointers, strict=True):
            for value, pointer in zip(line, pointers, strict=True):
                builder.store(value, pointer).align = 4
        return context.get_dummy_value()

    return signature, codegen


def _load(builder: Any, pointer: Any) -> Any:
    value = builder.load(pointer)
    value.align = 4
    return value


def _c_pointers(builder: Any, base: Any, offsets: dict[str, Any], rows: int, vectors: int) -> list[list[Any]]:
    lines = []
    for r in range(rows):
        at = builder.add(offsets["c_at"], builder.mul(offsets["c_step"], _INT(r)))
        elements = [builder.gep(base, [builder.add(at, _INT(w * LANES))]) for w in range(vectors)]
        lines.append([builder.bitcast(p, _VECTOR.as_pointer()) for p in elements])
    return lines


def _loop(
    builder: Any, start: list[list[Any]], a_pointers: list[Any], b: tuple[Any, Any, Any], offsets: dict[str, Any]
) -> Any:
    """The loop over k, with one phi per accumulator; returns the sums."""
    rows, vectors = len(start), len(start[0])
    b_base, b_rows, lines = b
    entry, body, done = builder.block, builder.append_basic_block("k"), builder.append_basic_block("done")
    builder.branch(body)
    builder.position_at_end(body)
    k = builder.phi(_INT)
    k.add_incoming(_INT(0), entry)
    sums = [[builder.phi(_VECTOR) for _ in range(vectors)] for _ in range(rows)]
    b_at = builder.add(builder.load(builder.gep(b_rows, [k])), offsets["b_at"])
    b_vectors = []
    for w in range(vectors):
        pointer = builder.gep(b_base, [builder.add(b_at, _INT(w * LANES))])
        b_vectors.append(_load(builder, builder.bitcast(pointer, _VECTOR.as_pointer())))
    fma_type = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    fma = cgutils.get_or_insert_function(builder.module, fma_type, f"llvm.fma.v{LANES}f32")
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    all_zero = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    a_at = builder.mul(k, offsets["a_step"])
    following = []
    for r in range(rows):
        scalar = builder.load(builder.gep(a_pointers[r], [a_at]))
        first = builder.insert_element(undefined, scalar, ir.IntType(32)(0))
        broadcast = builder.shuffle_vector(first, undefined, all_zero)
        following.append([builder.call(fma, [broadcast, b_vectors[w], sums[r][w]]) for w in range(vectors)])
    if lines is not None:
        _prefetch(builder, builder.load(builder.gep(lines, [k])))
    k_next = builder.add(k, _INT(1))
    k.add_incoming(k_next, body)
    for r in range(rows):
        for w in range(vectors):
            sums[r][w].add_incoming(start[r][w], entry)
            sums[r][w].add_incoming(following[r][w], body)
    branch = builder.cbranch(builder.icmp_signed("<", k_next, offsets["depth"]), body, done)
    branch.set_metadata("llvm.loop", _never_unroll(builder.module))
    builder.position_at_end(done)
    return following


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
