#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed, stopped, rewound and resumed in drawn order, against a plain model of what they leave.

    tests/e2e/check_events.py BUILD LIBRARY [SEEDS]            CI: seeds 0 to SEEDS - 1 (default 80)
    tests/e2e/check_events.py BUILD LIBRARY --seed N           one seed, with what it does
    tests/e2e/check_events.py BUILD LIBRARY --from N SEEDS     others

A seed is a case: settings, then a list of starts, each with the events that meet it. A negative one is written down, not drawn.
poison_products.c (LIBRARY) makes an event happen within a given product of a given step: a NaN or a spike in the loss, damage to the
newest checkpoint and then a NaN, TERM, KILL. Between two starts the newest checkpoint may be damaged, and a start may be a fork into
another folder. The learning rate is too small to change a weight, so the loss of a step tells which samples it read: it is compared
with that of an undisturbed run. A seed that fails is tried again without each of its events, as long as it still fails; the rest is
printed.
"""
import argparse
import dataclasses
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile

from checkpoint_runs import Failed, check, own_environment

MODEL = dict(model_type="llama", vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
             num_key_value_heads=1, max_position_embeddings=64)
SAMPLES, LIMITED = 200, 24 # of the text, and of a run whose epochs are limited
TABLE_STEPS = 90
SPIKE_LEAST = 16 # losses without which nothing is a spike (step/spike.c)
REWINDS_MAX = 10
FAILURES_MAX = 3 # each is shrunk, and more would say the same
KILLED, STOPPED, NUMERIC, DATA = 137, 75, 70, 65


@dataclasses.dataclass(frozen=True)
class Settings:
    workers: int
    steps: int
    interval: int
    keep: int       # checkpoints; 0: all
    validation: int # interval; 0: none
    best: bool
    limited: bool


@dataclasses.dataclass(frozen=True)
class Event:
    start: int   # in which start
    kind: str    # n, s, d, t, k (poison_products.c); D: damage before the start; F: the start is a fork
    attempt: int # at a step, counted in the start
    part: float  # which of the step's products


@dataclasses.dataclass
class Saved:
    """A checkpoint, as the model has it."""
    ahead: int
    losses: int # that spikes are judged by
    damaged: bool = False


class Folder:
    """What a run folder holds."""
    def __init__(self, name):
        self.name, self.saved, self.bad = name, {}, []
        self.doomed = {}    # what the newest save makes too many: it is deleted once that save is durable
        self.read = {}      # step: the first sample that it read; None: not known (a spike that counted as a step)
        self.validated = {} # step: how often, in what counts
        self.model = False

    def newest(self):
        return max((step for step, saved in self.saved.items() if not saved.damaged), default=None)


class Bench:
    def __init__(self, build, library):
        own_environment()
        self.build, self.library = pathlib.Path(build).resolve(), str(pathlib.Path(library).resolve())
        self._temporary = tempfile.TemporaryDirectory(prefix="nd_test_")
        self.folder = pathlib.Path(os.path.realpath(self._temporary.name))
        (self.folder / "model.json").write_text(json.dumps(MODEL))
        (self.folder / "text.txt").write_text("".join(chr(97 + (i * i // 3 + i // 7) % 26) for i in range(SAMPLES * 17)))
        (self.folder / "damage").write_text('f=$(ls -d "$1"/checkpoint-* | grep -v "[.]" | sort -V | tail -1)\n'
                                            'truncate -s -1 $(ls $f/state/*.safetensors | tail -1)\n')
        self._tables, self._counts = {}, {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._temporary.cleanup()

    def command(self, s, out, resume):
        data = f"[{{path: text.txt, epochs: {LIMITED / SAMPLES}}}]" if s.limited else "text.txt"
        size = str(s.workers)
        program = ["ndlaunch", "--num-processes", size, "--dp-shard-size", size] if s.workers > 1 else ["ndtrain", "train"]
        command = [str(self.build / program[0]), *program[1:], "--device", "cpu", "--set", "launch.threads_per_worker=1", "--model-config",
                   "model.json", "--data-path", data, "--sequence-length", "16", "--lr-scheduler", "constant", "--lr", "1e-30",
                   "--precision", "fp32", "--nonfinite", "rewind", "--spike-factor", "3", "--num-steps", str(s.steps), "--save-dir", out,
                   "--checkpoint-frequency", str(s.interval), "--save-total-limit", str(s.keep)]
        command += ["--validation-path", "text.txt", "--validation-batches", "1", "--eval-steps", str(s.validation)] if s.validation else \
            ["--validation-path", ""]
        return command + (["--load-best-model-at-end"] if s.best else []) + (["--resume-from-checkpoint", resume] if resume else [])

    def run(self, s, out, resume="", calls="", rank=0, count=None):
        environment = {**os.environ, "LD_PRELOAD": self.library, "ND_POISON_CALL": calls, "ND_POISON_COMMAND": f"sh damage {out}"}
        if s.workers > 1:
            environment["ND_POISON_RANK"] = str(rank)
        if count:
            environment["ND_POISON_COUNT"] = count
        done = subprocess.run(self.command(s, out, resume), cwd=self.folder, env=environment, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
        return (done.returncode if done.returncode >= 0 else 128 - done.returncode), done.stdout

    def events(self, out):
        path = self.folder / out / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def counted(self, out):
        """Losses and numbers of validations by step, of the lines that count: one "resumed" takes back later steps."""
        losses, validations = {}, {}
        for event in self.events(out):
            if event.get("event") == "resumed":
                losses = {step: loss for step, loss in losses.items() if step <= event["step"]}
                validations = {step: n for step, n in validations.items() if step <= event["step"]}
            elif "step_ms" in event:
                losses[event["step"]] = event["loss"]
            elif "validation_loss" in event:
                validations[event["step"]] = validations.get(event["step"], 0) + 1
        return losses, validations

    def measure(self, s):
        """Losses by the first sample that a step reads, products of a step, and of a validation."""
        key = (s.workers, s.limited)
        if key not in self._tables:
            steps = LIMITED // s.workers if s.limited else TABLE_STEPS
            plain = Settings(s.workers, steps, interval=1000, keep=0, validation=0, best=False, limited=s.limited)
            losses, calls = {}, []
            for out, one in (("table", plain), ("short", dataclasses.replace(plain, steps=2)),
                             ("validated", dataclasses.replace(plain, steps=2, validation=1))):
                code, printed = self.run(one, out, count=f"{out}.count")
                check(code == 0, f"an undisturbed run ended with {code}:\n{printed[-2000:]}")
                losses[out] = self.counted(out)[0]
                calls.append(int((self.folder / f"{out}.count").read_text()))
                shutil.rmtree(self.folder / out)
            step = calls[1] // 2
            check(calls[0] == step * plain.steps and calls[2] > calls[1], f"products: {calls}")
            self._tables[key] = ({(n - 1) * s.workers: loss for n, loss in losses["table"].items()}, step, (calls[2] - calls[1]) // 2)
        return self._tables[key]


class Case:
    """Runs one seed's starts, and what the model says beside them."""
    def __init__(self, bench, settings, events, rank):
        self.bench, self.s, self.drawn, self.rank = bench, settings, events, rank
        self.table, self.step_calls, self.validation_calls = bench.measure(settings)
        self.folders, self.log = [Folder("run-0")], []

    def last_step(self, step, ahead):
        if not self.s.limited:
            return self.s.steps
        left = max(LIMITED - step * self.s.workers - ahead, 0) // self.s.workers
        return min(self.s.steps, step + left)

    def due(self, step, last):
        return self.s.validation and (step == last or step % self.s.validation == 0)

    def best(self, f):
        """The losses of all validations are equal, so the first one with a checkpoint is the best."""
        return min((step for step, saved in f.saved.items() if f.validated.get(step) and not saved.damaged), default=None)

    def save(self, f, step, ahead, losses):
        f.saved[step], f.doomed = Saved(ahead, losses), {}

    def prune(self, f, best):
        good = sorted(f.saved)
        for step in good[:-self.s.keep] if self.s.keep else []:
            if not (self.s.best and step == best):
                f.doomed[step] = f.saved.pop(step)

    def simulate(self, f, source, events, begin, owed):
        """One start, from a step of a folder on. Returns the exit code, the list of calls, and the step of a save that may not be
        durable."""
        s, step, calls, list_, rewinds, pending = self.s, begin, 0, [], 0, None
        from_ = source.saved.get(begin, Saved(0, 0))
        ahead, losses = from_.ahead, from_.losses
        good, held, attempt = (begin if begin in source.saved else None), begin, 0
        last, stopped, over = self.last_step(step, ahead), False, False

        def validate():
            nonlocal calls
            calls += self.validation_calls
            f.validated[step] = f.validated.get(step, 0) + 1
        if owed and step > 0 and self.due(step, last):
            validate()
        while step < last and not stopped and not over:
            event, kind = events.get(attempt), ""
            if event: # only a checkpoint that is there for certain is damaged
                kind = "n" if event.kind == "d" and (pending is not None or good not in f.saved) else event.kind
                list_.append(f"{calls + 1 + int(event.part * self.step_calls)}{kind}")
            attempt += 1
            if kind == "k":
                return KILLED, list_, pending
            calls += self.step_calls
            if kind in ("n", "d") or (kind == "s" and losses >= SPIKE_LEAST):
                pending, rewinds = None, rewinds + 1
                if good is None or rewinds > REWINDS_MAX:
                    return NUMERIC, list_, None
                if kind == "d":
                    f.saved[good].damaged = True
                while good is not None and good in f.saved and f.saved[good].damaged:
                    del f.saved[good]
                    f.bad.append(good)
                    good = f.newest()
                good = begin if good is None and source is not f else good
                if good is None:
                    return DATA, list_, None
                seen = (step + 1) * s.workers + ahead
                step, losses = good, f.saved.get(good, from_).losses
                ahead, held, last = seen - step * s.workers, step, self.last_step(step, seen - step * s.workers)
                f.read = {n: at for n, at in f.read.items() if n <= step}
                f.validated = {n: count for n, count in f.validated.items() if n <= step}
                if step == last and self.due(step, last) and step % s.validation != 0:
                    validate()
                continue
            f.read[step + 1] = None if kind == "s" else step * s.workers + ahead
            step, losses = step + 1, losses + 1
            stopped = kind == "t"
            if step == s.steps or step % s.interval == 0:
                good = pending = held = step
                self.save(f, step, ahead, losses)
            if self.due(step, last) and not stopped:
                validate()
            self.prune(f, self.best(f))
        if not stopped and step >= last and last != s.steps:
            over = True
        if (stopped or over) and held != step:
            self.save(f, step, ahead, losses)
            self.prune(f, self.best(f))
        f.model = f.model or not stopped
        return (STOPPED if stopped else 0), list_, None

    def owes(self, f, step):
        """Whether the lines that count have no validation of the checkpoint's step; the placing of events needs it."""
        return step not in self.bench.counted(f.name)[1]

    def start(self, number):
        """False: nothing can go on from what is left."""
        mine = [event for event in self.drawn if event.start == number]
        before, resume = self.folders[-1], "auto"
        f, source = before, before
        if any(event.kind == "D" for event in mine) and before.newest() is not None:
            step = before.newest()
            before.saved[step].damaged = True
            state = self.bench.folder / before.name / f"checkpoint-{step}/state"
            shard = sorted(state.glob("*.safetensors"))[-1]
            os.truncate(shard, shard.stat().st_size - 1)
        if any(event.kind == "F" for event in mine) and before.saved:
            f = Folder(f"run-{number}")
            self.folders.append(f)
            resume = before.name
        begin = source.newest()
        if f is source: # what is newer is damaged
            for step in [step for step in f.saved if f.saved[step].damaged and (begin is None or step > begin)]:
                f.saved.pop(step)
                f.bad.append(step)
        impossible = begin is None and (f.bad or f is not source)
        owed = f is source and begin is not None and self.s.validation and self.owes(f, begin)
        f.read = {n: at for n, at in f.read.items() if n <= (begin or 0)}
        f.validated = {n: count for n, count in f.validated.items() if n <= (begin or 0) and not (owed and n == begin)}
        events = {}
        for event in mine:
            if event.kind not in "DF":
                events.setdefault(event.attempt, event)
        expected, calls, pending = (DATA, [], None) if impossible else self.simulate(f, source, events, begin or 0, owed)
        code, printed = self.bench.run(self.s, f.name, resume, ",".join(calls), self.rank)
        best = self.best(f)
        self.log.append(f"start {number}: {f.name} from {begin or 'the beginning'}, events {','.join(calls) or 'none'}: {expected}")
        check(code == expected, f"ended with {code}, not {expected}:\n{printed[-3000:]}")
        if code == 0 and self.s.best and max(f.read, default=0) > max(best or 0, begin or 0): # some step was done, and not the best last
            check(best is None or f"the model is that of step {best}," in printed,
                  f"the model is not that of step {best}:\n{printed[-2000:]}")
        self.compare(f, pending, code)
        return code not in (DATA, NUMERIC)

    def compare(self, f, pending, code):
        path = self.bench.folder / f.name
        names = {name for name in os.listdir(path) if "checkpoint-" in name} if path.is_dir() else set()
        if code == KILLED and pending is not None: # it was being written, or what it replaces was being deleted
            f.saved |= {step: saved for step, saved in f.doomed.items() if f"checkpoint-{step}" in names}
            if f"checkpoint-{pending}" not in names:
                del f.saved[pending]
        wanted = {f"checkpoint-{step}" for step in f.saved}
        for i, step in enumerate(f.bad): # .bad, then .bad-2 of the same step
            times = f.bad[:i + 1].count(step)
            wanted.add(f"checkpoint-{step}.bad" + (f"-{times}" if times > 1 else ""))
        left = {name for name in names if not name.startswith((".tmp", ".del"))}
        check((left if code == KILLED else names) == wanted, f"{f.name} has {sorted(names)}, not {sorted(wanted)}")
        for step, saved in f.saved.items():
            seen = json.loads((path / f"checkpoint-{step}/manifest.json").read_text())["position"]["samples_seen"]
            wanted = step * self.s.workers + saved.ahead
            check(seen == wanted, f"{f.name}/checkpoint-{step} has seen {seen} samples, not {wanted}")
        check(f.model == (path / "model/model.safetensors").exists(), f"{f.name}: the model is {'not ' if f.model else ''}there")
        if code in (0, STOPPED): # every line was written
            losses, validations = self.bench.counted(f.name)
            read = {step: at for step, at in f.read.items() if at is not None}
            check(sorted(losses) == sorted(f.read), f"{f.name} has the steps {sorted(losses)}, not {sorted(f.read)}")
            for step, at in read.items():
                check(losses[step] == self.table[at], f"{f.name}: the loss of step {step} is {losses[step]}, not that of sample {at}, "
                      f"{self.table[at]}")
            check(validations == f.validated, f"{f.name} has the validations {validations}, not {f.validated}")

    def play(self):
        for out in self.bench.folder.glob("run-*"):
            shutil.rmtree(out)
        for number in range(1 + max((event.start for event in self.drawn), default=0)):
            if not self.start(number):
                return
        if any(event.kind in "tk" for event in self.drawn):
            self.start(number + 1) # nothing happens any more, so the run ends


