// SPDX-License-Identifier: Apache-2.0
/* The chat template beside a tokenizer, which is known by its text. No Jinja is read. */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/hash.h"
#include "runtime/base/json.h"
#include "runtime/base/log.h"
#include "trainer/corpus/chat.h"

enum { TEMPLATE_BYTES_MAX = 64 << 20 };

static const nd_chat_template templates[] = {
#define ND_CHAT_TEMPLATE(sha256, form, system, prefix, does)                                       \
    {sha256, ND_CHAT_##form, system, prefix, does},
#include "trainer/corpus/chat_templates.def"
#undef ND_CHAT_TEMPLATE
};

/* In place: the two characters \n, which stand for a newline in a literal of Jinja, become one, and
 * one newline at the end goes, which Jinja drops: it writes other white space there. */
static void make_normal(char *text)
{
    char *to = text;
    for (const char *from = text; *from; from++) {
        const bool newline = from[0] == '\\' && from[1] == 'n';
        from += newline;
        *to++ = newline ? '\n' : *from;
    }
    const bool newline = to > text && to[-1] == '\n';
    to -= newline;
    to -= to > text && newline && to[-1] == '\r';
    *to = '\0';
}

/* "chat_template" of a tokenizer_config.json: a text, or a list of which one is named "default". */
static const char *template_of(const json_t *root)
{
    const json_t *value = json_object_get(root, "chat_template");
    size_t i;
    json_t *one;
    json_array_foreach(value, i, one)
    {
        const char *name = json_string_value(json_object_get(one, "name"));
        if (name && strcmp(name, "default") == 0) {
            return json_string_value(json_object_get(one, "template"));
        }
    }
    return json_string_value(value);
}

static nd_status read_config(const char *path, char **out)
{
    char *text = NULL;
    size_t size = 0;
    json_error_t error;
    ND_TRY(nd_fs_read(path, TEMPLATE_BYTES_MAX, ND_ERR_DATA, &text, &size));
    json_t *root = json_loadb(text, size, JSON_ALLOW_NUL | JSON_DECODE_INT_AS_REAL, &error);
    const char *template = template_of(root);
    nd_status status =
        !root && nd_json_no_memory(&error) ? nd_fail_memory("\"%s\"", path)
        : !root    ? nd_fail(ND_ERR_DATA, "\"%s\" line %d: %s", path, error.line, error.text)
        : template ? nd_fs_format(out, "%s", template)
                   : ND_OK;
    json_decref(root);
    free(text);
    return status;
}

nd_status nd_chat_template_read(const char *folder, char **out)
{
    char *path = NULL;
    size_t size;
    bool there = false;
    nd_status status = ND_OK;
    *out = NULL;
    ND_TRY_OUT(nd_fs_format(&path, "%s/chat_template.jinja", folder));
    ND_TRY_OUT(nd_fs_exists(path, &there));
    if (there) {
        status = nd_fs_read(path, TEMPLATE_BYTES_MAX, ND_ERR_DATA, out, &size);
        goto out;
    }
    free(path);
    path = NULL;
    ND_TRY_OUT(nd_fs_format(&path, "%s/tokenizer_config.json", folder));
    ND_TRY_OUT(nd_fs_exists(path, &there));
    status = there ? read_config(path, out) : ND_OK;
out:
    free(path);
    return status;
}

static const nd_chat_template *find_known(const char *hex)
{
    for (size_t i = 0; i < sizeof templates / sizeof *templates; i++) {
        if (strcmp(templates[i].sha256, hex) == 0) {
            return &templates[i];
        }
    }
    return NULL;
}

nd_status nd_chat_template_find(const char *tokenizer, nd_chat_format format,
                                const nd_chat_template **out, bool *foreign)
{
    char *folder = NULL, *text = NULL, hex[65];
    nd_status status = ND_OK;
    *out = NULL;
    *foreign = false;
    if (format == ND_CHAT_NONE || !tokenizer) {
        return ND_OK;
    }
    ND_TRY_OUT(nd_fs_parent(tokenizer, &folder));
    ND_TRY_OUT(nd_chat_template_read(folder, &text));
    if (text) {
        make_normal(text);
        ND_TRY_OUT(nd_sha256(text, strlen(text), hex));
        const nd_chat_template *known = find_known(hex);
        *foreign = !known || known->format != format;
        *out = !*foreign && (known->system || known->prefix || known->does) ? known : NULL;
    }
out:
    free(folder);
    free(text);
    return status;
}

void nd_chat_warn_of_foreign(nd_chat_format format)
{
    nd_log_warning("the chat template beside the tokenizer is not one that is known, so messages "
                   "are written in the plain form of %s; scripts/encode_rows.py writes them with "
                   "the template itself",
                   format == ND_CHAT_LLAMA3 ? "llama3" : "chatml");
}
