#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write text files as a C header: embed_text.py OUT NAME=FILE ... defines `static const char NAME[]` for each."""
import pathlib
import sys


def literal(text):
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("?", "\\?")
    return "\n".join(f'    "{line}\\n"' for line in escaped.splitlines()) or '    ""'


def main():
    out, *pairs = sys.argv[1:]
    parts = ["/* Made by scripts/embed_text.py. */\n"]
    for pair in pairs:
        name, _, file = pair.partition("=")
        parts.append(f"static const char {name}[] =\n{literal(pathlib.Path(file).read_text())};\n")
    pathlib.Path(out).write_text("".join(parts))


if __name__ == "__main__":
    main()
