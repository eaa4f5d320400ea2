#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time training steps of a Llama built from torch and transformers on one GPU, to compare ndtrain with.

  python scripts/gpu_peer.py --model config.json --layers 8 --sequence-length 8192 --steps 6 [--compile] [--checkpoint]

F32 state, BF16 autocast, SDPA (flash attention), AdamW (fused), micro-batches of one random sequence. Prints one JSON line:
the median step after two for warm-up, or {"error": "..."} (out of memory, no GPU) with exit status 1.
"""
import sys

sys.path.append(sys.path.pop(0))  # this folder last: its tokenize.py is not Python's module of that name

import argparse
import json
import statistics
import time

WARM_UP = 2


def parse_arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, help="a config.json")
    p.add_argument("--layers", type=int, default=0, help="instead of the config's")
    p.add_argument("--sequence-length", type=int, default=8192)
    p.add_argument("--accumulation", type=int, default=1)
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--compile", action="store_true")
    p.add_argument("--checkpoint", action="store_true", help="recompute every block")
    return p.parse_args()


def measure(arguments):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU")
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    config = LlamaConfig.from_json_file(arguments.model)
    config.num_hidden_layers = arguments.layers or config.num_hidden_layers
    config._attn_implementation = "sdpa"
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    if arguments.checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    call = torch.compile(model) if arguments.compile else model
    tokens = torch.randint(config.vocab_size, (1, arguments.sequence_length), device="cuda")
    times = []
    for _ in range(arguments.steps + WARM_UP):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(arguments.accumulation):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = call(input_ids=tokens, labels=tokens, use_cache=False).loss
            (loss / arguments.accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    step = statistics.median(times[WARM_UP:])
    count = arguments.sequence_length * arguments.accumulation
    return {"tokens_per_second": count / step, "step_ms": step * 1e3, "layers": config.num_hidden_layers,
            "parameters": sum(p.numel() for p in model.parameters()), "compile": arguments.compile,
            "checkpoint": arguments.checkpoint, "torch": torch.__version__, "gpu": torch.cuda.get_device_name(),
            "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30}


def main():
    arguments = parse_arguments()
    try:
        print(json.dumps(measure(arguments)), flush=True)
    except Exception as error:  # torch's own kinds are many: out of memory, a compiler that is not there
        print(json.dumps({"error": f"{type(error).__name__}: {error}"[:400]}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
