"""The engram gate: against its definition in float64, gradients against autograd in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.engram.gates import FULL, HIDDEN_SIZES, STREAMS, Gate, gate_in_float64, split
from tests.refusals import Refusal
from tilekernels.engram import engram_gate_bwd, engram_gate_fwd
from tilekernels.engram._reference import gate_gradients, gate_of_rows
from tilekernels.engram.engram_gate import engram_gate_bwd_ref, engram_gate_fwd_ref
from tilekernels.testing import assert_equal, calc_diff

# Of the bf16 output and the saved fp32 numbers, by calc_diff: the published bound. The exact gate itself is 1.3e-10 to
# 2.6e-10 from an fp32 one whose sums are less exact, because bf16 numbers flip.
OUTPUT_DIFF, SAVED_DIFF = 2e-10, 1e-11
# What rounding to bf16 alone makes of any numbers, by calc_diff
ROUNDING = 3e-6
# Of the gradients from the same saved numbers: the published bound; grad_w is not rounded and much nearer
GRADIENT_DIFF, GRAD_W_DIFF = 1e-8, 1e-12
FLIPS_DIFF = 1e-7  # bf16 numbers whose last bit fp32 decides otherwise: up to 2e-8 measured; rounding them all is 3e-6
# The slope of a gate is as 1 / sqrt(|p|), and fp32 sums leave p wrong by up to 1e-6 whatever makes them: half of
# 1e-6 / |p| of the slope. The few rows nearest to zero decide how far all gradients of a large batch are from exact
# ones (calc_diff of plain torch in fp32: 1e-12 to 1e-5 for one seed or another), below this |p| almost alone.
STEEP = 1e-3

SMALL = [
    Gate(*shape, layout, is_masked=is_masked)
    for shape, layout, is_masked in (
        ((1, 512), "one", False),
        ((7, 768), "pair", False),
        ((5, 2560), "one", True),
        ((3, 1024), "wide", False),
        ((2, 512), "odd", True),
    )
]
LARGE = [
    *(Gate(157, hidden) for hidden in range(512, 8448, 256)),
    *(Gate(301, hidden, layout) for hidden in (2560, 7168, 8192) for layout in ("pair", "wide", "odd")),
    *(Gate(301, hidden, is_masked=True) for hidden in (2048, 4096, 6144, 8704)),
    *(Gate(num_tokens, 3072) for num_tokens in (1, 2, 32, 33, 34, 65, 66, 67, 98, 99, 100, 131, 132, 133, 197, 1000)),
    *(Gate(num_tokens, hidden) for num_tokens in (4001, 8001) for hidden in HIDDEN_SIZES),
]
if FULL:
    LARGE += [
        Gate(num_tokens, hidden, layout, is_masked=is_masked)
        for num_tokens, hidden, layout, is_masked in itertools.product(
            (1, 512, 4001, 8001), HIDDEN_SIZES, ("one", "pair"), (False, True)
        )
        if num_tokens < 4001 or layout == "pair" or is_masked
    ]
every_small = pytest.mark.parametrize("gate", SMALL, ids=lambda gate: gate.id)
every_large = pytest.mark.parametrize("gate", SMALL + LARGE, ids=lambda gate: gate.id)


# ---- forward ---------------------------------------------------------------------------------------------------------


def check_forward(gate: Gate, device: str) -> None:
    call = gate.make(device)
    x, mask = call["hidden_states"], call["image_token_mask"]
    exact = gate_in_float64(x, *split(call["kv"]), call["weight_fused"], gate.eps, gate.clamp_value)
    keep = slice(None) if mask is None else ~mask
    before = x.clone()
    output, *saved = engram_gate_fwd(**call)
    assert output.is_contiguous()
    assert output.dtype == torch.bfloat16
    assert calc_diff(output[keep], exact[0][keep]) < ROUNDING
    assert calc_diff(output[keep], exact[0].bfloat16()[keep]) < (OUTPUT_DIFF if gate.num_tokens > 1000 else 1e-8)
    for found, wanted in zip(saved, exact[1:], strict=True):
        assert found is not None
        assert found.is_contiguous()
        assert found.dtype == torch.float32
        assert calc_diff(found[keep], wanted[keep]) < SAVED_DIFF
    if mask is not None:
        assert_equal(output[mask], x[mask])
    assert_equal(x, before)
    # Without saving, and in place: the same bytes
    alone = engram_gate_fwd(**call, save_for_backward=False)
    assert alone[1:] == (None, None, None, None)
    assert_equal(alone[0], output)
    replaced = engram_gate_fwd(**call, save_for_backward=False, inplace=True)
    assert replaced[0] is x
    assert_equal(x, output)


@every_small
def test_forward_on_cpu(gate: Gate) -> None:
    check_forward(gate, "cpu")


@pytest.mark.gpu
@every_large
def test_forward_on_gpu(gate: Gate) -> None:
    check_forward(gate, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("num_streams", [1, 2, 3, 5, 8, 40])
def test_forward_with_other_numbers_of_streams(num_streams: int) -> None:
    check_forward(Gate(101, 1280, num_streams=num_streams), "cuda")
    check_forward(Gate(11, 1280, layout="odd", num_streams=num_streams, is_masked=True), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [2560, 4096, 7168])
def test_forward_is_as_near_as_the_reference(hidden: int) -> None:
    """The published test holds the output against an fp32 reference."""
    call = Gate(8001, hidden, layout="pair").make("cuda")
    output, *saved = engram_gate_fwd(**call)
    expected, *expected_saved = engram_gate_fwd_ref(**call)
    assert calc_diff(output, expected) < 2 * OUTPUT_DIFF
    for found, wanted in zip(saved, expected_saved, strict=True):
        assert found is not None
        assert wanted is not None
        assert calc_diff(found, wanted) < OUTPUT_DIFF


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", HIDDEN_SIZES if FULL else [4096])
def test_limit_of_sms_changes_nothing_forward(hidden: int) -> None:
    import tilekernels

    call = Gate(333, hidden).make("cuda")
    expected = engram_gate_fwd(**call)
    try:
        for num_sms in (1, 3, 4, 113):
            tilekernels.set_num_sms(num_sms)
            for found, wanted in zip(engram_gate_fwd(**call), expected, strict=True):
                assert found is not None
                assert wanted is not None
                assert_equal(found, wanted)
    finally:
        tilekernels.config.reset_runtime_config()


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("hidden", [512, 8704])
def test_clamped_and_zero_rows(hidden: int, device: str) -> None:
    """Rows of zeros, keys at right angles to the rows, tiny and huge rows."""
    call = Gate(6, hidden, layout="pair", clamp_value=0.5).make(device)
    k, _ = call["kv"]
    x = call["hidden_states"]
    x[0], k[1] = 0, 0
    x[2, :, ::2], k[2, :, 1::2] = 0, 0
    x[3] *= 1e-15
    x[4] *= 1e15
    exact = gate_in_float64(x, *call["kv"], call["weight_fused"], 1e-20, 0.5)
    output, _, gate_score, *_ = engram_gate_fwd(**call)
    assert calc_diff(output[:4], exact[0][:4]) < ROUNDING
    assert calc_diff(output[4], exact[0][4]) < ROUNDING
    assert gate_score is not None
    assert calc_diff(gate_score, exact[2]) < SAVED_DIFF


@pytest.mark.parametrize("device", DEVICES)
def test_nan_goes_through(device: str) -> None:
    call = Gate(3, 512, layout="pair").make(device)
    call["kv"][0][1, 2, 5] = float("nan")
    output = engram_gate_fwd(**call)[0]
    is_nan = output.isnan().all(dim=-1)
    assert is_nan.tolist() == [[False] * 4, [False, False, True, False], [False] * 4]


# ---- backward --------------------------------------------------------------------------------------------------------


def make_backward(gate: Gate, device: str) -> dict[str, Any]:
    call = gate.make(device)
    _, *saved = engram_gate_fwd_ref(**call)
    mask = call["image_token_mask"]
    if mask is not None:
        for tensor in saved:
            assert tensor is not None
            tensor[mask] = float("nan")  # as good as unwritten
    del call["eps"]
    grad_out = torch.randn_like(call["hidden_states"])
    return {"grad_out": grad_out, **call, **dict(zip(("dot", "gate_score", "rstd_x", "rstd_k"), saved, strict=True))}


def autograd_in_float64(gate: Gate, call: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Gradients of x, k, v and the weight."""
    rows = [
        each.double().requires_grad_() for each in (call["hidden_states"], *split(call["kv"]), call["weight_fused"])
    ]
    output = gate_in_float64(*rows, gate.eps, gate.clamp_value)[0]
    mask = call["image_token_mask"]
    if mask is not None:
        output = torch.where(mask[:, None, None], rows[0], output)
    return torch.autograd.grad(output, rows, call["grad_out"].double())


