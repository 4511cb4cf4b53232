"""Element types: kgen's names (those of ml_dtypes and torch), their sizes, and their codes in other vocabularies."""

from __future__ import annotations

from typing import NamedTuple


class DType(NamedTuple):
    """One element type.

    Attributes:
        bits: size of an element.
        dlpack: (type code, bits) of DLPack 1.1, ``DLDataTypeCode`` in dlpack.h.
        array_interface: ``typestr`` of the CUDA array interface, or None where it has no word for the type.
    """

    bits: int
    dlpack: tuple[int, int]
    array_interface: str | None

    @property
    def bytes(self) -> int:
        return self.bits // 8


DTYPES: dict[str, DType] = {
    "bool": DType(8, (6, 8), "|b1"),
    "int8": DType(8, (0, 8), "|i1"),
    "int16": DType(16, (0, 16), "<i2"),
    "int32": DType(32, (0, 32), "<i4"),
    "int64": DType(64, (0, 64), "<i8"),
    "uint8": DType(8, (1, 8), "|u1"),
    "uint16": DType(16, (1, 16), "<u2"),
    "uint32": DType(32, (1, 32), "<u4"),
    "uint64": DType(64, (1, 64), "<u8"),
    "float16": DType(16, (2, 16), "<f2"),
    "float32": DType(32, (2, 32), "<f4"),
    "float64": DType(64, (2, 64), "<f8"),
    "bfloat16": DType(16, (4, 16), None),
    "float8_e4m3fn": DType(8, (10, 8), None),
    "float8_e5m2": DType(8, (12, 8), None),
    "float8_e8m0fnu": DType(8, (14, 8), None),
}

FROM_DLPACK = {dtype.dlpack: name for name, dtype in DTYPES.items()}
FROM_ARRAY_INTERFACE = {dtype.array_interface: name for name, dtype in DTYPES.items() if dtype.array_interface}
