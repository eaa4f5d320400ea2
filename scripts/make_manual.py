#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make man pages and shell completion from the field table: make_manual.py KIND VERSION OUT [SOURCE_ROOT]

KIND is ndlaunch.1, ndtrain.1, bash or zsh. Flags, keys, defaults, ranges and choices come from runtime/config/fields.def,
runtime/mesh/mesh.def and runtime/config/names.def, so a new key needs no line here. The flags that a command has of its own come from
runtime/config/commands.def, as the commands do. tests/e2e/check_manual.py compares all with what the programs print.
"""
import dataclasses
import pathlib
import re
import sys

ROOT = pathlib.Path(sys.argv[4]) if len(sys.argv) > 4 else pathlib.Path(__file__).resolve().parent.parent
CONFIGURED = ("train", "check", "plan", "generate", "eval", "bench") # commands that take the flags of the table
USES = ("generate", "eval", "bench") # those which ndlaunch starts too, and `ndtrain check` checks
COMMON = {"config-file": "a YAML file, native or accelerate's", "set": "section.key=value: sets any key",
          "help": "the flags used most; with a section or all: more", "version": "the version and what is inside"}
FILES = {"config-file", "make-key", "output", "input", "tokenizer", "side-files", "model", "prompt-file", "data", "requests"}
CODES = [(0, "the run ended well"), (1, "an internal error; from ndtrain plan and ndtrain ckpt diff: the answer is no"),
         (2, "configuration or usage"), (65, "bad data, model or checkpoint"), (70, "a number that is not finite"),
         (71, "memory is used up"), (73, "output cannot be written"), (74, "I/O, or a lost worker"),
         (75, "stopped by a signal, at a step boundary"), (124, "a deadline passed")]


@dataclasses.dataclass
class Field:
    section: str
    key: str
    type: str
    initial: str
    least: str
    most: str
    choices: list
    unit: str
    flags: list
    help: str

    @property
    def name(self):
        return f"{self.section}.{self.key}"

    @property
    def values(self):
        if self.choices:
            return self.choices
        return ["true", "false"] if self.type == "BOOL" else []


def arguments(text):
    """Splits the arguments of a macro at the commas that lie in no string, bracket or comment."""
    parts, depth, at, quoted = [""], 0, 0, False
    while at < len(text):
        c = text[at]
        if quoted and c == "\\":
            parts[-1] += text[at:at + 2]
            at += 2
            continue
        quoted ^= c == '"'
        if not quoted:
            depth += (c in "([{") - (c in ")]}")
            if c == "," and depth == 0:
                parts.append("")
                at += 1
                continue
        parts[-1] += c
        at += 1
    return [p.strip() for p in parts]


def calls(text, macro):
    """The arguments of each use of a macro, its definitions left out."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r"^[ \t]*#.*(?:\\\n.*)*$", "", text, flags=re.M)
    for match in re.finditer(rf"\b{macro}\(", text):
        depth, at, quoted = 1, match.end(), False
        while depth:
            c = text[at]
            if quoted and c == "\\":
                at += 2
                continue
            quoted ^= c == '"'
            depth += 0 if quoted else (c == "(") - (c == ")")
            at += 1
        yield arguments(text[match.end():at - 1])


def string(text):
    """Adjacent string literals of C, or None for NULL."""
    if text == "NULL":
        return None
    return "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', text)).replace('\\"', '"').replace("\\\\", "\\")


def commands_of(program):
    """The commands of a program with their lines of help."""
    rows = calls((ROOT / "runtime/config/commands.def").read_text(), "ND_COMMAND")
    return {string(row[2]): string(row[7]) for row in rows if {program, "BOTH"} & set(row[1].split(" | ")) and " " not in row[2]}


COMMANDS = commands_of("TRAIN") | {"version": "prints the version and what is inside"}
LAUNCHER_COMMANDS = {name: text for name, text in commands_of("LAUNCH").items() if name[0] != "-"}
LAUNCHER = {name[2:]: text for name, text in commands_of("LAUNCH").items() if name[0] == "-"} # flags in place of a command


def read_table(root):
    """(sections with titles, fields in the order of the table, flags of other programs with their values, own flags by command)."""
    table = (root / "runtime/config/fields.def").read_text()
    axes = [Field("mesh", name, "INT", string(initial), least, "16777216", [], "", string(flags).split(), string(text))
            for _, name, _, initial, least, flags, text in calls((root / "runtime/mesh/mesh.def").read_text(), "ND_AXIS")]
    recipes = "|".join(string(c[1]) for c in calls((root / "runtime/config/fp8_recipes.def").read_text(), "ND_FP8_RECIPE"))
    table = table.replace("ND_FP8_RECIPES", f'"{recipes}"')
    fields = []
    for section, key, kind, initial, least, most, choices, _, unit, flags, text in calls(table, "ND_FIELD"):
        if section != "mesh": # those of the mesh are made from the axes
            fields.append(Field(section, key, kind.split("(")[0], string(initial), least, most, (string(choices) or "").split("|") if
                                string(choices) else [], string(unit), string(flags).split(), string(text)))
    sections = [(name, string(title)) for name, title in calls(table, "ND_SECTION")]
    by_section = {name: [f for f in fields if f.section == name] for name, _ in sections}
    by_section["mesh"] = axes
    return sections, [f for name, _ in sections for f in by_section[name]], other_flags(root, [a.key for a in axes]), own_flags(root)


