// SPDX-License-Identifier: Apache-2.0
/* The chat template beside a tokenizer, which is known by its text. No Jinja is read. */
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/hash.h"
#include "runtime/base/log.h"
#include "trainer/corpus/chat.h"

enum { TEMPLATE_BYTES_MAX = 64 << 20 };

enum {
#define ND_CHAT_FORM(name, ...) FORM_##name,
#include "trainer/corpus/chat_templates.def"
    FORMS
};

const nd_chat_form nd_chat_forms[FORMS] = {
#define ND_CHAT_FORM(name, begin, s_open, s_close, u_open, u_close, a_open, a_close, ...)          \
    {begin, {{s_open, s_close}, {u_open, u_close}, {a_open, a_close}}, __VA_ARGS__},
#include "trainer/corpus/chat_templates.def"
};

const int nd_chat_form_count = FORMS;

/* The forms by name are first. */
static const nd_chat_template templates[] = {
#define ND_CHAT_TEMPLATE(sha256, form, system, prefix, does)                                       \
    {sha256, &nd_chat_forms[FORM_##form], system, prefix, does},
#include "trainer/corpus/chat_templates.def"
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

nd_status nd_chat_template_read(const char *folder, char **out)
{
    char *path = NULL;
    size_t size;
    json_t *config = NULL;
    bool there = false;
    nd_status status = ND_OK;
    *out = NULL;
    ND_TRY_OUT(nd_fs_format(&path, "%s/chat_template.jinja", folder));
    ND_TRY_OUT(nd_fs_exists(path, &there));
    if (there) {
        status = nd_fs_read(path, TEMPLATE_BYTES_MAX, ND_ERR_DATA, out, &size);
        goto out;
    }
    ND_TRY_OUT(nd_tokenizer_config_read(folder, &config));
    const char *template = template_of(config);
    status = template ? nd_fs_format(out, "%s", template) : ND_OK;
out:
    json_decref(config);
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

nd_chat_choice nd_chat_choice_of(const char *name)
{
    static const char *const names[] = {"none", "llama3", "chatml", "model"};
    nd_chat_choice i = ND_CHOOSE_CHAT_MODEL;
    while (i > ND_CHOOSE_CHAT_NONE && (!name || strcmp(names[i], name) != 0)) {
        i--;
    }
    return i;
}

/* What the files beside a tokenizer say: its template, if that is known, and its tokens. */
static nd_status read_beside(const char *tokenizer, const nd_chat_template **known,
                             nd_chat_rules *out)
{
    char *folder = NULL, *text = NULL, hex[65];
    json_t *config = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_fs_parent(tokenizer, &folder));
    ND_TRY_OUT(nd_chat_template_read(folder, &text));
    ND_TRY_OUT(nd_tokenizer_config_read(folder, &config));
    const char *bos = nd_tokenizer_config_token(config, "bos_token");
    const char *eos = nd_tokenizer_config_token(config, "eos_token");
    snprintf(out->bos, sizeof out->bos, "%s", bos ? bos : "");
    snprintf(out->eos, sizeof out->eos, "%s", eos ? eos : "");
    if (text) {
        make_normal(text);
        ND_TRY_OUT(nd_sha256(text, strlen(text), hex));
        *known = find_known(hex);
        out->foreign = true; /* until it is used */
    }
out:
    json_decref(config);
    free(folder);
    free(text);
    return status;
}

nd_status nd_chat_rules_find(const char *tokenizer, nd_chat_choice choice, nd_chat_rules *out)
{
    const bool own = choice == ND_CHOOSE_CHAT_MODEL;
    const nd_chat_template *known = NULL;
    *out = (nd_chat_rules){0};
    if (choice == ND_CHOOSE_CHAT_NONE) {
        return ND_OK;
    }
    ND_TRY(tokenizer ? read_beside(tokenizer, &known, out) : ND_OK);
    out->template = own ? known : &templates[choice - 1];
    if (known && known->form == out->template->form) {
        out->template = known;
        out->foreign = false;
    }
    return out->template
               ? ND_OK
               : nd_fail(
                     ND_ERR_DATA,
                     "data.chat_format (--chat-format) is model, but %s; scripts/encode_rows.py "
                     "writes messages with the template itself, and llama3 and chatml are forms "
                     "without one",
                     out->foreign ? "the chat template beside the tokenizer is none that is known"
                                  : "there is no chat template beside the tokenizer");
}

void nd_chat_rules_tell(const nd_chat_rules *rules)
{
    const nd_chat_template *t = rules->template;
    const char *name = t == templates ? "llama3" : "chatml";
    if (rules->foreign) {
        nd_log_warning("the chat template beside the tokenizer is not one that is known, or not of "
                       "the form that data.chat_format names, so messages are written in the plain "
                       "form of %s; --chat-format model takes a template of any form that is "
                       "known, and scripts/encode_rows.py writes them with the template itself",
                       name);
    } else if (t && t->sha256[0]) {
        nd_log_info("messages are written as the model's chat template writes them%s",
                    t->does & ND_DATED ? ", with the date in it for programs without a clock in "
                                         "place of the date of the day"
                                       : "");
    } else if (t) {
        nd_log_info("chat form: %s", name);
    }
}
