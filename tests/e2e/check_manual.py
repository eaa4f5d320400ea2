#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Man pages and completion cover every flag and key: check_manual.py SOURCE_ROOT [BUILD_ROOT].

What they must cover is what docs/config.md lists and, with a build, what the programs print for --help and their commands' --help.
bash completes flags, choices, keys, commands and verbs; groff (or man) finds nothing wrong with the pages.
"""
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from steps import check


def output_of(*command, code=0):
    done = subprocess.run([str(c) for c in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, timeout=60)
    check(done.returncode == code, f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def flags_in(text):
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9._-]*[a-z0-9]", text))


def documented(root):
    """Flags and keys of the tables in docs/config.md."""
    rows = [line for line in (root / "docs/config.md").read_text().splitlines() if re.match(r"\| `[a-z0-9_]+\.[a-z0-9_]+`", line)]
    check(len(rows) > 60, f"docs/config.md has {len(rows)} keys")
    return {re.match(r"\| `([^`]+)`", row)[1] for row in rows}, {f for row in rows for f in flags_in(row.split("|")[4])}


def strings(text):
    return "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', text))


def flags_of_tables(root):
    """Every flag that names.def has: all but those which are always refused."""
    table = re.sub(r"/\*.*?\*/", "", (root / "runtime/config/names.def").read_text(), flags=re.S)
    rows = re.findall(r'^ND_NAME_(\w+)\(\w+,((?:\s*"[^"]*")+)', table, re.M)
    names = [name for kind, text in rows if kind != "REFUSE" for name in strings(text).split()]
    names += [f"parallelism_config_{axis}_size" for axis in ("tp", "cp", "dp_shard", "dp_replicate")]
    refused = [name for kind, text in rows if kind == "REFUSE" for name in strings(text).split()]
    check(len(names) > 80 and len(refused) > 40, f"the tables have {len(names)} flags and refuse {len(refused)}")
    return {"--" + name.replace("_", "-") for name in names} - {"--" + name for name in refused}


def flags_of_commands(root):
    """command -> the flags of its table."""
    rows = re.findall(r'^ND_OWN\((\w+), \w+, \w+, "([a-z0-9-]+)', (root / "runtime/config/commands.def").read_text(), re.M)
    found = {name.lower(): {"--" + flag for command, flag in rows if command == name} for name in ("GENERATE", "EVAL", "BENCH")}
    check(all(found.values()), f"commands.def has {found}")
    return found


def complete(bash, *words):
    """What Tab offers behind these words, the last of which is being typed."""
    script = """source "$1"; shift
