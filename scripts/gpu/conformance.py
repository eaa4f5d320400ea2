# SPDX-License-Identifier: Apache-2.0
"""Items of phase conformance: tests of ops, and short runs of a small model that must agree with one another."""
import json
import os
import re
import shutil
import subprocess
import sys

import speeds
from place import Failure, Skip, complain, need_fp8, output_of, run, say, tool
from run_folder import Run

GIB = 2**30
# CUDA's context, cuBLASLt, cuDNN and the code of the kernels that were used, besides the plan; an estimate.
BESIDES_PLAN = 1.5 * GIB
GRANULE = 2**21  # of the driver's account
TEXT = bytes(97 + (i * i // 3 + i // 7) % 26 for i in range(400000))


# ---- Tests of ops -----------------------------------------------------------------------------------------------------

def suite(place, command):
    """(exit code, output) of a test program. One that ran no test has failed."""
    log = place.out / "data" / "suite.log"
    with open(log, "w") as copy, subprocess.Popen([str(c) for c in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                                  stderr=subprocess.STDOUT, text=True, errors="replace", close_fds=False) as process:
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            copy.write(line)
    text = log.read_text(errors="replace")
    if not re.search(r"Synthesis: Tested: *[1-9]", text):
        complain("no test ran")
        return process.returncode or 1, text
    return process.returncode, text


def test_program(place, name):
    program = place.tests.with_name(f"{place.tests.name}_{name}")
    if not os.access(program, os.X_OK):
        raise Skip(f"{program} was not built")
    return program


def tests_of(place, name, pattern="*/*"):
    """ops or goldens, those that a pattern of Criterion names."""
    return suite(place, [test_program(place, name), "--timeout", place.seconds_per_test, "--jobs", place.jobs,
                         "--filter", pattern])[0]


def suites_of_ops(place):
    """Names of the suites in the program that tests the ops."""
    program = place.tests.with_name(f"{place.tests.name}_ops")
    return re.findall(r"^([a-z0-9_]*): [0-9]", output_of([str(program), "--list"]), re.MULTILINE)


def sanitized(place, name):
    """A suite of the ops' tests under compute-sanitizer. An error that a call of CUDA returns is no finding: the program checks
    each answer, and libraries ask for what is not there, or whether the GPU is done."""
    if name is None:
        raise Skip(f"{place.tests}_ops has no list of its tests")
    if place.dry and not os.environ.get("ND_GPU_SANITIZER"):
        raise Skip("compute-sanitizer needs a GPU")
    sanitizer = tool("ND_GPU_SANITIZER", "compute-sanitizer")
    if not os.access(sanitizer, os.X_OK):
        raise Skip("compute-sanitizer is not there (part of the CUDA Toolkit)")
    code, text = suite(place, [sanitizer, "--error-exitcode", 9, "--report-api-errors", "no", "--launch-timeout", 60,
                               "--target-processes", "all", test_program(place, "ops"), "--jobs", place.jobs, "--timeout", 300,
                               "--filter", f"{name}/*"])
    if code != 0 and "Device not supported" in text:
        raise Skip("compute-sanitizer does not support this device")
    if code == 0 and "ERROR SUMMARY" not in text:
        raise Failure("compute-sanitizer has watched no process")
    return code


# ---- Runs of a small model --------------------------------------------------------------------------------------------

def train_small(place, name, *options, dry_steps=3):
    """A short run; the folder that it left."""
    steps, sequence, batch = (dry_steps, 32, 1) if place.dry else (place.small_steps, *place.small_shape)
    text, folder = place.out / "data" / "text.txt", place.out / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    text.write_bytes(TEXT)
    if run([place.programs / "ndlaunch", "--device", "cuda", "--workers", 1, "--set", "model.config=configs/model-small.json",
            "--set", f"data.path={text}", "--set", "data.tokenizer=bytes", "--sequence-length", sequence, "--micro-batch-size", batch,
            "--num-steps", steps, "--set", "output.save_model=false", "--set", f"output.dir={folder}", *options]) != 0:
        raise Failure
    return Run(folder)


def small(place, name, *options):
    """Prints the losses, and what was planned and used."""
    if "fp8" in options:
        need_fp8(place, "fp8")
    say(speeds.summary(name, train_small(place, name, *options), place.gpu))


def beside_doubles(place, name, made, precision):
    """Each loss beside that of the same run on the doubles of CUDA, which compute in the same types and add in another order:
    the bounds of two precisions hold for two orders in one."""
    want, bound = place.expected.get(name), 0.03 if precision == "fp8" else 0.01
    if want is None:
        raise Failure(f"there are no losses of the doubles for {name}")
    worst = max((abs(x - y) / y for x, y in zip(made.losses, want)), default=float("nan"))
    say({"losses_of": name, "against": "the doubles", "steps": len(made.losses), "worst_relative": worst, "bound": bound,
         "losses": made.losses, "of_doubles": want})
    if len(made.losses) != len(want) or not all(abs(x - y) <= bound * y for x, y in zip(made.losses, want)):
        raise Failure(f"the losses of {name} are {made.losses}, those of the doubles {want}; they may differ by {100 * bound} %")


def small_as_doubles(place, name, *options):
    made = train_small(place, name, *options)
    say(speeds.summary(name, made, place.gpu))
    beside_doubles(place, name, made, options[options.index("--precision") + 1])


def same_losses(one, other):
    """Digit for digit."""
    a, b = one.losses, other.losses
    say({"deterministic": a == b, "losses": len(a)})
    if a != b:
        first = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        raise Failure(f"{one.folder} and {other.folder}: of {len(a)} and {len(b)} losses, validations among them, number "
                      f"{first + 1} differs first: {a[first:first + 3]} and {b[first:first + 3]}")
    if not a:
        raise Failure(f"{one.folder} has no loss")


def deterministic_twice(place):
    options = ("--precision", "bf16", "--set", "train.deterministic=true")
    same_losses(train_small(place, "again1", *options), train_small(place, "again2", *options))


def graphs_as_without(place, precision):
    """With and without CUDA graphs; validations, and in FP8 steps of the health log, come between."""
    need_fp8(place, precision)
    validation = place.out / "data" / "validation.txt"
    validation.write_bytes(TEXT[:20000])
    made = []
    for graphs in ("false", "true"):
        name = f"graphs-{precision}-{graphs}"
        made.append(train_small(place, name, "--precision", precision, "--deterministic", "--set", f"kernels.cuda_graphs={graphs}",
                                "--gradient-accumulation-steps", 2, "--set", f"data.validation_path={validation}",
                                "--validation-interval", 2, "--set", "train.validation_batches=1", "--set",
                                f"fp8.health_interval={0 if place.dry else 4}", dry_steps=4))
        say(speeds.summary(name, made[-1], place.gpu))
    same_losses(*made)


def autotune_as_recorded(place, precision):
    """Choices of autotune, then two runs that take them from its record. The replays agree digit for digit, and in step 1 with
    the run that chose; later that one's attention may add in another order, since autotune is refused where the order is fixed."""
    need_fp8(place, precision)
    tuned = train_small(place, f"tuned-{precision}", "--precision", precision, "--autotune")
    replays = [train_small(place, f"tuned-{precision}-{again}", "--precision", precision, "--deterministic", "--autotune-from",
                           tuned.folder / "run.json") for again in (1, 2)]
    for made in (tuned, *replays):
        say(speeds.summary(made.folder.name, made, place.gpu))
    a, b, c = tuned.losses, replays[0].losses, replays[1].losses
    choices = tuned.record.get("autotune")
    near = len(a) == len(b) and all(abs(x - y) <= 0.01 * y for x, y in zip(a, b))
    good = bool(a) and a[0] == b[0] and b == c and near and choices is not None
    say({"replayed": good, "losses": len(a)})
    if not good:
        raise Failure(f"losses of the run that chose {a[:4]}, of its replays {b[:4]} and {c[:4]}; its record "
                      f"{'has no' if choices is None else 'has'} choices")


def losses(place, *names):
    """BF16 within 1 % of F32, every FP8 recipe within 3 % of BF16, at each step of the small model."""
    bad = False
    for name in names:
        against, bound = ("fp32", 0.01) if name == "bf16" else ("bf16", 0.03)
        try:
            rows = [[row["loss"] for row in Run(place.out / "runs" / of).steps] for of in (name, against)]
        except (OSError, ValueError) as error:
            complain(f"the losses of {name} cannot be compared with those of {against}: {error}")
            bad = True
            continue
        # A NaN is no number that is small.
        worst = max((abs(x - y) / y for x, y in zip(*rows)), default=float("nan"))
        alike = len(rows[0]) == len(rows[1]) and all(abs(x - y) <= bound * y for x, y in zip(*rows)) and rows[0] != []
        bad = bad or not alike
        say({"losses_of": name, "against": against, "steps": len(rows[0]), "worst_relative": worst, "bound": bound})
    return 1 if bad else 0


def generated(place, model, prompts, device, precision, *options):
    """Lines of `ndtrain generate`, and how many tokens a second it made while it computed no prompt. No lines: there is no such
    device in this build."""
    out, log = (place.out / "data" / f"texts-{device}-{precision}.{end}" for end in ("jsonl", "log"))
    with open(out, "w") as to, open(log, "w") as words:
        code = run([place.programs / "ndtrain", "generate", "--model", model, "--prompt-file", prompts, "--max-new-tokens",
                    8 if place.dry else 128, "--precision", precision, "--device", device, *options], stdout=to, stderr=words)
    said = log.read_text(errors="replace")
    if device == "cpu" and "built without the CPU backend" in said:
        return None, None
    if code != 0:
        raise Failure(f"generate with device {device} in {precision} ended with {code}: {said[-400:]}")
    rate = re.search(r"([0-9.]+) a second while no prompt", said)
    return out.read_text().splitlines(), float(rate[1]) if rate else None


def texts_as_on_the_cpu(place):
    """Greedy texts in F32 are those of the CPU, or, in a build without that, those that the GPU writes one at a time with prompts in
    other pieces. F32 and BF16 are timed, eight texts at once."""
    made = train_small(place, "texts", "--precision", "fp32", "--set", "output.save_model=true")
    prompts = place.out / "data" / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": TEXT[i:i + 8 + i // 20].decode()}) + "\n" for i in range(0, 800, 100)))
    want, _ = generated(place, made.folder / "model", prompts, "cpu", "fp32")
    other = "on the CPU" if want is not None else "one at a time"
    if want is None:
        want, _ = generated(place, made.folder / "model", prompts, "cuda", "fp32", "--max-batch", 1, "--prefill-chunk", 7)
    got, fp32 = generated(place, made.folder / "model", prompts, "cuda", "fp32")
    _, bf16 = generated(place, made.folder / "model", prompts, "cuda", "bf16")
    alike = got == want and want != []
    say({"texts": f"as {other}" if alike else f"not as {other}", "count": len(got), "tokens_per_second_fp32": fp32,
         "tokens_per_second_bf16": bf16})
    if not alike:
        first = next((i for i, (x, y) in enumerate(zip(got, want)) if x != y), min(len(got), len(want)))
        raise Failure(f"text {first + 1} on the GPU is {got[first:first + 1]}, {other} {want[first:first + 1]}")


def memory_as_planned(place):
    """Reports what the driver has given away beside the plan: the plan counts what was in use when it was made, and estimates what
    CUDA and its libraries take later, which differs by driver and GPU. Memory that grows from step to step is a failure."""
    idle = "0" if place.dry else \
        output_of(["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]).split("\n")[0]
    if not idle.isdigit():
        raise Skip("nvidia-smi is not there to say what is in use")
    made = train_small(place, "memory", "--precision", "bf16")
    used, planned = made.peak_bytes, made.planned_bytes
    grown = made.steps[-1]["peak_memory_bytes"] - made.steps[0]["peak_memory_bytes"]
    near = planned - GRANULE <= used <= planned + BESIDES_PLAN
    say({"memory": "as planned" if near else "not as planned", "planned_gib": planned / GIB, "used_gib": used / GIB,
         "beside_plan_gib": (used - planned) / GIB, "in_use_before_gib": (int(idle) << 20) / GIB, "grown_in_the_run_gib": grown / GIB})
    if grown > 0:
        raise Failure(f"from the first to the last step the driver has given away {grown / GIB:.2f} GiB more")
