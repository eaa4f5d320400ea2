#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A few layers of a Llama trained by torch and transformers, to compare a run of ndtrain with.

  python scripts/gpu/layer.py make --model config.json --layers 1 --sequence-length 8192 --folder F
  python scripts/gpu/layer.py compare --folder F --run RUN --precision fp32|bf16 [--device cpu]

`make` writes F/model, a Hugging Face folder with random weights, and F/tokens.bin, one block of random ids in the format of llm.c.
`compare` trains that model on that block in F32, without TF32, with SGD as the run did, and compares loss and gradient norm of
each step. Bounds, relative: in fp32 1e-5 of a loss and 1e-4 of a norm (other orders of sums), in bf16 1e-2 and 2e-2 (2^-8 of
every activation). Prints one JSON line.

Exit codes: 0 alike; 1 not alike, or a failure; 77 torch or transformers is missing.
"""
import argparse
import array
import json
import pathlib
import random
import sys

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parent.parent))

MISSING = 77
BOUNDS = {"fp32": (1e-5, 1e-4), "bf16": (1e-2, 2e-2)}


def parse_arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["make", "compare"])
    p.add_argument("--folder", type=pathlib.Path, required=True)
    p.add_argument("--model", help="a config.json")
    p.add_argument("--layers", type=int, default=1)
    p.add_argument("--sequence-length", type=int, default=8192)
    p.add_argument("--run", type=pathlib.Path)
    p.add_argument("--precision", choices=list(BOUNDS), default="bf16")
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    return p.parse_args()


def say(value):
    print(json.dumps(value), flush=True)


def write_tokens(path, count, vocabulary):
    header, draw = array.array("i", [0] * 256), random.Random(1)
    header[0:3] = array.array("i", [20240801, 7, count])
    words = array.array("I", (draw.randrange(vocabulary) for _ in range(count)))
    with open(path, "wb") as f:
        header.tofile(f)
        words.tofile(f)


def read_tokens(path):
    words = array.array("I")
    words.frombytes(path.read_bytes()[1024:])
    return words.tolist()


def make(a):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig.from_json_file(a.model)
    config.num_hidden_layers = a.layers
    a.folder.mkdir(parents=True, exist_ok=True)
    LlamaForCausalLM(config).float().save_pretrained(a.folder / "model")
    write_tokens(a.folder / "tokens.bin", a.sequence_length + 1, config.vocab_size)
    say({"made": str(a.folder), "layers": a.layers, "sequence": a.sequence_length})
    return 0


def train(a, steps, rate):
    """(loss, gradient norm) of each step in F32."""
    import torch
    from transformers import LlamaForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    model = LlamaForCausalLM.from_pretrained(a.folder / "model", dtype=torch.float32, attn_implementation="sdpa").to(a.device)
    model.train()
    ids = torch.tensor([read_tokens(a.folder / "tokens.bin")], device=a.device)
    rows = []
    for _ in range(steps):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0].float()
        loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * parameter.grad
                parameter.grad = None
        rows.append((loss.item(), norm.item()))
    return rows


def compare(a):
    from run_folder import Run

    run = Run(a.run)
    ours = [(row["loss"], row["grad_norm"]) for row in run.steps]
    theirs = train(a, len(ours), float(run.config["optimizer.lr"]))
    worst = [max((abs(x[i] - y[i]) / y[i] for x, y in zip(ours, theirs)), default=float("nan")) for i in (0, 1)]
    # A NaN is no number that is small.
    alike = ours != [] and all(abs(x[i] - y[i]) <= BOUNDS[a.precision][i] * y[i] for x, y in zip(ours, theirs) for i in (0, 1))
    say({"layer": a.precision, "as_torch": alike, "steps": len(ours), "worst_loss": worst[0], "bound_loss": BOUNDS[a.precision][0],
         "worst_norm": worst[1], "bound_norm": BOUNDS[a.precision][1], "losses": [x[0] for x in ours],
         "losses_torch": [y[0] for y in theirs]})
    return 0 if alike else 1


def main():
    a = parse_arguments()
    for module in ("torch", "transformers"):
        try:
            __import__(module)
        except ImportError as error:
            say({"skipped": f"{module} cannot be imported by {sys.executable} ({error}); ND_PEER_PYTHON names a Python that has it"})
            return MISSING
    return make(a) if a.what == "make" else compare(a)


if __name__ == "__main__":
    sys.exit(main())
