# SPDX-License-Identifier: Apache-2.0
"""Items for NCCL: on one GPU, where groups of one member use it, and on several, each mesh against one worker, a rank that is
killed, and the 8B shape sharded over all GPUs."""
import os
import pathlib
import shutil
import signal
import subprocess
import time

import conformance
import speeds
from bench import Shape, run_shape
from place import Failure, Skip, need_fp8, say
from run_folder import Run

# dp_replicate, dp_shard, cp, tp, and how cp exchanges keys and values.
MESHES = ((2, 1, 1, 1, "allgather"), (1, 2, 1, 1, "allgather"), (1, 1, 2, 1, "allgather"), (1, 1, 2, 1, "ring"),
          (1, 1, 2, 1, "ulysses"), (1, 1, 1, 2, "allgather"), (2, 2, 1, 1, "allgather"), (1, 2, 1, 2, "allgather"), (1, 2, 2, 1, "ring"),
          (1, 1, 2, 2, "allgather"), (1, 1, 1, 4, "allgather"), (1, 8, 1, 1, "allgather"), (2, 2, 1, 2, "allgather"),
          (1, 2, 2, 2, "allgather"), (1, 1, 8, 1, "ring"))
BOUND = 1e-4  # of an F32 loss: other orders of its sums over some steps of SGD
END_SECONDS = 90  # for a job whose rank was killed: the launcher's grace time, and the aborts of NCCL


def workers_of(mesh):
    replicas, shards, cp, tp, _ = mesh
    return replicas * shards * cp * tp


def meshes_on(gpus):
    return [mesh for mesh in MESHES if workers_of(mesh) <= gpus]


def name_of(mesh):
    replicas, shards, cp, tp, exchange = mesh
    return f"mesh-{replicas}x{shards}x{cp}x{tp}{'' if exchange == 'allgather' else '-' + exchange}"


def transport_of(run):
    return run.record.get("machine", {}).get("transport")


def train_mesh(place, mesh, name):
    """F32 and SGD: Adam hides gradients of a wrong scale. The global batch is the same on every mesh."""
    replicas, shards, cp, tp, exchange = mesh
    batch = 2 if place.dry else 8
    return conformance.train_small(
        place, name, "--workers", workers_of(mesh), "--dp-replicate-size", replicas, "--dp-shard-size", shards, "--cp-size", cp,
        "--tp-size", tp, "--cp-comm", exchange, "--micro-batch-size", 1, "--gradient-accumulation-steps", batch // (replicas * shards),
        "--precision", "fp32", "--optimizer", "sgd", "--lr", "0.02", dry_steps=2)


def as_one_worker(place, mesh):
    made = [train_mesh(place, m, name) for m, name in (((1, 1, 1, 1, "allgather"), "mesh-one"), (mesh, name_of(mesh)))]
    one, many = (run.losses for run in made)
    worst = max((abs(x - y) / y for x, y in zip(many, one)), default=float("nan"))
    alike = len(one) == len(many) and one != [] and all(abs(x - y) <= BOUND * y for x, y in zip(many, one))
    say({"mesh": name_of(mesh), "workers": workers_of(mesh), "steps": len(many), "worst_relative": worst, "bound": BOUND,
         "transport": transport_of(made[1])})
    if not alike:
        raise Failure(
            f"losses of {name_of(mesh)} are {many[:4]}, those of one worker {one[:4]}; they may differ by {BOUND} of a loss")


def nccl_alone(place, precision):
    """One GPU, whose groups use NCCL: the bits are those of a run without."""
    need_fp8(place, precision)
    flags = ("--precision", precision, "--deterministic", "--gradient-accumulation-steps", 2)
    made = [conformance.train_small(place, f"alone-{precision}-{alone}", *flags, "--nccl-alone", alone) for alone in ("false", "true")]
    for run in made:
        say(speeds.summary(run.folder.name, run, place.gpu))
    used = transport_of(made[1])
    if used != "nccl":
        raise Failure(f"the transport of the second run is {used}, not nccl")
    conformance.same_losses(*made)


def children(pid):
    try:
        return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def steps_of(folder):
    try:
        return len(Run(folder).steps)
    except (OSError, ValueError):
        return 0


def killed_rank(place):
    """A job that trains; KILL to its last worker. The launcher names the rank and the signal, and nobody is left."""
    folder, text, log = place.out / "runs" / "killed", place.out / "data" / "text.txt", place.out / "data" / "killed.log"
    shutil.rmtree(folder, ignore_errors=True)
    text.write_bytes(conformance.TEXT)
    command = [place.programs / "ndlaunch", "--device", "cuda", "--workers", 2, "--dp-shard-size", 2, "--set",
               "model.config=configs/model-small.json", "--set", f"data.path={text}", "--set", "data.tokenizer=bytes",
               "--precision", "bf16", "--sequence-length", 32 if place.dry else 512, "--num-steps", 1000000, "--set", "output.save_model=false", "--set",
               f"output.dir={folder}"]
    with open(log, "w") as to, subprocess.Popen([str(c) for c in command], stdin=subprocess.DEVNULL, stdout=to,
                                                stderr=subprocess.STDOUT, close_fds=False) as job:
        try:
            while job.poll() is None and steps_of(folder) < 3:
                time.sleep(0.05)
            workers = children(job.pid)
            if job.poll() is not None or len(workers) != 2:
                raise Failure(f"the job has {len(workers)} workers and not 2; {log} says why")
            os.kill(workers[-1], signal.SIGKILL)
            begin = time.monotonic()
            code = job.wait(END_SECONDS)
            seconds = time.monotonic() - begin
        except subprocess.TimeoutExpired:
            raise Failure(f"the job goes on {END_SECONDS} s after a worker was killed") from None
        finally:
            job.kill()  # its workers end with it
    said = log.read_text(errors="replace")
    left = [pid for pid in workers if is_alive(pid)]
    say({"killed_rank_exit_code": code, "seconds_until_the_end": seconds, "workers_left": len(left)})
    if code != 128 + signal.SIGKILL or "failed first" not in said or "signal 9" not in said or left:
        raise Failure(f"after KILL to a worker the job ended with {code}, {len(left)} workers live, and it said: {said[-600:]}")


def eight_b_sharded(place, name, asked, precision, recompute, *options):
    """The 8B shape with FSDP over all GPUs, each step with as many micro-batches as on one."""
    need_fp8(place, precision)
    if place.gpus < 2:
        raise Skip("it needs two GPUs")
    run_shape(Shape(place, name, precision, recompute, options, workers=place.gpus), asked)
