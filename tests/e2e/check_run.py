#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a run writes and when it validates, of small runs on two workers."""
import json
import math
import os
import re
import shutil
import time

import steps
from steps import SOURCE, check, test

S = 64
RUN = ("ndlaunch --device cpu --num-processes 2 --dp-shard-size 2 --set model.config=model.json --sequence-length 64 "
       "--set optimizer.schedule=constant --set output.dir=out")
ALONE = f"{RUN} --num-processes 1 --dp-shard-size 1"
ON_TEXT = "--set data.path=text.txt --set output.save_model=false"
VERSION = re.search(r"version: '([^']+)'", (SOURCE / "meson.build").read_text())[1]


def setup(t):
    t.write("block.txt", t.text(40 * (S + 1))[:S + 1])
    t.model(hidden_size=32, intermediate_size=64, num_hidden_layers=1)


@test
def validation_is_the_loss_of_its_data(t):
    """One block for training and validation, weights that stay as they are: the two losses are the same number."""
    t.run(f"{ALONE} --set data.path=block.txt --set data.validation_path=block.txt --num-steps 2 --precision fp32 "
          "--set train.validation_interval=1 --set optimizer.lr=1e-300 --set optimizer.weight_decay=0 --set output.save_model=false")
    losses, validation = t.metrics(key="loss"), t.metrics(key="validation_loss")
    check(len(losses) == 2 and validation == 2 * losses[1:], f"{validation}, not {losses}")


@test
def other_data_go_without_the_usual_validation_file(t):
    """A configuration with validation, data of one's own without: a run without validation, and bad data are said."""
    t.write("c.yaml", "data: {path: data/train.txt, validation_path: data/valid.txt}\n"
                      "train: {validation_interval: 1}\noutput: {save_model: false}\n")
    t.run(f"{RUN} --config-file c.yaml --num-steps 1 --data-path text.txt", says="no validation: data.validation_path names no file")
    check(not t.metrics(key="validation_loss"), t.metrics())
    t.remove("out")
    t.run(f"{RUN} --config-file c.yaml --data-path missing.txt", 65, "missing.txt")
    t.run(f"{RUN} --data-path text.txt --validation-path missing.txt", 65)


@test
def says_that_packed_weights_are_not_kept(t):
    """Between limits of memory (KiB) that are too small for the run and those that leave room for packed weights, the run goes without
    them, and says so."""
    t.model(hidden_size=512, intermediate_size=1408, num_hidden_layers=4)
    if "products by ndtrain's" not in t.run("ndtrain --version"):
        raise steps.Skipped("products of this CPU keep no packed weights")
    train = ("ndtrain train --device cpu --set model.config=model.json --sequence-length 64 --set optimizer.name=sgd --num-steps 1 "
             "--micro-batch-size 1 --set train.gradient_accumulation_steps=4 --set output.save_model=false --data-path text.txt "
             "--threads-per-worker 1 --set output.dir=out")

    def says_so(limit):
        t.remove("out")
        t.run(t.limited(f"-v {limit}", train), None)
        return t.code == 0 and "packed weights of the blocks" in t.out + t.log

    check(any(map(says_so, range(160000, 400001, 20000))), f"with no limit:\n{t.out}{t.log}")
    t.remove("out")
    t.run(train, never="packed weights")


@test
def fresh_weights_have_the_seed_and_the_width_of_the_model(t):
    """The seed of fresh weights is the model's. Of width 0, they find all bytes equally likely."""
    t.change("model.json", "}", ', "initializer_range": 0}', to="flat.json")
    losses = []
    for flags in ("train.seed=1 --set model.seed=8", "train.seed=2 --set model.seed=8", "train.seed=1 --set model.seed=9",
                  "model.config=flat.json"):
        t.remove("out")
        t.run(f"{RUN} --data-path text.txt --num-steps 1 --precision fp32 --save-model false --set data.shuffle_seed=3 --set {flags}")
        losses += t.metrics(key="loss")
    check(len(losses) == 4 and losses[0] == losses[1] != losses[2], losses)
    check(abs(losses[3] - math.log(256)) <= math.log(256) * 2**-22, losses)  # in F32


@test
def warns_of_more_threads_than_cpus(t):
    cpu = min(os.sched_getaffinity(0))
    for threads in 1, 2:
        t.remove("out")
        t.run(["taskset", "-c", cpu, *t.command(f"{RUN} --num-steps 1 {ON_TEXT} --threads-per-worker {threads}")])
        said = re.findall("are (.*) on 1 cpu, so steps may take many times as long; leave it out, or use 1\n", t.log)
        check(said == ["4 threads"] * (threads == 2), t.log)


@test
def is_recorded_with_the_command_that_started_it(t):
    """The flags as they were typed."""
    t.run(f"{RUN} --num-steps 1 --data-path=text.txt --set output.save_model=false --set output.dir=")
    record = json.loads(t.read("runs/run-1/run.json"))
    command = record["command"]
    check(record["config_file"] is None and command[0].endswith("ndlaunch") and command[-1] == "output.dir=", record)
    check("--data-path=text.txt" in command and command[command.index("--num-steps") + 1] == "1", command)


@test
def says_how_often_it_reads_the_data(t):
    """40 blocks of 65 tokens, of which a step of two workers takes 2, and the last run's takes 64."""
    t.run(f"{RUN} --num-steps 10 {ON_TEXT}", says="2600 tokens, 40 blocks of 65; the run reads them 0.5 times",
          never=("more data", "MLP in"))
    t.remove("out")
    t.run(f"{RUN} --num-steps 1 {ON_TEXT} --set train.micro_batch_size=32 --tiled-mlp 2",
          says=("MLP in 2 pieces of 1024 tokens\n", "a step takes 64 blocks, but the training data have 40"))


@test
def records_what_its_report_shows(t):
    """FP8 health every third step, the slowest rank of every step, the data, and a trace without validations."""
    begin = time.monotonic()
    t.run(f"{RUN} --validation-path block.txt --num-steps 6 --precision fp8 --fp8-filter mlp --fp8-health-interval 3 "
          f"--set train.validation_interval=3 --log-level debug {ON_TEXT}", says="\nlog: level debug\n")
    whole = (time.monotonic() - begin) * 1e3
    rows = [row for row in t.metrics() if "step_ms" in row]
    check(len(rows) == 6 and rows[1]["wire_bytes"] == rows[4]["wire_bytes"] > 0, rows)
    for row in rows:
        check(row["slowest_ms"] >= row["fastest_ms"] > 0 and row["slowest_rank"] in (0, 1), row)
        check(row["step_ms"] >= row["fastest_ms"], f"a step is shorter than the work of its fastest rank: {row}")
        check(abs(row["tokens_per_second"] * row["step_ms"] / 1e3 - 2 * S) <= 1e-9 * S, f"two samples a step: {row}")
    in_steps = sum(row["step_ms"] for row in rows)
    check(in_steps <= whole, f"steps of {in_steps} ms in a run of {whole} ms")
    healths = [row["fp8_health"]["input"] for row in t.metrics() if "fp8_health" in row]
    check(len(healths) == 2 and all("underflow" in health["mlp.gate_proj"] for health in healths), healths)
    said = re.findall(r"fp8 step [36] layers.0.mlp.gate_proj  input: amax ([^ ]+) scale .* weight: .* gradient: .* saturated", t.log)
    check(said == [f"{health['mlp.gate_proj']['amax']:.3g}" for health in healths] and t.log.count("fp8 step ") == 6, f"{said}\n{t.log}")
    record, trace = (json.loads(t.read(f"out/{name}.json")) for name in ("run", "trace"))
    held, planned = record["memory_plan_bytes"].values(), record["model"]["planned_bytes"]
    check(0 <= planned - sum(held) < 256 * len(held), f"a plan of {planned} bytes: {record}") # each begins at a multiple of 256
    check('"fp8_linears": 3' in t.read("out/run.json") and '"linears": 7,' in t.read("out/run.json"), record)
    check(f"memory plan of a worker: {planned / 2**20:.1f} MiB (" in t.log, f"{planned} are not in:\n{t.log}")
    check('"validation_ms"' in t.read("out/trace.json"), trace)
    gemm = float(re.search('"gemm_ms": ([0-9.]*)', t.read("out/trace.json"))[1])
    check(0 < gemm < in_steps, f"{gemm} ms of products in steps of {in_steps}")
    t.run("ndtrain report out")
    for word in ('"slowest":[[', '"fp8_health.input.mlp.gate_proj.underflow":{"count":2,', '"tokenizer":"bytes"',
                 '"first_step":3,"steps":4,'):
        check(word in t.read("out/report.html"), f"no {word} in the report")


@test
def steps_and_validations_without_a_counted_label(t):
    """Blocks of prompts alone: such a step makes no update, and such a validation no loss; neither ends the run, which still learns from
    the other blocks and saves its model. Each of them was known before step 1, and ndtrain check knows them."""
    t.write("sft.jsonl", [dict(prompt=(130 if i % 2 else 57) * "0", completion="abcdefgh") for i in range(8)])
    t.run(f"{ALONE} --set data.path=sft.jsonl --set data.validation_path=sft.jsonl --num-steps 8 --validation-batches 1 "
          "--validation-interval 8 --shuffle-seed 3 --nonfinite stop")
    check(t.log.count("none of its labels") == 1 and "is skipped: none of its labels counts" in t.log, f"it is said once:\n{t.log}")
    without = [row["step"] for row in t.metrics() if "skipped" in row]
    check(0 < len(without) < len(t.metrics(key="loss")), f"{without} of {t.metrics()}")
    check(t.has("out/model/model.safetensors"), "no model")
    said = (f"step {without[0]} has no label that counts in the loss" if len(without) == 1 else
            f"step {without[0]} and {len(without) - 1} later ones have no label that counts")
    check(said in t.log.split("none of its labels")[0], f"no {said!r} at the start:\n{t.log}")
    t.remove("out")
    t.run("ndtrain check --device cpu --model-config model.json --sequence-length 64 --data-path sft.jsonl --validation-path '' "
          "--num-steps 8 --shuffle-seed 3 --nonfinite stop --save-dir out", says=said)


@test
def padding_is_a_part_of_all_tokens_of_a_step(t):
    """Rows that leave a part of their blocks empty, as one micro-batch or as two."""
    t.write("sft.jsonl", [dict(prompt="0123456789", completion="abcdefghijklmnopqrstuvwxyz")] * 4)
    padding = []
    for micros in "--micro-batch-size 2", "--micro-batch-size 1 --gradient-accumulation-steps 2":
        t.remove("out")
        t.run(f"{ALONE} --set data.path=sft.jsonl --validation-path '' --num-steps 1 --save-model false {micros}")
        padding += t.metrics(key="padding")
    check(len(padding) == 2 and 0.25 < padding[0] == padding[1] < 0.75, padding)


@test
def a_validation_without_a_counted_label_is_foretold(t):
    """It reads one batch, and nearly all are within the prompt of the only row."""
    t.write("valid.jsonl", [dict(prompt=2000 * "0", completion="abcdefgh")])
    words = f"{ALONE} --set data.path=text.txt --set data.validation_path=valid.jsonl --num-steps 2"
    foretold = "sequences that a validation reads of"
    t.run(f"{words} --validation-batches 1", says=foretold)
    check("step 1" in t.log.split(foretold, 1)[1] and t.has("out/model/model.safetensors"), t.log)
    t.says("the validation after step 2 has no label that counts; check data.validation_path")
    t.remove("out")
    t.run(words, never=foretold)


@test
def saves_the_weights_in_the_type_that_was_asked_for(t):
    for dtype, name in ("fp32", "F32"), ("bf16", "BF16"):
        t.run(f"{RUN} --set data.path=text.txt --num-steps 1 --set output.dtype={dtype}")
        check(f'"dtype":"{name}"' in t.read("out/model/model.safetensors")[:200], dtype)
        check(all((t.folder / f"out/model/{part}.json").stat().st_size > 0 for part in ("tokenizer", "config")), "its other files")
        t.remove("out")


@test
def a_disk_too_full_for_the_model_is_found_at_the_start(t):
    """It is found before the first step, not when the model is to be saved."""
    t.run(t.mounted(f"{RUN} --set data.path=text.txt --num-steps 1 --set output.dir=small/out", "-t tmpfs -o size=64k none", "small",
                    "test -e small/out/metrics.jsonl && exit 1;"), 73, "the trained model")


@test
def a_disk_that_becomes_full_does_not_end_the_run(t):
    """It fills with lines of metrics.jsonl, and the run trains on. Where a short line fits the rest of the disk, it says how many."""
    t.run(t.mounted(f"{RUN} {ON_TEXT} --set data.validation_path= --num-steps 200 --set log.interval=100 --set output.dir=small/out",
                    "-t tmpfs -o size=64k none", "small", "cp small/out/metrics.jsonl small/out/run.json . || exit 1;"),
          says=("step 200/200 ", "warning: metrics.jsonl loses records of this run"))
    check("metrics.jsonl is written again, without " in t.log or " records of this run did not go to metrics.jsonl" in t.log, t.log)
    lines = t.read("metrics.jsonl").splitlines()
    check(10 < len(lines) < 199 and all(line.endswith("}") for line in lines), lines)
    if any("records_lost" in line for line in lines):
        t.run("ndtrain report .", says="finished: all 200 steps")


