#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Meshes as real processes under ndlaunch, over shared memory and between hosts: the losses of one worker at equal global batch (F32, SGD,
10 steps, 1e-6 relative: sums of at most 512 F32 terms in another order), and the same run twice gives the same bytes of metrics (times
aside) and of the saved weights."""
import re
import subprocess

import steps
from steps import check, test

SGD = "--set optimizer.name=sgd --set optimizer.max_grad_norm=0"


def setup(t):
    t.text()
    t.model(hidden_size=32, intermediate_size=72)


def train(out, mesh, accumulation):
    """A run with a global batch of 8 blocks of 64 tokens."""
    return ("ndlaunch --device cpu --set model.config=model.json --set data.path=text.txt --sequence-length 64 --num-steps 10 "
            "--precision fp32 --set optimizer.lr=0.1 --set optimizer.schedule=constant --set log.interval=100 --set output.dtype=fp32 "
            f"--set output.save_model=true --set output.dir={out} --set train.gradient_accumulation_steps={accumulation} {mesh}")


def run_one_worker(t):
    t.run(train("one", f"--num-processes 1 --dp-shard-size 1 {SGD}", 8))


def compare(t):
    """The run in the folder mesh with that of one worker."""
    expected, got = t.metrics("one", "loss"), t.metrics("mesh", "loss")
    check(len(expected) == len(got) == 10 and expected[-1] < expected[0], f"the model learns: {expected}, {got}")
    check(all(abs(a / b - 1) < 1e-6 for a, b in zip(got, expected)), f"losses {got}, those of one worker {expected}")


@test
def meshes_of_one_host(t):
    run_one_worker(t)
    for mesh, accumulation in (("--num-processes 4 --dp-shard-size 4", 2),
                               ("--num-processes 8 --dp-replicate-size 2 --dp-shard-size 2 --tp-size 2", 2),
                               ("--num-processes 4 --dp-shard-size 1 --cp-size 4 --set parallel.cp_comm=ring", 8),
                               ("--num-processes 4 --dp-shard-size 1 --cp-size 4 --ulysses 2 --cp-comm ring", 8)):
        t.remove("mesh")
        t.run(train("mesh", f"{mesh} {SGD}", accumulation))
        compare(t)


@test
def fsdp_x_tp_between_hosts(t):
    """Two nodes that share no memory, as on two hosts."""
    if subprocess.run(["unshare", "-ri", "true"], capture_output=True, check=False).returncode != 0:
        raise steps.Skipped("IPC namespaces cannot be made here (unshare -ri)")
    run_one_worker(t)
    t.run("ndlaunch --make-key key")
    command = train("mesh", f"--num-processes 4 --dp-shard-size 2 --tp-size 2 {SGD}", 4)
    meet = f"--nnodes 2 --rdzv-endpoint 127.0.0.1:{steps.port()} --rdzv-key-file key"
    t.wait([t.start(["unshare", "-ri", *t.command(f"{command} {meet} --node-rank {n}")], f"log{n}") for n in (0, 1)], 0)
    compare(t)


@test
def the_same_run_twice(t):
    metrics = []
    for out in "mesh", "again":
        t.run(train(out, "--num-processes 4 --dp-shard-size 2 --tp-size 2 --precision bf16", 2))
        metrics.append(re.sub(',"(step|validation)_ms".*', "", t.read(f"{out}/metrics.jsonl")))  # times and memory stand last
    check(metrics[0] == metrics[1] and metrics[0], metrics)
    t.same("mesh/model/model.safetensors", "again/model/model.safetensors")


steps.main("processes", setup)
