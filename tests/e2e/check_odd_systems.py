#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Systems that are not as they should be: disks that are full at any point of a run, and variables of the environment with any content. A
run works, or ends with a documented code and a sentence."""
import os
import pathlib
import re
import subprocess
import time

import steps
from steps import check, test

FLAGS = ("--device cpu --model-config model.json --data-path text.txt --validation-path '' --sequence-length 32 "
         "--set launch.threads_per_worker=1 --log-level warning")
TRAIN = f"ndtrain train {FLAGS} --set output.dir=out"
UNSAVED = f"{TRAIN} --num-steps 1 --set output.save_model=false"
JOB = f"ndlaunch {FLAGS} --num-processes 2 --dp-shard-size 2 --num-steps 1 --set output.save_model=false --set output.dir=out"
GENERATE = "ndtrain generate --model kept --prompt ab --max-new-tokens 3 --threads-per-worker 1 --log-level warning"
EVAL = "ndtrain eval --model kept --data text.txt --sequence-length 32 --threads-per-worker 1 --log-level warning"


def setup(t):
    t.text(4000)
    t.model(hidden_size=32, intermediate_size=64)


def save_model(t):
    t.run(f"{TRAIN} --num-steps 1 --set output.save_model=true")
    (t.folder / "out/model").rename(t.folder / "kept")


def ends_well(t, words):
    """The command's code, which is documented and comes with one sentence unless it is 0. A checkpoint that is not saved ends no run."""
    begin = time.monotonic()
    t.run(words, None)
    check(t.code in (0, 2, 65, 71, 73, 74), f"{words}\nended with {t.code}:\n{t.out}{t.log}")
    unsaved = f"\n{t.log}".count("\nerror: the checkpoint of step ")
    check(t.sentences() - unsaved == (t.code != 0), f"{words}\nended with {t.code} and not one sentence:\n{t.out}{t.log}")
    check(time.monotonic() - begin < steps.PATIENCE_S, words)
    return t.code


def run_on_disk(t, kib, saves_model):
    """One run in a small file system. 90: a saved model is not whole; 91: a checkpoint is not."""
    whole = ("cd small/out 2>/dev/null || exit $code; if test -e model; then (cd model && sha256sum --quiet -c SHA256SUMS) || exit 90; fi; "
             f"for c in checkpoint-*; do test ! -e $c || {t.build}/ndtrain ckpt verify $c >/dev/null || exit 91; done;")
    return ends_well(t, t.mounted(f"{TRAIN} --num-steps 4 --checkpoint-frequency 2 --set output.dir=small/out "
                                  f"--set output.save_model={saves_model}", f"-t tmpfs -o size={kib}k none", "small", whole))


@test
def full_disks(t):
    """Disks of every size up to one that is large enough. Whatever is left there is whole."""
    seen, pages, saves_model = set(), 1, "false"
    while pages < 700:
        code = run_on_disk(t, pages * 4, saves_model)
        check(code in (0, 73), f"{pages * 4} KiB: {code}:\n{t.out}{t.log}")
        seen.add((code, saves_model))
        saves_model = "true" if saves_model == "false" else "false"
        pages += 3 if pages < 16 else pages // 4
    check(len(seen) == 4, f"full and large enough, with a model and without: {seen}")


@test
def limits_of_files(t):
    """Limits of the size of a file (ulimit -f), up to one that is large enough."""
    codes = []
    for i, kib in enumerate((0, 1, 3, 8, 40, 150, 100000)):
        t.remove("out")
        codes.append(ends_well(t, t.limited(f"-f {2 * kib}", f"{TRAIN} --num-steps 20 --checkpoint-frequency 10 --set log.interval=1 "
                                                             f"--set output.save_model={'true' if i % 2 else 'false'}")))
    check(set(codes) == {0, 73}, f"too small and large enough: {codes}")


