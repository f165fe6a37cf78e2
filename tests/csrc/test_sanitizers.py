"""The tests of this folder that call the library, once more with the library and the fake driver under sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.csrc.sanitizers import SANITIZE

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

# Memory and undefined behaviour may go wrong anywhere, data races only where there are threads. Those of Python are
# left out: ThreadSanitizer takes thread-local memory that one thread of it leaves to the next for shared.
RUNS = {
    "address,undefined": [
        "test_call.py",
        "test_driver.py",
        "test_refusals.py",
        "test_misuse.py",
        "test_generated.py",
        "test_robustness.py",
        "test_workspace.py",
    ],
    "thread": ["test_robustness.py"],
}


@pytest.mark.skipif(bool(SANITIZE), reason="runs itself")
@pytest.mark.parametrize("sanitizer", RUNS)
def test_clean_under(sanitizer: str) -> None:
    files = [str(HERE / name) for name in RUNS[sanitizer]]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        | {"TILEKERNELS_SANITIZE": sanitizer},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout
