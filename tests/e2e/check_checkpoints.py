#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs that save, die and go on, as a user starts them."""
import os
import pathlib
import shlex
import shutil
import signal

import steps
from steps import check, test

TRAIN = ("ndlaunch --device cpu --model-config model.json --data-path text.txt --validation-path '' --sequence-length 64 "
         "--log-level info")
TWO = f"{TRAIN} --num-processes 2 --dp-shard-size 2"
CANNOT_RENAME = "strace -f -qq -o /dev/null -e trace=renameat2 -e inject=renameat2:error=EROFS".split()


def setup(t):
    t.write("other.txt", t.text(200 * 65)[:199 * 65])
    t.model(hidden_size=32, intermediate_size=64)


def refused(t, code, words, *facts, **environment):
    """No file in the folder `out` is changed; a start that fails while it loads leaves its run-2.json there."""
    def content():
        return {path: path.read_bytes() for path in (t.folder / "out").rglob("*")
                if path.is_file() and path.name != ".lock" and not path.name.startswith("run-")}

    before = content()
    t.run(words, code, facts, **environment)
    check(content() == before, f"{words} changed something")


def stop(t, process, number, resumed, out="out"):
    """Sends a signal once the process has made a step; the run had been resumed so often then."""
    def trains():
        rows = t.metrics(out) if t.has(f"{out}/metrics.jsonl") else []
        return bool(rows) and "step_ms" in rows[-1] and sum(row.get("event") == "resumed" for row in rows) == resumed

    t.until(trains, process)
    process.send_signal(number)


def cut(t, run, step):
    """Takes the last byte of a checkpoint's state."""
    path = max((t.folder / run / f"checkpoint-{step}/state").glob("*.safetensors"))
    os.truncate(path, path.stat().st_size - 1)


@test
def a_model_with_windows_goes_on(t):
    """Numbers of the model that only some families have are in its checkpoints."""
    t.model(hidden_size=32, intermediate_size=64, model_type="mistral", sliding_window=11)
    t.run(f"{TWO} --num-steps 6 --save-dir whole --checkpoint-frequency 2")
    t.run(f"{TWO} --num-steps 6 --save-dir out --checkpoint-frequency 2 --resume-from-checkpoint whole/checkpoint-4",
          says="resumed after step 4")
    t.same("whole/model/model.safetensors", "out/model/model.safetensors")


@test
def a_signal_saves_and_the_run_goes_on(t):
    own = "--num-steps 2000 --log-interval 500 --checkpoint-frequency 1500"
    auto = f"{TWO} {own} --save-dir out --resume-from-checkpoint auto"
    t.run(f"{TWO} {own} --save-dir whole --save-total-limit 0")
    for i, number in enumerate((signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)):
        process = t.start(auto)
        stop(t, process, number, i)
        t.ended(process, 75, ("; to go on, give the same command with --save-dir /", "/out --resume-from-checkpoint latest"))
        check(t.metrics(key="reason").count("signal") == i + 1 and not t.has("out/model"), t.metrics(key="reason"))
    # One whose last state has no checkpoint is no success of the signal.
    process = t.start(t.limited("-f 200", f"{TRAIN} --num-processes 1 --save-model false {own} --save-dir full"))
    stop(t, process, signal.SIGTERM, 0, "full")
    t.ended(process, 73, ("is not saved: ", "whose checkpoint could not be saved"))
    # One that saves no more names the checkpoint that it went on from.
    process = t.start(f"{auto} --checkpoint-frequency 0 --save-model false")
    stop(t, process, signal.SIGTERM, 3)
    t.ended(process, 75, "; the newest checkpoint is that of step ")
    t.run(auto)
    t.same_runs("whole", "out", 2000)


