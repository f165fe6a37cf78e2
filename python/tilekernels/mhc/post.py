"""The residual streams behind a layer: its output and the streams before it, mixed; and the gradients of all four."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from .._outputs import size_of
from ..testing.cases import BenchCase
from ._checks import check_mult, check_tensor, flatten
from ._reference import mix_streams

_NAME = "mhc.mhc_post_fwd"
_NAME_BACKWARD = "mhc.mhc_post_bwd"


def mhc_post_fwd(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each token's streams behind a layer: stream o is post[o] * x + the sum over i of comb[i, o] * residual[i].

    x: (..., hidden) bf16, the layer's output. residual: (..., m, hidden) bf16, m 2, 4 or 8; made dense if it is not.
    post_layer_mix: (..., m, 1) fp32. comb_res_mix: (..., m, m) fp32, the first index that of the stream before. Returns
    a tensor like residual, `out` if it is given. A product, then fused multiply-adds in fp32 in the order of the
    streams, rounded once.
    """
    residual = _dense(_NAME, residual)
    mult, arguments = _flatten(_NAME, x, residual, post_layer_mix, comb_res_mix)
    if out is None:
        result: torch.Tensor = _mhc_post_fwd(*arguments, (torch.bfloat16, 0, *_streams_of(1, mult)), mult)
        return result.view(residual.shape)
    shape = (mult, residual.shape[-1])
    _mhc_post_fwd(*arguments, flatten(_NAME, "out", out, torch.bfloat16, residual.shape[:-2], shape), mult)
    return out


