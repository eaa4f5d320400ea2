// SPDX-License-Identifier: Apache-2.0
/*
 * The configuration as text: native YAML, the lines that nodes compare, one key or each key for
 * run.json. All of it is made from the field table.
 */
#include <stdlib.h>
#include <string.h>

#include "runtime/config/reader.h"

static nd_status to_yaml(const nd_config *config, bool to_worker, char **out)
{
    nd_text text = {0};
    const char *section = "";
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        const nd_field *f = &nd_fields[i];
        if (to_worker && i == ND_FIELD_train_sequence_length && !config->sequence_given) {
            continue;
        }
        if (strcmp(section, f->section) != 0) {
            nd_text_append(&text, "%s:\n", f->section);
            section = f->section;
        }
        nd_text_append(&text, "  %s: ", f->key);
        if (f->type == ND_FIELD_TYPE_TEXT || f->type == ND_FIELD_TYPE_LIST) {
            nd_text_append_quoted(&text, *(char *const *)((const char *)config + f->offset));
        } else {
            nd_field_append(&text, config, (nd_field_id)i);
        }
        nd_text_append(&text, "\n");
    }
    return nd_text_finish(&text, out);
}

nd_status nd_config_to_yaml(const nd_config *config, char **out)
{
    return to_yaml(config, false, out);
}

nd_status nd_config_to_worker(const nd_config *config, char **out)
{
    return to_yaml(config, true, out);
}

nd_status nd_config_each(const nd_config *config,
                         void (*visit)(void *, const char *, const char *, bool), void *context)
{
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        char *value = NULL;
        ND_TRY(nd_field_format(config, (nd_field_id)i, &value));
        visit(context, nd_fields[i].name, value, nd_fields[i].job);
        free(value);
    }
    return ND_OK;
}

nd_status nd_config_job_text(const nd_config *config, char **out)
{
    nd_text text = {0};
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        if (nd_fields[i].job) {
            nd_text_append(&text, "%s=", nd_fields[i].name);
            nd_field_append(&text, config, (nd_field_id)i);
            nd_text_append(&text, "\n");
        }
    }
    return nd_text_finish(&text, out);
}

nd_status nd_config_diff(const char *text_a, const char *name_a, const char *text_b,
                         const char *name_b)
{
    const char *a = text_a, *b = text_b;
    while (*a || *b) {
        size_t na = strcspn(a, "\n"), nb = strcspn(b, "\n");
        if (na == nb && memcmp(a, b, na) == 0) {
            a += na + (a[na] == '\n');
            b += nb + (b[nb] == '\n');
            continue;
        }
        size_t ka = strcspn(a, "=\n"), kb = strcspn(b, "=\n");
        if (ka == kb && memcmp(a, b, ka) == 0 && a[ka] == '=' && b[kb] == '=') {
            return nd_fail(ND_ERR_CONFIG,
                           "the nodes have different configurations: %.*s is '%.*s' on %s but "
                           "'%.*s' on %s; start every node with the same settings",
                           (int)ka, a, (int)(na - ka - 1), a + ka + 1, name_a, (int)(nb - kb - 1),
                           b + kb + 1, name_b);
        }
        return nd_fail(ND_ERR_CONFIG,
                       "the nodes have different configurations: %s has '%.*s' where %s has "
                       "'%.*s'; start every node with the same version and settings",
                       name_a, (int)na, a, name_b, (int)nb, b);
    }
    return ND_OK;
}

nd_status nd_config_get(const nd_config *config, const char *key, char **out)
{
    const int id = nd_field_find(key);
    *out = NULL;
    return id >= 0 ? nd_field_format(config, (nd_field_id)id, out) : nd_text_replace(out, "");
}
