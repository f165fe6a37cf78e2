"""Writes a batch for moe_layer.cpp, and what the layer must make of it, by the package's references on the CPU.

    python make_batch.py batch.tensors expected.tensors

Needs the installed package, no GPU. The format of the files is in tensor_file.h.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from tilekernels import gemm, moe, quant

NUM_TOKENS, NUM_EXPERTS, NUM_TOPK, HIDDEN, INTERMEDIATE = 61, 24, 4, 1024, 512
ALIGNMENT = 16  # rows of an expert's segment are a multiple of it
GROUP = 128  # channels that share a scale


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    batch = make_batch()
    write(Path(sys.argv[1]), batch)
    write(Path(sys.argv[2]), run_layer(batch))


def make_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "scores": torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=generator),
        "x": torch.randn(NUM_TOKENS, HIDDEN, generator=generator).bfloat16(),
        "topk_weights": torch.rand(NUM_TOKENS, NUM_TOPK, generator=generator),
        # Of all experts; the rows of gates, then those of values
        "up_weight": (torch.randn(2 * INTERMEDIATE, HIDDEN, generator=generator) * HIDDEN**-0.5).bfloat16(),
        "down_weight": (torch.randn(HIDDEN, INTERMEDIATE, generator=generator) * INTERMEDIATE**-0.5).bfloat16(),
        "alignment": torch.tensor([ALIGNMENT], dtype=torch.int32),
    }


def run_layer(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The layer of moe_layer.cpp: CPU tensors run the references."""
    topk_idx = moe.topk_gate(batch["scores"], NUM_TOPK)
    num_positions = (NUM_TOKENS * NUM_TOPK + (ALIGNMENT - 1) * NUM_EXPERTS) // ALIGNMENT * ALIGNMENT
    mapping = moe.get_fused_mapping(topk_idx, NUM_EXPERTS, num_positions, ALIGNMENT)
    pos_to_expert, token_topk_to_pos = mapping[0], mapping[3]
    expanded = moe.expand_to_fused(batch["x"], token_topk_to_pos, pos_to_expert)
    data, sf = quant.per_token_cast(expanded, "e4m3", GROUP)
    restored = quant.per_token_cast_back((data, sf), "bf16", GROUP)
    gates_and_values = gemm.matmul(restored, batch["up_weight"])
    activated = quant.swiglu_forward_and_per_token_cast(gates_and_values, "e4m3", GROUP)
    returned = gemm.matmul(quant.per_token_cast_back(activated, "bf16", GROUP), batch["down_weight"])
    return {
        "topk_idx": topk_idx,
        "pos_to_expert": pos_to_expert,
        "token_topk_to_pos": token_topk_to_pos,
        "expanded": expanded,
        "data": data,
        "sf": sf,
        "restored": restored,
        "gates_and_values": gates_and_values,
        "out": moe.reduce_fused(returned, batch["topk_weights"], token_topk_to_pos),
    }


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    with path.open("wb") as file:
        for name, tensor in tensors.items():
            words = [name, str(tensor.dtype).removeprefix("torch."), *map(str, tensor.shape)]
            file.write(f"{' '.join(words)}\n".encode())
        file.write(b"\n")
        for tensor in tensors.values():
            file.write(bytes(tensor.contiguous().view(torch.uint8).flatten().tolist()))


if __name__ == "__main__":
    main()
