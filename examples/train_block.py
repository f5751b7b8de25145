"""Train two Llama blocks with tensor parallelism and compare every loss with the unsharded run.

    torchrun --standalone --nproc-per-node 2 examples/train_block.py [--device cuda]

Each rank holds its part of the attention heads and of the MLP, and S / W rows of the sequence
between the layers (Megatron's sequence parallelism). The unsharded model is trained beside it from
the same weights and data; the two losses must agree to rounding.

On CPUs it runs in fp64 over gloo, through the unfused path. On GPUs it runs in bf16, fused wherever
the tuning database has a record for a shape and its kernel is compiled; a GPU for each rank, or all
ranks on one (then with TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1). What ran and why is printed at
the end.
"""

from __future__ import annotations

import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import fluxgen
from fluxgen.nn import ParallelAttentionProjections, ParallelMLP


class Attention(nn.Module):
    """Causal self-attention of ``heads`` heads; x (S, B, H)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_size = hidden // heads
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, hidden, bias=False)
        self.v = nn.Linear(hidden, hidden, bias=False)
        self.o = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend over the whole sequence with the heads that q, k and v yield."""
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_size)).permute(1, 2, 0, 3)
            for layer in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.permute(2, 0, 1, 3).flatten(-2))


class Block(nn.Module):
    """RMSNorm, attention, RMSNorm, SwiGLU, with residuals; x (S, B, H)."""

    def __init__(self, hidden: int, heads: int, inter: int) -> None:
        super().__init__()
        self.attention = Attention(hidden, heads)
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.gate = nn.Linear(hidden, inter, bias=False)
        self.up = nn.Linear(hidden, inter, bias=False)
        self.down = nn.Linear(inter, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One transformer layer."""
        x = x + self.attention(self.norm1(x))
        normed = self.norm2(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class ParallelBlock(nn.Module):
    """This rank's part of a :class:`Block`; x (S/W, B, H)."""

    def __init__(self, whole: Block, group: dist.ProcessGroup) -> None:
        super().__init__()
        attention = whole.attention
        self.norm1, self.norm2 = copy.deepcopy(whole.norm1), copy.deepcopy(whole.norm2)
        self.attention = ParallelAttentionProjections.from_linears(
            attention.q, attention.k, attention.v, attention.o,
            head_dim=attention.head_size, group=group,
        )  # fmt: skip
        self.mlp = ParallelMLP.from_linears(whole.gate, whole.up, whole.down, group=group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One transformer layer; the sequence is whole between a gather and a scatter."""
        q, k, v = (part.permute(1, 2, 0, 3) for part in self.attention(self.norm1(x)))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.attention.project(mixed.permute(2, 0, 1, 3), residual=x)
        return self.mlp(self.norm2(x), residual=x)


def main() -> None:
    """Train both models and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    # NCCL refuses ranks that share a GPU; gloo carries what is small, and falls back, on any.
    dist.init_process_group("gloo")
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.set_default_device("cuda")
    dtype, close = {
        "cpu": (torch.float64, {"rtol": 1e-10, "atol": 1e-12}),
        "cuda": (torch.bfloat16, {"rtol": 2e-3, "atol": 2e-3}),
    }[args.device]
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights and data on every rank
    sequence, batch, hidden, heads = 16 * world, 2, 64, 4 * world
    whole = nn.Sequential(*(Block(hidden, heads, 96 * world) for _ in range(2))).to(dtype)
    parallel = nn.Sequential(*(ParallelBlock(block, group) for block in whole))
    norms = [p for name, p in parallel.named_parameters() if "norm" in name]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (whole, parallel)]
    mine = slice(rank * sequence // world, (rank + 1) * sequence // world)

    for step in range(args.steps):
        x, target = torch.randn(2, sequence, batch, hidden, dtype=dtype)
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = functional.mse_loss(whole(x).double(), target.double())
        expected.backward()

        # The mean over all tokens, so that gradients match: this rank's share of it.
        share = functional.mse_loss(
            parallel(x[mine]).double(), target[mine].double(), reduction="sum"
        )
        loss = share / target.numel()
        loss.backward()
        for norm in norms:  # replicated weights that saw this rank's rows only
            dist.all_reduce(norm.grad, group=group)
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        for optimizer in optimizers:
            optimizer.step()
        if rank == 0:
            print(f"step {step}: loss {total.item():.12f}, unsharded {expected.item():.12f}")
        torch.testing.assert_close(total, expected.detach(), **close)

    if rank == 0:
        print(fluxgen.explain())
        print(f"{args.steps} losses equal on {world} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
