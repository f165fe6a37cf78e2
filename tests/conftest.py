"""What all tests share: skipping those that need a GPU or the compiled extension, benchmarks, and a seed per test."""

import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.benchmarking import (
    add_benchmark_options,
    benchmark_record,
    benchmark_timer,
    configure_benchmarks,
    has_regressed,
    report_benchmarks,
    skip_benchmarks,
)
from tests.recording import add_record_option, record_outcomes
from tests.wheels import make_zig_wheel

__all__ = ["benchmark_record", "benchmark_timer"]  # fixtures

_MUCH_MEMORY = 2 << 30  # bytes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="base of every test's random seed (default 0)")
    add_record_option(parser)
    add_benchmark_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    configure_benchmarks(config)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    record_outcomes(terminalreporter, config)
    for line in report_benchmarks(config):
        terminalreporter.write_line(line)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == pytest.ExitCode.OK and has_regressed(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_benchmarks(config, items)
    reason = _why_no_gpu()
    if reason:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """Seeds torch with the test's own number, so that its inputs do not depend on which tests ran before it."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    own = int(hashlib.sha256(request.node.nodeid.encode()).hexdigest(), 16) % 2**31
    torch.manual_seed(request.config.getoption("--seed") + own)


@pytest.fixture(autouse=True)
def _give_memory_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Returns much memory that a test on the GPU held to the driver: workers of pytest-xdist share the card."""
    yield
    if request.node.get_closest_marker("gpu"):
        import torch

        if torch.cuda.is_available() and torch.cuda.memory_reserved() > _MUCH_MEMORY:
            torch.cuda.empty_cache()


@pytest.fixture
def needs_extension() -> None:
    """Skips the test in a source tree, where the compiled extension was never built."""
    if importlib.util.find_spec("tilekernels._C") is None:
        pytest.skip("tilekernels._C is not built here")


@pytest.fixture(scope="session")
def zig_wheel() -> Path:
    """The store of the wheel under test packed as released wheels are, by zig; skips where the tools are missing."""
    return make_zig_wheel()


def _why_no_gpu() -> str:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return "" if torch.cuda.is_available() else "no CUDA GPU here"
