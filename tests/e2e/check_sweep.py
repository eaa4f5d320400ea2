#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs of a sweep and their report: check_sweep.py SOURCE BUILD."""
import json
import os
import pathlib
import shutil
import sys
import tempfile

from steps import call, check

SOURCE, BUILD = (pathlib.Path(path) for path in sys.argv[1:3])
MODEL = {"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
         "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 64}
CONFIG = "launch: {workers: 1, device: cpu}\nmodel: {config: model.json}\ndata: {path: text.txt, validation_path: ''}\n" \
         "train: {steps: 3, sequence_length: 32}\noutput: {save_model: false}\n"


def sweep(folder, *arguments, code=0, launcher=BUILD / "ndlaunch"):
    return call([SOURCE / "scripts/sweep", *arguments], code, cwd=folder, env={**os.environ, "ND_LAUNCH": str(launcher)})


def setting(run, key):
    return json.loads((run / "run.json").read_text())["config"][key]


def check_commands(folder, runs):
    """The runs of a folder are taken for those of one command alone; a first command that made none binds nobody."""
    before = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    configuration = (folder / "tiny.yaml").read_text()
    for keys, flags, text in (("optimizer.lr", "5", configuration), ("optimizer.lr", "2", configuration + "# other\n"),
                              ("train.seed", "2", configuration)):
        (folder / "tiny.yaml").write_text(text)
        said = sweep(folder, f"{keys}=1e-3,2e-3", "tiny.yaml", "--num-steps", flags, "--folder", runs, code=2)
        check("are not of these keys, flags and configuration" in said, f"another command: {said}")
    (folder / "tiny.yaml").write_text(configuration)
    check(before == {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}, "a refused command changed the runs")
    sweep(folder, "optimizer.lr=1e-3", "tiny.yaml", "--num-stps", "2", "--folder", "typed", code=2)
    sweep(folder, "optimizer.lr=1e-3", "tiny.yaml", "--num-steps", "2", "--folder", "typed")


def check_stopped(folder, run):
    """One that was killed after its first step goes on; a report that fails is a sentence."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(lines[0])
    said = sweep(folder, "optimizer.lr=1e-3,4e-3", "tiny.yaml", "--num-steps", "2")
    check("resumed after step 0 from the start" in said and "4e-3: loss " in said, f"a stopped run: {said}")
    (folder / "ndlaunch").write_text("")
    said = sweep(folder, "optimizer.lr=1e-3,4e-3", "tiny.yaml", "--num-steps", "2", code=1, launcher=folder / "ndlaunch")
    check("report.html was not made: " in said and "Traceback" not in said, f"no ndtrain: {said}")


def check_places(folder):
    """The programs are those of the tree that the script lies in, wherever it is called."""
    (folder / "tree/scripts").mkdir(parents=True)
    for part in ("sweep", "run_folder.py"):
        shutil.copy(SOURCE / "scripts" / part, folder / "tree/scripts")
    (folder / "tree/build").symlink_to(BUILD)
    environment = {key: value for key, value in os.environ.items() if key != "ND_LAUNCH"}
    said = call(["tree/scripts/sweep", "optimizer.lr=1e-3", "tiny.yaml", "--folder", "places"], cwd=folder, env=environment)
    check((folder / "places/report.html").is_file(), f"called elsewhere: {said}")
    check("no.yaml cannot be used: No such file" in sweep(folder, "optimizer.lr=1", "no.yaml", code=2), "no configuration")


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
        check("1e-3 has ended already" in said and (runs / "1e-3/metrics.jsonl").read_bytes() == before, said)
        check_places(folder)
        check_commands(folder, runs)
        check_stopped(folder, runs / "4e-3")
        sweep(folder, "optimizer.lr=1e-3,2e-3", "train.seed=1,2", "tiny.yaml", "--folder", "both")
        made = sorted(path.name for path in (folder / "both").iterdir())
        check(made == ["1e-3-1", "1e-3-2", "2e-3-1", "2e-3-2", "report.html", "sweep.json"], f"every combination: {made}")
        said = sweep(folder, "optimizer.nosuch=1,2", "tiny.yaml", code=2)
        check("1 ended with 2; the sweep ends too" in said and "nosuch=2" not in said, f"a wrong key ends the sweep:\n{said}")
        check("none of the runs" in sweep(folder, "optimizer.lr=1,2", "tiny.yaml", "--baseline", "3", code=2), "a baseline that is no run")


main()