@test
def data_that_become_shorter_end_the_run_with_a_sentence(t):
    """The prefetch thread finds pages gone while the run computes."""
    t.write("long.txt", 200 * t.read("text.txt"))
    process = t.start(f"{RUN} {ON_TEXT} --set data.path=long.txt --num-steps 1000000 --set log.interval=100")
    t.until(lambda: t.has("out/metrics.jsonl") and "loss" in t.read("out/metrics.jsonl"), process)
    os.truncate(t.folder / "long.txt", 1000)
    t.ended(process, 74, "became shorter while it was read")


def recorded(t, key):
    """A version or name of run.json."""
    found = re.search(f'"{key}": *"([^"]+)"', t.read("out/run.json"))
    check(found, f"run.json has no {key}")
    return found[1]


@test
def one_worker_does_not_open_ucx(t):
    """It would read files and make threads for nothing."""
    t.run(f"{ALONE} {ON_TEXT} --set data.validation_path= --num-steps 1")
    check(recorded(t, "UCX") in ("not used", "none"), recorded(t, "UCX"))


@test
def version_lists_what_a_run_uses(t):
    """Both programs name the libraries that a run records, and so does its log what multiplies; ndlaunch asks the worker program."""
    t.run(f"{RUN} {ON_TEXT} --set data.validation_path= --num-steps 1")
    if "ND_WITH_CUDA" not in os.environ:
        raise steps.Skipped("meson.build says what is built in (ND_WITH_CUDA, ND_WITH_PMIX)")
    both, products = f"{recorded(t, 'isa')}; {recorded(t, 'products')}", recorded(t, "products")
    check(recorded(t, "oneDNN") in products and both in t.log, f"no {both!r} in:\n{t.log}")
    cuda, pmix = (os.environ[f"ND_WITH_{name}"] == "1" for name in ("CUDA", "PMIX"))
    listed = {name: recorded(t, name) for name in ("oneDNN", "UCX", "OpenSSL")}
    listed |= dict(CPU=both, PMIx="" if pmix else "not built in", CUDA="" if cuda else "not built in",
                   cuDNN="headers of 9." if cuda else "not built in", NCCL="headers of 2." if cuda else "not built in")
    for command in "ndtrain --version", "ndtrain train --version", "ndlaunch --version":
        t.run(command, says=[f"ndtrain {VERSION}\n", *(f"\n  {name:9} {value}" for name, value in listed.items())])
        check(("kernels for sm_" in t.out) == cuda, t.out)
    check(t.out.startswith(f"ndlaunch {VERSION}\n"), t.out)
    t.run("ndlaunch --version", 2, "ND_WORKER", ND_WORKER="/none")


@test
def a_run_folder_that_is_deleted_ends_the_run(t):
    process = t.start(f"{RUN} {ON_TEXT} --num-steps 100000 --set log.interval=100000")
    t.until(lambda: t.has("out/metrics.jsonl") and t.read("out/metrics.jsonl"), process)
    shutil.rmtree(t.folder / "out")
    t.ended(process, 73, "out/metrics.jsonl was deleted during the run")


@test
def a_limit_of_file_sizes_is_an_error_with_a_sentence(t):
    """Too little for the configuration that workers inherit, for shared memory, and for the model, which is known before training."""
    for limit, workers, sentence in ((0, "1", "cannot be handed down to the workers: File too large"),
                                     (1, "1", "cannot be handed down to the workers: File too large"),
                                     (40, "2 --save-model false", "shared memory between workers needs files of up to"),
                                     (40, "1", "the trained model needs a file of")):
        words = f"{RUN} --set data.path=text.txt --num-steps 2 --dp-shard-size -1 --num-processes {workers}"
        t.run(t.limited(f"-f {limit}", words), 73, sentence)
        t.remove("out")


@test
def output_that_is_lost_is_an_error(t):
    """A disk that is full where standard output goes."""
    inputs = "--device cpu --set model.config=model.json --data-path text.txt --sequence-length 64"
    for command in (f"ndtrain plan {inputs}", f"ndtrain check {inputs} --set output.dir=out", "ndtrain --help", "ndtrain version",
                    "ndlaunch --help"):
        t.run(t.in_shell('exec "$@" >/dev/full', command), 73, "standard output cannot be written: No space left")


