"""Hyper-connections with gradients: against autograd of plain torch, the shared gradient of a residual, training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tilekernels.modeling import MHCPipeline
from tilekernels.modeling.mhc import expand_from_embedding, mhc_head, mhc_pre, ops
from tilekernels.modeling.mhc import reference as ref
from tilekernels.modeling.mhc.functional import mhc_post

BF16 = 2.0**-7  # two roundings of the gradient of a residual, of the largest value
FP32_SUM = 2e-5  # sums over channels and tokens in fp32
TF32_SUM = 2e-3  # products of numbers with 11 bits, the published tests' bound

every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def assert_near(actual: torch.Tensor | None, expected: torch.Tensor | None, tolerance: float) -> None:
    """The largest difference is below `tolerance` times the largest expected magnitude."""
    assert actual is not None
    assert expected is not None
    assert actual.shape == expected.shape
    difference = (actual.double() - expected.double()).abs().max()
    assert difference <= tolerance * expected.double().abs().max() + 1e-12, f"largest difference {difference:.3e}"


def leaf(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return x.detach().to(dtype or x.dtype, copy=True).requires_grad_()


class Inputs:
    """A residual and the parameters of a hyper-connection around a layer."""

    def __init__(self, device: str, mult: int = 4, hidden: int = 64, leading: tuple[int, ...] = (2, 5)) -> None:
        num_mixes = mult * (mult + 2)
        self.mult = mult
        self.residual = torch.randn((*leading, mult, hidden), device=device).bfloat16()
        self.fn = torch.randn((num_mixes, mult * hidden), device=device) / (mult * hidden) ** 0.5
        self.scale = torch.rand(3, device=device) + 0.5
        self.base = torch.randn(num_mixes, device=device) / 4
        self.norm_weight = torch.rand(mult * hidden, device=device) + 0.5

    def leaves(self, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        return [leaf(x, dtype) for x in (self.residual, self.fn, self.scale, self.base, self.norm_weight)]


def run_sublayer(
    residual: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    mult: int,
    layer: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    layer_input, mixes = mhc_pre(residual, fn, scale, base, norm_weight=norm_weight, mhc_mult=mult, pre_eps=1e-2)
    return mhc_post(layer(layer_input), residual, *mixes)


def run_sublayer_ref(
    residual: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    mult: int,
    layer: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    mixes = ref.mhc_pre_norm_fn_ref(residual, fn, norm_weight, 1e-6)
    pre, post, comb = ref.mhc_pre_split_mixes_ref(mixes, scale, base, mult, 1.0, 1e-2)
    comb = ref.sinkhorn_normalize_ref(comb, 10, 1e-6)
    return ref.mhc_post_ref(layer(ref.mhc_pre_apply_mix_ref(residual, pre)), residual, post, comb)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


# ---- gradients -------------------------------------------------------------------------------------------------------


@every_device
@pytest.mark.parametrize("mult", [2, 4, 8])
def test_sublayer_gives_the_gradients_of_float64(mult: int, device: str) -> None:
    inputs = Inputs(device, mult)
    leaves, exact = inputs.leaves(), inputs.leaves(torch.float64)
    out, expected = run_sublayer(*leaves, mult=mult, layer=double), run_sublayer_ref(*exact, mult=mult, layer=double)
    assert_near(out, expected, BF16)
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad.double())
    names = "residual", "fn", "scale", "base", "norm_weight"
    for name, x, y in zip(names, leaves, exact, strict=True):
        # The layer's input and output are bf16, and so are gradients through them
        tolerance = 4 * BF16 if name != "residual" else 2 * BF16
        assert_near(x.grad, y.grad, tolerance)


@every_device
def test_inference_gives_the_bits_of_training(device: str) -> None:
    """With a norm weight too, in one launch behind the product."""
    inputs = Inputs(device, hidden=256, leading=(3, 33))
    leaves = inputs.leaves()
    with torch.no_grad():
        fused = run_sublayer(*leaves, mult=4, layer=double)
    assert torch.equal(fused, run_sublayer(*leaves, mult=4, layer=double))
    assert not fused.requires_grad


@every_device
def test_operators_give_the_gradients_of_float64(device: str) -> None:
    x = torch.randn((2, 7, 24), device=device)
    scale, base = torch.rand(3, device=device), torch.randn(24, device=device)
    check(
        lambda *each: ops.mhc_pre_split_mixes(*each, 4, 2.0, 1e-2),
        lambda *each: ref.mhc_pre_split_mixes_ref(*each, 4, 2.0, 1e-2),
        x,
        scale,
        base,
    )
    check(
        lambda *each: (ops.sinkhorn_normalize(*each),),
        lambda *each: (ref.sinkhorn_normalize_ref(*each),),
        x[..., :16].unflatten(-1, (4, 4)),
    )
    head = (x[..., :4], scale[:1], base[:4])
    check(
        lambda *each: (ops.mhc_head_compute_mix(*each, 1e-2),),
        lambda *each: (ref.mhc_head_compute_mix_ref(*each, 1e-2),),
        *head,
    )
    embedding = torch.randn((2, 7, 64), device=device).bfloat16()
    check(
        lambda *each: (ops.expand_to_mhc(*each, 4),),
        lambda *each: (ref.expand_to_mhc_ref(*each, 4),),
        embedding,
        tolerance=BF16,
    )


def check(
    function: Callable[..., Any], reference: Callable[..., Any], *inputs: torch.Tensor, tolerance: float = FP32_SUM
) -> None:
    leaves, exact = [leaf(x) for x in inputs], [leaf(x, torch.float64) for x in inputs]
    outputs, expected = function(*leaves), reference(*exact)
    for x, y in zip(outputs, expected, strict=True):
        assert_near(x, y, tolerance)
    grads = [torch.randn_like(x) for x in outputs]
    torch.autograd.backward(outputs, grads)
    torch.autograd.backward(expected, [grad.double() for grad in grads])
    for x, y in zip(leaves, exact, strict=True):
        assert_near(x.grad, y.grad, tolerance)


@every_device
def test_head_gives_the_gradients_of_float64(device: str) -> None:
    """Nobody leaves a gradient for it: it makes its own."""
    inputs = Inputs(device)
    leaves = [leaf(x) for x in (inputs.residual, inputs.fn[:4], inputs.scale[:1], inputs.base[:4])]
    exact = [leaf(x, torch.float64) for x in leaves]
    out = mhc_head(*leaves, pre_eps=1e-2)
    mixes = ref.mhc_pre_norm_fn_ref(exact[0], exact[1], None, 1e-6)
    mix = ref.mhc_head_compute_mix_ref(mixes, exact[2], exact[3], 1e-2)
    expected = ref.mhc_pre_apply_mix_ref(exact[0], mix.unsqueeze(-1))
    assert_near(out, expected, BF16)
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad.double())
    for x, y in zip(leaves, exact, strict=True):
        assert_near(x.grad, y.grad, BF16)


@every_device
@pytest.mark.parametrize("leading", [(0,), (2, 0), (1,), (2, 1, 3)], ids=str)
def test_takes_any_leading_dimensions(leading: tuple[int, ...], device: str) -> None:
    inputs = Inputs(device, leading=leading)
    leaves = inputs.leaves()
    out = run_sublayer(*leaves, mult=4, layer=double)
    assert out.shape == inputs.residual.shape
    out.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in leaves)
    with torch.no_grad():
        assert torch.equal(run_sublayer(*leaves, mult=4, layer=double), out)


@every_device
def test_output_can_be_given(device: str) -> None:
    inputs = Inputs(device)
    embedding = torch.randn((2, 5, 64), device=device).bfloat16()
    out = torch.empty_like(inputs.residual)
    with torch.no_grad():
        assert ops.expand_to_mhc(embedding, 4, out=out) is out
        assert torch.equal(out, expand_from_embedding(embedding))
        mix = torch.rand((2, 5, 4, 1), device=device)
        layer_input = torch.empty_like(embedding)
        assert ops.mhc_pre_apply_mix(inputs.residual, mix, out=layer_input) is layer_input
        assert torch.equal(layer_input, ops.mhc_pre_apply_mix(inputs.residual, mix))


# ---- the residual's gradient -----------------------------------------------------------------------------------------


def storage_of(x: torch.Tensor) -> Any:
    return x.untyped_storage()


@every_device
def test_parts_add_to_the_gradient_that_post_left(device: str) -> None:
    """As callers of the steps see it: the attribute is written by post, added to by apply, taken away by norm_fn."""
    inputs = Inputs(device)
    residual, fn = leaf(inputs.residual), leaf(inputs.fn)
    left = torch.zeros_like(residual)
    storage_of(residual).grad_from_mhc_post = left
    mix = leaf(torch.rand((2, 5, 4, 1), device=device))
    ops.mhc_pre_apply_mix(residual, mix).sum().backward()
    assert residual.grad is None
    assert_near(left, mix.detach().expand_as(left), BF16)
    ops.mhc_pre_norm_fn(residual, fn, None, 1e-6).sum().backward()
    assert residual.grad is None
    assert not hasattr(storage_of(residual), "grad_from_mhc_post")
    ops.mhc_pre_norm_fn(residual, fn, None, 1e-6, fuse_grad_acc=False).sum().backward()
    assert_near(left.float() - mix.detach(), residual.grad, 4 * BF16)


@every_device
def test_a_gradient_of_another_pass_is_not_added_to(device: str) -> None:
    inputs = Inputs(device)
    residual = leaf(inputs.residual)
    post, comb = torch.rand((2, 5, 4, 1), device=device), torch.rand((2, 5, 4, 4), device=device)
    ops.mhc_post(inputs.residual[..., 0, :].contiguous(), residual, post, comb).sum().backward()
    assert residual.grad is not None
    first = residual.grad.clone()
    ops.mhc_pre_apply_mix(residual, torch.ones_like(post)).sum().backward()
    assert_near(residual.grad, first + 1, BF16)


@every_device
def test_neighbours_in_one_storage_keep_apart(device: str) -> None:
    both = torch.randn((2, 3, 4, 64), device=device).bfloat16()
    first, second = leaf(both), leaf(both)
    one, other = first[0], second[1]
    storage_of(first).grad_from_mhc_post = None
    post, comb = torch.rand((3, 4, 1), device=device), torch.rand((3, 4, 4), device=device)
    out = ops.mhc_post(both[0, :, 0].contiguous(), one, post, comb).sum()
    (out + ops.mhc_pre_apply_mix(first[1], post).sum()).backward()
    assert first.grad is not None
    assert_near(first.grad[0], comb.sum(-1, keepdim=True).expand_as(one), BF16)
    assert_near(first.grad[1], post.expand_as(other), BF16)


@every_device
def test_main_grad_is_added_to(device: str) -> None:
    inputs = Inputs(device)
    leaves, plain = inputs.leaves(), inputs.leaves()
    for at in (1, 4):
        leaves[at].main_grad = torch.ones_like(leaves[at])  # type: ignore[attr-defined]
    run_sublayer(*leaves, mult=4, layer=double).sum().backward()
    run_sublayer(*plain, mult=4, layer=double).sum().backward()
    for at in (1, 4):
        assert leaves[at].grad is None
        assert plain[at].grad is not None
        assert_near(leaves[at].main_grad, plain[at].grad + 1, FP32_SUM)  # type: ignore[attr-defined]
    fn, residual = leaf(inputs.fn), inputs.residual
    fn.main_grad = torch.zeros_like(fn)  # type: ignore[attr-defined]
    ops.mhc_pre_norm_fn(residual, fn, None, 1e-6).sum().backward()
    assert fn.grad is None
    assert fn.main_grad.any()  # type: ignore[attr-defined]


# ---- the module ------------------------------------------------------------------------------------------------------


class Feed(torch.nn.Module):
    """A layer: two products and a non-linearity, in bf16."""

    def __init__(self, hidden: int, device: str) -> None:
        super().__init__()
        self.up = torch.nn.Linear(hidden, 2 * hidden, device=device, dtype=torch.bfloat16)
        self.down = torch.nn.Linear(2 * hidden, hidden, device=device, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.nn.functional.silu(self.up(x)))
        return result


def make_model(hidden: int, device: str, **options: Any) -> torch.nn.ModuleList:
    return torch.nn.ModuleList([MHCPipeline(Feed(hidden, device), hidden, device=device, **options) for _ in range(3)])


def copy_of(model: torch.nn.ModuleList, hidden: int, device: str, **options: Any) -> torch.nn.ModuleList:
    copy = make_model(hidden, device, **options)
    copy.load_state_dict(model.state_dict())
    return copy


def run_model(model: torch.nn.ModuleList, embedding: torch.Tensor) -> torch.Tensor:
    residual = expand_from_embedding(embedding)
    for block in model:
        residual = block(residual)
    return residual.float().mean(-2)


def run_model_ref(model: torch.nn.ModuleList, embedding: torch.Tensor) -> torch.Tensor:
    """The same parameters in plain torch."""
    residual = ref.expand_to_mhc_ref(embedding, 4)
    for block in model:
        assert isinstance(block, MHCPipeline)
        mixes = ref.mhc_pre_norm_fn_ref(residual, block.fn, block.norm_weight, 1e-6)
        pre, post, comb = ref.mhc_pre_split_mixes_ref(mixes, block.scale, block.base, 4, 1.0, 1e-6)
        comb = ref.sinkhorn_normalize_ref(comb, block.options["sinkhorn_repeat"], 1e-6)
        residual = ref.mhc_post_ref(block.layer(ref.mhc_pre_apply_mix_ref(residual, pre)), residual, post, comb)
    return residual.float().mean(-2)


def train(
    run: Callable[[torch.nn.ModuleList, torch.Tensor], torch.Tensor],
    model: torch.nn.ModuleList,
    embedding: torch.Tensor,
    target: torch.Tensor,
    rate: float,
    steps: int,
) -> list[float]:
    """The loss before each step. `rate` is that of the layers' weights; mixes learn at another."""
    groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[".layer." in name].append(parameter)
    rates = {True: rate, False: 0.2}
    optimizer = torch.optim.SGD([{"params": groups[key], "lr": rates[key]} for key in groups])
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (run(model, embedding) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("device", "num_tokens", "hidden", "repeat", "rate"),
    # Plain torch itself diverges at 1280 channels with a rate of 16
    [("cpu", 8, 16, 3, 0.2), pytest.param("cuda", 4096, 1280, 10, 1.0, marks=pytest.mark.gpu)],
    ids=["cpu", "cuda"],
)
@pytest.mark.parametrize("use_norm_weight", [False, True], ids=["plain", "norm_weight"])
def test_trains_as_plain_torch_does(
    device: str, num_tokens: int, hidden: int, repeat: int, rate: float, use_norm_weight: bool
) -> None:
    options = {"use_norm_weight": use_norm_weight, "sinkhorn_repeat": repeat}
    model = make_model(hidden, device, **options)
    reference = copy_of(model, hidden, device, **options)
    embedding = torch.randn((2, num_tokens // 2, hidden), device=device).bfloat16()
    target = torch.randn(hidden, device=device)  # for all tokens, so that many learn it as fast as few do
    losses = train(run_model, model, embedding, target, rate, 50)
    expected = train(run_model_ref, reference, embedding, target, rate, 50)
    assert expected[-1] < 0.9 * expected[0]
    assert abs(losses[-1] - expected[-1]) < 1e-3 * expected[0]


@every_device
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved", "reentrant"])
def test_checkpointed_module_has_the_same_gradients(use_reentrant: bool, device: str) -> None:
    """To the bit: the residual's gradient has one order of additions in both."""
    model = make_model(64, device, use_norm_weight=True)
    embedding = torch.randn((2, 9, 64), device=device).bfloat16()

    def grads_of(run: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        model.zero_grad()
        x = leaf(embedding)
        residual = expand_from_embedding(x)
        for block in model:
            residual = run(block, residual)
        residual.float().square().sum().backward()
        return [each.grad for each in (x, *model.parameters()) if each.grad is not None]

    plain = grads_of(lambda block, residual: block(residual))
    saved = grads_of(lambda block, residual: checkpoint(block, residual, use_reentrant=use_reentrant))
    assert len(plain) == len(saved) == 1 + len(list(model.parameters()))
    for x, y in zip(plain, saved, strict=True):
        assert torch.equal(x, y)


@every_device
def test_a_residual_that_others_read_gets_all_of_its_gradient(device: str) -> None:
    model = make_model(64, device)
    embedding = torch.randn((2, 9, 64), device=device).bfloat16()

    def grads_of(with_blocks: float, with_others: float) -> torch.Tensor:
        model.zero_grad()
        x = leaf(embedding)
        loss: Any = 0.0
        residual = expand_from_embedding(x)
        for block in model:
            following = block(residual)
            loss = loss + with_others * residual.float().square().sum()
            residual = following
        (loss + with_blocks * residual.float().square().sum()).backward()
        assert x.grad is not None
        return x.grad.double()

    assert_near(grads_of(1.0, 1.0), grads_of(1.0, 0.0) + grads_of(0.0, 1.0), 4 * BF16)


def test_module_passes_arguments_on_and_refuses_a_layer_that_changes_the_shape() -> None:
    block = MHCPipeline(lambda x, factor, *, bias: x * factor + bias, hidden=64, mhc_mult=2)
    residual = torch.randn(3, 2, 64).bfloat16()
    plain = MHCPipeline(lambda x: x * 3 + 1, hidden=64, mhc_mult=2)
    plain.load_state_dict(block.state_dict())
    assert torch.equal(block(residual, 3, bias=1), plain(residual))
    with pytest.raises(
        ValueError, match=r"^modeling\.MHCPipeline: layer must keep the shape \(3, 64\), got \(3, 32\)$"
    ):
        MHCPipeline(lambda x: x[..., :32], hidden=64, mhc_mult=2)(residual)
    with pytest.raises(ValueError, match=r"^modeling\.MHCPipeline: residual must end in \(2, 64\), got \(3, 4, 64\)$"):
        block(torch.zeros(3, 4, 64).bfloat16())
    with pytest.raises(ValueError, match=r"^modeling\.MHCPipeline: mhc_mult must be 2, 4 or 8, got 3$"):
        MHCPipeline(double, hidden=64, mhc_mult=3)


def test_functions_refuse_what_they_cannot_take() -> None:
    inputs = Inputs("cpu")
    parameters = inputs.fn, inputs.scale, inputs.base
    with pytest.raises(ValueError, match=r"^modeling\.mhc\.mhc_pre: residual must end in 2 streams, got .*"):
        mhc_pre(inputs.residual, *parameters, mhc_mult=2)
    with pytest.raises(ValueError, match=r"^modeling\.mhc\.expand_to_mhc: hidden must be contiguous, got .*"):
        expand_from_embedding(torch.zeros(4, 6).bfloat16().t())
    with pytest.raises(ValueError, match=r"^modeling\.mhc\.sinkhorn_normalize: repeat must be between 1 and 128, .*"):
        ops.sinkhorn_normalize(torch.zeros(1, 4, 4, requires_grad=True), 129)
    assert ops.sinkhorn_normalize(torch.zeros(1, 4, 4), 129).shape == (1, 4, 4)
