#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/compare_precision on a tiny model."""
import json
import re
import statistics

import steps
from steps import SOURCE, check, test

PRECISIONS = ["bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"]
SEEDS = [3, 4]
STEPS = 3
CONFIG = """
launch: {workers: 2, device: cpu}
mesh: {dp_replicate: 1, dp_shard: 2, cp: 1, tp: 1}
model: {config: model.json}
data: {path: text.txt, validation_path: text.txt, tokenizer: bytes}
train: {sequence_length: 64, micro_batch_size: 1, validation_batches: 2}
optimizer: {lr: 0.1} # so that recipes end apart by more than the table rounds
output: {save_model: false}
"""


def setup(t):
    t.write("tiny.yaml", CONFIG)
    t.model(hidden_size=32, intermediate_size=64, num_attention_heads=2)
    t.text(40 * 65)


def compare(t, flags, code=0, says=()):
    t.run(f"{SOURCE}/scripts/compare_precision tiny.yaml --build {t.build} --num-steps {STEPS} {flags}", code, says)


def lines_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def validation_of(run):
    return [s["validation_loss"] for s in lines_of(run) if "validation_loss" in s][-1]


def check_figures(out):
    """precision.json says what the runs' own files say."""
    results = json.loads((out / "precision.json").read_text())
    check(list(results) == PRECISIONS, f"precisions {list(results)}")
    for name, runs in results.items():
        check([r["seed"] for r in runs] == SEEDS, f"{name}: seeds {[r['seed'] for r in runs]}")
        for r in runs:
            run = out / f"{name}-seed{r['seed']}"
            config = json.loads((run / "run.json").read_text())["config"]
            steps = [s for s in lines_of(run) if "loss" in s]
            precision, recipe = config["train.precision"], config["fp8.recipe"]
            check((precision if precision == "bf16" else recipe) == name, f"{run} is {precision} {recipe}")
            check(config["train.seed"] == config["model.seed"] == config["data.shuffle_seed"] == r["seed"], f"seed of {run}")
            check(r["loss"] == [s["loss"] for s in steps] and len(steps) == STEPS, f"losses of {run}")
            check(r["validation_loss"] == validation_of(run), f"validation loss of {run}")
            check(r["tokens_per_second"] == steps[-1]["tokens_per_second"], f"speed of {run}") # two steps warm up
            check(r["peak_mib"] == max(s["peak_memory_bytes"] for s in steps) / 2**20, f"memory of {run}")
            sent = {s["wire_bytes"] for s in steps[1:]}
            check(len(sent) == 1 and min(sent) > 0, f"each step of {run} sends as much as another, not {sent}")
            check(r["wire_mb"] == statistics.median(s["wire_bytes"] for s in steps) / 1e6, f"wire bytes of {run}")
    check(results["bf16"][0]["loss"] != results["bf16"][1]["loss"], "two seeds with the same losses")
    check(results["bf16"][0]["loss"] != results["delayed"][0]["loss"], "bf16 and fp8 with the same losses")


def check_table(out, printed):
    words = (out / "precision.md").read_text()
    rows = [[c.strip() for c in row.strip("|\n").split("|")] for row in words.splitlines()]
    head, rows = rows[0], {r[0]: dict(zip(rows[0], r)) for r in rows[2:]}
    check(words in printed, "the table is not what was printed")
    check(list(rows) == PRECISIONS and "against bf16" in head, f"rows {list(rows)} under {head}")
    base = [validation_of(out / f"bf16-seed{s}") for s in SEEDS]
    for name, row in rows.items():
        losses = [validation_of(out / f"{name}-seed{s}") for s in SEEDS]
        check(row["seeds"] == "2" and row["validation loss"] == f"{statistics.fmean(losses):.4f}", f"mean of {name}: {row}")
        check(row["spread"] == f"{statistics.stdev(losses):.4f}", f"spread of {name}: {row}")
        if name != "bf16":
            off = [(x / b - 1) * 100 for x, b in zip(losses, base)]
            # of two, the standard error of the mean is half of their distance
            wanted = f"{statistics.fmean(off):+.2f} ± {abs(off[0] - off[1]) / 2:.2f} % ({min(off):+.2f} .. {max(off):+.2f})"
            check(row["against bf16"] == wanted, f"{name}: {row['against bf16']}, not {wanted}")


def check_page(out):
    """All runs have a curve of the loss, with their values."""
    page = (out / "precision.html").read_text()
    runs = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S).group(1))["runs"]
    wanted = [f"{name}-seed{seed}" for name in PRECISIONS for seed in SEEDS]
    check([run["name"] for run in runs] == wanted, f"runs {[run['name'] for run in runs]}")
    for run in runs:
        curve = run["curves"]["loss"]
        losses = [s["loss"] for s in lines_of(out / run["name"]) if "loss" in s]
        close = all(abs(drawn - loss) < 1e-3 for drawn, loss in zip(curve["mean"], losses))
        check(curve["step"] == list(range(1, STEPS + 1)) and close, f"{run['name']} is drawn as {curve['mean']}")


@test
def the_figures_are_those_of_the_runs(t):
    out, both = t.folder / "both", "--out both --seeds 3 4"
    compare(t, both)
    check_figures(out)
    check_table(out, t.out)
    check_page(out)
    # A run that has ended is not repeated; one that has not is.
    kept, whole = (out / "bf16-seed3/metrics.jsonl").stat().st_mtime_ns, validation_of(out / "delayed-seed4")
    t.write("both/delayed-seed4/metrics.jsonl", t.read("both/delayed-seed4/metrics.jsonl").splitlines()[0] + "\n")
    compare(t, f"{both} --resume")
    check((out / "bf16-seed3/metrics.jsonl").stat().st_mtime_ns == kept, "a run that had ended was repeated")
    check(validation_of(out / "delayed-seed4") == whole, "the repeated run is another")
    check_figures(out)
    compare(t, "--out both", 1, "exists already")


@test
def one_seed_is_that_of_the_file(t):
    """The difference is that of the one run."""
    compare(t, "--out one --precisions bf16 tensorwise --all-gather")
    off = (validation_of(t.folder / "one/tensorwise") / validation_of(t.folder / "one/bf16") - 1) * 100
    check(f"| {off:+.2f} % |" in t.out and "seeds" not in t.out, f"one seed:\n{t.out}")
    check(json.loads(t.read("one/tensorwise/run.json"))["config"]["fp8.all_gather"] is True, "--all-gather has no effect")
    compare(t, "--out wrong --num-steps none", 1, "the run in wrong/bf16 failed")


steps.main("compare_precision", setup)