def draw(seed):
    r = random.Random(seed)
    workers, limited = 2 if seed % 8 == 7 else 1, r.random() < 0.4
    most = LIMITED // workers
    steps = r.randint(most - 1, most) if limited else r.randint(7, 26) # one step that is passed over ends limited data
    validation = r.choice([0, 2, 3, 5])
    best = validation > 0 and r.random() < 0.5
    interval = validation if best else r.choice([2, 3, 4])
    settings = Settings(workers, steps, interval, r.choice([0, 0, 2]), validation, best, limited)
    events = []
    for start in range(r.randint(1, 4)):
        if start > 0:
            forks = r.random() < 0.25
            events += [Event(start, "F", 0, 0)] * forks + [Event(start, "D", 0, 0)] * (r.random() < (0.5 if forks else 0.2))
        attempts = set(r.sample(range(1, steps + 2), r.randint(0, 3)))
        attempts |= {attempt + r.randint(1, 2) for attempt in attempts if r.random() < 0.4} # often before the next checkpoint
        if limited and r.random() < 0.5:
            attempts.add(steps - 1) # late, so that few samples are left
        attempts = sorted(attempts)
        for i, attempt in enumerate(attempts):
            kind = "nnsd"[r.randrange(4)] if i < len(attempts) - 1 or r.random() < 0.4 else "ttk"[r.randrange(3)]
            if kind == "t" and r.random() < 0.6: # in the step before a checkpoint or a validation
                attempt += -(attempt + 1) % (validation or interval)
            events.append(Event(start, kind, attempt, 0.3 if kind == "s" else r.random()))
    return settings, events, r.randrange(workers)


