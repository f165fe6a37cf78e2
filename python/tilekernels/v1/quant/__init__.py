"""Casts to and from FP8 and FP4 with block scales."""

from ... import quant as _quant
from .._asserting import asserting
from .cast_back import cast_back_e5m6 as cast_back_e5m6
from .per_token_cast import per_token_cast as per_token_cast
from .per_token_cast import per_token_cast_to_e5m6 as per_token_cast_to_e5m6
from .per_token_cast import per_token_cast_with_precomputed_sf as per_token_cast_with_precomputed_sf
from .per_token_cast import per_token_cast_with_sf_only as per_token_cast_with_sf_only
from .swiglu import swiglu_backward_and_per_token_cast as swiglu_backward_and_per_token_cast
from .swiglu import swiglu_forward_and_per_token_cast as swiglu_forward_and_per_token_cast

cast_back = asserting(_quant.cast_back)
per_block_cast = asserting(_quant.per_block_cast)
per_block_cast_lossless = asserting(_quant.per_block_cast_lossless)
per_block_cast_with_precomputed_sf = asserting(_quant.per_block_cast_with_precomputed_sf)
per_block_cast_with_sf_only = asserting(_quant.per_block_cast_with_sf_only)
per_channel_cast = asserting(_quant.per_channel_cast)
per_channel_cast_and_transpose = asserting(_quant.per_channel_cast_and_transpose)
per_channel_cast_fused = asserting(_quant.per_channel_cast_fused)
per_token_cast_back = asserting(_quant.per_token_cast_back)
swiglu_forward_and_per_channel_cast_and_transpose = asserting(_quant.swiglu_forward_and_per_channel_cast_and_transpose)
unpack_from_e2m1fn_x2 = asserting(_quant.unpack_from_e2m1fn_x2)
