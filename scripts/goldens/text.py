# SPDX-License-Identifier: Apache-2.0
"""Small tokenizer.json files of each family, and the ids and texts that the Python package tokenizers makes of them.

    /path/to/python scripts/goldens/text.py

writes tests/unit/trainer/text/goldens/<family>.json, the tokenizer, and <family>.cases.json. A case is a text with its ids
when special tokens are parsed ("parse", with the post-processor's ids "post") and when they are text ("text"), and what
"parse" decodes to, with and without special tokens. Needs the package tokenizers.
"""
import json
import os
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "unit", "trainer", "text", "goldens")
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
          r"\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
# Patterns that have no scanner.
UPPER, LOWER, ENDING = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
LLAMA4 = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}|"
          r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK3 = [r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
             r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
             r"\s*[\r\n]+|\s+(?!\S)|\s+"]
# Looks back, matches nothing, leaves gaps, and has most of the syntax.
CAMEL = (r"(?<=\p{Ll})(?=\p{Lu})|\p{Lu}*\p{Ll}+|(?:[\p{L}&&[^\p{Han}]]\p{M}*)+?|\p{Han}{1,2}|\d{2,3}?|(?>[ \t]+)(?!\n)|"
         r"(?<!')(?i:'k|'s)|[^\w\s'\u2581]++|\x{2581}")
MARK = "\u2581"
CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's what they're told, and I'll say we've been there; don't you?",
    "for (int i = 0; i < 100; i++) {\n    total += table[i] * 3.14159;\n}\n\nreturn total;\n",
    "In 1999 and 2026, 1234567 people wrote 42 letters to 3 others.  Two  blanks,\ttabs\r\nand lines.\n\n\n",
    "Größe, Straße, Äpfel und Öl; naïve café, déjà vu. Привет, мир! Как дела? Γειά σου κόσμε.",
    "你好,世界。今天天气很好。こんにちは、世界。日本語のテキスト。안녕하세요 세계",
    "aaaa aaaaaaaa aaaaaaaaaaaaaaaa      ........ ======== ---------------- ________",
    "the the the that this these those then there their they them other another mother father brother gather",
    "\U0001F600 \U0001F680 \U0001F468\u200d\U0001F469\u200d\U0001F467 e\u0301 \u0928\u092e\u0938\u094d\u0924\u0947 \u00bd \u216b",
]
TEXTS = CORPUS + [
    "", " ", "  ", "\n", "a", "\u00e9", MARK, MARK + MARK + "a", "a" + MARK + "b", "\u0000", "\ufffd\ufffe",
    "it'\u017f x", "a\u180eb", "x   \n\n  y", "x \u200b y", "e\u0301x", "\u0085word", "'RE 'Ll 'S", "\u00bd\u216b\u2461 1234567",
    "a<s>b", "<s>a", "<s>", "</s> <s>  x", "<|eot|>", "a <|eot|> b", "<|eot", "<|eot|><|eot|>|>", "<think>x</think>",
    "[word] x[word] [word]x", "left   [left] x", "x [right]   right", "x [both] y [both]  [both]z", "<<both>>", "tool tools TOOL tool",
    "\u2028\u2029\u3000x", "tab\tx\t\ty", "\r\n\r\n x", "a\r", "100 200\u0660\u0661\u0662\u0663 \U0001D7CE\U0001D7CF", "\U0001F9FF\U000E0001",
]


def added(content, **flags):
    return AddedToken(content, **({"special": False, "normalized": False} | flags))


ADDED = [added("<|eot|>", special=True), added("<|begin|>", special=True), added("<think>"), added("</think>"),
         added("[word]", single_word=True), added("[left]", lstrip=True), added("[right]", rstrip=True),
         added("[both]", lstrip=True, rstrip=True, special=True), added("tool", normalized=True, single_word=True),
         added("<<both>>", normalized=True)]


