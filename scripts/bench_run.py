# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: programs that are started and read, the runs of configs/bench, and random tokens."""
import array
import json
import os
import pathlib
import random
import signal
import subprocess
import sys

from run_folder import Run

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs" / "bench"
# row -> (text, ranks, threads per rank)
ROWS = {
    "single": ("1 worker, 2 threads", 1, 2),
    "fsdp": ("2 workers, FSDP", 2, 1),
    "hsdp_tp": ("8 workers, HSDP 2 x 2, TP 2", 8, 1),
}


class BenchError(Exception):
    pass


def end_by_signal(number, _):
    raise SystemExit(128 + number)


signal.signal(signal.SIGTERM, end_by_signal)  # as by Ctrl-C: `run` ends what it has started


def run(command, timeout, environment=None):
    """The command's standard output; its whole process group ends with it."""
    process = subprocess.Popen([str(c) for c in command], cwd=ROOT, env=environment, start_new_session=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise BenchError(f"`{' '.join(map(str, command))}` did not end within {timeout:g} s") from None
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    if process.returncode != 0:
        raise BenchError(f"`{' '.join(map(str, command))}` ended with {process.returncode}:\n{err[-2000:]}{out[-1000:]}")
    return out


def last_json(text):
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    raise BenchError(f"no JSON line in this output:\n{text[-1000:]}")


def run_row(row, arguments, data, folder, *flags, environment=None):
    """The Run of `arguments.steps` steps of a row of configs/bench, which saves no model; environment: variables that differ."""
    run([arguments.build / "ndlaunch", "--config-file", CONFIGS / f"{row}.yaml", "--num-steps", arguments.steps, "--set", f"data.path={data}",
         "--set", f"output.dir={folder}", "--set", "output.save_model=false", *flags], arguments.timeout, {**os.environ, **(environment or {})})
    result = Run(folder)
    if len(result.steps) != arguments.steps:
        raise BenchError(f"{folder / 'metrics.jsonl'} has {len(result.steps)} steps, {arguments.steps} were asked for")
    return result


def in_turns(rounds, outer, inner):
    """Calls outer, inner, outer, inner ... outer, so that both see the same machine."""
    outer()
    for _ in range(rounds):
        inner()
        outer()


def ratios(outer, inner):
    """The mean of the two outer times around each inner time, over that."""
    return [(before + after) / 2 / own for before, own, after in zip(outer, inner, outer[1:])]


def write_tokens(path, vocab, count):
    """An llm.c token file (llama-3 form: magic 20240801, version 7, 32-bit ids) of seeded random ids."""
    source = random.Random(7)
    header = array.array("i", [0] * 256)
    header[0], header[1], header[2] = 20240801, 7, count
    tokens = array.array("I", (source.randrange(vocab) for _ in range(count)))
    if sys.byteorder == "big":
        header.byteswap()
        tokens.byteswap()
    with path.open("wb") as file:
        header.tofile(file)
        tokens.tofile(file)
