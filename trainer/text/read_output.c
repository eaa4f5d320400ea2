// SPDX-License-Identifier: Apache-2.0
/* Components behind the model: decoder and post-processor. */
#include "trainer/text/read.h"
#include "trainer/text/unicode.h"

/* Decoder. */

/* The steps of a Sequence in the only order that is understood. */
enum { STEP_REPLACE, STEP_BYTES, STEP_FUSE, STEP_STRIP };

static nd_status fail_order(const nd_tokenizer *t, const json_t *node)
{
    return nd_fail(ND_ERR_DATA,
                   "\"%s\": the decoder \"%s\" at this place of a Sequence is not "
                   "supported; the order is Replace, ByteFallback, Fuse, Strip",
                   t->name, nd_text_type(node));
}

static nd_status read_strip(nd_tokenizer *t, const json_t *node)
{
    const json_t *content = json_object_get(node, "content");
    const json_t *start = json_object_get(node, "start"), *stop = json_object_get(node, "stop");
    const char *text = json_string_value(content);
    size_t size = json_string_length(content);
    if (size == 0 || size > sizeof t->strip ||
        nd_utf8_next((const uint8_t *)text, size) != (int)size || !json_is_integer(start) ||
        json_integer_value(start) < 0) {
        return nd_text_fail_key(t, node, "content", "a character, or \"start\" not a number");
    }
    if (!json_is_integer(stop) || json_integer_value(stop) != 0) {
        return nd_fail(ND_ERR_DATA, "\"%s\": \"Strip\" at the end of a text is not supported",
                       t->name);
    }
    memcpy(t->strip, text, size);
    t->strip_size = size;
    t->strip_count = json_integer_value(start);
    return ND_OK;
}

static nd_status read_decoder_step(nd_tokenizer *t, const json_t *node, int *last)
{
    static const char *const names[] = {[STEP_REPLACE] = "Replace",
                                        [STEP_BYTES] = "ByteFallback",
                                        [STEP_FUSE] = "Fuse",
                                        [STEP_STRIP] = "Strip"};
    int step = STEP_REPLACE;
    while (step <= STEP_STRIP && !nd_text_is_type(node, names[step])) {
        step++;
    }
    if (step > STEP_STRIP) {
        return nd_text_fail_type(
            t, "decoder", node,
            "ByteLevel, Metaspace, and a Sequence of Replace, ByteFallback, Fuse and "
            "Strip");
    }
    if (step < *last || (step == *last && step != STEP_REPLACE) ||
        (step == STEP_STRIP && *last != STEP_FUSE)) {
        return fail_order(t, node);
    }
    *last = step;
    if (step == STEP_REPLACE) {
        return nd_text_read_rewrite(t, node, t->replaces, &t->replace_count);
    }
    t->byte_fallback |= step == STEP_BYTES;
    return step == STEP_STRIP ? read_strip(t, node) : ND_OK;
}

nd_status nd_text_read_decoder(nd_tokenizer *tokenizer, const json_t *node)
{
    if (nd_text_is_absent(node)) {
        return ND_OK;
    }
    if (nd_text_is_type(node, "ByteLevel")) {
        tokenizer->decoder = ND_DECODER_BYTE_LEVEL;
        return ND_OK;
    }
    if (nd_text_is_type(node, "Metaspace")) {
        nd_metaspace scheme;
        ND_TRY(nd_text_read_metaspace(tokenizer, node, &scheme));
        tokenizer->decoder = ND_DECODER_METASPACE;
        tokenizer->decoder_has_metaspace_prefix = scheme != ND_METASPACE_NEVER;
        return ND_OK;
    }
    int last = STEP_REPLACE;
    tokenizer->decoder = ND_DECODER_SEQUENCE;
    if (!nd_text_is_type(node, "Sequence")) {
        return read_decoder_step(tokenizer, node, &last);
    }
    const json_t *list = json_object_get(node, "decoders");
    if (!json_is_array(list)) {
        return nd_text_fail_key(tokenizer, node, "decoders", "a list");
    }
    if (json_array_size(list) == 1 && !nd_text_is_type(json_array_get(list, 0), "Sequence")) {
        return nd_text_read_decoder(tokenizer, json_array_get(list, 0));
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        ND_TRY(read_decoder_step(tokenizer, json_array_get(list, i), &last));
    }
    return ND_OK;
}

