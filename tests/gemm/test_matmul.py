"""matmul: within the rounding of the output of a product of fp32 matrices, for every size, stride and address."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.refusals import Refusal
from tilekernels.gemm import matmul
from tilekernels.gemm.matmul import matmul_ref
from tilekernels.testing import assert_equal

NAME = "gemm.matmul"

# ||c - ref|| / ||ref|| by the output's dtype: its own rounding, of bf16 2^-9 at most, and for fp32 the order of the sum
TOLERANCES = {torch.bfloat16: 2e-3, torch.float16: 5e-4, torch.float32: 1e-5}
DTYPES = (torch.bfloat16, torch.float16)

# Rows and columns of layers of open models
LAYERS = (576, 1536, 2048, 2112, 3584, 4096, 5120, 7168, 8192, 9216, 14336, 18432)


@dataclass(frozen=True)
class Case:
    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    fp32_out: bool = False
    # How a, b and out lie: dense, rows apart, off 16 bytes, columns apart
    a: str = "dense"
    b: str = "dense"
    out: str = "made"

    @property
    def id(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        views = "-".join(view for view in (self.a, self.b, self.out))
        return f"{self.m}x{self.n}x{self.k}-{dtype}{'-fp32' if self.fp32_out else ''}-{views}"

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.float32 if self.fp32_out else self.dtype


def make_view(
    view: str, rows: int, cols: int, dtype: torch.dtype, device: str, fill: float | None = None
) -> torch.Tensor:
    """A matrix of normal numbers that lies in a larger one as `view` says."""

    def make(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, device=device).to(dtype)
        return values if fill is None else values.fill_(fill)

    if view == "rows apart":
        return make(rows, cols + 24)[:, 8 : 8 + cols]
    if view == "odd rows apart":
        return make(rows, cols + 3)[:, :cols]
    if view == "off 16 bytes":
        return make(rows * cols + 1)[1:].view(rows, cols)
    if view == "columns apart":
        return make(rows, 2 * cols)[:, ::2]
    if view == "transposed":
        return make(cols, rows).t()
    if view == "one row":
        return make(1, cols).expand(rows, cols)
    return make(rows, cols)


def check_case(case: Case, device: str) -> None:
    a = make_view(case.a, case.m, case.k, case.dtype, device)
    b = make_view(case.b, case.n, case.k, case.dtype, device)
    expected = matmul_ref(a, b, out_dtype=case.out_dtype)
    if case.out == "made":
        out = matmul(a, b, out_dtype=case.out_dtype)
        assert out.is_contiguous()
    else:
        # Numbers beside the view must stay
        out = make_view(case.out, case.m, case.n, case.out_dtype, device, fill=7.0)
        storage = torch.empty(0, dtype=case.out_dtype, device=device).set_(out.untyped_storage())
        assert matmul(a, b, out) is out
        written = out.clone()
        assert_close(written, expected)
        out.fill_(7.0)
        assert bool((storage == 7.0).all())
        return
    assert (out.shape, out.dtype) == ((case.m, case.n), case.out_dtype)
    assert_close(out, expected)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """By the norm of the difference in fp64, a slice of rows at a time."""
    difference = scale = 0.0
    for start in range(0, max(actual.shape[0], 1), 4096):
        one, other = actual[start : start + 4096].double(), expected[start : start + 4096].double()
        difference += float((one - other).square().sum())
        scale += float(other.square().sum())
    error = math.sqrt(difference) / (math.sqrt(scale) or 1.0)
    assert error < TOLERANCES[actual.dtype], f"relative error {error:.2e}"


# ---- values ----------------------------------------------------------------------------------------------------------

# Sizes around the edges of tiles, warps and 16 bytes
EDGES = (1, 2, 7, 8, 16, 17, 33, 64, 65, 100, 128, 130)
SMALL = [
    Case(m, n, k, dtype, fp32_out)
    for (m, n, k), dtype, fp32_out in zip(
        [(m, n, k) for m in EDGES for n in (1, 9, 64, 200) for k in (1, 8, 40, 129)],
        [*DTYPES] * 96,
        [False, False, True] * 64,
        strict=True,
    )
]
EMPTY = [Case(*sizes) for sizes in ((0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 0, 0), (1, 8, 0), (0, 8, 0), (300, 40, 0))]
VIEWS = [
    Case(m, n, k, dtype, a=a, b=b, out=out)
    for m, n, k in ((1, 72, 136), (20, 300, 200), (150, 264, 72))
    for dtype, a, b, out in (
        (torch.bfloat16, "rows apart", "dense", "made"),
        (torch.float16, "dense", "rows apart", "made"),
        (torch.bfloat16, "rows apart", "rows apart", "rows apart"),
        (torch.bfloat16, "odd rows apart", "dense", "dense"),
        (torch.bfloat16, "off 16 bytes", "dense", "off 16 bytes"),
        (torch.float16, "dense", "off 16 bytes", "odd rows apart"),
        (torch.bfloat16, "columns apart", "dense", "rows apart"),
        (torch.bfloat16, "dense", "transposed", "made"),
        (torch.float16, "transposed", "transposed", "dense"),
        (torch.bfloat16, "one row", "one row", "dense"),
    )
]


@pytest.mark.parametrize("case", SMALL[::7] + EMPTY + VIEWS[:10], ids=lambda case: case.id)
def test_cpu(case: Case) -> None:
    check_case(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", SMALL + EMPTY + VIEWS, ids=lambda case: case.id)
def test_gpu(case: Case) -> None:
    check_case(case, "cuda")


def random_cases() -> list[Case]:
    """Sizes from 1 to those of large layers, ragged or not, few of them large in all three."""
    draw = random.Random(0)
    cases = []
    while len(cases) < 300:
        m = round(2 ** draw.uniform(0, 14))
        n, k = (draw.choice(LAYERS) if draw.random() < 0.6 else round(2 ** draw.uniform(0, 14)) for _ in range(2))
        k = k // 8 * 8 or 8 if draw.random() < 0.8 else k
        if m * n * k < 2**36:
            view = draw.choice(("dense", "dense", "rows apart"))
            cases.append(
                Case(m, n, k, draw.choice(DTYPES), draw.random() < 0.25, a=view, b=draw.choice(("dense", view)))
            )
    return cases


@pytest.mark.gpu
@pytest.mark.parametrize("case", random_cases(), ids=lambda case: case.id)
def test_random_sizes(case: Case) -> None:
    check_case(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", LAYERS)
@pytest.mark.parametrize("m", [1, 3, 16, 48, 64, 127, 128, 200, 512])
def test_layers(m: int, n: int, dtype: torch.dtype) -> None:
    check_case(Case(m, n, 2048, dtype), "cuda")


def test_reference_against_float64() -> None:
    a, b = torch.randn(50, 300).bfloat16(), torch.randn(70, 300).bfloat16()
    assert_close(matmul_ref(a, b, out_dtype=torch.float32), (a.double() @ b.double().t()).float())
    assert_equal(matmul_ref(a, b), matmul_ref(a, b, out_dtype=torch.float32).bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n", "k"), [(1, 512, 4096), (16, 512, 4096), (100, 300, 8192), (300, 512, 2048)])
def test_sum_is_fp32_over_all_of_k(m: int, n: int, k: int) -> None:
    """Numbers whose sum in fp32 is exact in any order: integers below 2^24."""
    a = torch.randint(-8, 9, (m, k), device="cuda").bfloat16()
    b = torch.randint(-8, 9, (n, k), device="cuda").bfloat16()
    exact = (a.double() @ b.double().t()).float()
    assert_equal(matmul(a, b, out_dtype=torch.float32), exact)
    assert_equal(matmul(a, b), exact.bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 576, 7168), (8, 576, 7168), (60, 2048, 7168), (128, 7168, 2048), (700, 900, 520)]
)
def test_same_bits_in_each_call(m: int, n: int, k: int) -> None:
    a, b = torch.randn((m, k), device="cuda").bfloat16(), torch.randn((n, k), device="cuda").bfloat16()
    first = matmul(a, b, out_dtype=torch.float32)
    for _ in range(20):
        assert_equal(matmul(a, b, out_dtype=torch.float32), first)


@pytest.mark.gpu
@pytest.mark.parametrize("value", [float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize("m", [1, 16, 64, 128, 300])
def test_infinity_and_nan_reach_their_row_alone(m: int, value: float) -> None:
    a, b = torch.rand((m, 520), device="cuda").bfloat16() + 1, torch.rand((300, 520), device="cuda").bfloat16() + 1
    a[m // 2, 333] = value
    out = matmul(a, b)
    expected = torch.zeros(m, 300, dtype=torch.bool, device="cuda")
    expected[m // 2] = True
    assert_equal(~out.isfinite(), expected)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    m, n, k = 131072 + 5, 16384 + 8, 64
    if 2 * m * n * 4 > torch.cuda.mem_get_info()[0]:
        pytest.skip("not enough free GPU memory")
    a, b = torch.randn((m, k), device="cuda").bfloat16(), torch.randn((n, k), device="cuda").bfloat16()
    out = matmul(a, b)
    for start in (0, m // 2, m - 500):
        assert_close(out[start : start + 500], matmul_ref(a[start : start + 500], b))


@pytest.mark.gpu
def test_general_form_counts_far_elements() -> None:
    """Rows of b 2^31 elements apart in all, which the fast forms cannot take."""
    rows, stride = 5, 2**29 + 1
    if rows * stride * 2 > torch.cuda.mem_get_info()[0]:
        pytest.skip("not enough free GPU memory")
    b = torch.empty(rows * stride, dtype=torch.bfloat16, device="cuda").as_strided((rows, 72), (stride, 1))
    b.copy_(torch.randn((rows, 72), device="cuda"))
    a = torch.randn((40, 72), device="cuda").bfloat16()
    assert_close(matmul(a, b), matmul_ref(a, b))


# ---- invalid calls ---------------------------------------------------------------------------------------------------


def refusals() -> Iterator[Refusal]:
    def matrix(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, device=device).to(dtype)

    def refusal(label: str, text: str, **changes: Any) -> Refusal:
        def make(device: str) -> dict[str, Any]:
            kwargs: dict[str, Any] = {"a": matrix(device, 4, 8), "b": matrix(device, 6, 8)}
            return kwargs | {name: value(device) if callable(value) else value for name, value in changes.items()}

        return Refusal(label, make, text)

    for dtype in (torch.float32, torch.float64, torch.int8, torch.float8_e4m3fn):
        name = str(dtype).removeprefix("torch.")
        text = rf"a must be (bfloat16|float16)( or (bfloat16|float16))?, got {name}"
        yield refusal(f"a {name}", text, a=lambda device, dtype=dtype: matrix(device, 4, 8, dtype=dtype))
    yield refusal("b fp16", r"b must be bfloat16.*, got float16.*", b=lambda d: matrix(d, 6, 8, dtype=torch.float16))
    yield refusal("other K", r"b must have shape .*, got .*", b=lambda d: matrix(d, 6, 16))
    yield refusal("a of rank 3", r"a must have 2 dimensions, got 3.*", a=lambda d: matrix(d, 1, 4, 8))
    yield refusal("b of rank 1", r"b must have 2 dimensions, got 1.*", b=lambda d: matrix(d, 8))
    yield refusal("out of other size", r"out must have shape .*, got .*", out=lambda d: matrix(d, 6, 4))
    yield refusal("out of columns apart", r"out must have strides .*, got .*", out=lambda d: matrix(d, 4, 12)[:, ::2])
    yield refusal("out int32", r"out must be .*, got int32", out=lambda d: matrix(d, 4, 6, dtype=torch.int32))
    yield refusal(
        "out_dtype int32", r"out_dtype must be torch.float32 or torch.bfloat16, got torch.int32", out_dtype=torch.int32
    )
    yield refusal("out_dtype fp16", r"out_dtype must be .*, got torch.float16", out_dtype=torch.float16)
    yield refusal(
        "out_dtype beside another out",
        r"out_dtype must be that of out, torch.bfloat16, got torch.float32",
        out=lambda d: matrix(d, 4, 6),
        out_dtype=torch.float32,
    )
    yield refusal("a None", r"a must be a .*tensor, got .*", a=None)


REFUSALS = list(refusals())


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused_on_cpu(refusal: Refusal) -> None:
    refusal.check(NAME, matmul, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused_on_gpu(refusal: Refusal) -> None:
    refusal.check(NAME, matmul, "cuda")
