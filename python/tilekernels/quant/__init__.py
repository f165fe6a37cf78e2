"""Casts to and from FP8 and FP4 with block scales."""

from ._formats import unpack_from_e2m1fn_x2 as unpack_from_e2m1fn_x2
from ._reference import QuantTensor as QuantTensor
from .cast_back import cast_back as cast_back
from .cast_back import per_token_cast_back as per_token_cast_back
from .per_block_cast import per_block_cast as per_block_cast
from .per_block_cast import per_block_cast_with_precomputed_sf as per_block_cast_with_precomputed_sf
from .per_block_cast import per_block_cast_with_sf_only as per_block_cast_with_sf_only
from .per_block_cast_lossless import per_block_cast_lossless as per_block_cast_lossless
from .per_channel_cast import per_channel_cast as per_channel_cast
from .per_channel_cast import per_channel_cast_fused as per_channel_cast_fused
from .per_channel_cast_and_transpose import per_channel_cast_and_transpose as per_channel_cast_and_transpose
from .per_token_cast import per_token_cast as per_token_cast
from .per_token_cast import per_token_cast_with_precomputed_sf as per_token_cast_with_precomputed_sf
from .per_token_cast import per_token_cast_with_sf_only as per_token_cast_with_sf_only
from .swiglu_forward_and_per_channel_cast_and_transpose import (
    swiglu_forward_and_per_channel_cast_and_transpose as swiglu_forward_and_per_channel_cast_and_transpose,
)