def mhc_post_bwd(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    d_o: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients (d_x, d_residual, d_post_layer_mix, d_comb_res_mix) of `mhc_post_fwd`, shaped as its inputs.

    d_o: like residual, the gradient of the result; made dense if it is not. d_x and d_residual are bf16: fused
    multiply-adds in fp32 from 0 on in the order of the streams, rounded once. The gradients of the mixes are fp32: sums
    over the channels in an order of their own.
    """
    residual = _dense(_NAME_BACKWARD, residual)
    mult, arguments = _flatten(_NAME_BACKWARD, x, residual, post_layer_mix, comb_res_mix)
    check_tensor(_NAME_BACKWARD, "d_o", d_o, torch.bfloat16)
    shape = (mult, residual.shape[-1])
    grad = flatten(_NAME_BACKWARD, "d_o", d_o.contiguous(), torch.bfloat16, residual.shape[:-2], shape)
    num_tokens, _, hidden = _streams_of(1, mult)
    d_x, d_residual, d_post, d_comb = _mhc_post_bwd(
        *arguments,
        grad,
        (torch.bfloat16, 0, num_tokens, hidden),
        (torch.bfloat16, 0, num_tokens, mult, hidden),
        (torch.float32, 0, num_tokens, mult),
        (torch.float32, 0, num_tokens, mult, mult),
        mult,
    )
    return (
        d_x.view(x.shape),
        d_residual.view(residual.shape),
        d_post.view(post_layer_mix.shape),
        d_comb.view(comb_res_mix.shape),
    )


def mhc_post_fwd_ref(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`mhc_post_fwd` in plain torch."""
    if out is None:
        out = torch.empty_like(residual, memory_format=torch.contiguous_format)
    _, (layer, streams, post, comb) = _flatten(_NAME, x, residual.contiguous(), post_layer_mix, comb_res_mix)
    _write_streams(layer, streams, post, comb, out.view(streams.shape))
    return out


def mhc_post_bwd_ref(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    d_o: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`mhc_post_bwd` in plain torch."""
    residual = residual.contiguous()
    mult, (layer, streams, post, comb) = _flatten(_NAME_BACKWARD, x, residual, post_layer_mix, comb_res_mix)
    grads = d_o.reshape(streams.shape).unbind(1)
    zero = torch.zeros(layer.shape, dtype=torch.float32, device=x.device)
    d_x = mix_streams(post.unbind(1), grads, zero).to(x.dtype)
    d_streams = [mix_streams(comb[:, i].unbind(1), grads, zero).to(x.dtype) for i in range(mult)]
    d_post = [_dot(layer, grad) for grad in grads]
    d_comb = [_dot(streams[:, i], grad) for i in range(mult) for grad in grads]
    return (
        d_x.view(x.shape),
        torch.stack(d_streams, 1).view(residual.shape),
        torch.stack(d_post, 1).view(post_layer_mix.shape),
        torch.stack(d_comb, 1).view(comb_res_mix.shape),
    )


def _streams_of(argument: int, mult: int) -> tuple[Any, ...]:
    """The sizes of a result that are those of the kernel's argument (num_tokens, mult, hidden)."""
    return size_of(argument, 0), mult, size_of(argument, 2)


def _dot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x.float() * y.float()).sum(1)


def _write_streams(
    x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, out: torch.Tensor
) -> None:
    streams = residual.unbind(1)
    layer = x.float()
    results = [
        mix_streams(comb[:, :, o].unbind(1), streams, post[:, o, None] * layer).to(out.dtype)
        for o in range(len(streams))
    ]
    out.copy_(torch.stack(results, 1))


def _dense(operator: str, residual: Any) -> torch.Tensor:
    check_tensor(operator, "residual", residual, torch.bfloat16)
    dense: torch.Tensor = residual.contiguous()
    return dense


def _flatten(
    operator: str, x: torch.Tensor, residual: torch.Tensor, post_layer_mix: torch.Tensor, comb_res_mix: torch.Tensor
) -> tuple[int, tuple[torch.Tensor, ...]]:
    """The number of streams, and the arguments with all leading dimensions in one."""
    check_tensor(operator, "x", x, torch.bfloat16)
    if residual.ndim < 2:
        check_tensor(operator, "residual", residual, torch.bfloat16, 3)
    leading, mult = residual.shape[:-2], check_mult(operator, "residual", residual.shape[-2])
    return mult, (
        flatten(operator, "x", x, torch.bfloat16, leading, residual.shape[-1:]),
        flatten(operator, "residual", residual, torch.bfloat16, leading, residual.shape[-2:]),
        flatten(operator, "post_layer_mix", post_layer_mix, torch.float32, leading, (mult, 1)).squeeze(-1),
        flatten(operator, "comb_res_mix", comb_res_mix, torch.float32, leading, (mult, mult)),
    )


def _fwd_cpu(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    out: torch.Tensor,
    mhc_mult: int,
) -> None:
    _write_streams(x, residual, post_layer_mix, comb_res_mix, out)


def _bwd_cpu(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    d_o: torch.Tensor,
    d_x: torch.Tensor,
    d_residual: torch.Tensor,
    d_post_layer_mix: torch.Tensor,
    d_comb_res_mix: torch.Tensor,
    mhc_mult: int,
) -> None:
    grads = mhc_post_bwd_ref(x, residual, post_layer_mix.unsqueeze(-1), comb_res_mix, d_o)
    for target, grad in zip((d_x, d_residual, d_post_layer_mix, d_comb_res_mix), grads, strict=True):
        target.copy_(grad.view(target.shape))


_mhc_post_fwd = kernel(_NAME, cpu=_fwd_cpu)
_mhc_post_bwd = kernel(_NAME_BACKWARD, cpu=_bwd_cpu)


def bench_cases() -> list[BenchCase]:
    """A few tokens, a decode batch, and training batches of two models."""
    sizes = [(7, 4, 1280), (128, 4, 7168), (4096, 4, 2560), (4096, 4, 7168), (8192, 4, 2560), (8192, 4, 7168)]
    sizes += [(4096, 2, 2560), (4096, 8, 2560)]
    return [make(*size) for make in (_forward_case, _backward_case) for size in sizes]


_MAX_DIFF = 1e-10  # of sums over the channels in another order


def _make_inputs(num_tokens: int, mult: int, hidden: int, device: Any) -> dict[str, Any]:
    return {
        "x": torch.randn((1, num_tokens, hidden), device=device).bfloat16(),
        "residual": torch.randn((1, num_tokens, mult, hidden), device=device).bfloat16(),
        "post_layer_mix": torch.rand((1, num_tokens, mult, 1), device=device),
        "comb_res_mix": torch.rand((1, num_tokens, mult, mult), device=device),
    }


def _forward_case(num_tokens: int, mult: int, hidden: int) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        return _make_inputs(num_tokens, mult, hidden, device)

    num_bytes = num_tokens * (2 * hidden * (2 * mult + 1) + 4 * mult * (mult + 1))
    return BenchCase(_NAME, {"num_tokens": num_tokens, "mult": mult, "hidden": hidden}, make, num_bytes)


def _backward_case(num_tokens: int, mult: int, hidden: int) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        inputs = _make_inputs(num_tokens, mult, hidden, device)
        return {**inputs, "d_o": torch.randn_like(inputs["residual"])}

    num_bytes = num_tokens * (2 * hidden * (3 * mult + 2) + 8 * mult * (mult + 1))
    params = {"num_tokens": num_tokens, "mult": mult, "hidden": hidden}
    return BenchCase(_NAME_BACKWARD, params, make, num_bytes, _MAX_DIFF)
