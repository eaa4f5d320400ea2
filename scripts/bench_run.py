# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: programs that are started and read, and random tokens."""
import array
import json
import os
import pathlib
import random
import signal
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


class BenchError(Exception):
    pass


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
