#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs of a sweep and their report: check_sweep.py SOURCE BUILD."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile

SOURCE, BUILD = (pathlib.Path(path) for path in sys.argv[1:3])
MODEL = {"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
         "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 64}
CONFIG = "launch: {workers: 1, device: cpu}\nmodel: {config: model.json}\ndata: {path: text.txt, validation_path: ''}\n" \
         "train: {steps: 3, sequence_length: 32}\noutput: {save_model: false}\n"


def check(holds, words):
    if not holds:
        sys.exit(f"check_sweep: {words}")


def sweep(folder, *arguments, code=0):
    done = subprocess.run([SOURCE / "scripts/sweep", *arguments], cwd=folder, env={**os.environ, "ND_LAUNCH": str(BUILD / "ndlaunch")},
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200)
    check(done.returncode == code, f"{arguments} ended with {done.returncode}, not {code}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def setting(run, key):
    return json.loads((run / "run.json").read_text())["config"][key]


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "model.json").write_text(json.dumps(MODEL))
        (folder / "text.txt").write_text("a text of a few words\n" * 200)
        (folder / "tiny.yaml").write_text(CONFIG)
        said = sweep(folder, "optimizer.lr=1e-3,2e-3", "tiny.yaml", "--num-steps", "2", "--baseline", "2e-3")
        runs = folder / "runs/sweep-tiny-optimizer.lr"
        for value in ("1e-3", "2e-3"):
            check(setting(runs / value, "optimizer.lr") == float(value) and setting(runs / value, "train.steps") == 2, f"the run of {value}")
            check(f"{value}: loss " in said, said)
        lines = [line for line in said.splitlines() if ": loss " in line]
        check(lines[0].startswith("runs/sweep-tiny-optimizer.lr/2e-3"), f"the baseline is not the first: {lines}")
        page = (runs / "report.html").read_text()
        check(-1 < page.find("2e-3") < page.find("1e-3"), "the report's runs, the baseline first")
        before = (runs / "1e-3/metrics.jsonl").read_bytes()
        said = sweep(folder, "optimizer.lr=1e-3,4e-3", "tiny.yaml", "--num-steps", "2")
        check("1e-3 is finished already" in said and (runs / "1e-3/metrics.jsonl").read_bytes() == before, said)
        sweep(folder, "optimizer.lr=1e-3,2e-3", "train.seed=1,2", "tiny.yaml", "--folder", "both")
        made = sorted(path.name for path in (folder / "both").iterdir())
        check(made == ["1e-3-1", "1e-3-2", "2e-3-1", "2e-3-2", "report.html"], f"every combination: {made}")
        said = sweep(folder, "optimizer.nosuch=1,2", "tiny.yaml", code=2)
        check("1 ended with 2; the sweep ends too" in said and "nosuch=2" not in said, f"a wrong key ends the sweep:\n{said}")
        check("none of the runs" in sweep(folder, "optimizer.lr=1,2", "tiny.yaml", "--baseline", "3", code=2), "a baseline that is no run")


main()