def check_backward(gate: Gate, device: str) -> None:
    call = make_backward(gate, device)
    check_against_saved(gate, call)
    mask = call["image_token_mask"]
    if mask is not None:
        grad_x, grad_kv, _ = engram_gate_bwd(**call)
        assert_equal(grad_x[mask], call["grad_out"][mask])
        assert not any(each[mask].any() for each in split(grad_kv))
    # Gradients that do not ask the steep gates how steep they are
    call["grad_out"] = torch.where(is_steep(call)[..., None], 0, call["grad_out"])
    exact = autograd_in_float64(gate, call)
    grad_x, grad_kv, grad_w = engram_gate_bwd(**call)
    for found, wanted in zip((grad_x, *split(grad_kv)), exact[:3], strict=True):
        assert calc_diff(found, wanted) < ROUNDING
    assert calc_diff(grad_w.sum(0), exact[3]) < (GRADIENT_DIFF if gate.num_tokens > 1000 else 3e-7)


def check_against_saved(gate: Gate, call: dict[str, Any]) -> None:
    """Against the definition in float64 from the same saved numbers: what the kernel itself adds."""
    saved = (call[name].double() for name in ("dot", "gate_score", "rstd_x", "rstd_k"))
    rows = (
        each.double() for each in (call["grad_out"], call["hidden_states"], *split(call["kv"]), call["weight_fused"])
    )
    wanted_grads = gate_gradients(*rows, *saved, gate.clamp_value, call["image_token_mask"], 1)
    grad_x, grad_kv, grad_w = engram_gate_bwd(**call)
    assert isinstance(grad_kv, tuple) == isinstance(call["kv"], tuple)
    for each in (grad_x, grad_w, *(grad_kv if isinstance(grad_kv, tuple) else (grad_kv,))):
        assert each.is_contiguous()
    for found, wanted in zip((grad_x, *split(grad_kv)), wanted_grads[:3], strict=True):
        assert found.dtype == torch.bfloat16
        assert found.shape == wanted.shape
        # A number that flips shows in a small sample
        assert calc_diff(found, wanted.bfloat16()) < (FLIPS_DIFF if gate.num_tokens > 1000 else 3e-7)
    assert grad_w.dtype == torch.float32
    assert calc_diff(grad_w.sum(0), wanted_grads[3].sum(0)) < GRAD_W_DIFF


