#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make and check the rows of trainer/corpus/chat_templates.def, the chat templates that ndtrain knows by their text.

  python scripts/chat_templates.py FILE_OR_FOLDER ...           print a row for each template that a row can describe
  python scripts/chat_templates.py --check FILE_OR_FOLDER ...   the same, but compare with the rows that are there

The Python needs transformers. A file is a tokenizer_config.json, a chat_template.jinja, or a JSON list or JSON lines of objects
whose values may be templates; a folder is a model's. Each template is rendered as transformers does it, on conversations with and
without a system turn, with white space around texts, several turns and a beginning of an answer. It gets a row only where one of
ndtrain's forms gives the same text for all of them. Exit status: 0, or with --check 1 where a row is missing or differs.
"""
import argparse
import hashlib
import json
import pathlib
import re
import sys

TABLE = pathlib.Path(__file__).resolve().parent.parent / "trainer/corpus/chat_templates.def"
BEGIN = "<|begin_of_text|>"
USER, ASSISTANT, SYSTEM = (lambda text, role=role: {"role": role, "content": text} for role in ("user", "assistant", "system"))
CONVERSATIONS = [
    [USER("Name three rivers.")],
    [SYSTEM("You are brief."), USER("Hello")],
    [SYSTEM(" \n spaces \t"), USER("  two before"), ASSISTANT("after \n\n")],
    [USER("a"), ASSISTANT("b"), USER("c"), ASSISTANT("d")],
    [USER("a\n\nb"), ASSISTANT("\nbegins with a newline"), USER("")],
    [SYSTEM(""), USER("an empty system turn")],
    [USER("a"), SYSTEM(" in the middle "), USER("b"), ASSISTANT("c")],
    [USER("\u00a0no-break\u2003"), ASSISTANT("\u4f60\u597d \U0001f600")],
    [ASSISTANT("begins"), USER("then")],
    [USER("a"), ASSISTANT("b"), USER("c"), ASSISTANT("\n\nends with an answer")],
    [USER("a"), ASSISTANT("\nfirst"), ASSISTANT("\nsecond")],
    [SYSTEM("x"), ASSISTANT("\nto nobody")],
]
TOOL = [USER("a"), {"role": "tool", "content": "12"}]


def normal_form(template):
    r"""The text that is hashed: \n within a literal of Jinja means a newline, and one newline at the end is dropped by Jinja."""
    return re.sub(r"\r?\n\Z", "", template.replace("\\n", "\n"))


def write(row, messages, begins):
    """What ndtrain writes: trainer/corpus/chat.c."""
    form, system, prefix = row["form"], row["system"], row["prefix"]
    has_system = messages[0]["role"] == "system"
    if not has_system and (system is not None or prefix is not None):
        messages = [SYSTEM(system or ""), *messages]
    text = BEGIN if form == "LLAMA3" or "ND_BEGINS" in row["does"] else ""
    if "ND_THINKS" in row["does"] and messages[-1]["role"] == "assistant" and any(m["role"] == "user" for m in messages):
        messages = [*messages[:-1], ASSISTANT("<think>\n\n</think>\n\n" + messages[-1]["content"].lstrip("\n"))]
    for number, message in enumerate(messages):
        content = message["content"].strip() if form == "LLAMA3" else message["content"]
        content = (prefix or "") + content if number == 0 and message["role"] == "system" else content
        if form == "LLAMA3":
            text += f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n{content}<|eot_id|>"
        else:
            text += f"<|im_start|>{message['role']}\n{content}<|im_end|>\n"
    beginnings = {"LLAMA3": "<|start_header_id|>assistant<|end_header_id|>\n\n", "CHATML": "<|im_start|>assistant\n"}
    return text + beginnings[form] if begins else text


def render(template, messages, begins):
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, _ = render_jinja_template(conversations=[messages], chat_template=template, add_generation_prompt=begins, bos_token=BEGIN,
                                     eos_token="<|eot_id|>" if "eot_id" in template else "<|im_end|>")
    return texts[0]


def writes_tools(template, row):
    """Whether the answer of a tool is not written as any other turn."""
    try:
        return render(template, TOOL, False) != write(row, TOOL, False)
    except Exception:  # there is no such turn
        return True


def describe(template):
    """The row of a template, or None."""
    form = "CHATML" if "<|im_start|>" in template else "LLAMA3" if "<|start_header_id|>" in template else None
    if not form or "strftime_now" in template:  # the date of the day is no rule
        return None
    try:
        first = render(template, [USER("x")], False)
        empty = render(template, [SYSTEM("S"), USER("x")], False)
        opening, closing = (("<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>") if form == "LLAMA3" else
                            ("<|im_start|>system\n", "<|im_end|>"))
        default = re.search(re.escape(opening) + "(.*?)" + re.escape(closing), first, re.S)
        given = re.search(re.escape(opening) + "(.*?)S" + re.escape(closing), empty, re.S)
        answer = render(template, [USER("x"), ASSISTANT("y")], False)
        does = [name for name, holds in (("ND_BEGINS", form == "CHATML" and first.startswith(BEGIN)), ("ND_THINKS", "<think>" in answer)) if holds]
        row = {"form": form, "system": default and default[1], "prefix": given and given[1] or None, "does": does}
        if row["prefix"]:
            if row["system"] is None or not row["system"].startswith(row["prefix"]):
                return None
            row["system"] = row["system"][len(row["prefix"]):]
        row["does"] = (["ND_OWN_TOOLS"] if writes_tools(template, row) else []) + does
        same = all(render(template, messages, begins) == write(row, messages, begins) for messages in CONVERSATIONS for begins in (False, True))
    except Exception:  # a template may refuse a conversation, or be none
        return None
    return row if same else None


def find_templates(path):
    if path.is_dir():
        for name in ("chat_template.jinja", "tokenizer_config.json"):
            if (path / name).is_file():
                yield from find_templates(path / name)
        return
    text = path.read_text()
    if path.suffix == ".jinja":
        yield text
        return
    try:
        values = [json.loads(text)]
    except ValueError:
        values = [json.loads(line) for line in text.splitlines() if line.strip()]
    while values:
        value = values.pop(0)
        if isinstance(value, str) and "{%" in value:
            yield value
        elif isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value


def quote(text):
    return "NULL" if text is None else json.dumps(text)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("paths", type=pathlib.Path, nargs="+", metavar="FILE_OR_FOLDER")
    p.add_argument("--check", action="store_true", help="compare with the rows that are there")
    arguments = p.parse_args()
    known = re.sub(r"\s+", " ", TABLE.read_text()) if TABLE.exists() else ""
    seen, missing = set(), 0
    for path in arguments.paths:
        for template in find_templates(path):
            digest = hashlib.sha256(normal_form(template).encode()).hexdigest()
            row = digest not in seen and describe(template)
            seen.add(digest)
            if row:
                line = f'ND_CHAT_TEMPLATE("{digest}", {row["form"]}, {quote(row["system"])}, {quote(row["prefix"])}, {" | ".join(row["does"]) or 0})'
                wanted = arguments.check and line not in known.replace('" "', "").replace("( ", "(")
                missing += bool(wanted)
                print(f"{'missing: ' if wanted else ''}{line}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
