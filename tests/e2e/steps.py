# SPDX-License-Identifier: Apache-2.0
"""Steps of tests that use the programs as a user does, and what runs these tests.

A file of tests marks them by @test and ends with main("suite", setup). Each test is a function of Steps, in a process and a folder of
its own. The file is called with the build folder, and as a program of Criterion with --filter 'suite/words*' and --jobs N; its last line
is that of Criterion, which .ci/suites counts.
"""
import argparse
import concurrent.futures
import fnmatch
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback

SOURCE = pathlib.Path(__file__).resolve().parents[2]
PATIENCE_S = 20 * max(1.0, float(os.environ.get("ND_TEST_TIME_FACTOR", "1")))  # whatever is done to it, a program ends by then
LIMIT_S = 240


def put_back_surroundings():
    """What tests/support/surroundings.c does for programs of Criterion."""
    lists = (SOURCE / "tests/support/surroundings.c").read_text().split("static int")[0].split("names[] =")
    families, names = (" ".join(re.findall('"([^"]*)"', part)).split() for part in lists)
    for variable in list(os.environ):
        if variable in names or (variable.startswith(tuple(families)) and variable != "SLURM_CONF"):
            del os.environ[variable]
    os.environ["LC_ALL"] = "C"
    for name in "HUP INT QUIT PIPE ALRM TERM USR1 USR2 CHLD TSTP TTIN TTOU".split():
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.umask(0o022)


class Skipped(Exception):
    pass


def check(holds, words):
    if not holds:
        raise AssertionError(words)


def call(words, code=0, **more):
    """What a program prints, which ends with this code."""
    done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S, **more)
    check(done.returncode == code, f"{words} ended with {done.returncode}, not {code}:\n{done.stdout}")
    return done.stdout


TESTS = []


def test(function):
    TESTS.append(function)
    return function


def port():
    """A port of loopback that for a minute the system gives to nobody who does not name it: the end of a connection waits there."""
    listener, client = socket.socket(), socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.listen(1)
    address = listener.getsockname()
    client.connect(address)
    listener.accept()[0].close()
    client.recv(1)
    client.close()
    listener.close()
    return address[1]


