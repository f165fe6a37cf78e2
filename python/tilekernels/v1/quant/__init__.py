"""Casts to and from FP8 and FP4 with block scales."""

from ...quant import unpack_from_e2m1fn_x2 as _unpack_from_e2m1fn_x2
from .._asserting import asserting
from .per_token_cast import per_token_cast as per_token_cast
from .per_token_cast import per_token_cast_to_e5m6 as per_token_cast_to_e5m6
from .per_token_cast import per_token_cast_with_precomputed_sf as per_token_cast_with_precomputed_sf
from .per_token_cast import per_token_cast_with_sf_only as per_token_cast_with_sf_only

unpack_from_e2m1fn_x2 = asserting(_unpack_from_e2m1fn_x2)
