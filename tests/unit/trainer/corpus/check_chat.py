# SPDX-License-Identifier: Apache-2.0
"""Our chats beside those of transformers, live: check_chat.py TOOL GOLDENS

Random messages in the forms llama3 and chatml: ids and the tokens that count are those of apply_chat_template, with
{% generation %} around what an assistant says; and so are the ids of a prompt that an assistant goes on with.
"""
import array
import json
import os
import random
import struct
import subprocess
import sys
import tempfile

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

FAMILIES = ["llama3", "qwen2", "qwen2_nfc", "gpt2", "llama4", "llama2", "llama2_first"]
CONTROLS = {"llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "chatml": ["<|im_start|>", "<|im_end|>"]}
TEMPLATES = {
    "llama3": "{{ '<|begin_of_text|>' }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
              "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
              "{% else %}{{ m['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
              "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
              "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
              "{% else %}{{ m['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
              "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
}
PARTS = ["\n", "\n\n", "\r\n", " ", "  ", "\t", "\u00a0", "\u3000", "a", "the end", "it's 4", "1234", ".", "?!", "\u00e9", "e\u0301", "\u4f60\u597d",
         "\U0001F600", "<|eot|>", "<think>", "tool", "[word]"]


def conversations(generator, controls):
    for number in range(60):
        messages = [{"role": "system", "content": "be good"}] if generator.random() < 0.3 else []
        for turn in range(generator.randint(1, 4)):
            text = "".join(generator.choices(PARTS + controls[-1:], k=generator.randint(0, 6)))
            messages.append({"role": "assistant" if turn % 2 else "user", "content": generator.choice(["", "\n", "\n\n", " "]) + text})
        yield messages


def ask(tool, path, form, mode, chats):
    sent = b"".join(struct.pack("<I", len(c)) + c for c in (json.dumps(chat).encode() for chat in chats))
    answer = subprocess.run([tool, path, form, mode], input=sent, stdout=subprocess.PIPE, check=True).stdout
    at, lists = 0, []
    for _ in range(2 * len(chats)):
        n = 4 * struct.unpack_from("<I", answer, at)[0]
        lists.append(array.array("i", answer[at + 4:at + 4 + n]).tolist())
        at += 4 + n
    return list(zip(lists[::2], lists[1::2]))


def check(tool, path, form, family):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(path))
    chats = list(conversations(random.Random(form + family), CONTROLS[form]))
    common = {"chat_template": TEMPLATES[form], "tokenize": True, "return_dict": True}
    for chat, (ids, spans) in zip(chats, ask(tool, path, form, "rows", chats)):
        theirs = tokenizer.apply_chat_template(chat, return_assistant_tokens_mask=True, **common)
        counted = [1] * len(ids)
        for begin, end in zip(spans[::2], spans[1::2]):
            counted[begin:end] = [0] * (end - begin)
        if ids != theirs["input_ids"]:
            sys.exit(f"{family}, {form}: {chat} gives {ids}, not {theirs['input_ids']}")
        if counted != theirs["assistant_masks"]:
            sys.exit(f"{family}, {form}: of {chat} count {counted}, not {theirs['assistant_masks']}")
    for chat, (ids, _) in zip(chats, ask(tool, path, form, "prompt", chats)):
        theirs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, **common)["input_ids"]
        if ids != theirs:
            sys.exit(f"{family}, {form}: the prompt of {chat} gives {ids}, not {theirs}")
    return len(chats)


def main():
    tool, folder = sys.argv[1:3]
    with tempfile.TemporaryDirectory() as work:
        path = os.path.join(work, "tokenizer.json")
        for family in FAMILIES:
            for form, controls in CONTROLS.items():
                tokenizer = Tokenizer.from_file(os.path.join(folder, family + ".json"))
                tokenizer.add_special_tokens(controls)
                file = json.loads(tokenizer.to_str())
                file["post_processor"] = None  # the beginning of the text stands in the template
                with open(path, "w", encoding="utf-8") as out:
                    json.dump(file, out)
                print(f"{family}, {form}: {check(tool, path, form, family)} chats")


if __name__ == "__main__":
    main()
