"""Scale layouts: shapes, strides and padding as the specification has them, and no two scales in one place."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilekernels.errors import ArgumentError
from tilekernels.layout import SfLayout, align, ceildiv

VALID_FLAGS = [
    # col-major, rounded, packed, e4m3
    (False, False, False, False),
    (False, True, False, False),
    (False, True, True, False),
    (False, False, False, True),
    (True, False, False, False),
    (True, True, False, False),
    (True, True, True, False),
    (True, False, False, True),
]
LAYOUTS = [SfLayout(*flags) for flags in VALID_FLAGS]


@pytest.mark.parametrize(
    ("value", "by", "quotient", "aligned"), [(0, 4, 0, 0), (1, 4, 1, 4), (8, 4, 2, 8), (9, 4, 3, 12)]
)
def test_rounding_up(value: int, by: int, quotient: int, aligned: int) -> None:
    assert ceildiv(value, by) == quotient
    assert align(value, by) == aligned


@pytest.mark.parametrize(
    ("layout", "dtype", "shape", "strides", "storage"),
    [
        # 5 x 6 blocks; the rows of the specification's table in its order
        (SfLayout(), "float32", (5, 6), (6, 1), 30),
        (SfLayout(col_major=True), "float32", (5, 6), (1, 8), 48),
        (SfLayout(rounded=True, packed=True), "int32", (5, 2), (2, 1), 10),
        (SfLayout(col_major=True, rounded=True, packed=True), "int32", (5, 2), (1, 8), 16),
        (SfLayout(e4m3=True), "float8_e4m3fn", (5, 6), (6, 1), 30),
        (SfLayout(col_major=True, e4m3=True), "float8_e4m3fn", (5, 6), (1, 16), 96),
    ],
    ids=lambda value: value.label if isinstance(value, SfLayout) else None,
)
def test_storage_of_every_layout(
    layout: SfLayout, dtype: str, shape: tuple[int, int], strides: tuple[int, int], storage: int
) -> None:
    assert layout.dtype == dtype
    assert layout.itemsize == getattr(torch, dtype).itemsize
    assert layout.shape(5, 6) == shape
    assert layout.strides(5, 6) == strides
    assert layout.storage_size(5, 6) == storage


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.col_major], ids=lambda layout: layout.label)
def test_column_major_without_rows_can_be_viewed_as_bytes(layout: SfLayout) -> None:
    assert layout.strides(0, 6) == (1, 0)
    sf = torch.empty_strided(layout.shape(0, 6), layout.strides(0, 6), dtype=getattr(torch, layout.dtype))
    assert sf.T.view(torch.uint8).shape[0] == layout.columns(6)


@given(st.sampled_from(LAYOUTS), st.integers(1, 70), st.integers(1, 70))
def test_every_scale_has_a_place_of_its_own(layout: SfLayout, num_rows: int, num_columns: int) -> None:
    shape, strides = layout.shape(num_rows, num_columns), layout.strides(num_rows, num_columns)
    places = {row * strides[0] + column * strides[1] for row, column in itertools.product(*map(range, shape))}
    assert len(places) == shape[0] * shape[1]
    assert max(places) < layout.storage_size(num_rows, num_columns)


@given(st.sampled_from([layout for layout in LAYOUTS if layout.col_major]), st.integers(0, 500))
def test_columns_start_on_16_bytes_and_waste_less_than_that(layout: SfLayout, num_rows: int) -> None:
    pitch_bytes = layout.pitch(num_rows, 3) * layout.itemsize
    assert pitch_bytes % 16 == 0
    assert 0 <= pitch_bytes - num_rows * layout.itemsize < 16


def test_bytes_of_a_roofline_count_one_per_packed_scale() -> None:
    assert [layout.num_bytes(5, 6) for layout in LAYOUTS] == [120, 120, 30, 30, 120, 120, 30, 30]


def test_labels_tell_layouts_apart() -> None:
    assert len({layout.label for layout in LAYOUTS}) == len(LAYOUTS)


@pytest.mark.parametrize("flags", VALID_FLAGS)
def test_flags_become_a_layout_without_making_one(flags: tuple[bool, bool, bool, bool]) -> None:
    layout = SfLayout.from_flags("quant.cast", *flags)
    assert layout == SfLayout(*flags)
    assert SfLayout.from_flags("quant.cast", *flags) is layout


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            {"use_packed_ue8m0": True},
            "quant.cast: use_packed_ue8m0 must come with round_sf=True, got round_sf=False",
        ),
        (
            {"use_tma_aligned_col_major_sf": True, "use_packed_ue8m0": True, "use_e4m3_sf": True},
            "quant.cast: use_packed_ue8m0 must come with round_sf=True, got round_sf=False",
        ),
        (
            {"round_sf": True, "use_e4m3_sf": True},
            "quant.cast: use_e4m3_sf must come without round_sf and use_packed_ue8m0, got round_sf=True",
        ),
        (
            {"round_sf": True, "use_packed_ue8m0": True, "use_e4m3_sf": True},
            "quant.cast: use_e4m3_sf must come without round_sf and use_packed_ue8m0, got use_packed_ue8m0=True",
        ),
    ],
)
def test_flags_that_exclude_each_other_are_refused(flags: dict[str, bool], text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        SfLayout.from_flags("quant.cast", **flags)
    assert str(caught.value) == text