/* Post-processor. */

static nd_status fail_template(const nd_tokenizer *t)
{
    return nd_fail(ND_ERR_DATA,
                   "\"%s\": \"TemplateProcessing\" is not a list of special tokens "
                   "around one sequence A, with ids of the vocabulary; the file is damaged",
                   t->name);
}

static nd_status read_template_token(const nd_tokenizer *t, const json_t *tokens,
                                     const json_t *item, nd_ids *ids)
{
    const json_t *name = json_object_get(json_object_get(item, "SpecialToken"), "id");
    const json_t *list =
        json_is_string(name)
            ? json_object_get(json_object_get(tokens, json_string_value(name)), "ids")
            : NULL;
    if (!json_is_array(list)) {
        return fail_template(t);
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *value = json_array_get(list, i);
        json_int_t id = json_is_integer(value) ? json_integer_value(value) : -1;
        if (id < 0 || id >= ND_VOCAB_IDS_MAX || !nd_vocab_piece(&t->vocab, (int32_t)id)) {
            return fail_template(t);
        }
        ND_TRY(nd_ids_add(ids, &(int32_t){(int32_t)id}, 1));
    }
    return ND_OK;
}

/* Fills what stands before and behind the sequence. */
static nd_status read_template(const nd_tokenizer *t, const json_t *node, nd_ids ids[2])
{
    const json_t *single = json_object_get(node, "single");
    int sequences = 0;
    for (size_t i = 0; i < json_array_size(single); i++) {
        const json_t *item = json_array_get(single, i);
        const char *which =
            json_string_value(json_object_get(json_object_get(item, "Sequence"), "id"));
        if (which && strcmp(which, "A") == 0 && sequences == 0) {
            sequences++;
        } else {
            ND_TRY(read_template_token(t, json_object_get(node, "special_tokens"), item,
                                       &ids[sequences]));
        }
    }
    return sequences == 1 ? ND_OK : fail_template(t);
}

/* A later template goes around what an earlier one has made. */
static nd_status add_template(nd_tokenizer *t, nd_ids ids[2])
{
    ND_TRY(nd_ids_add(&ids[0], t->before, (size_t)t->before_count));
    if (ids[0].count > ND_TEXT_AFFIX_MAX ||
        ids[1].count + (size_t)t->behind_count > ND_TEXT_AFFIX_MAX) {
        return nd_fail(ND_ERR_DATA, "\"%s\" adds more than %d ids to a text; that is not supported",
                       t->name, ND_TEXT_AFFIX_MAX);
    }
    t->before_count = (int)ids[0].count;
    for (size_t i = 0; i < ids[0].count; i++) {
        t->before[i] = ids[0].data[i];
    }
    for (size_t i = 0; i < ids[1].count; i++) {
        t->behind[t->behind_count++] = ids[1].data[i];
    }
    return ND_OK;
}

nd_status nd_text_read_post_processor(nd_tokenizer *tokenizer, const json_t *node)
{
    if (nd_text_is_absent(node) ||
        nd_text_is_type(node, "ByteLevel")) { /* ByteLevel changes offsets, no ids */
        return ND_OK;
    }
    if (nd_text_is_type(node, "Sequence")) {
        return nd_text_read_each(tokenizer, node, "processors", nd_text_read_post_processor);
    }
    if (!nd_text_is_type(node, "TemplateProcessing")) {
        return nd_text_fail_type(tokenizer, "post-processor", node,
                                 "ByteLevel, TemplateProcessing and Sequence");
    }
    nd_ids ids[2] = {{0}};
    nd_status status = read_template(tokenizer, node, ids);
    if (status == ND_OK) {
        status = add_template(tokenizer, ids);
    }
    free(ids[0].data);
    free(ids[1].data);
    return status;
}