@test
def auto_begins_goes_on_and_ends(t):
    """The same line in a batch script, whether the job is new, was requeued, or ended."""
    own = f"{TWO} --save-dir out --checkpoint-frequency 3 --resume-from-checkpoint"
    command = f"{own} auto --num-steps 6"
    over = "nothing is left to do after step 6"
    t.run(command)
    check("resumed" not in t.read("out/metrics.jsonl"), t.metrics())
    t.run(command, says=("resumed after step 6 from", over))
    check(t.has("out/model/model.safetensors") and not t.has("out/model.old"), "its model")
    # The command of another run, which would take this one for its own.
    for flags, fact in (("--set model.seed=9", "model.seed was 42, and this one has 9; give another --save-dir for a run of its own, or "
                                               "more steps"),
                        ("--learning-rate 7e-3 --resume-allow optimizer.lr", "optimizer.lr was 0.0003, and this one has 0.007"),
                        ("--precision fp32", "train.precision was bf16, and this one has fp32")):
        refused(t, 2, f"{command} {flags}", fact)
    # The model of a later step goes before the checkpoints of later steps: a start that ends between both leaves none that another start
    # would take for its own.
    t.run([*CANNOT_RENAME, "-P", t.folder / "out/checkpoint-6", *t.command(f"{own} 3 --num-steps 3")], 73, "Read-only file system")
    check(t.has("out/checkpoint-6") and not t.has("out/model"), "it goes first")
    (t.folder / "out/model.old").rename(t.folder / "out/model")
    # The model of a state that is gone is set aside, and one that was deleted is saved again.
    t.run(f"{own} 3 --num-steps 3")
    check(t.read("out/model/model.safetensors") != t.read("out/model.old/model.safetensors"), "the model of step 6 is not set aside")
    (t.folder / "out/checkpoint-6.old").rename(t.folder / "out/checkpoint-6")
    t.remove("out/model", "out/model.old")
    t.run(command)
    check(t.has("out/model/model.safetensors") and not t.has("out/model.old"), "it is not saved again")
    (t.folder / "out/checkpoint-6").rename(t.folder / "big")
    (t.folder / "out/checkpoint-6").symlink_to("../big")
    t.run(command, says=over)
    t.run(f"{own} 3 --num-steps 6", says="checkpoint 6 is not before the one that the run goes on from")
    check(t.has("out/checkpoint-6/state") and t.has("big") and (t.folder / "out/checkpoint-6.old").is_symlink(), "a link is set aside")
    # A run that died before its first checkpoint begins again in its folder.
    (t.folder / "out").rename(t.folder / "whole")
    t.write("out/run.json", t.read("whole/run.json"))
    t.write("out/metrics.jsonl", "".join(t.read("whole/metrics.jsonl").splitlines(keepends=True)[:2]) + '{"step":3,"lo')
    t.run(command, says="resumed after step 0 from the start")
    t.same_runs("whole", "out", 6)


@test
def latest_finds_the_newest_run_of_the_configuration(t):
    for flags in "--num-steps 4 --checkpoint-frequency 2", "--num-steps 3 --checkpoint-frequency 3", "--num-steps 1 --save-model false":
        t.run(f"{TWO} {flags}")
    t.run(f"{TWO} --num-steps 5 --checkpoint-frequency 3 --resume-from-checkpoint true", says="runs/run-2/checkpoint-3")
    check(t.has("runs/run-2/checkpoint-5") and not t.has("runs/run-4"), os.listdir(t.folder / "runs"))
    t.run(f"{TWO} --num-steps 5 --resume-from-checkpoint runs/run-1", says="runs/run-1/checkpoint-4")
    # Another folder is given: the old run stays as it is.
    t.run(f"{TWO} --num-steps 4 --save-dir fork --resume-from-checkpoint runs/run-1/checkpoint-2", says="run folder: fork")
    check(list(t.curve("fork")) == [3, 4] and not t.has("fork/run-2.json"), t.metrics("fork"))


