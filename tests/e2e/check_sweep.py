#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs of a sweep and their report."""
import json
import os
import shutil

import steps
from steps import SOURCE, check, test

RUNS = "runs/sweep-tiny-optimizer.lr"


def setup(t):
    t.model(hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    t.write("text.txt", 200 * "a text of a few words\n")
    t.write("tiny.yaml", "launch: {workers: 1, device: cpu}\nmodel: {config: model.json}\ndata: {path: text.txt, validation_path: ''}\n"
                         "train: {steps: 3, sequence_length: 32}\noutput: {save_model: false}\n")


def sweep(t, words, code=0, says=(), never=(), launcher=None):
    t.run(f"{SOURCE}/scripts/sweep {words}", code, says, never, ND_LAUNCH=str(launcher or t.build / "ndlaunch"))


@test
def runs_and_their_report(t):
    sweep(t, "optimizer.lr=1e-3,2e-3 tiny.yaml --num-steps 2 --baseline 2e-3", says=("1e-3: loss ", "2e-3: loss "))
    for value in "1e-3", "2e-3":
        config = json.loads(t.read(f"{RUNS}/{value}/run.json"))["config"]
        check(config["optimizer.lr"] == float(value) and config["train.steps"] == 2, f"the run of {value}")
    lines = [line for line in (t.out + t.log).splitlines() if ": loss " in line]
    check(lines[0].startswith(f"{RUNS}/2e-3"), f"the baseline is not the first: {lines}")
    page = t.read(f"{RUNS}/report.html")
    check(-1 < page.find("2e-3") < page.find("1e-3"), "the report's runs, the baseline first")
    before = t.read(f"{RUNS}/1e-3/metrics.jsonl")
    sweep(t, "optimizer.lr=1e-3,4e-3 tiny.yaml --num-steps 2", says="1e-3 has ended already")
    check(t.read(f"{RUNS}/1e-3/metrics.jsonl") == before, "a run that had ended is repeated")
    # The runs of a folder are taken for those of one command alone; a first command that made none binds nobody.
    before = {path: path.read_bytes() for path in (t.folder / RUNS).rglob("*") if path.is_file()}
    configuration = t.read("tiny.yaml")
    for keys, flags, text in (("optimizer.lr", "5", configuration), ("optimizer.lr", "2", configuration + "# other\n"),
                              ("train.seed", "2", configuration)):
        t.write("tiny.yaml", text)
        sweep(t, f"{keys}=1e-3,2e-3 tiny.yaml --num-steps {flags} --folder {RUNS}", 2, "are not of these keys, flags and configuration")
    t.write("tiny.yaml", configuration)
    check(before == {path: path.read_bytes() for path in (t.folder / RUNS).rglob("*") if path.is_file()}, "a refused command changed the runs")
    sweep(t, "optimizer.lr=1e-3 tiny.yaml --num-stps 2 --folder typed", 2)
    sweep(t, "optimizer.lr=1e-3 tiny.yaml --num-steps 2 --folder typed")
    # One that was killed after its first step goes on; a report that fails is a sentence.
    t.write(f"{RUNS}/4e-3/metrics.jsonl", t.read(f"{RUNS}/4e-3/metrics.jsonl").splitlines(keepends=True)[0])
    sweep(t, "optimizer.lr=1e-3,4e-3 tiny.yaml --num-steps 2", says=("resumed after step 0 from the start", "4e-3: loss "))
    t.write("ndlaunch", "")
    sweep(t, "optimizer.lr=1e-3,4e-3 tiny.yaml --num-steps 2", 1, "report.html was not made: ", "Traceback", t.folder / "ndlaunch")


@test
def the_programs_are_those_of_the_tree_of_the_script(t):
    """Wherever it is called."""
    (t.folder / "tree/scripts").mkdir(parents=True)
    for part in "sweep", "run_folder.py":
        shutil.copy(SOURCE / "scripts" / part, t.folder / "tree/scripts")
    (t.folder / "tree/build").symlink_to(t.build)
    os.environ.pop("ND_LAUNCH", None)
    t.run("tree/scripts/sweep optimizer.lr=1e-3 tiny.yaml --folder places")
    check(t.has("places/report.html"), f"called elsewhere: {t.out}{t.log}")


@test
def combinations_and_mistakes(t):
    sweep(t, "optimizer.lr=1e-3,2e-3 train.seed=1,2 tiny.yaml --folder both")
    made = sorted(os.listdir(t.folder / "both"))
    check(made == ["1e-3-1", "1e-3-2", "2e-3-1", "2e-3-2", "report.html", "sweep.json"], f"every combination: {made}")
    sweep(t, "optimizer.lr=1 no.yaml", 2, "no.yaml cannot be used: No such file")
    sweep(t, "optimizer.nosuch=1,2 tiny.yaml", 2, "1 ended with 2; the sweep ends too", "nosuch=2")
    sweep(t, "optimizer.lr=1,2 tiny.yaml --baseline 3", 2, "none of the runs")


steps.main("sweep", setup)
