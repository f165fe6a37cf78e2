"""apply_rotary: exact against the reference with its fused multiply-adds, near complex multiplication in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.engram.gates import FULL
from tests.refusals import Refusal
from tilekernels.testing import assert_equal, calc_diff
from tilekernels.transform import apply_rotary
from tilekernels.transform.apply_rotary import apply_rotary_ref

NAME = "transform.apply_rotary"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Rounding once to bf16 or fp32, by calc_diff against float64
ROUNDING = {torch.bfloat16: 3e-6, torch.float32: 1e-14}


@dataclass(frozen=True)
class Rotation:
    tokens: tuple[int, ...]  # or (batches, tokens)
    heads: int
    key_heads: int | None
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    position: torch.dtype | None = torch.int64
    interleaved: bool = False
    conjugate: bool = False
    seqlen_offset: int = 0
    margin: int = 0  # elements of each head before the rotated columns
    cache_margin: int = 0

    @property
    def id(self) -> str:
        names = [str(each).removeprefix("torch.") for each in (self.dtype, self.position)]
        flags = "i" * self.interleaved + "c" * self.conjugate
        margins = f"offset{self.seqlen_offset}-margins{self.margin},{self.cache_margin}"
        return f"{self.tokens}-{self.heads}+{self.key_heads}-{self.dim}-{names[0]}-{names[1]}-{flags}-{margins}"

    def make(self, device: str) -> dict[str, Any]:
        """The tensors are views; `base_of` gives what lies around them."""
        num_positions = max(300, self.tokens[-1])
        angles = torch.rand((num_positions, self.dim // 2), device=device) * 50
        cache = torch.empty((num_positions, self.dim + self.cache_margin), device=device)[:, self.cache_margin :]
        cache.copy_(torch.cat([angles.cos(), angles.sin()], dim=1))
        positions = None
        if self.position is not None:
            low, high = max(0, -self.seqlen_offset), num_positions - max(0, self.seqlen_offset)
            positions = torch.randint(low, high, self.tokens, device=device).to(self.position)

        def rows(heads: int) -> torch.Tensor:
            wide = torch.randn((*self.tokens, heads, self.margin + self.dim), device=device).to(self.dtype)
            return wide[..., self.margin :]

        return {
            "query": rows(self.heads),
            "cos_sin_cache": cache,
            "key": None if self.key_heads is None else rows(self.key_heads),
            "positions": positions,
            "interleaved": self.interleaved,
            "conjugate": self.conjugate,
            "seqlen_offset": self.seqlen_offset,
        }


def clone_call(call: dict[str, Any]) -> dict[str, Any]:
    """The same call on copies, strides and what lies between the rows included."""

    def clone(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        storage = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage().clone())
        return storage.as_strided(x.shape, x.stride(), x.storage_offset())

    return {name: clone(value) for name, value in call.items()}


def storage_of(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())


def rotate_in_complex(x: torch.Tensor, call: dict[str, Any]) -> torch.Tensor:
    own = torch.arange(x.shape[-3], device=x.device) if call["positions"] is None else call["positions"].long()
    cos, sin = call["cos_sin_cache"][own + call["seqlen_offset"]][..., None, :].double().chunk(2, dim=-1)
    factor = torch.complex(cos, -sin if call["conjugate"] else sin)
    if call["interleaved"]:
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous()) * factor
        return torch.view_as_real(pairs).flatten(-2)
    turned = torch.complex(*x.double().chunk(2, dim=-1)) * factor
    return torch.cat([turned.real, turned.imag], dim=-1)


def check(rotation: Rotation, device: str) -> None:
    call = rotation.make(device)
    given, expected = clone_call(call), clone_call(call)
    assert apply_rotary(**call) is None
    apply_rotary_ref(**expected)
    for name in ("query", "key"):
        if call[name] is not None:
            assert_equal(storage_of(call[name]), storage_of(expected[name]))
            exact = rotate_in_complex(given[name], given)
            assert calc_diff(call[name], exact) < ROUNDING[rotation.dtype]
    assert_equal(call["cos_sin_cache"], given["cos_sin_cache"])


FLAGS = [
    Rotation((5,), 3, 1, dim, dtype, position, interleaved, conjugate, offset)
    for dim, dtype, position, interleaved, conjugate, offset in itertools.product(
        (64, 128), ROUNDING, (None, torch.int32, torch.int64), (False, True), (False, True), (0, 11)
    )
]
SHAPES = [
    Rotation((1,), 1, None),
    Rotation((33,), 128, 1, margin=128),
    Rotation((7,), 5, 2, margin=3),
    Rotation((7,), 5, 2, margin=1, dtype=torch.float32, interleaved=True),
    Rotation((9,), 4, 1, cache_margin=4),
    Rotation((9,), 4, 1, cache_margin=1, dim=128),
    Rotation((2, 17), 6, 3),
    Rotation((3, 5), 4, 1, 128, torch.float32, None, margin=64),
    Rotation((3, 5), 9, 1, position=torch.int32, interleaved=True, conjugate=True, seqlen_offset=-7, margin=8),
    Rotation((1, 13), 8, 8, position=None),
    Rotation((64,), 33, 7, 128),
]
# With the rest of the lists: heads of 192 of which the last 64 or 128 turn, and dense ones
LISTS = [
    Rotation(tokens, heads, 1, dim, dtype, position, interleaved, margin=192 - dim if heads > 8 else 0)
    for tokens, heads, dim, dtype, position, interleaved in itertools.product(
        ((1,), (512,), (8001,), (2, 4001)), (1, 8, 64, 128), (64, 128), ROUNDING, (None, torch.int32, torch.int64),
        (False, True),
    )
]  # fmt: skip
every_case = pytest.mark.parametrize("rotation", FLAGS + SHAPES, ids=lambda rotation: rotation.id)


@every_case
def test_on_cpu(rotation: Rotation) -> None:
    check(rotation, "cpu")


@pytest.mark.gpu
@every_case
def test_on_gpu(rotation: Rotation) -> None:
    check(rotation, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("rotation", LISTS if FULL else [], ids=lambda rotation: rotation.id)
def test_full_lists(rotation: Rotation) -> None:
    check(rotation, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 8, 16, 31, 128])
def test_numbers_of_heads(heads: int, dtype: torch.dtype, interleaved: bool) -> None:
    check(Rotation((257,), heads, heads // 2 + 1, 64, dtype, interleaved=interleaved, margin=8), "cuda")
    check(Rotation((1001,), heads, 1, 128, dtype, torch.int32, interleaved, True), "cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_conjugate_turns_back(device: str) -> None:
    call = Rotation((40,), 8, 2, 128, torch.float32).make(device)
    before = clone_call(call)
    apply_rotary(**call)
    apply_rotary(**{**call, "conjugate": True})
    for name in ("query", "key"):
        torch.testing.assert_close(call[name], before[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [(0,), (0, 5), (2, 0)], ids=str)
def test_no_tokens(tokens: tuple[int, ...], device: str) -> None:
    call = Rotation(tokens, 4, 1).make(device)
    apply_rotary(**call)
    assert call["query"].numel() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [-1, 300, 2**31, -(2**40)])
def test_gpu_makes_zeros_of_positions_outside(wrong: int) -> None:
    call = Rotation((20,), 4, 2).make("cuda")
    call["positions"][7] = wrong
    expected = clone_call(call)
    apply_rotary_ref(**expected)
    apply_rotary(**call)
    for name in ("query", "key"):
        assert torch.equal(call[name], expected[name])
        assert not call[name][7].any()


@pytest.mark.parametrize(("wrong", "offset"), [(-1, 0), (300, 0), (0, -1), (290, 10)])
def test_cpu_refuses_positions_outside(wrong: int, offset: int) -> None:
    call = {**Rotation((20,), 4, 2).make("cpu"), "positions": torch.full((20,), 100), "seqlen_offset": offset}
    call["positions"][7] = wrong
    before = clone_call(call)
    text = rf"^{NAME}: positions must lie in the cache's 300 rows, got {wrong + offset}$"
    with pytest.raises(ValueError, match=text):
        apply_rotary(**call)
    assert torch.equal(call["query"], before["query"])


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    num_tokens = 2**31 // (128 * 64) + 5
    cache = Rotation((1,), 1, None).make("cuda")["cos_sin_cache"]
    x = torch.randn((num_tokens, 128, 64), device="cuda", dtype=torch.bfloat16)
    positions = torch.arange(num_tokens, device="cuda") % 300
    rows = [0, 1, num_tokens // 2, num_tokens - 6, num_tokens - 1]
    expected = x[rows]
    apply_rotary_ref(expected, cache, positions=positions[rows])
    apply_rotary(x, cache, positions=positions)
    assert_equal(x[rows], expected)


def refusals() -> Iterator[Refusal]:
    def refusal(label: str, text: str, **changes: Any) -> Refusal:
        def make(device: str) -> dict[str, Any]:
            call = Rotation((6,), 4, 2).make(device)
            return call | {name: change(call.get(name)) for name, change in changes.items()}

        return Refusal(label, make, text)

    yield refusal("query None", "query must be a tensor, got NoneType", query=lambda x: None)
    yield refusal("query 2 dimensions", "query must have 3 or 4 dimensions, got 2", query=lambda x: x[0])
    yield refusal("query half", "query must be bfloat16 or float32, got float16", query=lambda x: x.half())
    yield refusal(
        "96 channels", "query must have 64 or 128 channels, got 96", query=lambda x: x.repeat(1, 1, 2)[..., :96]
    )
    yield refusal("columns apart", "query must have strides .*", query=lambda x: x.repeat(1, 1, 2)[..., ::2])
    yield refusal("key a list", "key must be a tensor, got list", key=lambda x: [x])
    yield refusal("key of other tokens", "key must .*num_tokens.*", key=lambda x: x[:5])
    yield refusal("key of 128 channels", "key must .*dim.*", key=lambda x: x.repeat(1, 1, 2))
    yield refusal("key fp32", "key must be bfloat16, got float32.*", key=lambda x: x.float())
    yield refusal("key 4 dimensions", "key must have 3 dimensions like query, got 4", key=lambda x: x[None])
    yield refusal("cache bf16", "cos_sin_cache must be float32, got bfloat16", cos_sin_cache=lambda x: x.bfloat16())
    yield refusal("cache of 128", ".*cos_sin_cache.*", cos_sin_cache=lambda x: x.repeat(1, 2))
    yield refusal("positions int16", "positions must be int32 or int64, got int16", positions=lambda x: x.short())
    yield refusal("positions of 5", ".*positions.*5.*", positions=lambda x: x[:5])
    yield refusal("positions of rows", "positions must have 1 dimensions, got 2", positions=lambda x: x[None])
    yield refusal("positions a list", "positions must be a .*tensor, got list", positions=lambda x: x.tolist())
    yield refusal("offset float", "seqlen_offset must be an int, got float", seqlen_offset=lambda x: 1.0)
    yield refusal("offset bool", "seqlen_offset must be an int, got bool", seqlen_offset=lambda x: True)


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize("refusal", list(refusals()), ids=lambda refusal: refusal.id)
def test_refused(refusal: Refusal) -> None:
    refusal.check(NAME, apply_rotary, "cpu")
