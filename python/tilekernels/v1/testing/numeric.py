"""Comparisons."""

from ...testing.numeric import assert_equal as assert_equal
from ...testing.numeric import calc_diff as calc_diff
from ...testing.numeric import check_bias as check_bias
from ...testing.numeric import count_bytes as count_bytes