def is_steep(call: dict[str, Any]) -> torch.Tensor:
    """Which gates, (num_tokens, num_streams), are so near p = 0 that rounding dot to fp32 shows in their slope."""
    dot, rstd_x, rstd_k = (call[name].double() for name in ("dot", "rstd_x", "rstd_k"))
    return (dot * rstd_x * rstd_k).abs() / call["hidden_states"].shape[2] ** 0.5 < STEEP


@every_small
def test_backward_on_cpu(gate: Gate) -> None:
    check_backward(gate, "cpu")


@pytest.mark.gpu
@every_large
def test_backward_on_gpu(gate: Gate) -> None:
    check_backward(gate, "cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_no_gradient_through_a_clamped_gate(device: str) -> None:
    gate = Gate(9, 512, clamp_value=1e3)
    call = make_backward(gate, device)
    grad_x, grad_kv, grad_w = engram_gate_bwd(**call)
    assert_equal(grad_x, call["grad_out"])
    assert not split(grad_kv)[0].any()
    assert not grad_w.any()
    assert split(grad_kv)[1].any()


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [*(HIDDEN_SIZES if FULL else (2560, 4096, 7168)), 8704])
def test_backward_gives_the_same_bytes_every_time(hidden: int) -> None:
    import tilekernels

    call = make_backward(Gate(1111, hidden), "cuda")
    expected = engram_gate_bwd(**call)
    for _ in range(20):
        for found, wanted in zip(engram_gate_bwd(**call), expected, strict=True):
            assert_equal(found, wanted)
    try:
        for num_sms in (1, 8, 50):
            tilekernels.set_num_sms(num_sms)
            *grads, grad_w = engram_gate_bwd(**call)
            for found, wanted in zip(grads, expected, strict=False):
                assert_equal(found, wanted)
            assert calc_diff(grad_w.sum(0), expected[2].sum(0)) < GRAD_W_DIFF
            assert_equal(grad_w, engram_gate_bwd(**call)[2])
    finally:
        tilekernels.config.reset_runtime_config()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["one", "pair"])
