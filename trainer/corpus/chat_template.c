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
#define ND_CHAT_TEMPLATE(...)
#include "trainer/corpus/chat_templates.def"
    FORMS
};

const nd_chat_form nd_chat_forms[FORMS + 1] = {
#define ND_CHAT_FORM(name, ...) {__VA_ARGS__},
#define ND_CHAT_TEMPLATE(...)
#include "trainer/corpus/chat_templates.def"
};

/* The forms by name are first. */
static const nd_chat_template templates[] = {
#define ND_CHAT_FORM(...)
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
    to -= to > text && to[-1] == '\n';
    to -= to > text && to[-1] == '\r';
    *to = '\0';
}

nd_status nd_chat_template_read(const char *folder, char **out)
{
    char *path = NULL;
    size_t size, i;
    json_t *config = NULL, *one;
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
    const json_t *all = json_object_get(config, "chat_template"), *template = all;
    json_array_foreach(all, i, one)
    {
        const char *name = json_string_value(json_object_get(one, "name"));
        template =
            name &&strcmp(name, "default") == 0 ? json_object_get(one, "template") : template;
    }
    const char *text = json_string_value(template);
    status = text ? nd_fs_format(out, "%s", text) : ND_OK;
out:
    json_decref(config);
    free(path);
    return status;
}

/* Reads the files beside a tokenizer: the template, if that is known, and bos and eos tokens. */
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
        for (size_t i = 0; i < sizeof templates / sizeof *templates; i++) {
            *known = strcmp(templates[i].sha256, hex) == 0 ? &templates[i] : *known;
        }
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
    } else if (t) {
        nd_log_info("chat form: %s%s", t->sha256[0] ? "that of the model's chat template" : name,
                    t->prefix ? ", with the date in it for programs without a clock in place of "
                                "the date of the day"
                              : "");
    }
}
