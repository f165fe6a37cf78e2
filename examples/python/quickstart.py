"""Three operators of tilekernels, each compared with a plain computation. Ends with an error if one differs.

    python examples/python/quickstart.py

Runs on the GPU if there is one, where the compiled kernels are called, and on CPU tensors otherwise.
"""

import torch

import tilekernels

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
x = torch.randn(96, 512, device=device)


def same(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare element by element, bit for bit."""
    assert got.dtype == expected.dtype, f"{name}: dtype {got.dtype}, expected {expected.dtype}"
    assert torch.equal(got.float(), expected.float()), f"{name}: the values differ"
    print(f"{name:24} {tuple(got.shape)!s:12} {str(got.dtype).removeprefix('torch.'):14} as computed plainly")


# Transpose: each element x[i, j] at [j, i].
same("transpose.transpose", tilekernels.transpose.transpose(x), torch.stack([x[:, column] for column in range(512)]))

# The eight highest scores of each token.
expected = torch.topk(x, 8).indices
same("moe.topk_gate", tilekernels.moe.topk_gate(x, num_topk=8), expected)

# A cast to FP8 with one scale for 128 neighbouring channels: value = data * scale, the largest value becomes 448.
data, scale = tilekernels.quant.per_token_cast(x, "e4m3", num_per_channels=128)
groups = x.view(96, 4, 128)
largest = groups.abs().amax(dim=2)
same("quant.per_token_cast sf", scale, largest / 448)
same("quant.per_token_cast", data, (groups * (448 / largest)[:, :, None]).view(96, 512).to(torch.float8_e4m3fn))

# A wrong argument is refused with the operator, the argument, what is required and what was given.
try:
    tilekernels.moe.topk_gate(x.bfloat16(), num_topk=8)
except tilekernels.ArgumentTypeError as error:
    print(f"refused as it should be:  {error}")
else:
    raise SystemExit("a bfloat16 score tensor was not refused")

print(f"tilekernels {tilekernels.__version__}: all as expected on {device}")
