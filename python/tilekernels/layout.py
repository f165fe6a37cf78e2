"""Size arithmetic that kernels, operators and references share: rounding up, and where a scale tensor's bytes lie.

Pure integers and no torch, because kernel declarations import this file at build time.
"""

import itertools
from dataclasses import dataclass

from .errors import ArgumentError, argument_error, argument_type_error

__all__ = ["PACKED_PER_WORD", "TMA_ALIGNMENT", "SfLayout", "align", "ceildiv"]

# A tensor map (TMA) wants every column of a column-major matrix to start on this many bytes.
TMA_ALIGNMENT = 16

_FLAGS = ("use_tma_aligned_col_major_sf", "round_sf", "use_packed_ue8m0", "use_e4m3_sf")

# UE8M0 exponents, one byte each, in one int32 word.
PACKED_PER_WORD = 4


def ceildiv(value: int, divisor: int) -> int:
    """The quotient rounded up."""
    return -(-value // divisor)


def align(value: int, multiple: int) -> int:
    """`value` rounded up to a multiple of `multiple`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class SfLayout:
    """How the scales of a matrix of blocks are valued and stored; the one form of an operator's four scale flags.

    "Blocks" below are the (rows, columns) of scale values, one per block of the data: `ceildiv(T, bm)` by
    `ceildiv(H, bk)`. Shapes and strides count elements of `dtype`.
    """

    col_major: bool = False  # column after column, each starting on TMA_ALIGNMENT bytes
    rounded: bool = False  # scales are powers of two
    packed: bool = False  # stored as UE8M0 exponents, PACKED_PER_WORD neighbouring columns in one word
    e4m3: bool = False  # stored as float8_e4m3fn

    @staticmethod
    def from_flags(
        operator: str,
        use_tma_aligned_col_major_sf: bool = False,
        round_sf: bool = False,
        use_packed_ue8m0: bool = False,
        use_e4m3_sf: bool = False,
    ) -> "SfLayout":
        """The layout that an operator's flags ask for; raises ArgumentError for a combination that has no meaning."""
        flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf)
        for name, flag in zip(_FLAGS, flags, strict=True):
            if not isinstance(flag, bool):
                raise argument_type_error(operator, name, "be a bool", type(flag).__name__)
        layout = _LAYOUTS.get(flags)
        if layout is None:
            raise _refusal(operator, round_sf, use_packed_ue8m0)
        return layout

    @property
    def dtype(self) -> str:
        """torch's name of the stored dtype."""
        return "int32" if self.packed else "float8_e4m3fn" if self.e4m3 else "float32"

    @property
    def itemsize(self) -> int:
        """Bytes of one stored element."""
        return 1 if self.e4m3 else 4

    def columns(self, num_columns: int) -> int:
        """Stored columns of that many columns of blocks."""
        return ceildiv(num_columns, PACKED_PER_WORD) if self.packed else num_columns

    def pitch(self, num_rows: int, num_columns: int) -> int:
        """Elements from one stored column (column-major) or row (row-major) to the next."""
        if self.col_major:
            return align(num_rows, TMA_ALIGNMENT // self.itemsize)
        return self.columns(num_columns)

    def shape(self, num_rows: int, num_columns: int) -> tuple[int, int]:
        """Shape of the scale tensor for that many rows and columns of blocks."""
        return num_rows, self.columns(num_columns)

    def strides(self, num_rows: int, num_columns: int) -> tuple[int, int]:
        """Strides of the scale tensor; without rows a column-major one has (1, 0), so that a dtype view works."""
        pitch = self.pitch(num_rows, num_columns)
        return (1, pitch) if self.col_major else (pitch, 1)

    def storage_size(self, num_rows: int, num_columns: int) -> int:
        """Elements in memory, padding rows of column-major layouts included."""
        lines = self.columns(num_columns) if self.col_major else num_rows
        return lines * self.pitch(num_rows, num_columns)

    def num_bytes(self, num_rows: int, num_columns: int) -> int:
        """Bytes that carry a scale, padding left out: what a roofline counts."""
        return num_rows * num_columns * (1 if self.packed or self.e4m3 else 4)

    @property
    def label(self) -> str:
        """A short name for test ids: `row_fp32`, `col_packed`, `row_e4m3`."""
        storage = "packed" if self.packed else "e4m3" if self.e4m3 else "rounded" if self.rounded else "fp32"
        return f"{'col' if self.col_major else 'row'}_{storage}"


def _is_valid(col_major: bool, rounded: bool, packed: bool, e4m3: bool) -> bool:
    return not (rounded or packed) if e4m3 else rounded or not packed


def _refusal(operator: str, round_sf: bool, use_packed_ue8m0: bool) -> ArgumentError:
    if use_packed_ue8m0 and not round_sf:
        return argument_error(operator, "use_packed_ue8m0", "come with round_sf=True", "round_sf=False")
    flag = "use_packed_ue8m0" if use_packed_ue8m0 else "round_sf"
    return argument_error(operator, "use_e4m3_sf", "come without round_sf and use_packed_ue8m0", f"{flag}=True")


# Looked up, not built, on each call: making a frozen dataclass costs as much as half a kernel launch.
_LAYOUTS = {flags: SfLayout(*flags) for flags in itertools.product((False, True), repeat=4) if _is_valid(*flags)}
