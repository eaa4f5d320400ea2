#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed, stopped, rewound and resumed in drawn order, against a plain model of what they compute, write and leave.

    check_run.py PROGRAM [SEEDS]           CI: seeds 0 to SEEDS - 1 (default 100), and the cases that are written down
    check_run.py PROGRAM --seed N          one seed, with what it does
    check_run.py PROGRAM SEEDS --from N    others
    check_run.py PROGRAM --part K          every eighth case, K is 1 to 8

A seed is a case: settings, then a list of starts, each with the events that meet it. A negative one is written down, not drawn.
PROGRAM is test_run.c: ndtrain train, in which an event comes with a given micro-batch or batch of a validation, and whose losses are
plain numbers. A block of the data is one byte, repeated, so the first ids of a forward tell what it reads. What is compared: each
forward, with its samples and weights; each line of metrics.jsonl; the names in the run folder; checkpoints, model, trace and
profile; the exit code. A case that fails is tried again without each of its events, as long as it still fails; the rest is printed.
"""
import argparse
import concurrent.futures
import dataclasses
import json
import math
import os
import pathlib
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile

MODEL = dict(model_type="llama", vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
             num_key_value_heads=1, max_position_embeddings=64)
SEQUENCE, BLOCKS, FIRST = 16, 90, 33 # blocks of the data and the byte of the first
SETS = [range(128, 131), range(160, 165)] # the bytes of validation sets
PROMPTS = ["|", 15 * "}"] # the second one leaves room for one token
LR, SPIKE = 2.0**-10, 64 # SPIKE: what one adds to each label of a micro-batch
SPIKE_LEAST, REWINDS_MAX, WARM_UP = 16, 10, 2 # losses without which nothing is a spike; steps that are left out of the trace
MORE = 3 # steps of an event M
PARTS = 8
FAILURES_MAX = 3 # each is shrunk, and more would say the same
KILLED, STOPPED, NUMERIC, DATA = 137, 75, 70, 65


class Failed(Exception):
    pass


def check(holds, words):
    if not holds:
        raise Failed(words)


def loss_of(label, step=None):
    """test_run.c has the same numbers; step: in a validation."""
    return 1 + label % 32 / 16 + (0 if step is None else step * 5 % 7 // 2 / 4)


@dataclasses.dataclass(frozen=True)
class Settings:
    ranks: int = 1
    rows: int = 1         # of a micro-batch
    accumulation: int = 1
    steps: int = 12
    interval: int = 2     # of checkpoints; 0: none
    keep: int = 0         # checkpoints; 0: all
    keep_every: int = 0
    sets: int = 0         # of validations
    validation: int = 0   # interval; 0: at the end alone
    batches: int = 0      # of each set; 0: all
    patience: int = 0
    threshold: float = 0
    prompts: int = 0
    health: int = 0       # interval; 0: no FP8
    profile: tuple = ()   # first and last step
    warmup: int = 0
    limit: int = 0        # samples that the data give; 0: any number
    sources: bool = False # two
    dumps: bool = False   # of all steps
    best: bool = False
    wait: bool = False
    export: bool = False
    model: bool = True
    dtype: str = "bf16"
    nonfinite: str = "rewind"

    def restart(self):
        """What the launcher of several ranks says, which no worker counts itself."""
        return 3 if self.ranks > 1 else 0

    def samples(self):
        return self.rows * self.ranks * self.accumulation

    def blocks(self, number):
        """Those of a set that a validation reads, by batches of all ranks."""
        size, blocks = self.rows * self.ranks, SETS[number]
        batches = math.ceil(len(blocks) / size)
        return [list(blocks[i * size:(i + 1) * size]) for i in range(min(batches, self.batches or batches))]

    def set_loss(self, number, step):
        """The mean loss, and labels."""
        read = sum(self.blocks(number), [])
        return sum(SEQUENCE * loss_of(byte, step) for byte in read) / (len(read) * SEQUENCE), len(read) * SEQUENCE

    def validated(self, step):
        sets = [self.set_loss(number, step) for number in range(self.sets)]
        return sum(loss * labels for loss, labels in sets) / sum(labels for _, labels in sets)


@dataclasses.dataclass(frozen=True)
class Event:
    start: int
    kind: str # n, s, d, t, k (test_run.c); before the start D: damage to the newest checkpoint; W: to the best; F: the start is a
    #           fork; M: it has more steps; O: it goes on from the oldest checkpoint, by its number
    place: str = "T" # T, V, B (test_run.c)
    number: int = 0


@dataclasses.dataclass(frozen=True)
class State:
    """What a checkpoint has."""
    step: int = 0
    ahead: int = 0      # samples that were passed over
    losses: int = 0     # by which spikes are judged
    history: tuple = () # the first sample of each step, None where it made no update: the weights follow from it

    def updates(self):
        return [first for first in self.history if first is not None]


class Folder:
    """What a run folder holds."""
    def __init__(self, name):
        self.name, self.saved, self.damaged, self.bad, self.old = name, {}, set(), [], []
        self.doomed = {} # what the newest save makes too many: it is deleted once that save is durable
        self.validated = [] # steps, of the lines that count
        self.runs = self.traces = self.profiles = self.models = self.lines = 0
        self.model = None # the step of the one that is not set aside

    def newest(self):
        return max((step for step in self.saved if step not in self.damaged), default=None)


class Play:
    """One start, as the model has it."""
    def __init__(self, s, folder, source, events, named):
        self.s, self.f, self.source, self.events, self.named = s, folder, source, events, named
        self.calls, self.lines, self.saves = [], [], [] # forwards, lines of metrics.jsonl, and those of checkpoints, which come beside
        self.counts, self.given = {"T": 0, "V": 0, "B": 0}, []
        self.stopped = self.over = self.killed = self.profiling = self.profiled = self.traces_validation = self.kept_model = False
        self.code, self.pending, self.rewinds, self.profile, self.model_step = 0, None, 0, [], None
        self.begin = named or source.newest() or 0
        self.continues = folder is source and folder.runs > 0
        self.now = source.saved.get(self.begin, State())
        self.last = self.last_step()
        self.trace_from = self.held = self.begin
        self.attempts = 0 # at steps of the trace
        self.good = self.begin if self.begin else None
        self.durable = self.begin if self.begin and self.continues else -1
        self.asked = self.event("B") == "t"

    def last_step(self):
        left = max(self.s.limit - self.now.step * self.s.samples() - self.now.ahead, 0) // self.s.samples()
        return min(self.s.steps, self.now.step + left) if self.s.limit else self.s.steps

    def event(self, place):
        """What happens now. Damage comes only to a checkpoint that is there for certain, and that the run may go back to."""
        kind = next((event.kind for event in self.events if (event.place, event.number) == (place, self.counts[place])), "")
        if kind == "d" and (self.pending is not None or self.good not in self.f.saved or self.s.nonfinite != "rewind" or self.named):
            kind = "n"
        if kind:
            self.given.append(f"{place}{self.counts[place]}{kind}")
        self.counts[place] += 1
        return kind

    def call(self, kind, step, rows):
        """A forward; rows: of all ranks."""
        self.calls.append((kind, step, rows, self.now.history))
        happens = self.event(kind) if kind != "P" else ""
        self.asked |= happens == "t"
        self.killed |= happens == "k"
        return happens

    def validate(self):
        step, size = self.now.step, self.s.rows * self.s.ranks
        self.traces_validation = True
        for batch in sum((self.s.blocks(number) for number in range(self.s.sets)), []):
            self.stopped = self.asked
            if self.stopped or self.killed:
                return
            self.call("V", step, batch + [0] * (size - len(batch)))
        self.stopped = self.asked and self.s.prompts > 0
        if self.killed or self.stopped:
            return
        for prompt in PROMPTS[:self.s.prompts]: # each rank computes the text
            self.call("P", step, [ord(prompt[0])] + [0] * (self.s.rows - 1))
            self.lines.append(dict(event="sample", step=step, prompt=prompt))
        sets = [self.s.set_loss(number, step) for number in range(self.s.sets)] if self.s.sets > 1 else []
        self.lines.append(dict(event=None, step=step, validation_loss=self.s.validated(step),
                               validation_set_loss={f"v{i}": loss for i, (loss, _) in enumerate(sets)} or None,
                               validation_set_tokens={f"v{i}": labels for i, (_, labels) in enumerate(sets)} or None,
                               validation_tokens=sum(self.s.set_loss(number, step)[1] for number in range(self.s.sets))))
        self.f.validated.append(step)
        if step != self.s.steps and self.is_over():
            self.over = True
            self.lines.append(dict(event="early_stopped", step=step, why="validations in a row"))

    def is_over(self):
        lowest, stale = math.inf, 0
        for loss in [self.s.validated(step) for step in self.f.validated]:
            stale = 0 if lowest - loss > self.s.threshold else stale + 1
            lowest = min(lowest, loss)
        return 0 < self.s.patience <= stale

    def at_interval(self):
        return self.s.validation > 0 and self.now.step % self.s.validation == 0

    def is_due(self):
        return self.s.sets > 0 and not self.stopped and (self.now.step == self.last or self.at_interval())

    def best(self, but=None):
        steps = [step for step in sorted(self.f.saved) if step in self.f.validated and step != but]
        return min(steps, key=self.s.validated, default=None) if self.s.best else None

    def set_aside(self, step, to=None):
        self.f.damaged.discard(step)
        del self.f.saved[step]
        (self.f.bad if to is None else to).append(step)

    def save(self, reason):
        step, best = self.now.step, self.best(self.now.step)
        self.f.saved[step], self.f.doomed = self.now, {}
        for old in sorted(self.f.saved)[:-self.s.keep] if self.s.keep else []:
            if old != best and not (self.s.keep_every and old % self.s.keep_every == 0):
                self.f.doomed[old] = self.f.saved.pop(old)
        self.good = self.held = self.pending = self.durable = step
        self.saves.append(dict(event="checkpoint", step=step, reason=reason))

    def rewind(self, damages):
        failed, n = self.now.step + 1, self.s.samples()
        seen = failed * n + self.now.ahead
        self.pending, self.rewinds = None, self.rewinds + 1
        if self.good is None or self.rewinds > REWINDS_MAX:
            self.code = NUMERIC
            return
        if damages:
            self.f.damaged.add(self.good)
        while self.good in self.f.damaged:
            self.set_aside(self.good)
            self.good = self.f.newest()
            self.durable = self.good or self.durable
        own = self.good is not None
        if not own and self.source is not self.f:
            self.good = self.begin
        if self.good is None:
            self.code = DATA
            return
        own = self.good in self.f.saved
        state = (self.f if own else self.source).saved[self.good]
        self.now = dataclasses.replace(state, ahead=seen - state.step * n)
        self.held, self.last = self.now.step, self.last_step()
        self.f.validated = [step for step in self.f.validated if step <= self.now.step]
        self.lines.append(dict(event="resumed", step=self.good, restart=self.s.restart(), rewound_from=failed,
                               passed_over_samples=(failed - self.good) * n,
                               file=f"{(self.f if own else self.source).name}/checkpoint-{self.good}"))
        if self.is_due() and not self.at_interval():
            self.validate()

    def step(self):
        number, size = self.now.step + 1, self.s.rows * self.s.ranks
        first = self.now.step * self.s.samples() + self.now.ahead
        if self.s.profile and number >= self.s.profile[0] and not self.profiled:
            self.profiling |= number <= self.s.profile[1]
            self.profiled = not self.profiling
        self.attempts += 1
        happened = []
        for micro in range(self.s.accumulation):
            happened.append(self.call("T", number, range(first + micro * size, first + (micro + 1) * size)))
            if self.killed:
                return
        nan, spikes = "n" in happened or "d" in happened, happened.count("s")
        skipped = nan or (spikes > 0 and self.now.losses >= SPIKE_LEAST)
        if skipped and self.s.nonfinite == "rewind":
            self.rewind("d" in happened)
        elif skipped and self.s.nonfinite == "stop":
            self.code = NUMERIC
        else:
            self.now = State(number, self.now.ahead, self.now.losses + (not nan), self.now.history + (None if skipped else first,))
            self.lines.append(dict(event=None, step=number, skipped=True if skipped else None, samples=first, spikes=spikes, nan=nan))
            self.end_step()

    def end_step(self):
        number, warm = self.now.step, self.begin + WARM_UP
        self.stopped = self.asked
        if self.s.health and number % self.s.health == 0:
            self.lines.append(dict(event=None, step=number, health=True))
        if self.profiling:
            self.profile.append(number)
            if number >= self.s.profile[1]:
                self.end_profile()
        if number == warm < self.last and not self.stopped:
            self.trace_from, self.traces_validation, self.attempts = warm, False, 0
        if self.s.interval and (number == self.s.steps or number % self.s.interval == 0):
            self.save("end" if number == self.s.steps else "interval")
        if self.is_due():
            self.validate()

    def end_profile(self):
        self.f.profiles += self.profiling
        self.profiled |= self.profiling
        self.profiling = False

    def finish(self):
        s, f = self.s, self.f
        if not self.stopped and not self.over and self.now.step >= self.last != s.steps:
            self.over = True
            self.lines.append(dict(event="early_stopped", step=self.now.step, why=f"the epochs of data.path are over before step {s.steps} (train.steps): "
                                   f"of their {s.limit} samples {self.now.step * s.samples() + self.now.ahead} were read or passed over, "
                                   f"and a step takes {s.samples()}"))
        self.end_profile()
        f.traces += 1
        if s.interval and (self.stopped or self.over) and self.held != self.now.step:
            self.save("signal" if self.stopped else "end")
        saves = s.model and not (self.stopped and s.interval)
        self.kept_model = saves and self.continues and self.now.step == self.begin and f.model is not None
        self.model_step = (None if self.stopped or self.kept_model else self.best()) or self.now.step
        while self.model_step in f.damaged: # it is found only now
            self.set_aside(self.model_step)
            self.model_step = self.best()
            if self.model_step is None:
                self.code = DATA
                return
        if saves and not self.kept_model:
            f.models += 1
            f.model = self.model_step
        if self.stopped:
            self.code = STOPPED

    def play(self):
        f = self.f
        newer = [step for step in f.saved if step > self.begin] if f is self.source else []
        for step in newer: # they are damaged
            self.set_aside(step, f.old if self.named else f.bad)
        f.validated = [step for step in f.validated if step <= self.begin]
        f.runs += 1
        if self.begin or self.continues:
            self.lines.append(dict(event="resumed", step=self.begin, restart=self.s.restart(), rewound_from=None,
                                   file=f"{self.source.name}/checkpoint-{self.begin}" if self.begin else "the start"))
        self.over = self.was_over = self.continues and self.begin < self.s.steps and self.is_over()
        if self.named or (self.begin < self.last and not self.over):
            f.model = None
        if self.begin and self.continues and self.is_due() and self.begin not in f.validated:
            self.validate()
        while self.now.step < self.last and not (self.stopped or self.over or self.killed or self.code):
            self.step()
        if self.killed:
            self.code = KILLED
        elif not self.code:
            self.finish()
        if self.code in (STOPPED, NUMERIC, DATA):
            why = {STOPPED: f"stopped by a signal after step {self.now.step} of {self.s.steps}", DATA: "damaged",
                   NUMERIC: f"step {self.now.step + 1}: the loss is "}[self.code]
            if self.rewinds > REWINDS_MAX: # what the run does already is no advice
                why = "train.nonfinite: skip; the run has gone back ten times already"
            self.lines.append(dict(event="ended", step=self.now.step, code=self.code, why=why))
        return self


class Bench:
    """A folder in which starts are made, of one case at a time."""
    def __init__(self, program, folder):
        for variable in [v for v in os.environ if v.startswith(("ND_", "SLURM")) or v in ("RANK", "WORLD_SIZE")]:
            del os.environ[variable]
        self.program = str(pathlib.Path(program).resolve())
        self.folder = pathlib.Path(os.path.realpath(folder))
        (self.folder / "model.json").write_text(json.dumps(MODEL))
        half = FIRST + BLOCKS // 2
        for name, blocks in (("all", range(FIRST, FIRST + BLOCKS)), ("one", range(FIRST, half)), ("two", range(half, FIRST + BLOCKS)),
                             ("set0", SETS[0]), ("set1", SETS[1])):
            (self.folder / f"{name}.txt").write_bytes(b"".join(bytes([byte]) * (SEQUENCE + 1) for byte in blocks))

    def flags(self, s, out, resume):
        data = f"[{{path: all.txt, epochs: {s.limit / BLOCKS}}}]" if s.limit else \
            "[{name: a, path: one.txt, weight: 2}, {name: b, path: two.txt, weight: 1}]" if s.sources else "all.txt"
        values = {
            "device": "cpu", "threads-per-worker": 1, "dp-shard-size": s.ranks, "model-config": "model.json", "data-path": data,
            "validation-path": ["", "set0.txt", "[{name: v0, path: set0.txt}, {name: v1, path: set1.txt}]"][s.sets],
            "sequence-length": SEQUENCE, "micro-batch-size": s.rows, "gradient-accumulation-steps": s.accumulation, "num-steps": s.steps,
            "lr-scheduler": "constant", "lr": LR, "warmup-steps": s.warmup, "precision": "fp8" if s.health else "fp32",
            "fp8-filter": "mlp", "fp8-health-interval": s.health, "nonfinite": s.nonfinite, "spike-factor": 3,
            "checkpoint-frequency": s.interval, "save-total-limit": s.keep, "keep-every": s.keep_every,
            "checkpoint-staging": "wait" if s.wait else "overlap", "checkpoint-export-model": str(s.export).lower(),
            "load-best-model-at-end": str(s.best).lower(), "eval-steps": s.validation, "validation-batches": s.batches,
            "early-stopping-patience": s.patience, "early-stopping-threshold": s.threshold, "sample-tokens": 2,
            "sample-prompt": "".join(f"{prompt}\\n" for prompt in PROMPTS[:s.prompts]), "profile-steps": "-".join(map(str, s.profile)),
            "dump-tensors": "model.norm.weight" if s.dumps else "", "dump-steps": f"1-{s.steps}" if s.dumps else "",
            "save-model": str(s.model).lower(), "save-dtype": s.dtype, "save-dir": out, "resume-from-checkpoint": resume}
        return [word for key, value in values.items() for word in (f"--{key}", str(value))]

    def run(self, s, out, resume, events, rank):
        """The exit code of the rank that meets the events, and what it printed."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        processes, group = [], 0
        for r in range(s.ranks):
            environment = dict(os.environ, GOMP_SPINCOUNT="0", MALLOC_PERTURB_="165") # what is freed is of no use
            if s.ranks > 1:
                environment |= dict(RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE=str(s.ranks), LOCAL_WORLD_SIZE=str(s.ranks),
                                    MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_RESTART_COUNT=str(s.restart()))
            with open(self.folder / f"log-{r}", "w") as log:
                processes.append(subprocess.Popen([self.program, f"seen-{r}", ",".join(events) if r == rank else "", "train",
                                                   *self.flags(s, out, resume)], cwd=self.folder, env=environment,
                                                  stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                                  process_group=group))
            group = processes[0].pid
        code = processes[rank].wait(120)
        for process in processes:
            process.wait(120)
        return (code if code >= 0 else 128 - code), "".join((self.folder / f"log-{r}").read_text() for r in range(s.ranks))

    def seen(self, rank):
        """Bytes of the training samples, forwards, and what ndlaunch would read."""
        first, *lines = (self.folder / f"seen-{rank}").read_text().splitlines()
        calls = [line.split() for line in lines]
        ends = [tuple(map(int, call[1:])) for call in calls if call[0] == "ndlaunch"]
        return [int(byte) for byte in first.split()], \
            [(kind, int(step), weights, [int(row) for row in rows]) for kind, step, weights, *rows in calls if kind != "ndlaunch"], ends

    def lines(self, out):
        path = self.folder / out / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


