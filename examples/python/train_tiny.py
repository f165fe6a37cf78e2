"""Trains a tiny language model for 100 steps, with the operators and with plain torch: the same losses.

    python examples/python/train_tiny.py [--steps 100]

An embedding, an engram module (n-gram tables gated into four residual streams) and a mixture of experts (gate, mapping,
expansion, SwiGLU, weighted reduction) behind a hyper-connection predict the next token of a random text in which two
tokens decide the third.
Runs on the GPU if there is one, where the compiled kernels are called, and on CPU tensors otherwise. Ends with an error
if a loss is more than 1 % away.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tilekernels import moe, quant
from tilekernels.engram.engram_hash import engram_hash_ref
from tilekernels.modeling.engram import EngramGate
from tilekernels.modeling.mhc import MHCPipeline, expand_from_embedding
from tilekernels.modeling.mhc.reference import (
    expand_to_mhc_ref,
    mhc_post_ref,
    mhc_pre_apply_mix_ref,
    mhc_pre_norm_fn_ref,
    mhc_pre_split_mixes_ref,
    sinkhorn_normalize_ref,
)

VOCAB, HIDDEN, STREAMS = 61, 512, 4
NUM_EXPERTS, NUM_TOPK, INNER = 8, 2, 256
NUM_TOKENS = 128
LEARNING_RATE = 0.005
TOLERANCE = 0.01


# ---- the operators with their gradients ------------------------------------------------------------------------------


class Expand(torch.autograd.Function):
    """Token rows in the order of their experts; a token's gradient is the sum over its copies."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, token_topk_to_pos: torch.Tensor, pos_to_expert: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(token_topk_to_pos)
        return moe.expand_to_fused(x, token_topk_to_pos, pos_to_expert)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (token_topk_to_pos,) = ctx.saved_tensors
        return moe.reduce_fused(grad.contiguous(), None, token_topk_to_pos), None, None


class Reduce(torch.autograd.Function):
    """Weighted sums of each token's rows."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weights: torch.Tensor, token_topk_to_pos: torch.Tensor, pos_to_expert: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weights, token_topk_to_pos, pos_to_expert)
        return moe.reduce_fused(x, weights, token_topk_to_pos)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x, weights, token_topk_to_pos, pos_to_expert = ctx.saved_tensors
        rows = moe.expand_to_fused(grad.contiguous(), token_topk_to_pos, pos_to_expert).float()
        where = token_topk_to_pos.long()
        weight_of_row = torch.zeros(x.shape[0], device=x.device)
        weight_of_row[where] = weights
        return (rows * weight_of_row[:, None]).to(x.dtype), (rows * x.float()).sum(1)[where], None, None


class SwiGLU(torch.autograd.Function):
    """silu(gate) * value."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return quant.swiglu_forward(x, "bf16")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return quant.swiglu_backward(x, grad.contiguous(), "bf16")[0]


