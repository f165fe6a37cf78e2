"""transpose and batched_transpose: exact copies of every element size, any shape and strides."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.refusals import Refusal
from tilekernels.testing import assert_equal
from tilekernels.testing.generator import generate_hidden_sizes, generate_num_tokens
from tilekernels.transpose import batched_transpose, transpose
from tilekernels.transpose.transpose import batched_transpose_ref, transpose_ref

OPERATORS = {"transpose.transpose": transpose, "transpose.batched_transpose": batched_transpose}

DTYPES = (
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float32,
    torch.uint8,
    torch.int8,
    torch.bool,
    torch.float16,
    torch.int16,
    torch.int32,
    torch.float8_e5m2,
)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Every bit pattern of the dtype, NaN payloads included: a transpose has to keep them all."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, device=device).bool()
    size = shape[:-1] + (shape[-1] * dtype.itemsize,)
    return torch.randint(0, 256, size, device=device, dtype=torch.uint8).view(dtype)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


# ---- references ------------------------------------------------------------------------------------------------------


def test_references_swap_indices() -> None:
    x = torch.arange(2 * 3 * 5).reshape(2, 3, 5)
    for batch in range(2):
        matrix = x[batch]
        assert transpose_ref(matrix).tolist() == [[matrix[row, col].item() for row in range(3)] for col in range(5)]
        assert_equal(batched_transpose_ref(x)[batch], transpose_ref(matrix))
    assert transpose_ref(x[0]).is_contiguous()
    assert batched_transpose_ref(x).is_contiguous()


# ---- valid calls -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One input: a view into a larger tensor with these gaps after each row and matrix, and elements before it."""

    batch: int | None
    num_rows: int
    num_cols: int
    dtype: torch.dtype
    row_gap: int = 0
    batch_gap: int = 0
    offset: int = 0

    @property
    def id(self) -> str:
        shape = "x".join(str(size) for size in (self.batch, self.num_rows, self.num_cols) if size is not None)
        return f"{shape}-{name_of(self.dtype)}-gaps{self.row_gap},{self.batch_gap}-at{self.offset}"

    def make(self, device: str) -> torch.Tensor:
        row_stride = self.num_cols + self.row_gap
        batch_stride = self.num_rows * row_stride + self.batch_gap
        storage = random_bytes((self.offset + (self.batch or 1) * batch_stride + 1,), self.dtype, device)
        if self.batch is None:
            return storage.as_strided((self.num_rows, self.num_cols), (row_stride, 1), self.offset)
        return storage.as_strided(
            (self.batch, self.num_rows, self.num_cols), (batch_stride, row_stride, 1), self.offset
        )


def random_cases(count: int, batched: bool) -> Iterator[Case]:
    """Ragged, aligned, thin, empty, strided and unaligned inputs of every dtype."""
    choose = random.Random(batched)
    sizes = (0, 1, 2, 3, 7, 16, 31, 63, 64, 65, 100, 127, 128, 129, 192, 256, 576, 1000)
    for at in range(count):
        yield Case(
            batch=choose.choice((0, 1, 2, 3, 5, 8, 33)) if batched else None,
            num_rows=choose.choice(sizes),
            num_cols=choose.choice(sizes),
            dtype=DTYPES[at % len(DTYPES)],
            row_gap=choose.choice((0, 0, 1, 3, 4, 8, 64)),
            batch_gap=choose.choice((0, 0, 1, 64)) if batched else 0,
            offset=choose.choice((0, 0, 0, 1, 2, 3)),
        )


def check_case(case: Case, device: str) -> None:
    x = case.make(device)
    actual = transpose(x) if case.batch is None else batched_transpose(x)
    expected = transpose_ref(x) if case.batch is None else batched_transpose_ref(x)
    assert actual.dtype == x.dtype
    assert_equal(as_bytes(actual), as_bytes(expected))


RANDOM_CASES = [*random_cases(200, batched=False), *random_cases(200, batched=True)]


@pytest.mark.parametrize("case", RANDOM_CASES[::8], ids=lambda case: case.id)
def test_cpu(case: Case) -> None:
    check_case(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", RANDOM_CASES, ids=lambda case: case.id)
def test_gpu(case: Case) -> None:
    check_case(case, "cuda")


# Sizes and addresses that are multiples of 4 bytes but not of 16, and next to them some that are not
WORD_CASES = [
    Case(batch, num_rows, num_cols, dtype, row_gap, 4 * (batch or 0), offset)
    for batch in (None, 3)
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float32)
    for num_rows, num_cols in ((4, 4), (100, 300), (132, 68), (252, 1004), (130, 66), (129, 128))
    for row_gap, offset in ((0, 0), (4, 4), (2, 0), (0, 2), (1, 4))
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", WORD_CASES, ids=lambda case: case.id)
def test_words_on_gpu(case: Case) -> None:
    check_case(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("hidden", generate_hidden_sizes())
@pytest.mark.parametrize("num_tokens", generate_num_tokens(64))
def test_transpose_at_published_sizes(num_tokens: int, hidden: int, dtype: torch.dtype) -> None:
    x = random_bytes((num_tokens, 2 * hidden), dtype, "cuda")[:, :hidden]
    assert_equal(as_bytes(transpose(x)), as_bytes(x).t().contiguous())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32], ids=name_of)
