// SPDX-License-Identifier: Apache-2.0
/* Helpers for reading the components of a tokenizer.json. */
#include "trainer/text/read.h"

const char *nd_text_type(const json_t *node)
{
    const char *type = json_string_value(json_object_get(node, "type"));
    return type ? type : "";
}

bool nd_text_is_type(const json_t *node, const char *type)
{
    return strcmp(nd_text_type(node), type) == 0;
}

bool nd_text_is_absent(const json_t *node)
{
    return !node || json_is_null(node);
}

nd_status nd_text_fail_type(const nd_tokenizer *t, const char *part, const json_t *node,
                            const char *known)
{
    return nd_fail(ND_ERR_DATA, "\"%s\": the %s \"%s\" is not supported; supported are %s", t->name,
                   part, nd_text_type(node), known);
}

nd_status nd_text_fail_key(const nd_tokenizer *t, const json_t *node, const char *key,
                           const char *wanted)
{
    return nd_fail(ND_ERR_DATA,
                   "\"%s\": the key \"%s\" of \"%s\" is not %s, which is not supported", t->name,
                   key, nd_text_type(node), wanted);
}

/* Reads each element of a list of components. */
nd_status nd_text_read_each(nd_tokenizer *t, const json_t *node, const char *key,
                            nd_text_read *read)
{
    const json_t *list = json_object_get(node, key);
    if (!json_is_array(list)) {
        return nd_text_fail_key(t, node, key, "a list");
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        ND_TRY(read(t, json_array_get(list, i)));
    }
    return ND_OK;
}

nd_status nd_text_read_bool(const nd_tokenizer *tokenizer, const json_t *node, const char *key,
                            bool fallback, bool *out)
{
    const json_t *value = json_object_get(node, key);
    *out = nd_text_is_absent(value) ? fallback : json_is_true(value);
    return nd_text_is_absent(value) || json_is_boolean(value)
               ? ND_OK
               : nd_text_fail_key(tokenizer, node, key, "true or false");
}

nd_status nd_text_fail_damaged(const nd_tokenizer *t, const char *key, const char *wanted)
{
    return nd_fail(ND_ERR_DATA, "\"%s\": the key \"%s\" is not %s; the file is damaged", t->name,
                   key, wanted);
}

nd_status nd_text_fail_piece(const nd_tokenizer *t)
{
    return nd_fail_context(ND_ERR_DATA, "reading the vocabulary of \"%s\"", t->name);
}

/* An id, or -1. */
int32_t nd_text_id(const json_t *value)
{
    json_int_t id = json_is_integer(value) ? json_integer_value(value) : -1;
    return id >= 0 && id < ND_VOCAB_IDS_MAX ? (int32_t)id : -1;
}