# Variables that a worker without ndlaunch inherits.
OF_A_WORKER = """
RANK=abc
RANK=-1
RANK=5
RANK=0 WORLD_SIZE=0
RANK=0 WORLD_SIZE=99999999999
WORLD_SIZE=2
LOCAL_RANK=7
MASTER_ADDR= MASTER_PORT=70000
ND_CONFIG_FD=77
ND_CONFIG_FD=x
ND_KEY_FD=-5
ND_PROGRESS_FD=1
ND_RUN_ID=a\x1bb
ND_NODE_RANK=9 ND_NNODES=3
ND_RESTART_EPOCH=-2
OMP_NUM_THREADS=0
OMP_NUM_THREADS=many
OMP_PLACES=nonsense
OMP_PROC_BIND=spread GOMP_SPINCOUNT=infinite
OMP_WAIT_POLICY=ACTIVE
OMP_STACKSIZE=1
OMP_THREAD_LIMIT=1
ONEDNN_MAX_CPU_ISA=NONE
ONEDNN_VERBOSE=9
DNNL_MAX_CPU_ISA=SSE41
HOME=
-u HOME
-u PATH
-i
TMPDIR=/nonexistent
LANG=xx_YY.UTF-8 LC_ALL=tr_TR
TZ=:../../etc/passwd
COLUMNS=0
COLUMNS=-1
TERM=
NO_COLOR=1 CLICOLOR_FORCE=1
CUDA_VISIBLE_DEVICES=-1
CUDA_HOME=/nonexistent
MALLOC_ARENA_MAX=0 MALLOC_PERTURB_=85
HF_HOME=/nonexistent
SLURM_JOB_ID=x
PMIX_RANK=0
SLURM_PROCID=3 SLURM_NTASKS=2
"""
# Variables that ndlaunch inherits, and its workers from it.
OF_A_JOB = """
RANK=3 WORLD_SIZE=7 LOCAL_RANK=9 MASTER_PORT=1 ND_KEY_FD=0 ND_CONFIG_FD=1 ND_RUN_ID=x
-i
TMPDIR=/nonexistent HOME=/nonexistent
UCX_TLS=nonsense
UCX_TLS=self
UCX_TLS=tcp,self
UCX_NET_DEVICES=none
UCX_POSIX_DIR=/nonexistent
UCX_LOG_LEVEL=nonsense
OMP_NUM_THREADS=-3
ND_WORKER=/
ND_WORKER=/bin/true
SLURM_JOB_ID=1 SLURM_NNODES=2 SLURM_NODEID=0
"""


@test
def environments_of_a_worker(t):
    save_model(t)
    for i, variables in enumerate(OF_A_WORKER.strip().split("\n")):
        t.remove("out")
        ends_well(t, ["env", *variables.split(" "), *t.command(UNSAVED)])
        if i % 6 == 0:
            ends_well(t, ["env", *variables.split(" "), *t.command(GENERATE)])


@test
def environments_of_a_job(t):
    for variables in OF_A_JOB.strip().split("\n"):
        t.remove("out")
        ends_well(t, ["env", *variables.split(" "), *t.command(f"{JOB} --set launch.comm_timeout_seconds=10")])


@test
def full_and_closed_outputs_of_a_used_model(t):
    """Outputs that take nothing."""
    save_model(t)
    for words, script, code in ((GENERATE, '"$@" >/dev/full', 73), (f"{GENERATE} --jsonl", '"$@" >/dev/full', 73),
                                (EVAL, '"$@" >/dev/full', 73), (GENERATE, '"$@" >&-', 0), (EVAL, '"$@" 2>&-', 0),
                                (GENERATE, 'ulimit -f 0; "$@" >text', 73)):
        check(ends_well(t, t.in_shell(script, words)) == code, f"{words}, {script}: {t.code}:\n{t.out}{t.log}")


# Variables by which OpenMP's library would bind all threads to one CPU.
BINDINGS = ("OMP_PROC_BIND=spread", "OMP_PROC_BIND=close OMP_PLACES=cores", "OMP_PLACES=threads", "GOMP_CPU_AFFINITY=0",
            "OMP_PROC_BIND=true GOMP_SPINCOUNT=100")


def expect_own_mask(t, binding):
    """Every thread of a program that computes with two may use the CPUs that the program was given."""
    def masks(process):
        return [re.search("Cpus_allowed_list.*", path.read_text())[0] for path in pathlib.Path("/proc").glob(f"{process}/task/*/status")]

    process = t.start(["env", *binding.split(" "), *t.command(
        "ndtrain generate --model kept --interactive --max-new-tokens 3 --threads-per-worker 2")],
                      stdin=subprocess.PIPE, stdout=open(t.folder / "text", "wb"))
    process.stdin.write(b"ab\n")
    process.stdin.flush()
    t.until(lambda: t.read("text"), process)
    found = masks(process.pid)
    process.stdin.close()
    t.ended(process, 0)
    check(len(found) >= 2 and set(found) == set(masks("self")), f"{binding}: {found}")


@test
def openmp_binds_no_thread(t):
    save_model(t)
    cpus = os.sched_getaffinity(0)
    for binding in BINDINGS:
        expect_own_mask(t, binding)
        t.remove("out")
        t.run(["env", *binding.split(" "), *t.command(f"{JOB} --log-level info")])
        check(re.search(rf"cpus: {len(cpus)}.* for 2 local workers", t.log), t.log)
    if len(cpus) > 1:
        os.sched_setaffinity(0, cpus - {min(cpus)})
    try:
        expect_own_mask(t, BINDINGS[0])
    finally:
        os.sched_setaffinity(0, cpus)


@test
def a_core_of_two_cpus_has_one_thread(t):
    """hwloc describes a machine whose cores have two CPUs each."""
    for threads, fact in ((0, "cpus: 8 of 4 cores for 1 local worker, 4 threads each, bound"),
                          (9, "9 threads on 8 cpus, .* leave it out, or use 4\n")):
        t.remove("out")
        t.run(f"{UNSAVED} --log-level info --threads-per-worker {threads}", HWLOC_SYNTHETIC="core:4 pu:2")
        check(re.search(fact, t.log), t.log)


steps.main("odd_systems", setup)