@test
def a_failure_in_a_validation_costs_no_step(t):
    """The state of a step is durable long before its validation has ended, and a validation that was cut off is made up, once."""
    t.write("long.txt", 500 * t.read("text.txt"))
    validated = (f"{TWO} --num-steps 4 --checkpoint-frequency 2 --save-model false --validation-path long.txt "
                 "--set train.validation_interval=2 --save-dir")
    short = "--set train.validation_batches=3"
    go_on = f"{validated} out --resume-from-checkpoint latest {short}"

    def validations(run):
        return [(row["step"], row["validation_loss"], row["validation_tokens"]) for row in t.metrics(run) if "validation_loss" in row]

    t.run(f"{validated} whole {short}")
    whole = validations("whole")
    check(len(whole) == 2, whole)
    for number, code in (signal.SIGKILL, 137), (signal.SIGTERM, 75):
        t.remove("out")
        process = t.start(f"{validated} out")
        t.until(lambda: t.has("out/checkpoint-2"), process) # pylint: disable=cell-var-from-loop
        process.send_signal(number)
        t.ended(process, code)
        check(t.has("out/checkpoint-2") and not validations("out"), validations("out"))
        t.run(go_on, says="resumed after step 2")
        check(validations("out") == whole, validations("out"))
    t.run(go_on, says="resumed after step 4")
    check(validations("out") == whole, validations("out"))
    # With a damaged line the last validation is made again, and no earlier one is the best.
    t.write("out/metrics.jsonl", "damaged\n" + t.read("out/metrics.jsonl").split("\n", 1)[1])
    t.run(f"{go_on} --load-best-model-at-end true",
          says=("resumed after step 4", "validations before step 4 do not count for the best one"))
    check(validations("out") == [*whole, whole[-1]], validations("out"))
    t.run(f"{validated} fork --resume-from-checkpoint out --set train.validation_batches=2",
          says="resume: a validation was over at most 6 sequences and is over at most 4")


@test
def a_failed_job_names_its_newest_checkpoint(t):
    """Without restarts, the end of a job tells how to go on."""
    process = t.start(f"{TWO} --num-steps 100000 --lr-scheduler constant --save-dir out --log-interval 50000 --checkpoint-frequency 50")
    t.until(lambda: t.has("out/checkpoint-*"), process)
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    t.ended(process, 137, ("the newest checkpoint is that of step ", "/out --resume-from-checkpoint latest"))


