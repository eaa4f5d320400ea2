#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time training steps of a Llama built from torch and transformers on CPU, to compare ndtrain with.

  python scripts/bench_peer.py single --threads 2
  python -m torch.distributed.run --standalone --nproc-per-node 2 scripts/bench_peer.py fsdp
  python -m torch.distributed.run --standalone --nproc-per-node 8 scripts/bench_peer.py hsdp_tp

A step is forward, loss, backward, AdamW and a barrier, on one micro-batch of random tokens per data rank; F32 master
weights, BF16 compute, F32 gradient reduction. Rank 0 prints one JSON line; its rate is that of the median step after
two for warm-up.
"""
import argparse
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

# mode -> axis sizes (dp_replicate, dp_shard, tp) for a world of n ranks
MESHES = {
    "single": lambda n: (1, 1, 1),
    "compile": lambda n: (1, 1, 1),
    "ddp": lambda n: (n, 1, 1),
    "fsdp": lambda n: (1, n, 1),
    "tp": lambda n: (1, 1, n),
    "fsdp_tp": lambda n: (1, n // 2, 2),
    "hsdp_tp": lambda n: (2, n // 4, 2),
}
WARM_UP = 2


def parse_arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("mode", choices=list(MESHES))
    p.add_argument("--model", default=os.path.join(os.path.dirname(__file__), "../configs/bench/llama-56m.json"),
                   help="a config.json")
    p.add_argument("--threads", type=int, default=0, help="per rank; 0: the CPUs divided by the ranks")
    p.add_argument("--sequence-length", type=int, default=1024)
    p.add_argument("--micro-batch-size", type=int, default=1)
    p.add_argument("--steps", type=int, default=8)
    p.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    arguments = p.parse_args()
    if arguments.steps <= WARM_UP:
        p.error(f"--steps must be above {WARM_UP}: the first {WARM_UP} are not counted")
    return arguments


def split_layers(model, mesh):
    """Tensor parallel: q, k, v, gate, up by column; o, down by row."""
    column, row = ("q_proj", "k_proj", "v_proj"), ("o_proj",)
    plan = {f"self_attn.{name}": ColwiseParallel() for name in column}
    plan |= {f"self_attn.{name}": RowwiseParallel() for name in row}
    plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)


def shard(model, mesh, precision):
    """FSDP2, one unit per layer and one for the rest; a mesh of two axes replicates over the first."""
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def parallelize(model, mode, axes, precision):
    """Returns the model to call, and whether autocast has to give the BF16 compute."""
    replicate, shards, tp = axes
    bf16 = precision == "bf16"
    if mode == "compile":
        return torch.compile(model), bf16
    if mode == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model), bf16
    if mode == "single":
        return model, bf16
    mesh = init_device_mesh("cpu", axes, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    if tp > 1:
        split_layers(model, mesh["tp"])
    if replicate * shards == 1:
        return model, bf16
    shard(model, mesh["dp_replicate", "dp_shard"] if replicate > 1 else mesh["dp_shard"], precision)
    return model, False


def time_steps(model, arguments, autocast, dp_index, vocab):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    generator = torch.Generator().manual_seed(dp_index)
    shape = (arguments.micro_batch_size, arguments.sequence_length + 1)
    tokens = torch.randint(0, vocab, shape, generator=generator)
    inputs, labels = tokens[:, :-1], tokens[:, 1:].reshape(-1)
    seconds, losses = [], []
    for _ in range(arguments.steps):
        begin = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(input_ids=inputs).logits
            loss = torch.nn.functional.cross_entropy(logits.float().view(-1, vocab), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.is_initialized():
            dist.barrier()
        seconds.append(time.perf_counter() - begin)
        losses.append(round(loss.item(), 4))
    return seconds, losses


def main():
    arguments = parse_arguments()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    axes = MESHES[arguments.mode](world)
    if axes[0] * axes[1] * axes[2] != world:
        raise SystemExit(f"{arguments.mode} on {world} ranks: the mesh {axes} does not hold them; pick another "
                         "--nproc-per-node")
    cpus = len(os.sched_getaffinity(0))
    torch.set_num_threads(arguments.threads or max(1, cpus // world))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = LlamaConfig.from_json_file(arguments.model)
    config.use_cache = False
    model = LlamaForCausalLM(config)
    parameters = sum(p.numel() for p in model.parameters())
    model, autocast = parallelize(model, arguments.mode, axes, arguments.precision)
    seconds, losses = time_steps(model, arguments, autocast, rank // axes[2], config.vocab_size)
    step = statistics.median(seconds[WARM_UP:])
    tokens = arguments.micro_batch_size * arguments.sequence_length * axes[0] * axes[1]
    if rank == 0:
        print(json.dumps(dict(peer=f"torch {torch.__version__}", mode=arguments.mode, ranks=world,
                              precision=arguments.precision, parameters=parameters, tokens_per_step=tokens,
                              step_seconds=[round(s, 4) for s in seconds], tokens_per_second=round(tokens / step, 1),
                              losses=losses)), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
