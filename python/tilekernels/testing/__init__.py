"""What a user needs to test against tilekernels: exact comparison, input generation, timing, benchmark cases."""

from .cases import BenchCase as BenchCase
from .numeric import assert_equal as assert_equal
from .numeric import calc_diff as calc_diff
from .numeric import check_bias as check_bias
from .numeric import count_bytes as count_bytes
from .numeric import quant_level_rank as quant_level_rank
from .quant import clear_unused_sf as clear_unused_sf
from .quant import clear_unused_sf_col_pack as clear_unused_sf_col_pack