@test
def must_fit_the_run(t):
    t.change("model.json", '"intermediate_size": 64', '"intermediate_size": 96', to="wide.json")
    six = f"{TWO} --num-steps 6"
    resumed = "--num-steps 6 --save-dir out --checkpoint-frequency 2 --resume-from-checkpoint latest"
    go_on = f"{TWO} {resumed}"

    def fork(name, *facts, of="out"):
        words, flags = name.split(" ", 1)
        t.run(f"{six} --save-dir {words} --resume-from-checkpoint {of} {flags}", says=facts)

    t.run(f"{TWO} --num-steps 4 --save-dir out --checkpoint-frequency 2")
    refused(t, 2, f"{go_on} --data-path other.txt", "other training data")
    refused(t, 2, f"{go_on} --data-path '[text.txt, other.txt]'",
            ", whose order it goes on in, and this run has [text.txt, other.txt] (digest ")
    fork("fork --data-path other.txt --resume-allow data.path", "resume: data.path has another content (digest ")
    refused(t, 2, f"{go_on} --model-config wide.json", "has intermediate_size 64, and the model of this run has 96")
    refused(t, 2, f"{go_on} --micro-batch-size 2", "made with 2 samples a step, and this run has 4")
    t.says(never="for instance")
    fork("twice --micro-batch-size 2 --resume-allow samples_per_step --checkpoint-frequency 9",
         "a step had 2 samples and has 4", "--resume-allow", "behind sample 8", "count on from 4")
    check('"samples_seen": 16,' in t.read("twice/checkpoint-6/manifest.json"), t.read("twice/checkpoint-6/manifest.json"))
    refused(t, 2, f"{TRAIN} --num-processes 1 {resumed}",
            "this run has 1; keep the product of train.micro_batch_size, train.gradient_accumulation_steps and the data-parallel "
            "ranks, for instance with --gradient-accumulation-steps 2")
    refused(t, 2, f"{go_on} --sequence-length 32", "train.sequence_length 64, and this run has 32")
    refused(t, 2, f"{go_on} --optimizer sgd", "optimizer.name adamw, and this run has sgd")
    refused(t, 2, f"{go_on} --learning-rate 7e-3",
            "optimizer.lr 0.0003, and this run has 0.007; use the same value, or allow the change with --resume-allow optimizer.lr")
    refused(t, 2, f"{go_on} --lr-scheduler linear --precision fp8 --seed 9",
            "give --resume-allow data.shuffle_seed,model.seed,train.precision,optimizer.schedule")
    fork("colder --learning-rate 7e-3 --resume-allow optimizer.lr --dump-tensors '*' --dump-steps 4",
         "resume: optimizer.lr was 0.0003 and is 0.007",
         "no tensor is dumped: log.dump_steps is 4, and the run goes on after step 4")
    fp8 = "--precision fp8 --fp8-recipe delayed"
    t.run(f"{six} --save-dir fp8 --checkpoint-frequency 2 {fp8}")
    fork(f"less {fp8} --set fp8.amax_history_length=8 --resume-allow fp8.amax_history_length",
         "FP8 histories of another recipe; those of this run begin afresh", of="fp8/checkpoint-4")
    fork("none --resume-allow train.precision", "FP8 histories, which this run does not need", of="fp8/checkpoint-4")
    refused(t, 2, f"{go_on} --resume-allow train.steps", "train.steps, which allows nothing")
    refused(t, 2, f"{go_on} --set data.shuffle_seed=7", "data.shuffle_seed 42, and this run has 7")
    refused(t, 2, f"{go_on} --num-steps 3", "already at step 4, and train.steps is 3")
    refused(t, 65, f"{six} --save-dir out --resume-from-checkpoint 3", "no checkpoint-3; the newest there are: checkpoint-2, checkpoint-4")
    refused(t, 65, f"{six} --resume-from-checkpoint nowhere", "there is no such folder")
    refused(t, 65, f"{six} --resume-from-checkpoint .", "holds no checkpoint")
    refused(t, 65, f"{six} --resume-from-checkpoint lates",
            "--resume-from-checkpoint (checkpoint.resume) is lates, but there is no such folder (did you mean latest?)")
    refused(t, 2, f"{six} --save-dir new --resume-from-checkpoint out --optimizer sgd", "optimizer.name adamw, and this run has sgd")
    fork("plain --optimizer sgd --resume-allow optimizer.name --checkpoint-verify false --checkpoint-frequency 6",
         "has moments of AdamW, which are left out", "was loaded without comparing its checksums")
    fork("adam --num-steps 7 --resume-allow optimizer.name --checkpoint-frequency 7",
         "has no moments of AdamW, so these begin at zero", of="plain")
    t.run("ndtrain ckpt diff plain adam", 1, "\nexp_avg_sq: only in B\n")
    refused(t, 65, f"{six} --save-dir new --resume-from-checkpoint out/model",
            "holds no checkpoint: neither checkpoint-N nor manifest.json of ndtrain")
    check(not t.has("new"), "a folder was made")
    refused(t, 73, f"{six} --save-dir out", "already holds a run")
    t.run(f"{go_on} --data-path other.txt --resume-allow data.path", says="resumed after step 4")


@test
def no_rank_waits_for_a_folder_that_is_not_opened(t):
    """Rank 0 refuses to begin. The other rank waits for the name of the run folder, and gets the failure."""
    t.model(hidden_size=512, intermediate_size=1536)  # more than 8 MiB
    for out, flags in ("out0", "--checkpoint-frequency 2"), ("out1", ""):
        t.run(t.limited("-f 16384", f"{TWO} --num-steps 2 --save-dir {out} {flags}"), 73, "ulimit -f", "did not end in time")


