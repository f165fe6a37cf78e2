"""Casts to and from FP8 and FP4 with block scales."""

from ._formats import unpack_from_e2m1fn_x2 as unpack_from_e2m1fn_x2
from ._reference import QuantTensor as QuantTensor
from .per_token_cast import per_token_cast as per_token_cast
from .per_token_cast import per_token_cast_with_precomputed_sf as per_token_cast_with_precomputed_sf
from .per_token_cast import per_token_cast_with_sf_only as per_token_cast_with_sf_only
from .swiglu_forward import swiglu_forward as swiglu_forward
from .swiglu_forward import swiglu_forward_and_per_token_cast as swiglu_forward_and_per_token_cast