class OperatorLayers:
    """All layers by the operators."""

    @staticmethod
    def expand(x: torch.Tensor) -> torch.Tensor:
        return expand_from_embedding(x, STREAMS)

    @staticmethod
    def connect(module: MHCPipeline, states: torch.Tensor) -> torch.Tensor:
        return module(states)

    @staticmethod
    def swiglu(x: torch.Tensor) -> torch.Tensor:
        return SwiGLU.apply(x)

    @staticmethod
    def engram(module: EngramGate, states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return module(states, ids)

    @staticmethod
    def experts(model: TinyModel, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = moe.topk_gate(scores.detach(), NUM_TOPK)
        weights = model.weights_of(scores, chosen)
        num_positions = chosen.numel()
        pos_to_expert, _, _, token_topk_to_pos, _, _, counts, _ = moe.get_fused_mapping(
            chosen, NUM_EXPERTS, num_positions, 1
        )
        rows = Expand.apply(x, token_topk_to_pos, pos_to_expert)
        sizes = counts.tolist()
        parts = [model.expert(expert, part) for expert, part in enumerate(rows.split(sizes))]
        return Reduce.apply(torch.cat(parts), weights, token_topk_to_pos, pos_to_expert)


class PlainLayers:
    """All layers in torch alone, differentiated by autograd."""

    @staticmethod
    def expand(x: torch.Tensor) -> torch.Tensor:
        return expand_to_mhc_ref(x, STREAMS)

    @staticmethod
    def connect(module: MHCPipeline, states: torch.Tensor) -> torch.Tensor:
        given = module.options
        mixes = mhc_pre_norm_fn_ref(states, module.fn, None, given["norm_eps"])
        sizes = STREAMS, given["post_mult_value"], given["pre_eps"]
        pre, post, comb = mhc_pre_split_mixes_ref(mixes, module.scale, module.base, *sizes)
        comb = sinkhorn_normalize_ref(comb, given["sinkhorn_repeat"], given["sinkhorn_eps"])
        return mhc_post_ref(module.layer(mhc_pre_apply_mix_ref(states, pre)), states, post, comb)

    @staticmethod
    def swiglu(x: torch.Tensor) -> torch.Tensor:
        gate, value = x.float().chunk(2, dim=-1)
        return (functional.silu(gate) * value).bfloat16()

    @staticmethod
    def engram(module: EngramGate, states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows = engram_hash_ref(ids, module.multipliers, module.vocab_sizes, module.offsets)[0]
        found = functional.embedding(rows.long(), module.table).flatten(1)
        kv = functional.linear(found, module.projection).view(len(ids), STREAMS + 1, HIDDEN).float()
        x, k, v = states.float(), kv[:, :-1], kv[:, -1:]
        weight = module.weight_hidden.float() * module.weight_embed.float()
        normed_x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.eps)
        normed_k = k * torch.rsqrt(k.square().mean(-1, keepdim=True) + module.eps)
        p = (normed_x * weight * normed_k).sum(-1, keepdim=True) * HIDDEN**-0.5
        gate = torch.sigmoid(p.sign() * p.abs().clamp(min=module.clamp_value).sqrt())
        return (x + gate * v).bfloat16()

    @staticmethod
    def experts(model: TinyModel, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = scores.detach().topk(NUM_TOPK).indices
        weights = model.weights_of(scores, chosen)
        total = torch.zeros(x.shape, device=x.device)
        for expert in range(NUM_EXPERTS):
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            rows = model.expert(expert, x[token]).float() * weights[token, slot, None]
            total = total.index_add(0, token, rows)
        return total.bfloat16()


# ---- the model -------------------------------------------------------------------------------------------------------


class TinyModel(nn.Module):
    """bf16 throughout, but for the scores of the gate and the loss."""

    def __init__(self, layers: Any, device: str) -> None:
        super().__init__()
        self.layers = layers

        def numbers(*shape: int, scale: float) -> nn.Parameter:
            return nn.Parameter((torch.randn(shape) * scale).to(device).bfloat16())

        self.embedding = numbers(VOCAB, HIDDEN, scale=1.0)
        self.engram = EngramGate(HIDDEN, [[997, 1009]], table_dim=32, num_streams=STREAMS, device=device)
        self.router = nn.Parameter((torch.randn(NUM_EXPERTS, HIDDEN) * HIDDEN**-0.5).to(device))
        self.up = nn.ParameterList(numbers(2 * INNER, HIDDEN, scale=HIDDEN**-0.5) for _ in range(NUM_EXPERTS))
        self.down = nn.ParameterList(numbers(HIDDEN, INNER, scale=INNER**-0.5) for _ in range(NUM_EXPERTS))
        self.head = numbers(VOCAB, HIDDEN, scale=HIDDEN**-0.5)
        self.connection = MHCPipeline(self.mix, HIDDEN, mhc_mult=STREAMS, device=device)

    def weights_of(self, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        weights = scores.gather(1, chosen)
        return weights / weights.sum(1, keepdim=True)

    def expert(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.layers.swiglu(functional.linear(rows, self.up[expert])), self.down[expert])

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        """The mixture of experts."""
        return self.layers.experts(self, x, torch.softmax(functional.linear(x.float(), self.router), dim=-1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: (num_tokens, 2), the token before and the token itself."""
        embedded = functional.embedding(ids[:, 1].long(), self.embedding)
        states = self.layers.engram(self.engram, self.layers.expand(embedded), ids)
        states = self.layers.connect(self.connection, states)
        return functional.linear(states.float().mean(1).bfloat16(), self.head).float()


def train(layers: Any, num_steps: int, device: str) -> list[float]:
    """The loss of each step."""
    torch.manual_seed(0)
    model = TinyModel(layers, device)
    successors = torch.randint(VOCAB, (VOCAB, VOCAB), device=device)
    # Steps are smaller than bf16 can hold: they are taken on copies in fp32
    masters = [parameter.detach().float() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=LEARNING_RATE, momentum=0.9)
    batches = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(num_steps):
        ids = torch.randint(VOCAB, (NUM_TOKENS, 2), generator=batches, dtype=torch.int32).to(device)
        model.zero_grad()
        loss = functional.cross_entropy(model(ids), successors[ids[:, 0], ids[:, 1]])
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    num_steps = parser.parse_args().steps
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ours, plain = (train(layers, num_steps, device) for layers in (OperatorLayers, PlainLayers))
    for step in range(0, num_steps, max(num_steps // 10, 1)):
        print(f"step {step:4}  operators {ours[step]:.4f}  plain torch {plain[step]:.4f}")
    worst = max(abs(x - y) / y for x, y in zip(ours, plain, strict=True))
    print(f"last {ours[-1]:.4f} and {plain[-1]:.4f} on {device}; furthest apart {worst:.2%}")
    assert worst <= TOLERANCE, f"losses differ by {worst:.2%}"
    if num_steps >= 50:
        assert sum(ours[-10:]) < sum(ours[:10]), "nothing was learned"


if __name__ == "__main__":
    main()