@test
def no_rank_waits_for_a_checkpoint_that_cannot_be_set_aside(t):
    """Neither does one wait when rank 0 cannot rename a damaged checkpoint, or a later one."""
    t.run(f"{TWO} --num-steps 4 --save-dir out --checkpoint-frequency 2 --save-model false")
    cut(t, "out", 4)
    for resume in "latest", "2":
        command = t.command(f"{TWO} --num-steps 6 --save-dir out --save-model false --resume-from-checkpoint {resume}")
        t.run([*CANNOT_RENAME, *command], 73, "Read-only file system", "did not end in time")
        check(t.has("out/checkpoint-4") and not t.has("out/*.bad", "out/*.old"), os.listdir(t.folder / "out"))


@test
def go_to_another_mesh(t):
    """2 shards, then 1 worker with the same samples a step, then tensor parallelism."""
    own = "--precision fp32 --lr-scheduler constant"
    t.run(f"{TWO} --num-steps 2 --save-dir out --checkpoint-frequency 2 {own}")
    t.run(f"{TRAIN} --num-processes 1 --micro-batch-size 2 --num-steps 4 --save-dir out --checkpoint-frequency 2 {own} "
          "--resume-from-checkpoint latest",
          says="resume: mesh.dp_shard was 2 and is 1", never=("no checkpoints are saved", "a validation was over"))
    t.run(f"{TRAIN} --num-processes 4 --tp-size 2 --dp-shard-size 2 --num-steps 6 --save-dir out {own} --resume-from-checkpoint latest",
          says=("resumed after step 4", "with --checkpoint-frequency 2 they are, as before", "the mesh was 1 x 1 x 1 x 1 ("))
    moved = [(row["mesh"], row["mesh_was"]) for row in t.metrics() if "mesh_was" in row]
    check(len(moved) == 2 and moved[0][0].startswith("1 x 1 x 1 x 1 (") and moved[0][1].startswith("1 x 2 x 1 x 1 ("), moved)
    t.run(f"{TWO} --num-steps 6 --save-dir whole {own}")
    curves = t.curve("whole"), t.curve("out")
    check(list(curves[0]) == list(curves[1]) == [1, 2, 3, 4, 5, 6] and
          all(abs(a["loss"] - b["loss"]) <= 1e-5 for a, b in zip(*(curve.values() for curve in curves))), curves)


@test
def a_damaged_one_is_set_aside_for_the_one_before(t):
    eight = f"{TWO} --num-steps 8"
    t.run(f"{TWO} --num-steps 6 --save-dir out --checkpoint-frequency 2")
    cut(t, "out", 6)
    # A checkpoint that was named is not replaced by another.
    refused(t, 65, f"{eight} --save-dir out --resume-from-checkpoint 6", "checkpoint-6")
    check(t.has("out/checkpoint-6") and not t.has("out/checkpoint-6.bad"), "it is renamed")
    # Another run that begins with these finds the next good one, and renames nothing here.
    t.run(f"{eight} --save-dir other --resume-from-checkpoint out", says="resumed after step 4")
    check(t.has("out/checkpoint-6") and not t.has("out/checkpoint-6.bad"), "another run renames it")
    # A fresh run that could not begin leaves its folder to the next.
    refused(t, 65, f"{eight} --save-dir fork --resume-from-checkpoint out/checkpoint-6", "checkpoint-6")
    t.run(f"{TWO} --num-steps 5 --save-dir fork --resume-from-checkpoint out/checkpoint-4", says="resumed after step 4")
    check(t.has("fork/run.json") and not t.has("fork/run-2.json"), os.listdir(t.folder / "fork"))
    for step in 2, 4, 6:
        os.truncate(t.folder / f"out/checkpoint-{step}/manifest.json", 9)
    refused(t, 65, f"{TWO} --num-steps 6 --save-dir out --checkpoint-frequency 2 --resume-from-checkpoint latest",
            "no checkpoint that can be used")
    # Once they are set aside, auto does not begin afresh over them.
    for step in 2, 4, 6:
        (t.folder / f"out/checkpoint-{step}").rename(t.folder / f"out/checkpoint-{step}.bad")
    refused(t, 65, f"{TWO} --num-steps 6 --save-dir out --resume-from-checkpoint auto", "checkpoint-4.bad")