@pytest.mark.parametrize("hidden", [512, *(HIDDEN_SIZES if FULL else (7168,))])
def test_no_tokens(hidden: int, layout: str, device: str) -> None:
    gate = Gate(0, hidden, layout)
    output, *saved = engram_gate_fwd(**gate.make(device))
    assert output.shape == (0, STREAMS, hidden)
    assert all(each is not None and each.shape == (0, STREAMS) for each in saved)
    grad_x, grad_kv, grad_w = engram_gate_bwd(**make_backward(gate, device))
    assert grad_x.shape == output.shape
    assert not grad_w.any()
    assert split(grad_kv)[0].shape == output.shape
    assert split(grad_kv)[1].shape == (0, hidden)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    """Rows at both ends, and where a 32-bit index would wrap."""
    num_tokens, hidden = 80_000, 7168
    call = Gate(num_tokens, hidden).make("cuda")
    output, *saved = engram_gate_fwd(**call)
    rows = [0, 1, 59_918, 59_919, 74_897, 74_898, 74_899, num_tokens - 1]  # 2^31 / (5 or 4 * hidden)
    few = {**call, "hidden_states": call["hidden_states"][rows], "kv": call["kv"][rows]}
    few_output, *few_saved = engram_gate_fwd(**few)
    assert_equal(output[rows], few_output)
    for found, wanted in zip(saved, few_saved, strict=True):
        assert found is not None
        assert wanted is not None
        assert_equal(found[rows], wanted)
    names = "dot", "gate_score", "rstd_x", "rstd_k"
    inputs = {name: call[name] for name in ("hidden_states", "kv", "weight_fused", "clamp_value")}
    grads = engram_gate_bwd(grad_out=output, **inputs, **dict(zip(names, saved, strict=True)))
    inputs |= {name: few[name] for name in ("hidden_states", "kv")}
    few_grads = engram_gate_bwd(grad_out=few_output, **inputs, **dict(zip(names, few_saved, strict=True)))
    assert_equal(grads[0][rows], few_grads[0])
    assert isinstance(grads[1], torch.Tensor)
    assert isinstance(few_grads[1], torch.Tensor)
    assert_equal(grads[1][rows], few_grads[1])


# ---- the references --------------------------------------------------------------------------------------------------


def test_references_follow_the_definition() -> None:
    gate = Gate(9, 512, is_masked=True)
    call = gate.make("cpu")
    rows = [each.double() for each in (call["hidden_states"], *split(call["kv"]), call["weight_fused"])]
    exact = gate_in_float64(*rows, gate.eps, gate.clamp_value)
    found = gate_of_rows(*rows, gate.eps, gate.clamp_value)
    for each, wanted in zip(found, exact, strict=True):
        assert calc_diff(each, wanted) < 1e-24
    grad_out = torch.randn(9, STREAMS, 512)
    wanted_grads = autograd_in_float64(gate, {**call, "grad_out": grad_out})
    for num_parts in (1, 2, 9, 20):
        grads = gate_gradients(
            grad_out.double(), *rows, *found[1:], gate.clamp_value, call["image_token_mask"], num_parts
        )
        assert grads[3].shape[0] == num_parts
        for each, wanted in zip((*grads[:3], grads[3].sum(0)), wanted_grads, strict=True):
            assert calc_diff(each, wanted) < 1e-24


