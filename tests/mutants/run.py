#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Puts one subtle fault after the other into a copy of the source and counts how many the tests notice.

    tests/mutants/run.py --check              every rule of rules.txt still applies to this source; CI runs this
    tests/mutants/run.py [options] [WORDS]    with WORDS only the faults whose name or file holds one of them

      --folder DIR      where the copy and its build are kept between calls (default: build-mutants)
      --jobs N          compiler jobs (default: 1)
      --trust-suites    do not run the suites without a fault first
      --sample N        only N of the faults, chosen at random by --seed (default: 1)

A rule of rules.txt is a name behind "==", then the lines to search for, which must occur exactly once, each behind "-", and their
replacement, each line behind "+". A line "file PATH suites NAME..." above says for all rules up to the next such line what is
changed and who should notice; a line "suites NAME..." names others for the same file. A suite may be followed by a filter of
Criterion: trainer_model:head/*. The parts of a suite, as events_1, are named together: events. The suites are tried in their
order until one fails. The last line is the share noticed.
"""
import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

SOURCE = pathlib.Path(__file__).resolve().parents[2]
RULES = pathlib.Path(__file__).with_name("rules.txt")
LEAST_SHARE = 0.95
LONGEST_S = 400  # a suite that runs longer hangs, which is noticed
BUILD = "build-without-cuda"


class Rule:
    def __init__(self, name, file, suites):
        self.name = name
        self.file = file
        self.suites = suites
        self.search = []
        self.replacement = []

    def apply(self, text):
        search = "\n".join(self.search)
        count = text.count(search)
        if count != 1:
            raise ValueError(f"rule \"{self.name}\": its search text is {count} times in {self.file}, not once; "
                             "write it anew for the code as it is now, or remove the rule")
        return text.replace(search, "\n".join(self.replacement))


def read_rules():
    rules = []
    file, suites = "", []
    for number, line in enumerate(RULES.read_text().splitlines(), 1):
        kind, _, rest = line.partition(" ")
        if line.startswith("#") or not line.strip():
            continue
        if kind == "==":
            rules.append(Rule(rest, file, suites))
        elif kind == "file":
            file, _, rest = rest.partition(" suites ")
            suites = rest.split()
        elif kind == "suites":
            suites = rest.split()
        elif line[0] == "-":
            rules[-1].search.append(line[1:])
        elif line[0] == "+":
            rules[-1].replacement.append(line[1:])
        else:
            raise ValueError(f"{RULES.name} line {number}: \"{line}\" is no part of a rule")
    names = [rule.name for rule in rules]
    for rule in rules:
        if not (rule.file and rule.suites and rule.search) or names.count(rule.name) > 1:
            raise ValueError(f"rule \"{rule.name}\": it lacks a part, or its name comes twice")
        if rule.search == rule.replacement:
            raise ValueError(f"rule \"{rule.name}\": it changes nothing")
    return rules


def check(rules, root):
    """The number of rules that do not apply; each is named."""
    bad = 0
    for rule in rules:
        try:
            rule.apply((root / rule.file).read_text())
        except (OSError, ValueError) as error:
            print(error)
            bad += 1
    return bad


def copy_source(folder):
    """Copies what has changed, so that only that is compiled."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=SOURCE, check=True, text=True,
                            stdout=subprocess.PIPE).stdout.splitlines()
    wanted = {name for name in listed if (SOURCE / name).is_file()}
    for name in wanted:
        new, old = SOURCE / name, folder / name
        if not old.is_file() or new.read_bytes() != old.read_bytes():
            old.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(new, old)
    for old in folder.rglob("*"):
        name = str(old.relative_to(folder))
        if old.is_file() and name not in wanted and not name.startswith(BUILD):
            old.unlink()


class Build:
    def __init__(self, folder, jobs):
        self.folder = folder / BUILD
        self.jobs = jobs
        self.log = folder / "mutants.log"
        subprocess.run(["scripts/build", "--without-cuda", "--tests", f"-j{jobs}", "ndlaunch", "ndtrain"], cwd=folder,
                       check=True, stdout=subprocess.DEVNULL)
        self.tests = {test["name"]: test for test in self.introspect("--tests")}
        self.outputs = {target["id"]: target["filename"] for target in self.introspect("--targets")}

    def introspect(self, what):
        return json.loads(subprocess.run(["meson", "introspect", what, str(self.folder)], check=True,
                                         stdout=subprocess.PIPE).stdout)

    def parts(self, suites):
        """Their names; "events" stands for events_1, events_2, ..."""
        return [part for suite in suites for part in sorted(name for name in self.tests if name.rstrip("0123456789") == suite + "_") or [suite]]

    def make(self, suites):
        """Builds what the suites need. False: the source does not compile."""
        targets = []
        for suite in suites:
            test = self.tests[suite.partition(":")[0]]
            files = [name for one in test["depends"] for name in self.outputs.get(one, [])] + test["cmd"][:1]
            targets += [os.path.relpath(name, self.folder) for name in files if name.startswith(str(self.folder))]
        with open(self.log, "w") as log:
            return subprocess.run(["ninja", f"-j{self.jobs}", "-C", str(self.folder), *sorted(set(targets))], stdout=log,
                                  stderr=log).returncode == 0

    def passes(self, suite):
        """Whether a suite passes, and why not."""
        name, _, pattern = suite.partition(":")
        test = self.tests[name]
        command = test["cmd"] + (["--filter", pattern] if pattern else [])
        with open(self.log, "w") as log:
            process = subprocess.Popen(command, cwd=self.folder, env={**os.environ, **test["env"]}, stdin=subprocess.DEVNULL,
                                       stdout=log, stderr=log, start_new_session=True)
            try:
                code = process.wait(LONGEST_S)
            except subprocess.TimeoutExpired:
                code = None
            try: # what a failed test has left
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        if "Synthesis: Tested: 0" in self.log.read_text(errors="replace"):
            raise RuntimeError(f"{suite} has no test")
        if code == 77:
            raise RuntimeError(f"{suite} cannot run on this machine")
        return code == 0


def notice(build, rule):
    """The suite that notices the fault, or None."""
    for suite in build.parts(rule.suites):
        if not build.make([suite]):
            raise RuntimeError(f"rule \"{rule.name}\": the fault does not compile; see {build.log}")
        if not build.passes(suite):
            return suite
    return None


def try_suites(build, rules):
    """All suites pass without a fault; otherwise they would notice anything."""
    for suite in sorted({suite for rule in rules for suite in build.parts(rule.suites)}):
        begin = time.monotonic()
        if not build.make([suite]) or not build.passes(suite):
            raise RuntimeError(f"{suite} fails without a fault; see {build.log}")
        print(f"passes    {time.monotonic() - begin:5.1f} s  {suite}", flush=True)


def run(rules, options):
    folder = pathlib.Path(options.folder).resolve()
    folder.mkdir(exist_ok=True)
    copy_source(folder)
    build = Build(folder, options.jobs)
    if not options.trust_suites:
        try_suites(build, rules)
    unnoticed = []
    for rule in sorted(rules, key=lambda rule: rule.file):
        path, begin = folder / rule.file, time.monotonic()
        text = path.read_text()
        path.write_text(rule.apply(text))
        try:
            suite = notice(build, rule)
        except RuntimeError as error:
            suite = None
            print(error)
        finally:
            path.write_text(text)
        print(f"{'noticed' if suite else 'UNNOTICED':9} {time.monotonic() - begin:5.1f} s  {rule.name} ({rule.file}): "
              f"{suite or ' '.join(rule.suites)}", flush=True)
        if not suite:
            unnoticed.append(rule)
    share = 1 - len(unnoticed) / len(rules)
    for rule in unnoticed:
        print(f"unnoticed: {rule.name} ({rule.file})")
    print(f"{len(rules) - len(unnoticed)} of {len(rules)} faults noticed ({100 * share:.1f} %)")
    return 0 if share >= LEAST_SHARE else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--folder", default=str(SOURCE / "build-mutants"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--trust-suites", action="store_true")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    rules = read_rules()
    bad = check(rules, SOURCE)
    if bad or options.check:
        print(f"{len(rules) - bad} of {len(rules)} rules apply")
        return 1 if bad else 0
    if options.words:
        rules = [rule for rule in rules if any(word in rule.name or word in rule.file for word in options.words)]
    if options.sample is not None:
        rules = random.Random(options.seed).sample(rules, min(options.sample, len(rules)))
    if not rules:
        print("no rule has one of these words in its name or file")
        return 2
    return run(rules, options)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RuntimeError, ValueError) as error:
        print(f"mutants: {error}", file=sys.stderr)
        sys.exit(2)