@test
def a_damaged_one_is_not_replaced_by_that_of_another_run(t):
    """Neither is another run gone on from, nor are its checkpoints renamed."""
    for flags in "--num-steps 4 --checkpoint-frequency 2", "--num-steps 3 --checkpoint-frequency 3":
        t.run(f"{TWO} {flags} --save-model false")
    (t.folder / "runs/run-2").rename(t.folder / "a")
    for resume in "latest", "auto":
        t.remove("runs/run-2")
        shutil.copytree(t.folder / "a", t.folder / "runs/run-2")
        cut(t, "runs/run-2", 3)
        command = f"{TWO} --num-steps 6 --checkpoint-frequency 2 --resume-from-checkpoint {resume}"
        t.run(command, 65, ("no checkpoint of ", "runs/run-2 can be used"))
        check(t.has("runs/run-2/checkpoint-3.bad") and t.has("runs/run-1/checkpoint-4"), "it is set aside")
        check(not t.has("runs/run-1/*.old", "runs/run-1/*.bad"), "one of another run is renamed")
        t.run(command, 65, "checkpoint-3.bad is damaged")  # when the job is started again


@test
def two_runs_do_not_share_a_folder(t):
    """Nor does a run without checkpoints share its own."""
    own = f"{TWO} --num-steps 100000 --lr-scheduler constant --save-dir out"
    for flags, begun in ("--checkpoint-frequency 50", "out/checkpoint-50"), ("--save-model false", "out/metrics.jsonl"):
        t.remove("out")
        process = t.start(f"{own} {flags}")
        t.until(lambda: t.has(begun), process) # pylint: disable=cell-var-from-loop
        t.run(f"{own} --resume-from-checkpoint auto", 73, "another process trains in", "did not end in time")
        process.terminate()
        process.wait(steps.LIMIT_S)


@test
def a_full_disk_costs_the_checkpoint_and_not_the_run(t):
    t.model(hidden_size=128, intermediate_size=256)  # 4 MB a checkpoint: room for one, not for two
    own = f"{TWO} --num-steps 6 --save-dir small/out --checkpoint-frequency 2"

    def on_disk(kib, words, behind=""):
        return t.mounted(words, f"-t tmpfs -o size={kib}k none", "small", behind)

    t.run(on_disk(7000, f"{own} --save-model false", "cp -r small/out out;"),
          says=("keeping 4 more checkpoints", "the checkpoint of step 4 is not saved: "))
    check(t.has("out/checkpoint-2") and "checkpoint_failed" in t.read("out/metrics.jsonl") and not t.has("out/.tmp*"), t.metrics())
    t.run(on_disk(7000, f"{own} --save-model false --checkpoint-on-error stop"), 73)
    t.run(on_disk(4000, own), 73, "a checkpoint")
    # Two fit, and leave no room for a third.
    go_on = shlex.join(t.command(f"{own} --save-model false --resume-from-checkpoint latest"))
    t.run(on_disk(10500, f"{own} --save-model false --num-steps 4", f"test $code = 0 && {go_on}; code=$?;"), 73,
          "of the 2 checkpoints there `ndtrain ckpt prune ")
    t.run(on_disk(10500, f"{own} --save-model false --num-steps 2", f"test $code = 0 && {go_on}; code=$?;"),
          says="keeping 3 more checkpoints")