class Case:
    """Runs one seed's starts, and what the model says beside them."""
    def __init__(self, bench, settings, events, rank):
        self.bench, self.s, self.drawn, self.rank = bench, settings, events, rank
        self.folders, self.log, self.weights = [Folder("run-0")], [], {}

    def start(self, number):
        """False: nothing can go on from what is left."""
        mine = [event for event in self.drawn if event.start == number]
        source, resume = self.folders[-1], "auto"
        f, newest = source, source.newest()
        if any(event.kind == "M" for event in mine):
            self.s = dataclasses.replace(self.s, steps=self.s.steps + MORE)
        best = min((step for step in source.saved if step in source.validated), key=self.s.validated, default=None)
        for kind, step in (("D", newest), ("W", best)):
            if any(event.kind == kind for event in mine) and step is not None and step not in source.damaged:
                source.damaged.add(step)
                shard = sorted((self.bench.folder / source.name / f"checkpoint-{step}/state").glob("*.safetensors"))[-1]
                data = bytearray(shard.read_bytes())
                data[-9] ^= 1 # found only by its chunk's checksum, when others are loaded
                shard.write_bytes(data[:-1] if kind == "D" else data)
        if any(event.kind == "F" for event in mine) and source.saved:
            f, resume = Folder(f"run-{number}"), source.name
            self.folders.append(f)
        if source.newest() is None and (source.bad or source.damaged or f is not source):
            code, printed = self.bench.run(self.s, f.name, resume, [], self.rank)
            check(code == DATA, f"without a good checkpoint it ended with {code}:\n{printed[-3000:]}")
            return False
        oldest = min(source.saved) if any(event.kind == "O" for event in mine) and f is source and source.saved and not source.damaged else None
        resume = str(oldest or resume)
        p = Play(self.s, f, source, [event for event in mine if event.kind in "nsdtk"], oldest).play()
        self.log.append(f"start {number}: {f.name} from step {p.begin} of {source.name}, events {','.join(p.given) or 'none'}, "
                        f"to step {p.now.step}: {p.code}")
        code, printed = self.bench.run(self.s, f.name, resume, p.given, self.rank)
        check(code == p.code, f"ended with {code}, not {p.code}:\n{printed[-3000:]}")
        for rank in range(self.s.ranks):
            self.compare_calls(p, rank)
        self.compare_lines(p)
        self.compare_files(p)
        if code in (0, STOPPED):
            self.compare_end(p, printed)
        return code not in (DATA, NUMERIC)

    def compare_calls(self, p, rank):
        s, (samples, seen, _) = self.s, self.bench.seen(rank)
        kept = [call for i, call in enumerate(seen) if call[0] != "P" or i == 0 or seen[i - 1] != call] # the second of two tokens
        for i, (kind, step, rows, history) in enumerate(p.calls):
            if p.killed and rank != self.rank and i >= len(kept):
                break
            mine = list(rows)[rank * s.rows:(rank + 1) * s.rows] if kind != "P" else rows
            wanted = (kind, step, [samples[at] for at in mine] if kind == "T" else mine)
            check(i < len(kept), f"rank {rank} made {len(kept)} forwards; the next one should be {wanted}")
            got = (kept[i][0], kept[i][1], kept[i][3])
            check(got == wanted, f"forward {i} of rank {rank} is {got}, not {wanted}")
            weights = self.weights.setdefault(history, kept[i][2])
            check(weights == kept[i][2], f"forward {i} of rank {rank}, {got}, has weights of another history")
        check(len(kept) <= len(p.calls), f"rank {rank} made the forward {kept[len(p.calls):][:1]} after the last")
        runs = [list(group) for group in (seen[i:i + 3] for i in range(len(seen))) if len(group) == 3 and group[0][0] == "P"]
        check(not any(a == b == c for a, b, c in runs), f"rank {rank} made three tokens of a sample text")

    def expand(self, line):
        """A step's line, with what follows from its samples."""
        if "samples" not in line:
            return line
        s, samples = self.s, self.bench.seen(0)[0]
        line = dict(line)
        first, spikes, nan, step = line.pop("samples"), line.pop("spikes"), line.pop("nan"), line["step"]
        read, n = samples[first:first + s.samples()], s.samples() * SEQUENCE
        loss = sum(SEQUENCE * loss_of(byte) for byte in read) + spikes * SPIKE * s.rows * SEQUENCE
        line |= dict(loss=None if nan else loss / n, tokens=n, tokens_seen=step * n,
                     lr=LR * step / s.warmup if step <= s.warmup else LR, source_loss=None, source_tokens=None)
        if s.sources:
            parts = {name: [byte for byte in read if (byte >= FIRST + BLOCKS // 2) == (name == "b")] for name in "ab"}
            line["source_tokens"] = {name: SEQUENCE * len(part) for name, part in parts.items()}
            line["source_loss"] = {name: sum(map(loss_of, part)) / len(part) if part else None for name, part in parts.items()}
        return line

    def compare_line(self, line, wanted):
        wanted = self.expand(wanted)
        words = f"metrics.jsonl has {line}, not {wanted}"
        check(("step_ms" in line, "validation_ms" in line, "fp8_health" in line) ==
              ("lr" in wanted, "validation_loss" in wanted, "health" in wanted), words)
        check(len(line.get("text", "")) <= 2, words) # tokens of a sample
        check("file" not in wanted or line["from"].endswith(wanted["file"]), words)
        for key, value in wanted.items():
            if key == "why":
                check(value in line[key], words)
            elif isinstance(value, float):
                check(math.isclose(line.get(key) or math.nan, value, rel_tol=1e-14), words) # sums that were divided and added again
            elif key not in ("file", "health"):
                check(line.get(key) == value, words)
        check("lr" not in wanted or (line["grad_norm"] > 0 and line["peak_memory_bytes"] > 0 and line["wire_bytes"] >= 0 and
                                 0 < line["data_wait_ms"] < line["step_ms"]), words)

    def compare_lines(self, p):
        """Lines of saves come while the loop goes on, so they are compared among themselves."""
        all_lines = self.bench.lines(p.f.name)
        new = all_lines[p.f.lines:]
        p.f.lines = len(all_lines)
        for wanted, kind in ((p.lines, False), (p.saves, True)):
            got = [line for line in new if (line.get("event") == "checkpoint") == kind]
            for line, one in zip(got, wanted):
                self.compare_line(line, one)
            check(len(got) <= len(wanted), f"metrics.jsonl has {got[len(wanted):]} after the last line")
            least = 0 if p.killed else len(wanted) - (kind and p.code == NUMERIC and p.pending is not None)
            check(len(got) >= least, f"metrics.jsonl lacks {wanted[len(got):]}")
        p.traced = sum(line["validation_ms"] for line in new if "validation_ms" in line and line["step"] >= p.trace_from)
        if p.killed: # it may not have written what it had made
            p.f.validated = []
            for line in all_lines:
                if line.get("event") == "resumed":
                    p.f.validated = [step for step in p.f.validated if step <= line["step"]]
                elif "validation_loss" in line:
                    p.f.validated.append(line["step"])

    def compare_files(self, p):
        f, path = p.f, self.bench.folder / p.f.name
        names = set(os.listdir(path))
        cut = p.killed or (p.code == NUMERIC and p.pending is not None) # a save may have been, of which one rank may leave its part
        if cut and p.pending is not None: # it was being written, or what it replaces was being deleted
            f.saved |= {step: saved for step, saved in f.doomed.items() if f"checkpoint-{step}" in names}
            if f"checkpoint-{p.pending}" not in names:
                del f.saved[p.pending]
        if cut:
            names = {name for name in names if not name.startswith((".tmp", ".del")) and not (p.killed and name == "profile")}
        wanted = {".lock", "metrics.jsonl"} | {f"checkpoint-{step}" for step in f.saved}
        for name, suffix, count in [("run", ".json", f.runs), ("trace", ".json", f.traces), ("profile", ".json", f.profiles),
                                    ("dumps", "", self.s.dumps), ("model", "", f.model is not None), ("model.old", "", f.models - (f.model is not None))] + \
                [(f"checkpoint-{step}.{word}", "", steps.count(step)) for word, steps in (("bad", f.bad), ("old", f.old)) for step in steps]:
            wanted |= {name + (f"-{i}" if i > 1 else "") + suffix for i in range(1, count + 1)}
        check(names == wanted, f"{f.name} has {sorted(names - wanted)} too many, and lacks {sorted(wanted - names)}")
        dumped = set(os.listdir(path / "dumps")) if self.s.dumps else None
        check(dumped in (None, {f"step-{step}" for step in range(1, self.s.steps + 1)}), f"dumps are {dumped}")
        for step, saved in f.saved.items():
            manifest = json.loads((path / f"checkpoint-{step}/manifest.json").read_text())
            position = manifest["position"]
            check(manifest["written_by"]["restart_epoch"] == self.s.restart(), f"{f.name}/checkpoint-{step}: {manifest['written_by']}")
            lines = (path / "metrics.jsonl").read_bytes()[:position["metrics_bytes"]].decode()
            last = ["0", *re.findall(r'"step":(\d+),(?:"skipped":true,)?"loss"', lines)][-1]
            check(lines[-1:] == "\n" and int(last) == step, f"{f.name}/checkpoint-{step} has lines up to step {last}")
            seen = step * self.s.samples() + saved.ahead
            got = (position["samples_seen"], len(position["recent_losses"]))
            check(got == (seen, saved.losses), f"{f.name}/checkpoint-{step} has samples and losses {got}, not {(seen, saved.losses)}")
        if p.profile and p.profiled:
            events = json.loads(self.numbered(f, "profile", f.profiles).read_text())
            for rank in range(self.s.ranks):
                steps = [int(e["name"].split()[1]) for e in events["traceEvents"] if e.get("cat") == "step" and e["pid"] == rank]
                check(steps == p.profile, f"the profile of rank {rank} has the steps {steps}, not {p.profile}")
            check(min(e.get("ts", 0) for e in events["traceEvents"]) >= 0, "the profile begins before its first step")
            check([events["firstStep"], events["lastStep"]] == list(self.s.profile), "the profile has other bounds")

    def numbered(self, f, name, count):
        return self.bench.folder / f.name / (f"{name}-{count}.json" if count > 1 else f"{name}.json")

    def compare_end(self, p, printed):
        s, f, path = self.s, p.f, self.bench.folder / p.f.name
        trace = json.loads(self.numbered(f, "trace", f.traces).read_text())
        got, wanted = (trace["first_step"], trace["steps"]), (p.trace_from + 1, p.now.step - p.trace_from)
        check(got == wanted, f"the trace has first step and steps {got}, not {wanted}")
        check((trace["validation_ms"] > 0) == p.traces_validation and trace["validation_ms"] + 0.001 >= p.traced,
              f"the trace has {trace['validation_ms']} ms of validations, of which {p.traced} have a line")
        # A step has as many calls as another one; what validations call is not in the trace.
        check(trace["attention_calls"] % max(p.attempts, 1) == 0, f"the trace has {trace['attention_calls']} calls in {p.attempts} steps")
        if s.export and f.model in f.saved:
            model, updates = (path / "model/model.safetensors").read_bytes(), f.saved[f.model].updates()
            for step, saved in f.saved.items():
                same = model == (path / f"checkpoint-{step}/model.safetensors").read_bytes()
                check(same == (saved.updates() == updates), f"the model of {f.name}, of step {f.model}, and checkpoint-{step} are alike, or not")
        loss = f" whose validation loss {s.validated(p.model_step):.6g} was" if p.model_step != p.now.step else ""
        for words, wanted in ((f"the model is that of step {p.model_step},{loss}", p.model_step != p.now.step),
                              (f"nothing is left to do after step {p.now.step},", p.kept_model),
                              ("the run has ended early, after step", p.was_over)):
            check((words in printed) == wanted, f"\"{words}\" is {'not ' if wanted else ''}said:\n{printed[-2000:]}")
        if s.interval:
            ends = self.bench.seen(0)[2]
            check(ends == [(p.begin, p.durable)], f"ndlaunch would read {ends} of first and durable step, not {(p.begin, p.durable)}")

    def play(self):
        for out in self.bench.folder.glob("run-*"):
            shutil.rmtree(out)
        number = 0
        for number in range(1 + max((event.start for event in self.drawn), default=0)):
            if not self.start(number):
                return
        if any(event.kind in "tk" for event in self.drawn):
            self.start(number + 1) # nothing happens any more, so the run ends


def draw_events(r, s, start):
    """Often before the next checkpoint or behind it; the last one may end the start."""
    events = []
    attempts = set(r.sample(range(1, s.steps + 2), r.randint(0, 3)))
    attempts |= {attempt + r.randint(1, 2) for attempt in attempts if r.random() < 0.4}
    if s.limit and r.random() < 0.5:
        attempts.add(s.steps - 1) # late, so that few samples are left
    for i, attempt in enumerate(sorted(attempts)):
        kind = r.choice("nnsd") if i < len(attempts) - 1 or r.random() < 0.4 else r.choice("ttk")
        if kind == "t" and r.random() < 0.6: # in the step before a checkpoint or a validation
            attempt += -(attempt + 1) % (s.validation or s.interval or 1)
        events.append(Event(start, kind, "T", attempt * s.accumulation + r.randrange(s.accumulation)))
    if s.sets and r.random() < 0.3:
        events.append(Event(start, r.choice("ttk"), "V", r.randint(0, 12)))
    if r.random() < 0.05:
        events.append(Event(start, "t", "B"))
    return events


def draw(seed):
    r = random.Random(seed)
    nonfinite = r.choice(["rewind"] * 4 + ["skip", "stop"])
    sets, interval = r.choice([0, 1, 1, 2]), r.choice([2, 3, 4] + ([0] if nonfinite != "rewind" else []))
    validation = r.choice([0, 2, 3, 5]) if sets else 0
    best = validation > 0 and interval > 0 and r.random() < 0.5
    s = Settings(ranks=2 if seed % 8 == 7 else 1, rows=r.choice([1, 1, 2]), accumulation=r.choice([1, 1, 2, 3]), steps=r.choice([2, 3, *range(7, 27)]),
                 interval=validation * r.randint(1, 2) if best else interval, keep=r.choice([0, 2, 3]), keep_every=r.choice([0, 0, 6]),
                 sets=sets, validation=validation, batches=r.randint(0, 4), patience=r.choice([0, 0, 2, 3]) if validation else 0,
                 threshold=r.choice([0, 0.3]), prompts=r.choice([0, 0, 1, 2]) if sets else 0, health=r.choice([0] * 5 + [1, 2, 3]),
                 warmup=r.randint(0, 3), sources=r.random() < 0.25, best=best, wait=r.random() < 0.3,
                 export=interval > 0 and r.random() < 0.5, model=r.random() < 0.8, dtype=r.choice(["bf16", "fp32"]), nonfinite=nonfinite)
    if not s.sources and r.random() < 0.4: # one step that is passed over ends limited data
        s = dataclasses.replace(s, limit=(s.steps + r.randint(0, 1)) * s.samples() + r.randint(0, 1))
    if r.random() < 0.4:
        first = r.randint(1, s.steps)
        s = dataclasses.replace(s, profile=(first, min(first + r.randint(0, 3), s.steps)))
    events = []
    for start in range(r.randint(1, 3)):
        if start > 0:
            forks = r.random() < 0.25
            events += [Event(start, "F")] * forks + [Event(start, "D")] * (r.random() < (0.5 if forks else 0.2))
            events += [Event(start, "O")] * (not forks and s.keep == 0 and r.random() < 0.2)
            events += [Event(start, "W")] * (s.best and r.random() < 0.3) + [Event(start, "M")] * (not s.limit and r.random() < 0.2)
        events += draw_events(r, s, start)
    return s, events, r.randrange(s.ranks)


def at(start, kind, *numbers, place="T"):
    return [Event(start, kind, place, number) for number in numbers or (0,)]


VALIDATED = Settings(sets=1, validation=2) # its best losses are those of steps 10, 2 and 6
BEST = dataclasses.replace(VALIDATED, keep=2, best=True)
WRITTEN = [ # what a draw rarely makes
    # All samples behind the newest checkpoint are passed over, so that the run ends with it; it was damaged besides.
    (Settings(steps=24, limit=24, interval=4, sets=1, validation=3, profile=(1, 4)), at(0, "n", 23)),
    (Settings(limit=12), at(0, "t", 9) + at(1, "d", 1)),
    # A stop, and an early stop, at the step with which the data end; the last step is no early one.
    (Settings(limit=12), at(0, "n", 5) + at(0, "t", 11)),
    (dataclasses.replace(VALIDATED, steps=10, limit=10, patience=3), at(0, "n", 5)),
    (dataclasses.replace(VALIDATED, steps=6, patience=2), at(1, "t", 0)),
    # Validations, and checkpoints by which the best is judged, lie before and behind a rewind.
    (BEST, at(0, "n", 5, 7) + at(0, "t", 9)),
    (BEST, at(0, "t", 9) + at(1, "d", 0) + at(1, "t", 2)),
    (dataclasses.replace(VALIDATED, interval=4, patience=3), at(0, "n", 6)),
    # Saves behind the best checkpoint without a validation of their own; one that is damaged.
    (BEST, at(0, "t", 6) + at(1, "t", 0)),
    (dataclasses.replace(BEST, keep=1, wait=True), at(0, "t", 3)),
    (dataclasses.replace(BEST, keep=1, wait=True, steps=14), at(0, "t", 9) + at(1, "t", 1)),
    (dataclasses.replace(BEST, keep=3, steps=9, export=True), at(0, "t", 6) + at(1, "W")),
    # Rewinds: too many; to a checkpoint of this start that is damaged, and again; in a fork, which owes no validation.
    (Settings(steps=20), at(0, "n", *range(4, 15))),
    (Settings(), at(0, "n", 7) + at(0, "d", 8, 9) + at(0, "n", 10)),
    (Settings(), at(0, "t", 5) + at(1, "d", 0) + at(1, "n", 1)),
    (VALIDATED, at(0, "t", 0, place="V") + at(1, "F") + at(1, "n", 0)),
    # A run that is all warm-up; a validation that is made up within the warm-up alone.
    (Settings(steps=2, sets=2, validation=1, prompts=2, profile=(1, 2)), []),
    (dataclasses.replace(VALIDATED, interval=4, validation=4), at(0, "t", 0, place="V") + at(1, "t", 2)),
    # A stop without checkpoints; a run that has a model, goes on and is killed; one that goes on from its first checkpoint.
    (Settings(interval=0, nonfinite="skip"), at(0, "t", 5)),
    (Settings(steps=8), at(1, "M") + at(1, "k", 2)),
    (VALIDATED, at(0, "t", 8) + at(1, "O") + at(1, "n", 1)),
    # Steps that are computed again are not dumped again.
    (Settings(dumps=True), at(0, "n", 7))]


def fails(bench, settings, events, rank):
    """What is wrong with a case, with its log; None."""
    case = Case(bench, settings, events, rank)
    try:
        case.play()
    except (Failed, OSError, subprocess.TimeoutExpired) as failure:
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


def try_seeds(program, seeds, says):
    """The number of cases that fail."""
    bad = 0
    with tempfile.TemporaryDirectory(prefix="nd_test_") as folder:
        bench = Bench(program, folder)
        for seed in seeds:
            settings, events, rank = draw(seed) if seed >= 0 else (*WRITTEN[-seed - 1], 0)
            wrong = fails(bench, settings, events, rank)
            if wrong or says:
                print(f"seed {seed}: {settings}, rank {rank}\n  " + "\n  ".join(map(str, events)), flush=True)
            if wrong:
                bad += 1
                fewest = shrink(bench, settings, events, rank)
                print("\n  ".join(["fails; the fewest events that do:", *map(str, fewest)]))
                print(fails(bench, settings, fewest, rank) or f"(not again; the first time:)\n{wrong}", flush=True)
            if bad == FAILURES_MAX:
                break
    return bad


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("seeds", nargs="?", type=int, default=100)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--part", type=int, choices=range(1, PARTS + 1))
    options = parser.parse_args()
    seeds = list(range(options.first or -len(WRITTEN), options.first + options.seeds))
    seeds = seeds[options.part - 1::PARTS] if options.part else seeds
    seeds, says = ([options.seed], True) if options.seed is not None else (seeds, False)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        bad = sum(pool.map(lambda part: try_seeds(options.program, seeds[part::2], says), range(2)))
    print(f"{len(seeds)} drawn runs" + (f", of which {bad} or more do not leave" if bad else " leave") + " what the model says")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