def byte_level(pre, vocab=420, ignore_merges=False, template=False):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(CORPUS * 2, trainers.BpeTrainer(
        vocab_size=vocab, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_tokens(ADDED)
    if template:
        begin = tokenizer.token_to_id("<|begin|>")
        tokenizer.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", begin)])])
    return json.loads(tokenizer.to_str())


def split(*patterns):
    return pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def marked(pieces, inner=False):
    """A SentencePiece-like file: byte pieces, and merges that stay in a word, or cross a blank when `inner`."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
    if not inner:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=MARK, prepend_scheme="never", split=True)
    control = ["<unk>", "<s>", "</s>"]
    texts = CORPUS[:3] + CORPUS[5:7] + [MARK * 8]
    tokenizer.train_from_iterator(texts * 2, trainers.BpeTrainer(
        vocab_size=pieces, show_progress=False, special_tokens=control + [f"<0x{b:02X}>" for b in range(256)]))
    tokenizer.pre_tokenizer = None
    tokenizer.decoder = decoders.Sequence([decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    file = json.loads(tokenizer.to_str())
    file["added_tokens"] = file["added_tokens"][:len(control)]  # the bytes are pieces, no added tokens
    return file


def with_added(file):
    tokenizer = Tokenizer.from_str(json.dumps(file))
    tokenizer.add_tokens(ADDED)
    return json.loads(tokenizer.to_str())


def families():
    byte = pre_tokenizers.ByteLevel
    yield "gpt2", byte_level(byte(add_prefix_space=False, use_regex=True))
    yield "prefix", byte_level(byte(add_prefix_space=True, use_regex=True))
    yield "llama3", byte_level(split(LLAMA3), ignore_merges=True, template=True)
    yield "qwen2", byte_level(split(QWEN2))
    composed = byte_level(split(QWEN2))
    composed["normalizer"] = {"type": "NFC"}
    yield "qwen2_nfc", composed
    yield "llama4", byte_level(split(LLAMA4), ignore_merges=True, template=True)
    yield "deepseek3", byte_level(split(*DEEPSEEK3))
    yield "camel", byte_level(split(CAMEL))
    yield "digits", byte_level(pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte(add_prefix_space=False)]))
    llama2 = with_added(marked(420))
    yield "llama2", llama2
    early = json.loads(json.dumps(llama2))  # <s> is searched in the normalised text
    for token in early["added_tokens"][:3]:
        token["normalized"] = True
    yield "llama2_early", early
    yield "llama2_inner", with_added(marked(380, inner=True))
    newer = json.loads(json.dumps(llama2))
    newer["normalizer"] = None
    newer["pre_tokenizer"] = {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "first", "split": False}
    yield "llama2_first", newer
    always = json.loads(json.dumps(newer))
    always["pre_tokenizer"] = {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "always", "split": True}
    always["decoder"] = {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "always", "split": True}
    yield "metaspace", always
    unknown = json.loads(json.dumps(llama2))  # pieces of some bytes are missing: unknown tokens, fused or not
    for byte_piece in ("<0xE4>", "<0xC3>", "<0xF0>"):
        del unknown["model"]["vocab"][byte_piece]
        unknown["model"]["vocab"][byte_piece + "gone"] = llama2["model"]["vocab"][byte_piece]
    yield "unknown", unknown
    alone = json.loads(json.dumps(unknown))
    alone["model"]["fuse_unk"] = False
    yield "unknown_alone", alone


def cases(file, texts):
    tokenizer = Tokenizer.from_str(json.dumps(file))
    for text in texts:
        tokenizer.encode_special_tokens = False
        parse = tokenizer.encode(text, add_special_tokens=False).ids
        case = {"text": text, "parse": parse, "post": tokenizer.encode(text).ids,
                "decoded": tokenizer.decode(parse, skip_special_tokens=False),
                "skipped": tokenizer.decode(parse, skip_special_tokens=True)}
        tokenizer.encode_special_tokens = True
        case["as_text"] = tokenizer.encode(text, add_special_tokens=False).ids
        yield case


def mixtures(count):
    """Pieces of the texts in random order: borders that nobody thought of."""
    generator = random.Random(17)
    pieces = [t[i:i + 3] for t in TEXTS for i in range(0, len(t), 3)] + ["<s>", "<|eot|>", "[both]", "  ", "tool", "'s", "\n"]
    return ["".join(generator.choices(pieces, k=generator.randint(1, 12))) for _ in range(count)]


def main():
    os.makedirs(FOLDER, exist_ok=True)
    for name, file in families():
        with open(os.path.join(FOLDER, name + ".json"), "w", encoding="utf-8") as out:
            json.dump(file, out, ensure_ascii=False, separators=(",", ":"))
            out.write("\n")
        with open(os.path.join(FOLDER, name + ".cases.json"), "w", encoding="utf-8") as out:
            json.dump(list(cases(file, TEXTS + mixtures(40))), out, ensure_ascii=True, separators=(",", ":"))
            out.write("\n")


if __name__ == "__main__":
    main()
