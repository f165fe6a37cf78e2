"""The speed of every operator on the calls of its bench_cases(), against the committed run (`--run-benchmark`).

Microseconds, counted bytes over them, and the share of a copy (of a plain kernel, of torch's matmul) of as many bytes.
TK_FULL_TEST=1 adds the small calls, which are mostly launch.
"""

import os

import pytest

from tests.benchmarking import add_row
from tilekernels.bench.cases import Call, find_calls
from tilekernels.bench.limits import Limits, measure_limits
from tilekernels.bench.measure import Options, measure

FULL = os.environ.get("TK_FULL_TEST", "0").lower() in ("1", "true")
SMALL_BYTES = 4 * 1024 * 1024  # a launch is most of the time of what moves less

CALLS = [call for call in find_calls() if FULL or call.case.bytes > SMALL_BYTES]


@pytest.fixture(scope="module")
def limits() -> Limits:
    return measure_limits()


@pytest.mark.gpu
@pytest.mark.benchmark
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.case.id)
def test_speed(call: Call, limits: Limits, request: pytest.FixtureRequest) -> None:
    (row,) = measure([call], limits, Options())
    assert "failure" not in row, row["failure"]
    add_row(request.config, row)
