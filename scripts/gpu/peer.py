#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time training steps of a Llama built from torch and transformers on one GPU, to compare ndtrain with.

  python scripts/gpu/peer.py --model config.json --layers 8 --sequence-length 8192 --steps 6 [--compile] [--checkpoint]
  python scripts/gpu/peer.py --model config.json --sequence-length 8192 --fit

F32 state, BF16 autocast, SDPA (flash attention), AdamW (fused), micro-batches of one random sequence. Prints one JSON line:
the median step after those for warm-up. --compile compiles each block: they are alike, so that takes seconds, where the whole
model takes minutes. --fewer measures without --compile first and, where that was asked for, prints the faster of both, with
the other and with what became of torch.compile; it takes as many layers less as do not fit. --fit prints the most layers,
checkpointed, that do fit.

Exit codes: 1 a failure, 71 out of memory, 77 torch, transformers or the GPU is missing; the JSON line says what.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

WARM_UP = 2
NO_MEMORY, MISSING = 71, 77
COMPILED_LIMIT = 240  # seconds of a child with torch.compile
PLAIN_LEAST = 60  # seconds that must be left to measure what is not compiled too
CPU_FIT = 3  # layers that --fit finds on a CPU, where memory is not what it tests


def parse_arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, help="a config.json")
    p.add_argument("--layers", type=int, default=0, help="instead of the config's")
    p.add_argument("--sequence-length", type=int, default=8192)
    p.add_argument("--accumulation", type=int, default=1)
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--warm-up", type=int, default=WARM_UP)
    p.add_argument("--compile", action="store_true")
    p.add_argument("--checkpoint", action="store_true", help="recompute every block")
    p.add_argument("--fewer", action="store_true")
    p.add_argument("--halve", action="store_true", help="with --fewer: half as many where so many do not fit, in place of one less")
    p.add_argument("--seconds", type=float, default=480, help="with --fewer: of all")
    p.add_argument("--fit", action="store_true")
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try this script")
    return p.parse_args()


def make(a, torch):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_json_file(a.model)
    config.num_hidden_layers = a.layers or config.num_hidden_layers
    config._attn_implementation = "sdpa"
    with torch.device(a.device):
        model = LlamaForCausalLM(config).float()
    if a.checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return config, model


def measure(a, compiled):
    import torch

    cuda = a.device == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    config, model = make(a, torch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for block in model.model.layers if compiled else ():
        block.compile()  # in place: checkpoints stay around it
    tokens = torch.randint(config.vocab_size, (1, a.sequence_length), device=a.device)
    times = []
    for step in range(a.steps + a.warm_up):
        print(f"step {step + 1} of {a.steps + a.warm_up}, {config.num_hidden_layers} layers", file=sys.stderr, flush=True)
        wait()
        begin = time.perf_counter()
        for _ in range(a.accumulation):
            with torch.autocast(a.device, dtype=torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            (loss / a.accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wait()
        times.append(time.perf_counter() - begin)
    step = statistics.median(times[a.warm_up:])
    count = a.sequence_length * a.accumulation
    return {"tokens_per_second": count / step, "step_ms": step * 1e3, "layers": config.num_hidden_layers,
            "parameters": sum(p.numel() for p in model.parameters()), "compile": compiled, "checkpoint": a.checkpoint,
            "torch": torch.__version__, "gpu": torch.cuda.get_device_name() if cuda else "none",
            "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
            "total_memory_gib": torch.cuda.mem_get_info()[1] / 2**30 if cuda else 0.0}


def say(value):
    print(json.dumps(value), flush=True)


def missing(a):
    """What the comparison lacks here, in a sentence, or None."""
    for module in ("torch", "transformers"):
        try:
            __import__(module)
        except ImportError as error:
            return f"{module} cannot be imported by {sys.executable} ({error}); ND_PEER_PYTHON names a Python that has it"
    import torch

    return f"torch {torch.__version__} sees no GPU" if a.device == "cuda" and not torch.cuda.is_available() else None


def is_memory(error):
    return "out of memory" in str(error).lower()


def child(a, layers, *flags, limit=None):
    """(exit code, result) of a process of its own: what ran out of memory leaves pieces behind."""
    command = [sys.executable, __file__, "--model", a.model, "--layers", str(layers), "--sequence-length", str(a.sequence_length),
               "--device", a.device, *flags]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return 1, {"error": f"not done after {limit} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return done.returncode, json.loads(lines[-1]) if lines else {"error": f"exit code {done.returncode} and no result"}


def fit(a):
    """Two small models tell what a layer needs; the number that follows from them is tried."""
    most = json.load(open(a.model))["num_hidden_layers"]
    probe = ("--checkpoint", "--steps", "1", "--warm-up", "1")
    if a.device == "cpu":
        most = min(most, CPU_FIT)
    small = []
    for layers in (1, 3):
        code, result = child(a, layers, *probe)
        if code:
            say(result)
            return code
        small.append(result)
    each = (small[1]["peak_memory_gib"] - small[0]["peak_memory_gib"]) / 2
    left = small[0]["total_memory_gib"] - small[0]["peak_memory_gib"]
    layers = most if each <= 0 else min(most, 2 + int(left / each))
    tried = []
    while layers >= 1:
        code, result = child(a, layers, *probe)
        tried.append({"layers": layers, "fits": code == 0, "peak_memory_gib": result.get("peak_memory_gib")})
        if code == 0:
            say({"fit_layers": layers, "tried": tried, "total_memory_gib": result["total_memory_gib"]})
            return 0
        if code != NO_MEMORY:
            say(result)
            return code
        layers -= 1
    say({"error": "not even one layer fits"})
    return NO_MEMORY


def fewer(a):
    """Each number of layers in a process of its own: compiled, which needs less memory, then as it is, where time is left."""
    flags = ["--steps", str(a.steps), "--accumulation", str(a.accumulation), "--warm-up", str(a.warm_up)]
    flags += ["--checkpoint"] if a.checkpoint else []
    begin, layers = time.monotonic(), a.layers
    while layers >= 1:
        found, failed, code = {}, {}, 0
        for kind in ("compiled", "not_compiled") if a.compile else ("not_compiled",):
            if code == NO_MEMORY or (found and a.seconds - (time.monotonic() - begin) < PLAIN_LEAST):
                break
            compiled = kind == "compiled"
            code, result = child(a, layers, *flags, *(["--compile"] if compiled else []), limit=COMPILED_LIMIT if compiled else None)
            if code == 0:
                found[kind] = result
                say({**result, "partial": True})  # in case that the time is up before the other is done
            else:
                failed[kind] = result.get("error", f"exit code {code}")
        if found:
            fastest = max(found, key=lambda kind: found[kind]["tokens_per_second"])
            say({**found[fastest], **{f"tokens_per_second_{kind}": result["tokens_per_second"] for kind, result in found.items()},
                 **{f"{kind}_failed": why for kind, why in failed.items()}})
            return 0
        if code != NO_MEMORY:
            say(result)
            return code
        layers = layers // 2 if a.halve else layers - 1
    say({"error": "not even one layer fits"})
    return NO_MEMORY


def main():
    a = parse_arguments()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    lacking = missing(a)
    if lacking:
        say({"skipped": lacking})
        return MISSING
    if a.fit:
        return fit(a)
    if a.fewer:
        return fewer(a)
    try:
        say(measure(a, a.compile))
    except Exception as error:  # torch's own kinds are many: out of memory, a compiler that is not there
        say({"error": f"{type(error).__name__}: {error}"[:400]})
        return NO_MEMORY if is_memory(error) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
