#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a run does when its reports go where nobody takes them."""
import os
import pathlib
import signal

import steps
from steps import check, test

RUN = ("ndlaunch --device cpu --num-processes 2 --dp-shard-size 2 --set model.config=model.json --sequence-length 64 "
       "--set output.dir=out --set data.path=text.txt --num-steps 8 --set data.validation_path= --set log.interval=1")


def setup(t):
    t.text(40 * 65)
    t.model(hidden_size=32, intermediate_size=64, num_hidden_layers=1)


def hanging(t, file, call):
    """The environment in which this call to write the file does not come back, as on a server that went away."""
    return dict(LD_PRELOAD=str(t.build / "tests/e2e/libnd_hang_writes.so"), ND_HANG_FILE=file, ND_HANG_CALL=str(call))


@test
def metrics_that_hang_cost_lines_and_not_the_run(t):
    """The run makes its steps, saves its model, and ends well."""
    t.run(RUN, says=("step 8/8 ", "warning: 6 records of this run did not go to metrics.jsonl"), **hanging(t, "out/metrics.jsonl", 3))
    check(t.has("out/model/model.safetensors") and t.read("out/metrics.jsonl").count("\n") == 2, t.metrics())


@test
def a_tracker_that_hangs_costs_lines_and_not_the_run(t):
    """A tracker's file on the same disk is written by the same thread."""
    t.run(f"{RUN} --log-with tensorboard", **hanging(t, "out/tensorboard/", 5), says=(
        "step 8/8 ", "warning: TensorBoard does not answer, and the run goes on", "records of this run did not go to TensorBoard"))
    check(t.has("out/model/model.safetensors") and 1 in t.curve(), t.metrics())


@test
def a_tracker_whose_program_ends_is_dropped(t):
    """The run goes on, and says how that program has ended."""
    t.write("python", "#!/bin/sh\nkill -9 $$\n")
    (t.folder / "python").chmod(0o755)
    for python, code in ("false", 1), ("./python", 137):
        t.remove("out")
        process = t.start(f"{RUN} --num-steps 1000000 --log-with wandb --tracker-python {python}")
        t.until(lambda: "has ended" in t.read("log"), process)
        process.terminate()
        t.ended(process, 75, f"which goes on without it: wandb_sync.py has ended with {code} before the run; ")


@test
def a_run_that_is_killed_while_its_metrics_hang_leaves_whole_lines(t):
    """The lines before the one that hangs stay whole; a half of that one is passed over."""
    for half in {}, dict(ND_HANG_HALF="1"):
        t.remove("out")
        process = t.start(f"{RUN} --num-steps 1000000 --set log.interval=100000",
                          env=os.environ | hanging(t, "out/metrics.jsonl", 3) | half)
        t.until(lambda: "metrics.jsonl does not answer" in t.read("log"), process)
        for child in pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        process.kill()
        t.ended(process, 137)
        *lines, rest = t.read("out/metrics.jsonl").split("\n")
        check(len(lines) == 2 and list(t.curve()) == [1, 2], lines)
        check(rest.startswith('{"step":3,') and not rest.endswith("}") if half else not rest, rest)
        t.run("ndtrain report out", says="step 2 of 1")


steps.main("sinks", setup)
