#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write a page with its style and script as a C header: embed_page.py OUT PAGE STYLE SCRIPT.

PAGE is a page of HTML with {style}, {style_hash}, {script}, {script_hash} and {data}. The header has the text before {data} as
`page_before` and the text behind it as `page_after`. The hashes are what a Content-Security-Policy takes.
"""
import base64
import hashlib
import pathlib
import sys


def literal(text):
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("?", "\\?")
    return "\n".join(f'    "{line}\\n"' for line in escaped.splitlines()) or '    ""'


def main():
    out, page, *parts = sys.argv[1:]
    text = pathlib.Path(page).read_text()
    for name, path in zip(("style", "script"), parts):
        part = pathlib.Path(path).read_text()
        text = text.replace(f"{{{name}_hash}}", "sha256-" + base64.b64encode(hashlib.sha256(part.encode()).digest()).decode())
        text = text.replace(f"{{{name}}}", part)
    before, after = text.split("{data}")
    pathlib.Path(out).write_text("/* Made by scripts/embed_page.py. */\n" + "".join(
        f"static const char {name}[] =\n{literal(part)};\n" for name, part in (("page_before", before), ("page_after", after))))


if __name__ == "__main__":
    main()
