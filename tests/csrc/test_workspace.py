"""How much scratch memory a call needs: told before it is made, by name and by the typed entries."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.csrc.steps import CPU, Runtime, enter, tensor, workspace_size
from tests.golden_store import install_golden

SCORES = tensor("float32", 10, 64, device=CPU)
PARAM = 2  # scores, num_sms, workspace, out
INT32 = [0, 32, 1]


@pytest.fixture
def golden(driver_folder: Path, tmp_path: Path) -> Runtime:
    return Runtime(install_golden() / "lib" / "libtilekernels.so.0", driver_folder, tmp_path)


def test_size_follows_the_arguments(golden: Runtime) -> None:
    step = workspace_size("demo.rank", PARAM, SCORES, None, None, scalars=[8])
    (answer,) = golden.run(step, driver=False).answers
    assert (answer["status"], answer["num_bytes"]) == ("TK_OK", 8 * 64 * 4)
    assert (answer["shape"], answer["dtype"]) == ([8, 64], INT32)


def test_workspaces_that_are_there_do_not_matter(golden: Runtime) -> None:
    wrong = tensor("float32", 3)
    (answer,) = golden.run(workspace_size("demo.rank", PARAM, SCORES, wrong, None, scalars=[8]), driver=False).answers
    assert (answer["status"], answer["shape"]) == ("TK_OK", [8, 64])


def test_wrong_arguments_are_refused_as_the_call_refuses_them(golden: Runtime) -> None:
    too_many = tensor("float32", 10, 513, device=CPU)
    result = golden.run(workspace_size("demo.rank", PARAM, too_many, None, None, scalars=[8]), driver=False)
    assert result.last == (
        "TK_INVALID_ARGUMENT",
        "demo.rank: num_experts <= 512 is required, got num_experts = 513",
    )


@pytest.mark.parametrize(
    ("param", "message"),
    [
        (0, "demo.rank: param must be a workspace of a size that the library knows, got scores"),
        (1, "demo.rank: param must be the index of a tensor parameter, from 0 to 3, got 1"),
        (4, "demo.rank: param must be the index of a tensor parameter, from 0 to 3, got 4"),
    ],
)
def test_other_parameters_are_refused(golden: Runtime, param: int, message: str) -> None:
    result = golden.run(workspace_size("demo.rank", param, SCORES, None, None, scalars=[8]), driver=False)
    assert result.last == ("TK_INVALID_ARGUMENT", message)


def test_answer_makes_a_valid_call(golden: Runtime) -> None:
    size = workspace_size("demo.rank", PARAM, tensor("float32", 10, 64), None, None, scalars=[8])
    shape = golden.run(size, driver=False).answers[0]["shape"]
    tensors = [tensor("float32", 10, 64), tensor("int32", *shape), tensor("int64", 10)]
    launch = {"do": "call", "kernel": "demo.rank", "tensors": tensors, "scalars": [8], "axes": []}
    assert golden.run(enter(), launch).last == ("TK_OK", "")