@test
def bench_times_every_precision(t):
    """Each precision is timed, on the mesh that was asked for; not how long it takes."""
    t.run("ndlaunch bench --layer --repeats 1 --device cpu --num-processes 4 --dp-replicate-size 2 --cp-size 2 --micro-batch-size 3 "
          "--set model.config=model.json --sequence-length 64", says=(
              "\nbf16 ", "\nfp8 tensorwise ", "\nfp8 rowwise ", "\nfp8 rowwise_with_gw_hp ", "\nfp8 delayed ", "mesh 2 x 1 x 2 x 1 ",
              ", 384 tokens; "))
    layer = "ndtrain bench --layer --repeats 1 --device cpu --set model.config=model.json --sequence-length 64"
    # Milliseconds have three digits, the number of times two, and tokens a second none.
    lines = [line.split()[-5:] for line in t.run(layer).splitlines() if line.startswith(("bf16 ", "fp8 "))]
    check(len(lines) == 5, t.out)
    for forward, backward, both, times, speed in (map(float, line) for line in lines):
        usual = float(lines[0][2])
        check(abs(forward + backward - both) < 2e-3 and abs(times - usual / both) < 6e-3 + usual / both * 1e-3 / min(usual, both), t.out)
        check(abs(speed * both / 64e3 - 1) < 1e-3 / both + 1 / speed, t.out)
    t.run(f"{layer} --jsonl")
    check([row["precision"].split()[-1] for row in t.rows()] == ["bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"], t.out)
    check(all(row["forward_seconds"] > 0 < row["backward_seconds"] and row["tokens"] == 64 for row in t.rows()), t.out)
    own = "ndtrain bench --products --device cpu --jsonl --sizes 32x48x64"
    t.run(f"{own},16x16x16", says=('"m":32,"k":48,"n":64,"bf16_seconds":', '"delayed_seconds":'))
    t.run(own, says='"tensorwise_seconds":', ND_CPU_ISA="amx_emulated")  # where operands are packed
    one, many = (json.loads(t.run(f"{own} --gradient-accumulation-steps {n}"))["bf16_seconds"] for n in (1, 4096))
    check(many <= 64 * one, f"a product is one of a micro-batch, but takes {many / one} times as long")


@test
def bench_times_the_linears_of_a_file_for_several_workers(t):
    """The lines of README: a file for eight workers gives the sizes of one of its ranks, which one worker times."""
    t.folder = SOURCE
    own = "--config-file configs/tp_hsdp.yaml --device cpu"
    t.run(f"ndtrain bench --products {own}", says=(
        "a rank of mesh 2 x 2 x 1 x 2 ", "\n    512     256     128 ", "\n    512     256      64 ", "\n    512     128     256 ",
        "\n    512     256     352 ", "\n    512     352     256 "))
    # GFLOP/s of the three products, and how many times as fast each recipe is, by milliseconds with three digits.
    for line in re.findall(r"^ +\d+ +\d+ +\d+ [ .\d]+$", t.out, re.M):
        m, k, n, ms, rate, *fp8 = map(float, line.split())
        check(abs(rate * ms - 6e-6 * m * k * n) <= 0.05 * ms + 5e-4 * (rate + 1) and len(fp8) == 8, line)
        check(all(abs(ms / own - times) <= 6e-3 + 5e-4 * (1 + times) / (own - 5e-4) for own, times in zip(fp8[::2], fp8[1::2])), line)
    t.run(f"ndtrain check bench --products {own}")
    t.run(f"ndtrain bench --products --sizes 16x16x16 --jsonl {own}", says='"m":16,"k":16,"n":16,')
    t.run(f"ndtrain bench --layer {own}", 2, "start it with ndlaunch")


@test
def bench_refuses_what_it_cannot_time(t):
    for command, sentence in (
            ("ndtrain bench --device cpu", "give --products"),
            ("ndtrain bench --products --sizes 32x40x64", '--sizes is "32x40x64"; it must be MxKxN'),
            ("ndtrain bench --products --sizes 32x48", '--sizes is "32x48"; it must be MxKxN'),
            ("ndtrain bench --products --sizes 16x16x16,0x16x16", "each a multiple of 16 up to"),
            ("ndtrain bench --products --sizes 16x16x16777232", "a multiple of 16 up to 16777216"),
            ("ndtrain bench --products --layer", "give --products"),
            ("ndtrain bench --layer --sizes 32x32x32", "--sizes is for --products"),
            ("ndtrain bench --products --repeats 3", "--repeats is for --layer"),
            ("ndlaunch bench --products --sizes 32x32x32 --device cpu --num-processes 2",
             "--products times one worker, but this job has 2; start it with `ndtrain bench --products`")):
        t.run(command, 2, sentence)


steps.main("run", setup)