# What a draw rarely makes: all samples behind the newest checkpoint are passed over, so that the run ends with it; and two validations
# by which the best is judged lie before and behind a rewind.
WRITTEN = [(Settings(1, 24, 4, 0, 3, False, True), [Event(0, "n", 23, 0.5)], 0),
           (Settings(1, 12, 2, 2, 2, True, False), [Event(0, "n", 5, 0.5), Event(0, "n", 7, 0.5), Event(0, "t", 9, 0.5)], 0)]


def fails(bench, settings, events, rank):
    """What is wrong with a case, with its log; None."""
    case = Case(bench, settings, events, rank)
    try:
        case.play()
    except (Failed, subprocess.TimeoutExpired) as failure:
        return "\n".join([*case.log, str(failure)])
    return None


def shrink(bench, settings, events, rank):
    """Leaves out one event after the other while the case still fails."""
    at = 0
    while at < len(events):
        fewer = events[:at] + events[at + 1:]
        if fails(bench, settings, fewer, rank):
            events = fewer
        else:
            at += 1
    return events


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("library")
    parser.add_argument("seeds", nargs="?", type=int, default=80)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--from", dest="first", type=int, default=0)
    options = parser.parse_args()
    first = options.first or -len(WRITTEN)
    seeds = [options.seed] if options.seed is not None else range(first, options.first + options.seeds)
    bad = tried = 0
    with Bench(options.build, options.library) as bench:
        for seed in seeds:
            settings, events, rank = draw(seed) if seed >= 0 else WRITTEN[-seed - 1]
            wrong = fails(bench, settings, events, rank)
            if wrong or options.seed is not None:
                print(f"seed {seed}: {settings}, rank {rank}")
            if wrong:
                bad += 1
                fewest = shrink(bench, settings, events, rank)
                print("fails; the fewest events that do:")
                for event in fewest:
                    print(f"  {event}")
                print(fails(bench, settings, fewest, rank) or f"(not again; the first time:)\n{wrong}", flush=True)
            tried += 1
            if bad == FAILURES_MAX:
                break
    print(f"{tried - bad} of {tried} drawn runs leave what the model says")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
