# SPDX-License-Identifier: Apache-2.0
"""Our chats beside those of transformers, live: check_chat.py TOOL GOLDENS

Random messages in each form of trainer/corpus/chat_templates.def: ids and the tokens that count are those of the text that
scripts/chat_templates.py writes, which it has compared with apply_chat_template, in tokenizers of all families; and so are the ids of a
prompt that an assistant goes on with. That script reads the forms and rows off templates that are written here.
"""
import array
import json
import os
import pathlib
import random
import re
import struct
import subprocess
import sys
import tempfile

from tokenizers import AddedToken, Tokenizer

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[4] / "scripts"))
import chat_templates

FAMILIES = ["llama3", "qwen2", "qwen2_nfc", "gpt2", "llama4", "llama2", "llama2_first"]
BITS = {"ND_THINKS": 2}
ROWS = [{"system": None, "prefix": None, "does": []}, {"system": "You help.", "prefix": None, "does": []},
        {"system": None, "prefix": None, "does": ["ND_THINKS"]}]
BOS, EOS = "<s>", "</s>"
PLAIN = ("ZEPHYR", "LLAMA2", "MISTRAL_1", "MISTRAL_1_SYSTEM")  # whose marks are no tokens
PARTS = ["\n", "\n\n", "\r\n", " ", "  ", "\t", "\u00a0", "\u3000", "a", "the end", "it's 4", "1234", ".", "?!", "\u00e9", "e\u0301", "\u4f60\u597d",
         "\U0001F600", "<|eot|>", "<think>", "tool", "[word]", EOS]


OPENS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}" + OPENS
LLAMA3 = ("{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
          "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}")
TURNS = ("{{ bos_token }}{% for m in messages %}{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
         "{{ raise_exception('take turns') }}{% elif m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
         "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}")
# A template, and the form and the default system turn that are read off it.
TEMPLATES = [(CHATML, "CHATML", None), (LLAMA3, "LLAMA3", None), (TURNS, "MISTRAL_1", None), ("{{ messages | tojson }}", None, None),
             ("{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}" + CHATML, "CHATML", "You help.")]


def check_templates():
    for template, form, system in TEMPLATES:
        found = chat_templates.describe(template, chat_templates.known_forms())
        row = {"system": system, "prefix": None, "does": []}
        if (found and (found[0], found[2])) != (form and (form, row)):
            sys.exit(f"of the template {template} the script reads {found}")


def conversations(generator):
    for number in range(30):
        messages = [{"role": "system", "content": generator.choice(["", "be good", " be\n"])}] if generator.random() < 0.4 else []
        for turn in range(generator.randint(1, 4)):
            text = "".join(generator.choices(PARTS, k=generator.randint(0, 6)))
            messages.append({"role": "assistant" if turn % 2 else "user", "content": generator.choice(["", "\n", "\n\n", " "]) + text})
        yield messages


def ask(tool, path, form, row, mode, chats):
    sent = b"".join(struct.pack("<I", len(c)) + c for c in (json.dumps(chat).encode() for chat in chats))
    bits = str(sum(BITS[name] for name in row["does"]))
    answer = subprocess.run([tool, path, str(form), bits, row["system"] or "-", BOS, EOS, mode], input=sent, stdout=subprocess.PIPE, check=True)
    at, lists = 0, []
    for _ in range(2 * len(chats)):
        n = 4 * struct.unpack_from("<I", answer.stdout, at)[0]
        lists.append(array.array("i", answer.stdout[at + 4:at + 4 + n]).tolist())
        at += 4 + n
    return list(zip(lists[::2], lists[1::2]))


def whole(tokenizer, parts):
    """The ids of the text of the parts, and which of them have a byte that counts."""
    text, ranges = "", []
    for part, counts in parts:
        part = part.replace("{bos}", BOS).replace("{eos}", EOS)
        ranges += [(len(text), len(text) + len(part))] if counts else []
        text += part
    encoding = tokenizer.encode(text, add_special_tokens=False)
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    counted = [int(any(begin < b and a < end and not (i in special and begin < a) for a, b in ranges))
               for i, (begin, end) in zip(encoding.ids, encoding.offsets)]
    return encoding.ids, counted


def check(tool, path, form, row, family, number):
    tokenizer = Tokenizer.from_file(path)
    generator = random.Random(family + str(number) + str(row))
    chats = []
    for chat in conversations(generator):
        try:
            chat_templates.check(form, chat)
            chats.append(chat)
        except chat_templates.Refused:
            continue
    for mode in ("rows", "prompt"):
        for chat, (ids, spans) in zip(chats, ask(tool, path, number, row, mode, chats)):
            theirs, counts = whole(tokenizer, chat_templates.parts(form, row, chat, mode == "prompt"))
            counted = [1] * len(ids)
            for begin, end in zip(spans[::2], spans[1::2]):
                counted[begin:end] = [0] * (end - begin)
            if ids != theirs:
                sys.exit(f"{family}, form {number}, {row}: {mode} of {chat} gives {ids}, not {theirs}")
            if mode == "rows" and counted != counts:
                sys.exit(f"{family}, form {number}, {row}: of {chat} count {counted}, not {counts}")
    return len(chats)


def main():
    tool, folder = sys.argv[1:3]
    check_templates()
    with tempfile.TemporaryDirectory() as work:
        path = os.path.join(work, "tokenizer.json")
        for family in FAMILIES:
            chats = 0
            for number, (name, form) in enumerate(chat_templates.known_forms().items()):
                if name == "ZEPHYR" and family == "llama2_first":
                    continue  # puts a blank before the first text of all alone, which we take for one behind a token
                generator = random.Random(name)
                texts = " ".join(text for text in form.values() if isinstance(text, str)).replace("{role}", "user")
                named = set(re.findall(r"<[^<>\s]+>|\[[^\[\]\s]+\]", texts + texts.replace("user", "assistant") + texts.replace("user", "system")))
                named = set() if name in PLAIN else named
                tokenizer = Tokenizer.from_file(os.path.join(folder, family + ".json"))
                tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False, rstrip=name.startswith("PHI"))
                                              for token in sorted(named) if token not in ("<think>", "</think>")] + [BOS, EOS])
                file = json.loads(tokenizer.to_str())
                file["post_processor"] = None  # the beginning of the text stands in the template
                with open(path, "w", encoding="utf-8") as out:
                    json.dump(file, out)
                for row in ROWS if name in ("LLAMA3", "CHATML") else ROWS[:1]:
                    chats += check(tool, path, form, row, family, number)
            print(f"{family}: {chats} chats")


if __name__ == "__main__":
    main()
