// SPDX-License-Identifier: Apache-2.0
#include <stdlib.h>
#include <string.h>

#include "runtime/base/suggest.h"
#include "runtime/config/reader.h"
#include "runtime/config/sources.h"

static nd_status unknown_key(const char *where, const char *section, const char *key)
{
    nd_suggest search;
    nd_suggest_init(&search, key);
    const char *elsewhere = NULL;
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        if (strcmp(nd_fields[i].section, section) == 0) {
            nd_suggest_offer(&search, nd_fields[i].key);
        } else if (strcmp(nd_fields[i].key, key) == 0 && !elsewhere) {
            elsewhere = nd_fields[i].section;
        }
    }
    for (nd_axis a = 0; a < ND_AXIS_COUNT; a++) {
        if (nd_axis_reserved(a) && strcmp(section, "mesh") == 0 &&
            strcmp(key, nd_axis_name(a)) == 0) {
            return nd_fail(ND_ERR_CONFIG, "%smesh.%s: %s; remove it", where, key,
                           nd_axis_reserved(a));
        }
    }
    if (search.best) {
        return nd_fail(ND_ERR_CONFIG, "%sunknown key '%s.%.80s'; did you mean %s.%s?", where,
                       section, key, section, search.best);
    }
    if (elsewhere) {
        return nd_fail(ND_ERR_CONFIG, "%sunknown key '%s.%.80s'; did you mean %s.%s?", where,
                       section, key, elsewhere, key);
    }
    nd_text list = {0};
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        if (strcmp(nd_fields[i].section, section) == 0) {
            nd_text_append(&list, "%s%s", list.used ? ", " : "", nd_fields[i].key);
        }
    }
    char *names = NULL;
    ND_TRY(nd_text_finish(&list, &names));
    nd_fail(ND_ERR_CONFIG, "%sunknown key '%s.%.80s'; the keys of %s are %s", where, section, key,
            section, names);
    free(names);
    return ND_ERR_CONFIG;
}

static void offer(void *search, const char *name)
{
    nd_suggest_offer(search, name);
}

static nd_status unknown_section(const char *where, const char *key)
{
    nd_suggest search;
    nd_suggest_init(&search, key);
    for (int i = 0; i < ND_SECTION_COUNT; i++) {
        nd_suggest_offer(&search, nd_sections[i].name);
    }
    nd_accelerate_each_top_key(offer, &search);
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        if (strcmp(nd_fields[i].key, key) == 0) {
            return nd_fail(ND_ERR_CONFIG,
                           "%sunknown section '%.80s'; the key belongs in a section: %s.%s", where,
                           key, nd_fields[i].section, key);
        }
    }
    if (search.best) {
        return nd_fail(ND_ERR_CONFIG, "%sunknown section '%.80s'; did you mean %s?", where, key,
                       search.best);
    }
    char names[256] = "";
    for (int i = 0; i < ND_SECTION_COUNT; i++) {
        size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", nd_sections[i].name);
    }
    return nd_fail(ND_ERR_CONFIG, "%sunknown section '%.80s'; the sections are %s", where, key,
                   names);
}

/* Sources as a YAML list or map, kept as one text. */
static nd_status read_sources(nd_reader *reader, nd_field_id id, const nd_yaml_node *node,
                              const char *file)
{
    char where[600], name[128], *text = NULL;
    nd_data_sources sources;
    snprintf(where, sizeof where, "%.500s:%d: ", file, node->line);
    snprintf(name, sizeof name, "%s.%s", nd_fields[id].section, nd_fields[id].key);
    ND_TRY(nd_data_sources_of_node(file, name, node, &sources));
    nd_status status = nd_data_sources_format(&sources, &text);
    nd_data_sources_fini(&sources);
    ND_TRY(status);
    nd_setting setting = {where, name, text, true};
    status = nd_reader_set(reader, id, &setting);
    free(text);
    return status;
}

static nd_status read_key(nd_reader *reader, const char *section, const nd_yaml_node *node,
                          const char *file)
{
    char where[600], name[128];
    snprintf(where, sizeof where, "%.500s:%d: ", file, node->line);
    int id = nd_field_find(section, node->key);
    if (id < 0) {
        return unknown_key(where, section, node->key);
    }
    const nd_field *f = &nd_fields[id];
    snprintf(name, sizeof name, "%s.%s", section, f->key);
    bool is_text = f->type == ND_FIELD_TYPE_LIST || (f->type == ND_FIELD_TYPE_TEXT && !f->choices);
    if (nd_yaml_is_null(node) && !is_text) {
        return nd_fail(ND_ERR_CONFIG, "%s%s has no value; give one or remove the line (%s)", where,
                       name, f->help);
    }
    if (node->kind != ND_YAML_SCALAR && nd_field_is_sources((nd_field_id)id)) {
        return read_sources(reader, (nd_field_id)id, node, file);
    }
    if (node->kind == ND_YAML_SEQUENCE && f->type != ND_FIELD_TYPE_LIST &&
        f->type != ND_FIELD_TYPE_CHOICES && f->type != ND_FIELD_TYPE_PAIR) {
        return nd_fail(ND_ERR_CONFIG, "%s%s is a list; it must be a single value (%s)", where, name,
                       f->help);
    }
    char *text = NULL;
    ND_TRY(nd_reader_flatten(node, where, name, &text));
    nd_setting setting = {where, name, nd_yaml_is_null(node) ? "" : text, node->quoted};
    nd_status status = nd_reader_set(reader, (nd_field_id)id, &setting);
    free(text);
    return status;
}

static nd_status read_native(nd_reader *reader, const nd_yaml_node *root, const char *file)
{
    for (const nd_yaml_node *s = root->first; s; s = s->next) {
        char where[600];
        snprintf(where, sizeof where, "%.500s:%d: ", file, s->line);
        if (nd_section_find(s->key) < 0) {
            return unknown_section(where, s->key);
        }
        if (nd_yaml_is_null(s)) {
            continue;
        }
        if (s->kind != ND_YAML_MAP) {
            return nd_fail(ND_ERR_CONFIG, "%ssection %s is %s; it must be a map of keys", where,
                           s->key, nd_yaml_kind_name(s->kind));
        }
        for (const nd_yaml_node *n = s->first; n; n = n->next) {
            ND_TRY(read_key(reader, s->key, n, file));
        }
    }
    return ND_OK;
}

nd_status nd_read_yaml(nd_reader *reader, const nd_yaml_node *root, const char *file)
{
    if (root->kind != ND_YAML_MAP) {
        return nd_fail(ND_ERR_CONFIG, "%s:%d: the file is %s; it must be a map of sections", file,
                       root->line, nd_yaml_kind_name(root->kind));
    }
    const nd_yaml_node *native = NULL, *accelerate = NULL;
    for (const nd_yaml_node *n = root->first; n; n = n->next) {
        if (!native && (nd_section_find(n->key) >= 0)) {
            native = n;
        }
        if (!accelerate && nd_accelerate_is_top_key(n->key)) {
            accelerate = n;
        }
    }
    if (native && accelerate) {
        return nd_fail(ND_ERR_CONFIG,
                       "%s holds the section %s (line %d) and accelerate's key %s (line %d); write "
                       "the file in one of the two forms",
                       file, native->key, native->line, accelerate->key, accelerate->line);
    }
    return accelerate ? nd_read_accelerate(reader, root, file) : read_native(reader, root, file);
}