def own_flags(root):
    """command, such as generate or "ckpt ls" -> its own flags, the first name of each."""
    table = (root / "runtime/config/commands.def").read_text()
    names = {row[0]: string(row[2]) for row in calls(table, "ND_COMMAND")}
    found = {name: [] for name in [*COMMANDS, *names.values()]}
    rows = list(calls(table, "ND_OWN"))
    for kinds in ("SWITCH", "TEXT TEXTS WORDS CHOICE", "INT REAL"):
        for row in [r for r in rows if r[2] in kinds.split()]:
            found[names[row[0]]].append("--" + string(row[3]).split()[0])
    return found


def verbs_of(table):
    """verb of ckpt -> its flags."""
    return {name.split()[1]: flags for name, flags in table[3].items() if name.startswith("ckpt ")}


def values_of(text):
    """The values among "theirs|theirs=ours"; none where they are lists, or mean that nothing is given."""
    return [] if "[" in text or text == "-1=" else [value.split("=")[0] for value in text.split("|")]


def other_flags(root, axes):
    """(flag, its values) of names.def, but for those that are always refused."""
    table = (root / "runtime/config/names.def").read_text()
    kinds = {"FIELD": None, "IGNORED": None, "CALL": None, "WORDS": 4, "STATE": 5, "ONLY": 2} # the argument that has the values
    found = [("TOP", f"parallelism-config-{axis.replace('_', '-')}-size", []) for axis in axes]
    for kind, at in kinds.items():
        for row in (r for r in calls(table, f"ND_NAME_{kind}") if r[1].startswith('"') and "#" not in r[1]):
            values = values_of(string(row[at])) if at else ["true", "false"] if row[2] == "true" else []
            found += [(row[0], name.replace("_", "-"), values) for name in string(row[1]).split()]
    found += [("FLAGS", name, ["1"]) for _, _, _, names, _ in calls((root / "runtime/mesh/mesh.def").read_text(), "ND_AXIS_RESERVED")
              for name in string(names).split()]
    refused = {name for _, names, _ in calls(table, "ND_NAME_REFUSE") for name in string(names or "").split()}
    return list({name: values for _, name, values in sorted(found, key=lambda row: row[0] == "FLAGS") if name not in refused}.items())


