#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Early stopping and the best model, in runs of two workers: check_best.py NDLAUNCH.

A run whose learning rate is 0 ends after its patience, with its best checkpoint kept beyond the limit. A run that goes on with a
learning rate that ruins the model saves the model of its best checkpoint, which an earlier start has made.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile

MODEL = {"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
FLAGS = ["--device", "cpu", "--num-processes", "2", "--sequence-length", "64", "--eval-steps", "2", "--save-steps", "2",
         "--validation-batches", "2", "--load-best-model-at-end", "--schedule", "constant", "--set", "model.config=model.json",
         "--set", "data.path=text.txt", "--set", "data.validation_path=text.txt"]


def check(holds, words):
    if not holds:
        sys.exit(f"check_best: {words}")


def run(ndlaunch, folder, name, *flags, code=0):
    done = subprocess.run([ndlaunch, *FLAGS, "--save-dir", name, *flags], cwd=folder, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240)
    check(done.returncode == code, f"{name} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout, [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def check_patience(ndlaunch, folder):
    said, rows = run(ndlaunch, folder, "patient", "--lr", "0", "--num-steps", "100", "--early-stopping-patience", "3",
                     "--save-total-limit", "2", "--checkpoint-staging", "wait")
    check(max(row["step"] for row in rows) == 8, f"the run has ended after step {max(row['step'] for row in rows)}, not 8")
    check([row["step"] for row in rows if row.get("event") == "early_stopped"] == [8], f"no early stop in {rows}")
    check("early stop after step 8" in said and "after step 2" in said, f"the reason is not said:\n{said}")
    kept = sorted(path.name for path in (folder / "patient").glob("checkpoint-*"))
    check(kept == ["checkpoint-2", "checkpoint-6", "checkpoint-8"], f"{kept} are kept")
    ends = [row["reason"] for row in rows if row.get("event") == "checkpoint" and row["step"] == 8]
    check(ends == ["interval"] and (folder / "patient" / "model").is_dir(), f"the last checkpoint says {ends}")
    # Started again it has nothing left to do, and with more patience it has.
    flags = ["--lr", "0", "--num-steps", "100", "--save-total-limit", "2", "--checkpoint-staging", "wait", "--resume-from-checkpoint", "auto"]
    before = (folder / "patient" / "model" / "model.safetensors").stat().st_mtime_ns
    said, rows = run(ndlaunch, folder, "patient", *flags, "--early-stopping-patience", "3")
    check("the run has ended early, after step 8" in said and max(row["step"] for row in rows) == 8, f"it went on:\n{said}")
    check("nothing is left to do after step 8" in said, f"this is not said:\n{said}")
    check((folder / "patient" / "model" / "model.safetensors").stat().st_mtime_ns == before, "the model was saved again")
    said, rows = run(ndlaunch, folder, "patient", *flags, "--early-stopping-patience", "3", "--seed", "9", "--schedule", "cosine", code=2)
    check("give --resume-allow data.shuffle_seed,model.seed,optimizer.schedule" in said, f"what differs is not said:\n{said}")
    said, rows = run(ndlaunch, folder, "patient", *flags, "--early-stopping-patience", "4")
    check(max(row["step"] for row in rows) == 10, f"it did not go on with more patience:\n{said}")


def check_best(ndlaunch, folder):
    said, rows = run(ndlaunch, folder, "run", "--lr", "3e-3", "--num-steps", "4", "--checkpoint-export-model")
    said, rows = run(ndlaunch, folder, "run", "--lr", "2", "--num-steps", "10", "--resume-from-checkpoint", "latest",
                     "--checkpoint-export-model", "--save-total-limit", "2", "--resume-allow", "optimizer.lr")
    losses = {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}
    check(min(losses, key=losses.get) == 4 and losses[10] > losses[4], f"the second start was to ruin the model: {losses}")
    check("the model is that of step 4" in said, f"the best model is not named:\n{said}")
    names = [path.name for path in (folder / "run" / "model").glob("*.safetensors")]
    check(names, "there is no model")
    for name in names:
        saved, best, last = ((folder / "run" / where / name).read_bytes() for where in ("model", "checkpoint-4", "checkpoint-10"))
        check(saved == best != last, f"{name} is not that of checkpoint-4")


def check_damaged_best(ndlaunch, folder):
    """The checkpoint with the lowest loss is damaged when its weights are wanted: the best of the others is taken."""
    file = max((folder / "run" / "checkpoint-4" / "state").glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    said, rows = run(ndlaunch, folder, "run", "--lr", "2", "--num-steps", "10", "--resume-from-checkpoint", "latest", "--save-total-limit", "2")
    kept = sorted(path.name for path in (folder / "run").glob("checkpoint-*"))
    check("checkpoint-4.bad" in kept and "checkpoint-4" not in kept, f"{kept} are kept")
    losses = {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row and f"checkpoint-{row['step']}" in kept}
    best = min(losses, key=losses.get)
    check(best in (8, 10) and f"checkpoint-{best}" in kept, f"{best} is the best of {losses}")
    saved, wanted = ((folder / "run" / where / "model.safetensors").read_bytes() for where in ("model", f"checkpoint-{best}"))
    check(saved == wanted, f"the model is not that of step {best}:\n{said}")


def main():
    ndlaunch = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "model.json").write_text(json.dumps(MODEL))
        (folder / "text.txt").write_bytes(bytes(range(97, 123)) * 400)
        check_patience(ndlaunch, folder)
        check_best(ndlaunch, folder)
        check_damaged_best(ndlaunch, folder)
    print("best: patience ends a run, and the best model is the one that is saved")


if __name__ == "__main__":
    main()