@pytest.mark.parametrize("hidden", generate_hidden_sizes())
@pytest.mark.parametrize("num_tokens", generate_num_tokens(64))
@pytest.mark.parametrize("num_experts", [8, 32])
def test_batched_transpose_at_published_sizes(
    num_experts: int, num_tokens: int, hidden: int, dtype: torch.dtype
) -> None:
    num_bytes = num_experts * num_tokens * hidden * dtype.itemsize
    if 4 * num_bytes > torch.cuda.mem_get_info()[0]:
        pytest.skip("not enough free GPU memory")
    x = random_bytes((1, num_tokens, hidden), dtype, "cuda").expand(num_experts, -1, -1).contiguous()
    raw = as_bytes(x)
    raw += torch.arange(num_experts, device="cuda", dtype=raw.dtype)[:, None, None]  # no two experts are equal
    actual = as_bytes(batched_transpose(x))
    for expert in range(num_experts):  # one at a time: the reference of all would take as much memory again
        assert_equal(actual[expert], raw[expert].t().contiguous())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize(
    "shape", [(65536 + 64, 32768 + 64), (5, 2**29 + 3), (2**29 + 3, 5)], ids=["square", "wide", "tall"]
)
def test_more_than_two_to_the_31_elements(shape: tuple[int, int], dtype: torch.dtype) -> None:
    num_rows, num_cols = shape
    if 4 * num_rows * num_cols * dtype.itemsize > torch.cuda.mem_get_info()[0]:
        pytest.skip("not enough free GPU memory")
    x = random_bytes(shape, dtype, "cuda")
    actual, raw = as_bytes(transpose(x)), as_bytes(x)
    assert actual.shape == (num_cols, num_rows)
    step = max(1, 2**28 // num_rows)
    for start in range(0, num_cols, step):
        assert torch.equal(actual[start : start + step], raw[:, start : start + step].t())


@pytest.mark.gpu
def test_row_stride_beyond_two_to_the_31_bytes() -> None:
    stride = 2**31 + 64
    if 8 * stride > torch.cuda.mem_get_info()[0]:
        pytest.skip("not enough free GPU memory")
    storage = torch.zeros(3 * stride, dtype=torch.uint8, device="cuda")
    x = storage.as_strided((2, 128, 64), (stride, 64, 1))
    x.copy_(torch.randint(0, 256, x.shape, device="cuda"))
    assert_equal(batched_transpose(x), batched_transpose_ref(x))


# ---- invalid calls ---------------------------------------------------------------------------------------------------

WRONG_DTYPES = (torch.float64, torch.int64, torch.complex64, torch.complex128, torch.uint64)
NOT_TENSORS: dict[str, Any] = {
    "None": None,
    "list": [[1.0, 2.0]],
    "int": 3,
    "str": "x",
    "tuple": (1, 2),
    "dict": {},
    "float": 0.5,
    "type": torch.Tensor,
}


def refusals(rank: int) -> Iterator[Refusal]:
    """Every kind of input that an operator over tensors of `rank` dimensions refuses."""
    shapes = {"square": (64,) * rank, "ragged": (3, 5, 7)[:rank], "empty": (0, 64, 64)[:rank], "one": (1,) * rank}
    for dtype in WRONG_DTYPES:
        for label, shape in shapes.items():

            def wrong_dtype(device: str, shape: tuple[int, ...] = shape, dtype: torch.dtype = dtype) -> dict[str, Any]:
                return {"x": torch.zeros(shape, dtype=dtype, device=device)}

            yield Refusal(f"{name_of(dtype)}-{label}", wrong_dtype, rf"x must .*, got .*{name_of(dtype)}.*")
    for other in (0, 1, 2, 3, 4, 5):
        if other == rank:
            continue
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):

            def wrong_rank(device: str, other: int = other, dtype: torch.dtype = dtype) -> dict[str, Any]:
                return {"x": torch.ones((4,) * other, dtype=dtype, device=device)}

            text = rf"x must have {rank} dimensions, got {other}.*"
            yield Refusal(f"{other} dimensions-{name_of(dtype)}", wrong_rank, text)
    columns: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "transposed": lambda x: x.transpose(-1, -2),
        "every second column": lambda x: x[..., ::2],
        "one column expanded": lambda x: x[..., :1].expand(*x.shape),
    }
    for label, view in columns.items():
        for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float32):

            def wrong_stride(
                device: str,
                view: Callable[[torch.Tensor], torch.Tensor] = view,
                dtype: torch.dtype = dtype,
            ) -> dict[str, Any]:
                return {"x": view(torch.zeros((4, 8, 16)[-rank:], device=device).to(dtype))}

            yield Refusal(f"{label}-{name_of(dtype)}", wrong_stride, r"x must have strides .*, got .*")
    for label, value in NOT_TENSORS.items():

        def not_a_tensor(device: str, value: Any = value) -> dict[str, Any]:
            return {"x": value}

        yield Refusal(f"not a tensor-{label}", not_a_tensor, r"x must be a .*tensor, got .*")


REFUSALS = [
    pytest.param(name, refusal, id=f"{name.removeprefix('transpose.')}-{refusal.id}")
    for name, rank in (("transpose.transpose", 2), ("transpose.batched_transpose", 3))
    for refusal in refusals(rank)
]


def test_enough_invalid_calls_are_tried() -> None:
    assert len(REFUSALS) >= 2 * 50


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize(("name", "refusal"), REFUSALS)
def test_refused_on_cpu(name: str, refusal: Refusal) -> None:
    refusal.check(name, OPERATORS[name], "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "refusal"), REFUSALS)
def test_refused_on_gpu(name: str, refusal: Refusal) -> None:
    refusal.check(name, OPERATORS[name], "cuda")
