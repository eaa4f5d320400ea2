#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Parts of scripts/gpu_check.sh that handle JSON.

  gpu_report.py inputs MODEL LAYERS FOLDER TOKENS   a config.json of that many layers, and random tokens (llm.c format)
  gpu_report.py run NAME RUN_FOLDER                 one line of JSON about a run of ndtrain
  gpu_report.py same RUN RUN                        fails unless two runs have the same losses, digit for digit
  gpu_report.py losses RUNS                         fails unless the small runs' losses agree as they should
  gpu_report.py report FOLDER                       writes gpu_check.json and gpu_check.md
"""
import array
import json
import pathlib
import random
import statistics
import sys

WARM_UP = 2
PEAK_BF16, PEAK_FP8 = 989e12, 1979e12  # dense, H100 and H200 SXM by their data sheet


def steps_of(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row and "step_ms" in row]


def inputs(model, layers, folder, tokens):
    config = json.loads(pathlib.Path(model).read_text())
    config["num_hidden_layers"] = int(layers)
    folder = pathlib.Path(folder)
    (folder / f"layers-{layers}.json").write_text(json.dumps(config))
    header = array.array("i", [0] * 256)
    header[0:3] = array.array("i", [20240801, 7, int(tokens) + 1024])
    draw = random.Random(1)
    words = array.array("I", (draw.randrange(config["vocab_size"]) for _ in range(int(tokens) + 1024)))
    with open(folder / f"tokens-{layers}.bin", "wb") as f:
        header.tofile(f)
        words.tofile(f)


def seconds_at_peak(config, sequence, fp8):
    """What one token needs at the peak of the type each product uses: blocks' linears in FP8 where asked, the rest in BF16."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, size = config["num_attention_heads"], config.get("head_dim") or hidden // config["num_attention_heads"]
    kv = config.get("num_key_value_heads", heads)
    linear = layers * (hidden * size * (2 * heads + 2 * kv) + 3 * hidden * config["intermediate_size"])
    attention = layers * 6 * heads * size * sequence  # causal: half of 12
    head = 6 * hidden * config["vocab_size"]
    return 6 * linear / (PEAK_FP8 if fp8 else PEAK_BF16) + (attention + head) / PEAK_BF16


def run(name, folder):
    folder = pathlib.Path(folder)
    steps = steps_of(folder)
    record = json.loads((folder / "run.json").read_text())
    timed = steps[WARM_UP:] or steps
    rate = statistics.median(row["tokens_per_second"] for row in timed)
    out = {"run": name, "first_loss": steps[0]["loss"], "last_loss": steps[-1]["loss"], "tokens_per_second": rate,
           "tflops_causal": statistics.median(row["tflops_per_worker_causal"] for row in timed),
           "tflops_accelerate": statistics.median(row["tflops_per_worker_accelerate"] for row in timed),
           "used_gib": max(row["peak_memory_bytes"] for row in steps) / 2**30}
    planned = sum(record.get("memory_plan_bytes", {}).values())
    out["planned_gib"] = planned / 2**30
    config = record.get("config", {})
    model, train = config.get("model.config"), config
    try:
        shape = json.loads(pathlib.Path(model).read_text())
        sequence, fp8 = int(train["train.sequence_length"]), train["train.precision"] == "fp8"
        out["share_of_speed_of_light"] = rate * seconds_at_peak(shape, sequence, fp8)
    except (TypeError, KeyError, OSError, ValueError):
        pass  # the record does not hold them: the share is left out
    print(json.dumps(out))


def same(one, other):
    a, b = ([row["loss"] for row in steps_of(pathlib.Path(p))] for p in (one, other))
    print(json.dumps({"deterministic": a == b, "losses": len(a)}))
    return 0 if a == b else 1


def losses(runs):
    """BF16 within 1 % of F32, every FP8 recipe within 3 % of BF16, at each step of the small model."""
    rows = {p.name: [row["loss"] for row in steps_of(p)] for p in pathlib.Path(runs).iterdir() if (p / "metrics.jsonl").exists()}
    bounds = {"bf16": ("fp32", 0.01), "fp8": ("bf16", 0.03), "rowwise": ("bf16", 0.03), "delayed": ("bf16", 0.03)}
    bad = 0
    for name, (against, bound) in bounds.items():
        if name not in rows or against not in rows:
            continue
        worst = max(abs(x - y) / y for x, y in zip(rows[name], rows[against]))
        bad += worst > bound
        print(json.dumps({"losses_of": name, "against": against, "worst_relative": worst, "bound": bound}))
    return 1 if bad else 0


def read_items(folder):
    items = []
    for status in sorted((folder / "items").glob("*.status")):
        item = json.loads(status.read_text())
        item["done"] = status.with_suffix(".done").exists()
        item["results"] = []
        for line in status.with_suffix(".out").read_text(errors="replace").splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                item["results"].append(value)
        errors = status.with_suffix(".err").read_text(errors="replace").splitlines()
        item["said"] = [line for line in errors if "Synthesis" in line or "ERROR SUMMARY" in line][-2:] or \
            (errors[-3:] if item["exit_code"] else [])
        items.append(item)
    return items


def table(title, rows):
    if not rows:
        return []
    keys = list(dict.fromkeys(key for row in rows for key in row))
    text = lambda v: f"{v:.4g}" if isinstance(v, float) else str(v)
    return ["", f"## {title}", "", "| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)] + \
        ["| " + " | ".join(text(row.get(key, "")) for key in keys) + " |" for row in rows]


def report(folder):
    folder = pathlib.Path(folder)
    items = read_items(folder)
    mode = (folder / "mode").read_text().strip()
    results = [value for item in items for value in item["results"]]
    (folder / "gpu_check.json").write_text(json.dumps({"mode": mode, "items": items}, indent=1) + "\n")
    of = lambda key: [value for value in results if key in value]
    lines = [f"# ndtrain: {mode}", ""]
    if "dry run" in mode:
        lines += ["No GPU took part: nothing here says how fast one is, nor that one computes the same.", ""]
    for value in of("commit") + of("memory_gib"):
        lines.append("- " + ", ".join(f"{k} {v}" for k, v in value.items()))
    lines += ["", "| item | result | seconds | |", "|---|---|---|---|"]
    for item in items:
        result = "done" if item["done"] else f"failed ({item['exit_code']})"
        if item["exit_code"] == 77 or any("skipped" in value for value in item["results"]):
            result = "skipped"
        lines.append(f"| {item['item']} | {result} | {item['seconds']} | {' '.join(item['said'])[:160].replace('|', '/')} |")
    lines += table("Runs", of("run")) + table("torch and transformers", of("compile")) + table("Products", of("product"))
    lines += table("Attention", of("attention")) + table("Kernels beside a copy", of("kernel")) + table("Losses", of("losses_of"))
    (folder / "gpu_check.md").write_text("\n".join(lines) + "\n")
    print(f"gpu_check: results are in {folder}/gpu_check.md and gpu_check.json")


if __name__ == "__main__":
    commands = {"inputs": (inputs, 4), "run": (run, 2), "same": (same, 2), "losses": (losses, 1), "report": (report, 1)}
    if len(sys.argv) < 2 or sys.argv[1] not in commands or len(sys.argv) - 2 != commands[sys.argv[1]][1]:
        sys.exit(__doc__)
    sys.exit(commands[sys.argv[1]][0](*sys.argv[2:]))