def test_reference_of_one_tensor_is_that_of_the_pair() -> None:
    call = make_backward(Gate(5, 512), "cpu")
    pair = {**call, "kv": split(call["kv"])}
    grad_x, grad_kv, grad_w = engram_gate_bwd_ref(**call)
    pair_x, pair_kv, pair_w = engram_gate_bwd_ref(**pair)
    assert_equal(grad_x, pair_x)
    assert_equal(grad_w, pair_w)
    for each, wanted in zip(split(grad_kv), pair_kv, strict=True):
        assert_equal(each, wanted, check_stride=False)


# ---- invalid calls ---------------------------------------------------------------------------------------------------


def refusals(is_backward: bool) -> Iterator[Refusal]:
    def refusal(label: str, text: str, **changes: Any) -> Refusal:
        def make(device: str) -> dict[str, Any]:
            call = make_backward(Gate(6, 512), device) if is_backward else Gate(6, 512).make(device)
            return call | {name: change(call.get(name)) for name, change in changes.items()}

        return Refusal(label, make, text)

    first = "grad_out" if is_backward else "hidden_states"
    for width in (256, 500, 640):
        text = f"{first} must have a multiple of 256 columns, at least 512, got {width}"
        yield refusal(f"{width} columns", text, **{first: lambda x, w=width: torch.zeros((6, 4, w)).to(x.dtype)})
    yield refusal("x fp32", "hidden_states must be bfloat16, got float32", hidden_states=lambda x: x.float())
    yield refusal("x 2 dimensions", "hidden_states must have 3 dimensions, got 2.*", hidden_states=lambda x: x[0])
    yield refusal("x strided", "hidden_states must have strides .*", hidden_states=lambda x: x.repeat(1, 2, 1)[:, ::2])
    yield refusal("kv None", r"kv must be a tensor or a pair \(k, v\), got NoneType", kv=lambda x: None)
    yield refusal("kv of three", r"kv must be a tensor or a pair \(k, v\), got 3 of them", kv=lambda x: (x, x, x))
    yield refusal("kv without v", r"kv must have shape \(6, 5, 512\), got \(6, 4, 512\)", kv=lambda x: x[:, :4])
    yield refusal("kv flat", "kv must have 3 dimensions, got 2", kv=lambda x: x.view(6, -1))
    yield refusal("kv fp32", "k must be bfloat16, got float32", kv=lambda x: x.float())
    yield refusal("kv columns apart", "k must have strides .*", kv=lambda x: x.repeat_interleave(2, 2)[..., ::2])
    yield refusal("k of 5 tokens", ".*k.*5.*", kv=lambda x: (x[:5, :4], x[:, 4]))
    yield refusal("v of 3 dimensions", "v must have 2 dimensions, got 3.*", kv=lambda x: (x[:, :4], x[:, 4:]))
    yield refusal("weight bf16", "weight_fused must be float32, .*", weight_fused=lambda x: x.bfloat16())
    yield refusal("weight of 3 streams", ".*weight_fused.*3.*", weight_fused=lambda x: x[:3])
    yield refusal("mask int", "image_token_mask must be bool, .*", image_token_mask=lambda _: torch.zeros(6).int())
    yield refusal("mask of 7", ".*image_token_mask.*7.*", image_token_mask=lambda _: torch.zeros(7).bool())
    if not is_backward:
        yield refusal(
            "in place and saved",
            "inplace must be False where save_for_backward is True, got True",
            inplace=lambda _: True,
        )
        return
    yield refusal("grad_out fp32", "grad_out must be bfloat16, got float32", grad_out=lambda x: x.float())
    yield refusal("dot None", "dot must be a .*tensor, got .*", dot=lambda x: None)
    yield refusal("rstd_k bf16", "rstd_k must be float32, got bfloat16", rstd_k=lambda x: x.bfloat16())
    yield refusal("gate of 3 streams", ".*gate_score.*3.*", gate_score=lambda x: x[:, :3].contiguous())


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize("refusal", list(refusals(False)), ids=lambda refusal: refusal.id)
def test_forward_refused(refusal: Refusal) -> None:
    refusal.check("engram.engram_gate_fwd", engram_gate_fwd, "cpu")


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize("refusal", list(refusals(True)), ids=lambda refusal: refusal.id)
def test_backward_refused(refusal: Refusal) -> None:
    refusal.check("engram.engram_gate_bwd", engram_gate_bwd, "cpu")