class Steps:
    """A folder, and the last program that was run in it: its standard output and its log."""

    def __init__(self, build, folder):
        self.build, self.folder, self.out, self.log, self.code = pathlib.Path(build), pathlib.Path(folder), "", "", 0
        self.started = []  # by start() and ranks()

    def write(self, name, content):
        """Text, bytes, or a list of rows of JSON."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return content

    def read(self, name):
        return (self.folder / name).read_bytes().decode(errors="surrogateescape")

    def change(self, name, *pairs, to=None):
        """Replaces each text, which is there, by the one behind it; `to`: in a copy."""
        text = self.read(name)
        for old, new in zip(pairs[::2], pairs[1::2]):
            check(old in text, f"no {old!r} in {name}")
            text = text.replace(old, new)
        self.write(to or name, text)

    def same(self, a, b):
        check((self.folder / a).read_bytes() == (self.folder / b).read_bytes(), f"{a} and {b} differ")

    def text(self, size=20000):
        """text.txt: lower-case letters with some structure to learn."""
        return self.write("text.txt", "".join(chr(97 + (i * i // 3 + i // 7) % 26) for i in range(size)))

    def model(self, name="model.json", **more):
        shape = dict(model_type="llama", vocab_size=256, hidden_size=64, intermediate_size=144, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
        self.write(name, json.dumps({key: value for key, value in (shape | more).items() if value is not ...}))

    def command(self, words):
        """The words of a command line; ndtrain, ndlaunch and a checkpoint_tool are those of the build."""
        words = shlex.split(words) if isinstance(words, str) else [str(word) for word in words]
        places = {"ndtrain": "ndtrain", "ndlaunch": "ndlaunch", "checkpoint_tool": "tests/unit/trainer/checkpoint/checkpoint_tool"}
        return [str(self.build / places[words[0]]) if words[0] in places else words[0], *words[1:]]

    def run(self, words, code=0, says=(), never=(), given=None, **environment):
        """Runs a command, which ends with the code (128 + a signal; None: any) and prints these texts. Returns its output."""
        given = given.encode() if isinstance(given, str) else given
        done = subprocess.run(self.command(words), cwd=self.folder, input=given, stdin=subprocess.DEVNULL if given is None else None,
                              capture_output=True, timeout=LIMIT_S, env=os.environ | environment)
        self.out, self.log = (stream.decode(errors="surrogateescape") for stream in (done.stdout, done.stderr))
        self.code = got = done.returncode if done.returncode >= 0 else 128 - done.returncode
        check(code is None or got == code, f"{words}\nended with {got}, not {code}:\n{self.out[-9000:]}{self.log[-9000:]}")
        self.says(says, never)
        return self.out

    def sentences(self):
        """How many sentences of the output say why a program ended: a user should find one."""
        text = f"\n{self.out}\n{self.log}"
        return text.count("\nerror: ") + text.count(" failed first (")

    def metrics(self, run="out", key=None):
        """The rows of a run's metrics.jsonl that are whole; with a key its values in the rows that have it."""
        rows = [json.loads(line) for line in self.read(f"{run}/metrics.jsonl").splitlines() if line.endswith("}")]
        return [row[key] for row in rows if key in row] if key else rows

    def curve(self, run="out", behind=0):
        """What each step computed, without traffic and times; a line "resumed" takes back the later steps above it."""
        curve = {}
        for row in self.metrics(run):
            if row.get("event") == "resumed":
                curve = {step: values for step, values in curve.items() if step <= row["step"]}
            elif "step_ms" in row:
                curve[row["step"]] = dict(itertools.takewhile(lambda item: item[0] != "wire_bytes", row.items()))
        return {step: values for step, values in curve.items() if step > behind}

    def same_runs(self, a, b, steps):
        """Both computed the same in so many steps, and have the same model."""
        curves = self.curve(a), self.curve(b)
        check(len(curves[0]) == steps and curves[0] == curves[1], f"{a} and {b} differ:\n{curves}")
        self.same(f"{a}/model/model.safetensors", f"{b}/model/model.safetensors")

    def has(self, *names):
        """Whether the folder has one of these, or names of these patterns."""
        return any(list(self.folder.glob(name)) for name in names)

    def remove(self, *names):
        """Files and folders, which need not be there."""
        for path in (self.folder / name for name in names):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def in_shell(self, script, words):
        """The command as "$@" of a script."""
        return ["sh", "-c", script, "sh", *self.command(words)]

    def limited(self, limit, words):
        """The command with a limit of the shell: "-v 20000"."""
        return self.in_shell(f'ulimit {limit}; exec "$@"', words)

    def mounted(self, words, what, place, behind=""):
        """The command with what mount is given mounted at the place, and then more of the shell, which also sees it."""
        (self.folder / place).mkdir(exist_ok=True, parents=True)
        tried = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", place]
        if subprocess.run(tried, cwd=self.folder, capture_output=True, check=False).returncode != 0:
            raise Skipped("file systems cannot be mounted here (unshare -rm)")
        script = f'"$@"; code=$?; {behind} exit $code' if behind else 'exec "$@"'
        return ["unshare", "-rm", *self.in_shell(f"mount {what} {place} || exit; {script}", words)]

    def says(self, says=(), never=()):
        for word in (says,) if isinstance(says, str) else says:
            check(word in self.out + self.log, f"no {word!r} in:\n{self.out}{self.log}")
        for word in (never,) if isinstance(never, str) else never:
            check(word not in self.out + self.log, f"{word!r} in:\n{self.out}{self.log}")

    def rows(self):
        """The rows of JSON that were printed."""
        return [json.loads(line) for line in self.out.splitlines()]

    def start(self, words, log="log", **more):
        """A process whose log is a file."""
        self.started.append(subprocess.Popen(self.command(words), cwd=self.folder, stdin=more.pop("stdin", subprocess.DEVNULL),
                                             stdout=more.pop("stdout", subprocess.DEVNULL), stderr=open(self.folder / log, "wb"), **more))
        return self.started[-1]

    def ranks(self, words, count=2, folders=None):
        """Processes as torchrun starts them; rank R writes outR and logR."""
        place = dict(WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port()))
        ranks = [subprocess.Popen(self.command(words), cwd=self.folder / (folders[r] if folders else "."), stdin=subprocess.DEVNULL,
                                  stdout=open(self.folder / f"out{r}", "wb"), stderr=open(self.folder / f"log{r}", "wb"),
                                  env=os.environ | place | dict(RANK=str(r), LOCAL_RANK=str(r))) for r in range(count)]
        self.started += ranks
        return ranks

    def ended(self, process, code, says=(), log="log"):
        """Waits for a process of start(), which ends with the code (128 + a signal) and writes these texts to its log."""
        got = process.wait(LIMIT_S)
        self.out, self.log, self.code = "", self.read(log), got if got >= 0 else 128 - got
        check(self.code == code, f"ended with {self.code}, not {code}:\n{self.log}")
        self.says(says)

    def wait(self, processes, code):
        for process in processes:
            got = process.wait(LIMIT_S)
            check(got == code, f"ended with {got}, not {code}:\n" + "".join(self.read(f"log{r}") for r in range(len(processes))))

    def until(self, holds, process=None):
        """Waits for something, or for the end of the process."""
        end = time.monotonic() + LIMIT_S
        while not holds() and (process is None or process.poll() is None):
            check(time.monotonic() < end, "it does not come")
            time.sleep(0.02)

    def python(self, modules):
        """The Python of ND_PEER_PYTHON, which has these modules."""
        python = os.environ.get("ND_PEER_PYTHON")
        find = "import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, sys.argv[1:])))"
        if not python or subprocess.run([python, "-c", find, *modules.split()], check=False).returncode != 0:
            raise Skipped(f"ND_PEER_PYTHON names no Python with {modules.replace(' ', ', ')}")
        return python


