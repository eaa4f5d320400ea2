#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make and check the rows of trainer/corpus/chat_templates.def, the chat templates that ndtrain knows by their text.

  python scripts/chat_templates.py FILE_OR_FOLDER ...           print a row for each template that a row can describe
  python scripts/chat_templates.py --check FILE_OR_FOLDER ...   the same, but compare with the rows that are there

The Python needs transformers. A file is a tokenizer_config.json, a chat_template.jinja, or a JSON list or JSON lines of objects
whose values may be templates; a folder is a model's. What stands around messages is read off a few rendered ones. The row is printed
where `write` below, which does what trainer/corpus/chat.c does, then gives the text of transformers for conversations with and without
a system turn, with white space around texts, several turns and a beginning of an answer, and refuses at least those that the template
refuses. A template that writes the date of the day is rendered with the date of its own that it has for programs without a clock.
Where no form of the table fits, a row for a new form is printed too. Exit status: 0, or with --check 1 where a row is missing or differs.
"""
import argparse
import hashlib
import json
import pathlib
import re
import sys

TABLE = pathlib.Path(__file__).resolve().parent.parent / "trainer/corpus/chat_templates.def"
BOS, EOS, DATE = "<|begin_of_text|>", "<EOS>", "26 Jul 2024"  # the first as the form LLAMA3 has it
FIELDS = ("begin", "user_open", "user_close", "assistant_open", "assistant_close", "prompt", "end", "strips")
USER, ASSISTANT, SYSTEM = (lambda text, role=role: {"role": role, "content": text} for role in ("user", "assistant", "system"))
CONVERSATIONS = [
    [USER("Name three rivers.")],
    [SYSTEM("You are brief."), USER("Hello")],
    [SYSTEM(" \n spaces \t"), USER("  two before"), ASSISTANT("after \n\n")],
    [USER("a"), ASSISTANT("b"), USER("c"), ASSISTANT("d")],
    [USER("a\n\nb"), ASSISTANT("\nbegins with a newline"), USER("")],
    [SYSTEM("s"), USER("a"), ASSISTANT("b"), USER(" c ")],
    [USER("a"), SYSTEM(" in the middle "), USER("b"), ASSISTANT("c")],
    [USER("\u00a0no-break\u2003"), ASSISTANT("\u4f60\u597d \U0001f600")],
    [ASSISTANT("begins"), USER("then")],
    [USER("a"), ASSISTANT("b"), USER("c"), ASSISTANT("\n\nends with an answer")],
    [USER("a"), ASSISTANT("\nfirst"), ASSISTANT("\nsecond")],
    [USER("a"), USER("b")],
    [SYSTEM("x"), ASSISTANT("\nto nobody")],
    [SYSTEM(""), USER("an empty system turn")],
]
TOOL = [USER("a"), {"role": "tool", "content": "12"}]
THOUGHTS = [("x</think>y", {}), ("<think>x</think>\n\ny", {}), ("y", {"reasoning_content": "x"})]


def normal_form(template):
    r"""The text that is hashed: \n within a literal of Jinja means a newline, and one newline at the end is dropped by Jinja."""
    return re.sub(r"\r?\n\Z", "", template.replace("\\n", "\n"))


class Refused(Exception):
    """A conversation that is not written."""


def check(form, messages):
    """A form that does not write the names of roles has turns of a user and an assistant only."""
    if "{role}" not in form["user_open"] and any(m["role"] != ("user", "assistant")[i % 2] for i, m in enumerate(messages)):
        raise Refused


def parts(form, row, messages, begins):
    """What is written, as pairs of a text and whether it counts in the loss."""
    check(form, messages)
    if messages[0]["role"] != "system" and row["system"] is not None:
        messages = [SYSTEM(row["system"]), *messages]
    out = [(form["begin"], False)]
    for number, message in enumerate(messages):
        role, text, last = message["role"], message["content"], number + 1 == len(messages)
        kind = "assistant" if role == "assistant" else "user"
        opening, closing = form[kind + "_open"].replace("{role}", role), form[kind + "_close"]
        if form["strips"]:
            text = text.strip()
        if number == 0 and role == "system":
            text = (row["prefix"] or "") + text
        if role == "assistant" and last and "ND_THINKS" in row["does"] and any(m["role"] == "user" for m in messages):
            opening, text = opening + "<think>\n\n</think>\n\n", text.lstrip("\n")
        end = closing.rstrip() if role == "assistant" else ""
        out += [(opening, False), (text + end, role == "assistant"), (closing[len(end):], False)]
    prompt = form["assistant_open"].replace("{role}", "assistant") if form["prompt"] is None else form["prompt"]
    return [*out, (prompt if begins else form["end"], False)]


def write(form, row, messages, begins):
    return "".join(text for text, _ in parts(form, row, messages, begins)).replace("{bos}", BOS).replace("{eos}", EOS)


def render(template, messages, begins):
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, _ = render_jinja_template(conversations=[messages], chat_template=template, add_generation_prompt=begins, bos_token=BOS,
                                     eos_token=EOS, **({"date_string": DATE} if "date_string" in template else {}))
    return texts[0]


def same(template, form, row, messages, begins):
    try:
        ours = write(form, row, messages, begins)
    except Refused:
        return True
    try:
        return render(template, messages, begins) == ours
    except Exception:  # the template refuses, or cannot write it
        return False


def cut(text, head, tail):
    """What stands between both."""
    if not text.startswith(head) or not text.endswith(tail) or len(text) < len(head) + len(tail):
        raise ValueError
    return text[len(head):len(text) - len(tail)]


def loses_space(template, messages):
    """Whether the text "\tq\t" of a message has lost its white space."""
    try:
        return all(side not in render(template, messages, False) for side in ("\tq", "q\t"))
    except Exception:
        return False


def read_form(template, end):
    """The form of a template that ends a conversation with `end`, and what stands before the first turn when no system turn is given."""
    texts = [USER("Uq1"), ASSISTANT("Aq1"), USER("Uq2"), ASSISTANT("Aq2")]
    first, middle, between, _, last = re.split("[UA]q[12]", render(template, texts, False))
    form = {"user_close": cut(render(template, texts[:1], False), first + "Uq1", end), "assistant_close": cut(last, "", end), "end": end}
    form["assistant_open"] = cut(middle, form["user_close"], "")
    form["user_open"] = cut(between, form["assistant_close"], "")
    form["prompt"] = cut(render(template, texts[:1], True), first + "Uq1" + form["user_close"], "")
    before = cut(first, "", form["user_open"])
    form["begin"] = BOS if before.startswith(BOS) else ""
    space, other = "\tq\t", [USER("x")]
    strips = [loses_space(template, messages) for messages in ([USER(space)], [*other, ASSISTANT(space)], [SYSTEM(space), *other])]
    form.update(strips=strips[0], system_open=None, system_close=None)
    if strips[0] != strips[1]:
        raise ValueError
    try:
        given, inner = re.split("Sq1|Uq1", render(template, [SYSTEM("Sq1"), USER("Uq1")], False))[:2]
        given = cut(given, form["begin"], "")
    except Exception:
        return form, before
    if not form["user_open"] or not given.startswith(form["user_open"]):  # else it stands in the turn of a user
        if strips[2] != strips[0]:
            raise ValueError
        form.update(system_open=given, system_close=cut(inner, "", form["user_open"]))
    return form, before


def tidy(form):
    """With the marks of the table for names of roles and tokens; a prompt that is the opening of an answer is none of its own."""
    named = {role: form[role + "_open"] and form[role + "_open"].replace(role, "{role}") for role in ("system", "user", "assistant")}
    prompt = form["prompt"]
    form = {**form, "prompt": None if prompt == form["assistant_open"] else prompt}
    if named["system"] is not None:
        if not named["system"].startswith(named["user"]) or not named["user"] == named["assistant"] != form["user_open"]:
            raise ValueError  # a form has the same around all but the assistant
        form.update({role + "_open": text for role, text in named.items()})
    return {key: value.replace(BOS, "{bos}").replace(EOS, "{eos}") if isinstance(value, str) else value for key, value in form.items()}


def known_forms():
    """name -> form, as the table has them; with what stands around a system turn."""
    words, forms = re.compile(r'"(?:[^"\\]|\\.)*"|\w+'), {}
    for name, rest in re.findall(r"^ND_CHAT_FORM\((\w+),(.*)\)$", TABLE.read_text(), re.M):
        forms[name] = dict(zip(FIELDS, (None if word == "NULL" else json.loads(word) for word in words.findall(rest))))
        says = "{role}" in forms[name]["user_open"]
        forms[name].update({f"system_{side}": forms[name][f"user_{side}"] if says else None for side in ("open", "close")})
    return forms


def fit(template, form, before, known):
    """The row of a template whose form is `known`; a ValueError or KeyError where it is not."""
    if any(form[f] != known[f] for f in (*FIELDS[1:], "system_close")) or bool(form["begin"]) != bool(known["begin"]):
        raise ValueError
    if (form["system_open"] is None) != (known["system_open"] is None):
        raise ValueError
    prefix = cut(form["system_open"] or "", known["system_open"] or "", "") or None
    before = cut(before.replace(BOS, "{bos}").replace(EOS, "{eos}"), form["begin"], "")
    opening = (form["system_open"] or "").replace("{role}", "system")
    row = {"system": cut(before, opening, form["system_close"]) if before else None, "prefix": prefix, "does": []}
    if "<think>" in render(template, [USER("x"), ASSISTANT("y")], False):
        row["does"] = ["ND_THINKS"]
    elif not all(same(template, known, row, [USER("x"), {**ASSISTANT(text), **more}], False) for text, more in THOUGHTS):
        raise ValueError
    if "{role}" in known["user_open"] and not tools_alike(template, known, row):
        row["does"] = ["ND_OWN_TOOLS", *row["does"]]
    if not all(same(template, known, row, messages, begins) for messages in CONVERSATIONS for begins in (False, True)):
        raise ValueError
    return row


def tools_alike(template, form, row):
    try:
        return render(template, TOOL, False) == write(form, row, TOOL, False)
    except Exception:  # there is no such turn
        return False


def describe(template, forms):
    """(name of the form, form, row) of a template, or None. A form that the table lacks has no name."""
    if "strftime_now" in template and "date_string" not in template:  # the date of the day is no rule
        return None
    for end in ("", EOS):
        try:
            form, before = read_form(template, end)
        except Exception:
            continue
        form = tidy(form)
        for name, known in [*forms.items(), (None, form)]:
            try:
                return name, known, fit(template, form, before, known)
            except Exception:
                continue
    return None


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
    return "NULL" if text is None else json.dumps(text, ensure_ascii=False)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("paths", type=pathlib.Path, nargs="+", metavar="FILE_OR_FOLDER")
    p.add_argument("--check", action="store_true", help="compare with the rows that are there")
    arguments = p.parse_args()
    forms, known = known_forms(), TABLE.read_text()
    seen, missing = set(), 0
    for path in arguments.paths:
        for template in find_templates(path):
            digest = hashlib.sha256(normal_form(template).encode()).hexdigest()
            found = digest not in seen and describe(template, forms)
            seen.add(digest)
            if not found:
                continue
            name, form, row = found
            if not name:
                print(f'ND_CHAT_FORM(NEW, {", ".join(quote(form[f]) for f in FIELDS)})')
            line = f'ND_CHAT_TEMPLATE("{digest}", {name or "NEW"}, {quote(row["system"])}, {quote(row["prefix"])}, {" | ".join(row["does"]) or 0})'
            wanted = arguments.check and line not in known
            missing += bool(wanted)
            print(f"{'missing: ' if wanted else ''}{line}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