compopt() { :; }
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); "_$1"; printf '%s\\n' "${COMPREPLY[@]}" """
    return set(output_of("bash", "-c", script, "bash", bash, *words).split())


def check_commands(made, commands):
    """Own flags of a command, wherever it is completed."""
    zsh = (made / "zsh").read_text()
    for name, own in commands.items():
        for words in (["ndlaunch", name], ["ndtrain", name], ["ndtrain", "check", name]):
            offered = complete(made / "bash", *words, "--")
            check(own | {"--precision"} <= offered, f"bash lacks {sorted(own - offered)} behind {' '.join(words)}")
        lines = re.findall(rf"^ *{name}\) _arguments (.*)", zsh, re.M)
        check(len(lines) >= 3 and all(own <= flags_in(line) for line in lines), f"zsh lacks flags of {name}: {lines}")
    check(set(commands) | {"config", "env"} <= complete(made / "bash", "ndlaunch", ""), "bash lacks commands of ndlaunch")
    check(complete(made / "bash", "ndlaunch", "config", "--") == {"--default", "--config-file", "--help"}, "ndlaunch config")
    check(set(commands) <= complete(made / "bash", "ndtrain", "check", ""), "bash lacks the commands of ndtrain check")
    launcher = zsh[zsh.index("== ndlaunch"):zsh.index("return\nfi")]
    check(all(f"'{name}:" in launcher for name in [*commands, "config", "env"]), "zsh lacks commands of ndlaunch")


def check_completion(bash, flags, keys):
    offered = complete(bash, "ndlaunch", "--")
    check(flags <= offered, f"bash does not complete {sorted(flags - offered)}")
    check({f"{k}=" for k in keys} == complete(bash, "ndlaunch", "--set", ""), "bash does not complete the keys")
    check(complete(bash, "ndlaunch", "--precision", "f") == {"fp32", "fp8"}, "bash does not complete choices")
    check(complete(bash, "ndlaunch", "--save-model", "") == {"true", "false"}, "bash does not complete switches")
    for flag, values in (("--log-with", {"tensorboard", "wandb", "trackio", "all", "none"}), ("--report-to", {"wandb"}),
                         ("--save-strategy", {"no", "steps", "epoch"}), ("--eval-strategy", {"no", "steps", "epoch"}),
                         ("--metric-for-best-model", {"eval_loss", "loss"}), ("--rdzv-backend", {"static", "c10d"})):
        check(values <= complete(bash, "ndlaunch", flag, ""), f"bash does not complete the values of {flag}")
    check(complete(bash, "ndlaunch", "--report-to", "tensorboard", "w") == {"wandb"}, "bash does not complete a list's next word")
    check(complete(bash, "ndlaunch", "--report-to", "wandb,tr") == {"wandb,trackio"}, "bash does not complete a list with commas")
    check("--precision" in complete(bash, "ndlaunch", "--report-to", "wandb", "--"), "bash does not complete flags behind a list")
    check(complete(bash, "ndlaunch", "--precision", "fp8", "f") == set(), "bash takes a word for a list")
    check(complete(bash, "ndtrain", "r") == {"report"}, "bash does not complete commands")
    check(complete(bash, "ndtrain", "ckpt", "pr") == {"prune"}, "bash does not complete verbs")
    check("--rank" in complete(bash, "ndtrain", "plan", "--ra"), "bash does not complete --rank")


def check_pages(made, flags, keys):
    for name in ("ndlaunch.1", "ndtrain.1"):
        text = re.sub(r"\\f[BIR]", "", (made / name).read_text()).replace("\\-", "-")
        check(not flags - flags_in(text), f"{name} lacks {sorted(flags - flags_in(text))}")
        check("##" not in text, f"{name} shows a part of a table: {re.findall('.*##.*', text)[:2]}")
        check(not {k for k in keys if f"{k}:" not in text}, f"{name} lacks keys")
        check("none|tensorboard|all|wandb|trackio,..." in text, f"{name} does not show that trackers are a list")
        if shutil.which("groff"):
            said = output_of("groff", "-man", "-ww", "-z", "-Tutf8", made / name)
            check(not said, f"groff says of {name}: {said}")


def check_programs(build, made):
    """Each flag that a command prints is completed behind it."""
    ndtrain, bash = build / "ndtrain", made / "bash"
    every = flags_in("\n".join(re.findall(r"^  (--.*)", output_of(build / "ndlaunch", "--help", "all"), re.M)))
    offered = complete(bash, "ndlaunch", "--")
    check(every <= offered, f"bash does not complete {sorted(every - offered)} of ndlaunch --help all")
    commands = re.findall(r"^  ([a-z]+)\b", output_of(ndtrain, "--help"), re.M)
    for command in {c for c in commands if c not in ("train", "check", "plan")} & {"ckpt", "tokenize", "report", "generate", "eval", "bench"}:
        check(command in complete(bash, "ndtrain", command), f"bash does not complete the command {command}")
        if command == "ckpt":
            for verb in re.findall(r"^  ([a-z]+) ", output_of(ndtrain, "ckpt", "--help"), re.M):
                listed = flags_in("\n".join(re.findall(r"^  (--\S+)", output_of(ndtrain, "ckpt", verb, "--help"), re.M)))
                check(listed <= complete(bash, "ndtrain", "ckpt", verb, "--"), f"bash lacks flags of ckpt {verb}: {listed}")
        else:
            listed = flags_in("\n".join(re.findall(r"^  (?:-\w, )?(--\S+)", output_of(ndtrain, command, "--help"), re.M)))
            check(listed <= complete(bash, "ndtrain", command, "--"), f"bash lacks flags of {command}: {listed}")


def main():
    root = pathlib.Path(sys.argv[1])
    keys, flags = documented(root)
    flags |= flags_of_tables(root)
    with tempfile.TemporaryDirectory() as name:
        made = pathlib.Path(name)
        for kind in ("ndlaunch.1", "ndtrain.1", "bash", "zsh"):
            output_of(sys.executable, root / "scripts/make_manual.py", kind, "9.9", made / kind, root)
        check_pages(made, flags, keys)
        check_completion(made / "bash", flags, keys)
        check_commands(made, flags_of_commands(root))
        zsh = (made / "zsh").read_text()
        check(all(f"'{flag}[" in zsh for flag in flags), "zsh lacks flags")
        check(re.search(r"'--report-to\[.*\]:\*-\*:value:\(none tensorboard ", zsh), "zsh does not complete lists")
        if shutil.which("zsh"):
            output_of("zsh", "-n", made / "zsh")
        if len(sys.argv) > 2:
            check_programs(pathlib.Path(sys.argv[2]), made)
    print(f"manual: {len(keys)} keys and {len(flags)} flags are in the man pages and completed")


if __name__ == "__main__":
    main()