def run_test(function, setup, build):
    """The reason of a failure; "": it passed; None: it was skipped."""
    with tempfile.TemporaryDirectory(prefix="nd_test_") as folder:
        steps = Steps(build, os.path.realpath(folder))
        try:
            if setup:
                setup(steps)
            function(steps)
        except Skipped as reason:
            print(f"skipped: {reason}", flush=True)
            return None
        except Exception: # pylint: disable=broad-except
            return traceback.format_exc()[-12000:]
        finally:
            for process in steps.started:
                if process.poll() is None:
                    process.kill()  # its workers end with it, also where a test has stopped it
                    process.wait()
    return ""


def main(suite, setup=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("build")
    parser.add_argument("--filter", default="*")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    build = pathlib.Path(options.build).resolve()
    put_back_surroundings()
    failed = tested = 0
    with concurrent.futures.ProcessPoolExecutor(options.jobs, multiprocessing.get_context("fork")) as pool:
        running = {function.__name__: pool.submit(run_test, function, setup, build) for function in TESTS
                   if fnmatch.fnmatch(f"{suite}/{function.__name__}", options.filter)}
        for name, result in running.items():
            reason = result.result()
            tested += reason is not None
            if reason:
                failed += 1
                print("".join(f"[----] {line}\n" for line in reason.splitlines()) + f"[FAIL] {suite}::{name}", flush=True)
    print(f"[====] Synthesis: Tested: {tested} | Passing: {tested - failed} | Failing: {failed} | Crashing: 0")
    sys.exit(failed > 0)
