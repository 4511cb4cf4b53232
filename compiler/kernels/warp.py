"""Operations of a whole warp that tilelang has no word for. All 32 lanes must take part."""

import tilelang.language as T

ALL = 0xFFFFFFFF


def max_u32(value):
    """The largest uint32 of the lanes, in one instruction."""
    return T.call_extern("uint32", "__reduce_max_sync", T.uint32(ALL), value)


def min_u32(value):
    """The least uint32 of the lanes, in one instruction."""
    return T.call_extern("uint32", "__reduce_min_sync", T.uint32(ALL), value)


def add_u32(value):
    """The sum of the lanes' uint32, in one instruction."""
    return T.call_extern("uint32", "__reduce_add_sync", T.uint32(ALL), value)


def ordered(value):
    """A float32 as a uint32 in the same order. -0 comes before 0; NaN is not in it."""
    bits = T.reinterpret(value, "uint32")
    return T.if_then_else(bits >> 31 == 1, ~bits, bits | T.uint32(1 << 31))


def disordered(key):
    """The float32 that `ordered` made `key` of."""
    return T.reinterpret(T.if_then_else(key >> 31 == 1, key & T.uint32((1 << 31) - 1), ~key), "float32")


def lanes_before(mask, thread):
    """How many lanes before the thread's are in `mask`, a uint32."""
    below = (T.uint32(1) << T.cast(thread % 32, "uint32")) - T.uint32(1)
    return T.cast(T.popcount(mask & below), "int32")