@test
def a_start_whose_store_does_not_answer_commits_nothing(t):
    """The job may have started again without it. ndlaunch has the store, and is stopped; a save may have asked it before."""
    def failed():
        return [row for row in t.metrics() if row.get("event") == "checkpoint_failed"]

    process = t.start(f"{TWO} --num-steps 1000000 --lr-scheduler constant --save-dir out --log-interval 500000 --checkpoint-frequency 50")
    t.until(lambda: t.has("out/checkpoint-50"), process)
    process.send_signal(signal.SIGSTOP)
    t.until(failed, process)
    process.send_signal(signal.SIGCONT)
    check(failed() and all("the job's store does not answer" in row["why"] for row in failed()), t.metrics())
    process.terminate()
    t.ended(process, 75, "is not saved: ")


def write_worker(t, command):
    """./worker runs a command in a place of mounts of its own before it becomes rank 1."""
    t.write("worker", f"""#!/bin/sh
test "$RANK $1" = '1 train' && exec unshare -rm sh -c '{command} && exec "$0" "$@"' {t.build}/ndtrain "$@"
exec {t.build}/ndtrain "$@"
""")
    (t.folder / "worker").chmod(0o755)


@test
def a_run_folder_that_some_rank_does_not_see_is_refused(t):
    """Rank 1 alone has a disk of its own where rank 0 has the run folder: without a folder of that name, with one, and with one that holds
    a run."""
    t.mounted("true", "-t tmpfs none", "mine")  # skips the test where it cannot
    for command, fact in (("true", "nothing is /"), ("mkdir mine/out", "another folder is /"),
                          ("mkdir mine/out && echo {} > mine/out/run.json", "another folder is /")):
        write_worker(t, f"mount -t tmpfs none mine && {command}")
        t.run(f"{TWO} --num-steps 4 --save-dir mine/out --checkpoint-frequency 2 --set launch.comm_timeout_seconds=10", 73,
              ("rank 1 on ", fact), ND_WORKER="./worker")
        check(not t.has("mine/out/*checkpoint-*", "mine/out/run.json"), "something is written")


@test
def damage_that_one_rank_alone_finds_condemns_no_checkpoint(t):
    """Rank 1 alone reads other bytes in the newest checkpoint: memory or a cache of its host is bad."""
    t.run(f"{TWO} --num-steps 4 --save-dir out --checkpoint-frequency 2 --save-model false")
    shutil.copytree(t.folder / "out/checkpoint-4", t.folder / "bad")
    for path in (t.folder / "bad/state").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-9] + b"wrong" + path.read_bytes()[-4:])
    t.mounted("true", "-t tmpfs none", "mine")  # skips the test where it cannot
    write_worker(t, "mount --bind bad out/checkpoint-4")
    refused(t, 74, f"{TWO} --num-steps 6 --save-dir out --checkpoint-frequency 2 --resume-from-checkpoint latest",
            "finds damage where rank 0 finds none", ND_WORKER="./worker")


@test
def a_disk_that_does_not_answer_has_a_deadline(t):
    """Each write takes four seconds, and the update may wait for one."""
    slow = "strace -f -qq -o /dev/null -e trace=pwrite64 -e inject=pwrite64:delay_enter=4000000".split()
    alone = TRAIN.replace("ndlaunch", "ndtrain train")
    t.run([*slow, *t.command(f"{alone} --num-steps 6 --save-dir out --checkpoint-frequency 2 --set launch.comm_timeout_seconds=1")],
          124, "does not answer")


@test
def can_be_models_too(t):
    """The checkpoint of the last step has the model that the run saves."""
    t.run(f"{TWO} --num-steps 4 --save-dir out --checkpoint-frequency 2 --checkpoint-export-model true --checkpoint-checksum sha256 "
          "--checkpoint-staging wait")
    for name in "model.safetensors", "config.json", "tokenizer.json":
        t.same(f"out/model/{name}", f"out/checkpoint-4/{name}")
    check("sha256" in t.read("out/checkpoint-4/manifest.json"), t.read("out/checkpoint-4/manifest.json"))
    t.run(f"{TWO} --num-steps 6 --save-dir out --resume-from-checkpoint 2 --checkpoint-frequency 9",
          says=("resumed after step 2", "from here on checkpoints hold no Hugging Face model"))


steps.main("checkpoints", setup)