def roff(text):
    """Text of a man page: no character of it is a request or an escape."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", text)


def value_name(field):
    if field.choices:
        return "|".join(field.choices) + (",..." if field.type == "CHOICES" else "")
    return {"INT": "N", "REAL": "X", "BOOL": "true|false", "PAIR": "A,B"}.get(field.type, "TEXT")


def field_entry(field):
    flags = ", ".join(rf"\fB\-\-{roff(f)}\fR" for f in field.flags)
    limits = [f"default {field.initial or 'empty'}"]
    if field.type in ("INT", "REAL") and not field.choices:
        limits.append(f"{field.least} to {field.most}")
    if field.unit:
        limits.append(field.unit)
    return [".TP", rf"{flags} \fI{roff(value_name(field))}\fR", roff(f"{field.name}: {field.help} ({'; '.join(limits)})")]


def page(program, version, summary, usage, own, table):
    sections, fields, more, _ = table
    lines = [f'.TH {program.upper()} 1 "" "ndtrain {version}" "User Commands"', ".SH NAME", f"{program} \\- {roff(summary)}",
             ".SH SYNOPSIS"]
    for line in usage:
        lines += [".nf", roff(line), ".fi"]
    lines += [".SH DESCRIPTION", roff("A run is described by defaults, then a YAML file, then the other flags in their order; later wins. "
                                      "Flags are written with hyphens or underscores, as --flag value or --flag=value.")]
    lines += own + [".SH OPTIONS"]
    for name, text in COMMON.items():
        lines += [".TP", rf"\fB\-\-{roff(name)}\fR", roff(text)]
    for section, title in sections:
        lines += [f".SS {roff(section)}: {roff(title)}"]
        for field in (f for f in fields if f.section == section):
            lines += field_entry(field)
    lines += [".SS " + roff("further flags of accelerate, torchrun and transformers"),
              roff(", ".join("--" + name for name, _ in more))]
    lines += [".SH EXIT STATUS"]
    for code, text in CODES:
        lines += [".TP", str(code), roff(text)]
    return "\n".join(lines) + "\n"


def launcher_page(version, table):
    own = [".SH COMMANDS"]
    for name, text in LAUNCHER_COMMANDS.items():
        own += [".TP", rf"\fB{name}\fR", roff(text)]
    own += [".SH OWN OPTIONS"]
    for name, text in LAUNCHER.items():
        own += [".TP", rf"\fB\-\-{roff(name)}\fR \fIFILE\fR", roff(text)]
    return page("ndlaunch", version, "trains a Llama on the workers of one or several nodes", ["ndlaunch [--config-file FILE] [flags]",
                "ndlaunch config [--config-file FILE]", "ndlaunch env", "ndlaunch --make-key FILE"], own, table)


def worker_page(version, table):
    own = [".SH COMMANDS"]
    _, _, _, flags_of = table
    for name, text in COMMANDS.items():
        flags = flags_of[name]
        own += [".TP", rf"\fB{name}\fR", roff(text + (": " + ", ".join(flags) if flags else ""))]
    own += [".SS " + roff("verbs of ckpt")]
    for verb, flags in verbs_of(table).items():
        own += [".TP", rf"\fB{verb}\fR", roff(", ".join(flags) or "no flags of its own")]
    return page("ndtrain", version, "the worker of ndlaunch, and tools for its files", ["ndtrain train|check|plan [--config-file FILE] "
                "[flags]", "ndtrain ckpt VERB ...", "ndtrain tokenize ...", "ndtrain report RUN ... [-o FILE]"], own, table)


def all_flags(table):
    """flag -> its values, for flags of the table and of names.def."""
    _, fields, more, _ = table
    found = {f: field.values for field in fields for f in field.flags}
    found.update({name: values for name, values in more if name not in found})
    return found


def list_flags(fields):
    """Flags that take several of their choices, as words or with commas."""
    return [f for field in fields if field.type == "CHOICES" for f in field.flags]


def bash(table):
    _, fields, _, flags_of = table
    verbs_flags = verbs_of(table)
    flags = all_flags(table)
    lists = "|".join("--" + f for f in list_flags(fields))
    names = " ".join(f"--{f}" for f in [*flags, *COMMON])
    cases = "\n".join(f"    --{f}) COMPREPLY=($(compgen -W '{' '.join(values)}' -- \"$cur\")); return ;;"
                      for f, values in flags.items() if values)
    files = "|".join(f"--{f}" for f in sorted(FILES | {f for field in fields if field.type in ("TEXT", "SOURCES") and not field.choices
                                                       for f in field.flags}))
    keys = " ".join(f"{field.name}=" for field in fields)
    used = "\n".join(f"    {name}) flags=\"$_ndtrain_flags {' '.join(flags_of[name])}\" ;;" for name in USES)
    own = "\n".join(f"    {name}) flags=\"$_ndtrain_flags {' '.join(own)}\" ;;" if name in CONFIGURED else
                    f"    {name}) flags='{' '.join(own)} --help' ;;" for name, own in ((n, flags_of[n]) for n in COMMANDS) if name != "ckpt")
    verbs = "\n".join(f"        {verb}) flags='{' '.join(own)} --help' ;;" for verb, own in verbs_flags.items())
    return f"""# Made by scripts/make_manual.py.
