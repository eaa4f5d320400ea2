// SPDX-License-Identifier: Apache-2.0
/* The tokenizer of models whose ids are bytes: byte-level BPE without merges. */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/json.h"
#include "trainer/text/tokenizer.h"
#include "trainer/text/unicode.h"

/* GPT-2's printable bytes stand for themselves (Latin-1); the other 68, in order, are U+0100,
 * U+0101, ... */
static bool is_printable(int byte)
{
    return (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
}

static json_t *vocabulary(void)
{
    json_t *vocab = json_object();
    int other = 0x100;
    for (int byte = 0; byte < 256; byte++) {
        char key[5] = "";
        nd_utf8_put((uint8_t *)key, (uint32_t)(is_printable(byte) ? byte : other++));
        if (json_object_set_new(vocab, key, json_integer(byte)) != 0) {
            json_decref(vocab);
            return NULL;
        }
    }
    return vocab;
}

static json_t *byte_level(void)
{
    return json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 0,
                     "trim_offsets", 0, "use_regex", 0);
}

static json_t *tokenizer(void)
{
    json_t *model =
        json_pack("{s:s, s:n, s:n, s:n, s:n, s:b, s:b, s:b, s:o, s:[]}", "type", "BPE", "dropout",
                  "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", 0,
                  "byte_fallback", 0, "ignore_merges", 0, "vocab", vocabulary(), "merges");
    return json_pack("{s:s, s:n, s:n, s:[], s:n, s:o, s:n, s:o, s:o}", "version", "1.0",
                     "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
                     byte_level(), "post_processor", "decoder", byte_level(), "model", model);
}

nd_status nd_byte_tokenizer_text(bool indented, char **out)
{
    json_t *root = tokenizer();
    *out = nd_json_text(root, indented ? JSON_INDENT(2) : 0);
    json_decref(root);
    return *out ? ND_OK : nd_fail_memory("the tokenizer of bytes");
}

nd_status nd_byte_tokenizer_create(nd_tokenizer **out)
{
    char *text = NULL;
    ND_TRY(nd_byte_tokenizer_text(false, &text));
    nd_status status = nd_tokenizer_parse(text, strlen(text), "bytes", out);
    free(text);
    return status;
}