_ndtrain_value() {{ # completes the value of $prev; 1: it has none
    local at=$COMP_CWORD before=
    while (( --at > 0 )) && [[ ${{COMP_WORDS[at]}} != -* ]]; do :; done
    case "${{COMP_WORDS[at]}}" in
    {lists}) # a list: words behind the flag, or one word with commas
        [[ $cur == -* ]] && return 1
        prev=${{COMP_WORDS[at]}}
        [[ $cur == *,* ]] && before=${{cur%,*}},
        cur=${{cur##*,}}
        ;;
    esac
    _ndtrain_choice || return 1
    COMPREPLY=("${{COMPREPLY[@]/#/$before}}")
}}
_ndtrain_choice() {{
    case "$prev" in
{cases}
    --set) COMPREPLY=($(compgen -W '{keys}' -- "$cur")); compopt -o nospace; return ;;
    {files}) compopt -o filenames; COMPREPLY=($(compgen -f -- "$cur")); return ;;
    esac
    return 1
}}
_ndtrain_flags='{names}'
_ndlaunch() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD - 1]}} flags=
    _ndtrain_value && return
    case "${{COMP_WORDS[1]}}" in
{used}
    config) flags='{' '.join(flags_of['config'])} --help' ;;
    env) flags=--help ;;
    *) flags="$_ndtrain_flags {' '.join('--' + f for f in LAUNCHER)}" ;;
    esac
    [ "$COMP_CWORD" != 1 ] || flags="$flags {' '.join(LAUNCHER_COMMANDS)}"
    COMPREPLY=($(compgen -W "$flags" -- "$cur"))
}}
_ndtrain() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD - 1]}} flags=
    if [ "$COMP_CWORD" = 1 ]; then
        COMPREPLY=($(compgen -W '{' '.join(COMMANDS)} --help --version' -- "$cur"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{own}
    ckpt)
        if [ "$COMP_CWORD" = 2 ]; then
            COMPREPLY=($(compgen -W '{' '.join(verbs_flags)} --help' -- "$cur"))
            return
        fi
        case "${{COMP_WORDS[2]}}" in
{verbs}
        esac
        ;;
    *) flags=$_ndtrain_flags ;;
    esac
    if [ "${{COMP_WORDS[1]}}" = check ]; then # of a run, or of the use of a command
        case "${{COMP_WORDS[2]}}" in
{used}
        esac
        [ "$COMP_CWORD" != 2 ] || flags="$flags {' '.join(USES)}"
    fi
    _ndtrain_value && return
    if [[ $cur == -* || "${{COMP_WORDS[1]}}" =~ ^({"|".join(CONFIGURED)})$ ]]; then
        COMPREPLY=($(compgen -W "$flags" -- "$cur"))
    else
        compopt -o filenames
        COMPREPLY=($(compgen -f -- "$cur"))
    fi
}}
complete -F _ndlaunch ndlaunch
complete -F _ndtrain ndtrain
"""


def zsh_text(text):
    return re.sub(r"([\[\]:\\'])", lambda m: "'\\''" if m[1] == "'" else "\\" + m[1], text)


def zsh(table):
    """_arguments lines: flag, help, and choices or files."""
    _, fields, _, flags_of = table
    helps = {f: field.help for field in fields for f in field.flags}
    lines = []
    lists = set(list_flags(fields))
    for flag, values in {**all_flags(table), "config-file": [], "set": []}.items():
        text = zsh_text(helps.get(flag) or COMMON.get(flag, "see docs/config.md"))
        action = f"({' '.join(values)})" if values else "_files" if flag in FILES else " "
        lines.append(f"    '--{flag}[{text}]:{'*-*:' if flag in lists else ''}value:{action}'")
    commands = "\n".join(f"        '{name}:{zsh_text(text)}'" for name, text in COMMANDS.items())
    own = "\n".join(f"    {name}) _arguments {' '.join(own)} '*:file:_files' ;;" for name, own in ((n, flags_of[n]) for n in COMMANDS)
                    if name not in CONFIGURED and name != "ckpt")
    used = "\n".join(f"    {name}) _arguments $configured {' '.join(flags_of[name])} ;;" for name in USES)
    launched = "\n".join(f"        '{name}:{zsh_text(text)}'" for name, text in LAUNCHER_COMMANDS.items())
    own += "\n" + used
    verbs_flags = verbs_of(table)
    verbs = sorted({f for flags in verbs_flags.values() for f in flags})
    return f"""#compdef ndlaunch ndtrain
# Made by scripts/make_manual.py.
local -a configured commands
configured=(
{chr(10).join(lines)}
    '--help[{zsh_text(COMMON["help"])}]'
    '--version[{zsh_text(COMMON["version"])}]'
)
if [[ $service == ndlaunch ]]; then
    case $words[2] in
{used}
    config) _arguments {' '.join(flags_of['config'])} --help ;;
    env) _arguments --help ;;
    *)
        if (( CURRENT == 2 )); then
            commands=(
{launched}
            )
            _describe command commands
        fi
        _arguments $configured '--make-key[{zsh_text(LAUNCHER["make-key"])}]:file:_files'
        ;;
    esac
    return
fi
if (( CURRENT == 2 )); then
    commands=(
{commands}
    )
    _describe command commands
    return
fi
if [[ $words[2] == check ]]; then # of a run, or of the use of a command
    (( CURRENT == 3 )) && compadd {' '.join(USES)}
    case $words[3] in
{used}
    *) _arguments $configured ;;
    esac
    return
fi
case $words[2] in
{own}
    ckpt)
        if (( CURRENT == 3 )); then
            compadd {' '.join(verbs_flags)}
        else
            _arguments {' '.join(verbs)} '*:file:_files'
        fi
        ;;
    plan) _arguments $configured {' '.join(flags_of["plan"])} ;;
    *) _arguments $configured ;;
esac
"""


def main():
    kind, version, out = sys.argv[1:4]
    table = read_table(ROOT)
    makers = {"ndlaunch.1": lambda: launcher_page(version, table), "ndtrain.1": lambda: worker_page(version, table),
              "bash": lambda: bash(table), "zsh": lambda: zsh(table)}
    pathlib.Path(out).write_text(makers[kind]())


if __name__ == "__main__":
    main()
