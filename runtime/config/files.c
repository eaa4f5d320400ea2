// SPDX-License-Identifier: Apache-2.0
/*
 * Configuration files: native ones, which have sections of keys, and accelerate's, with a fixed set
 * of keys (names.def).
 */
#include <stdlib.h>
#include <string.h>

#include "runtime/base/log.h"
#include "runtime/config/reader.h"
#include "runtime/config/sources.h"

enum { WHERE_MAX = 600 };

static const char *format_where(char where[WHERE_MAX], const char *file, const nd_yaml_node *node)
{
    snprintf(where, WHERE_MAX, "%.500s:%d: ", file, node->line);
    return where;
}

static nd_status fail_no_map(const char *where, const char *what, const nd_yaml_node *node)
{
    return nd_fail(ND_ERR_CONFIG, "%s%s is %s; it must be a map of keys", where, what,
                   nd_yaml_kind_name(node->kind));
}

/* A scalar or a list of scalars as text: *out is owned by the caller. */
static nd_status flatten(const nd_yaml_node *node, const char *where, const char *name, char **out)
{
    nd_text text;
    ND_REFUSE(node->kind == ND_YAML_MAP, "%s%s is a map of keys; it must be a single value", where,
              name);
    for (const nd_yaml_node *n = node->first; n; n = n->next) {
        ND_REFUSE(n->kind != ND_YAML_SCALAR,
                  "%s%s holds %s inside a list; its items must be single values", where, name,
                  nd_yaml_kind_name(n->kind));
    }
    ND_TRY(nd_text_begin(&text));
    fputs(node->kind == ND_YAML_SCALAR ? node->text : "[", text.out);
    for (const nd_yaml_node *n = node->first; n; n = n->next) {
        fprintf(text.out, "%s%s", n == node->first ? "" : ", ", n->text);
    }
    fputs(node->kind == ND_YAML_SCALAR ? "" : "]", text.out);
    return nd_text_finish(&text, out);
}

/* Native files. */

/* The keys of the section, and the nearest one, which may be of another section. */
static nd_status fail_key(const char *where, const char *section, const char *key)
{
    const char *of = section, *near = NULL;
    char keys[1024] = "";
    nd_suggest search;
    nd_suggest_init(&search, key);
    for (nd_axis a = 0; a < ND_AXIS_COUNT; a++) {
        ND_REFUSE(nd_axis_reserved(a) && strcmp(section, "mesh") == 0 &&
                      strcmp(key, nd_axis_name(a)) == 0,
                  "%smesh.%s: %s; remove it", where, key, nd_axis_reserved(a));
    }
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        const nd_field *f = &nd_fields[i];
        const size_t used = strlen(keys);
        if (strcmp(f->section, section) == 0) {
            nd_suggest_offer(&search, f->key);
            snprintf(keys + used, sizeof keys - used, "%s%s", used ? ", " : "", f->key);
        } else if (!near && strcmp(f->key, key) == 0) {
            near = key;
            of = f->section;
        }
    }
    return nd_fail(ND_ERR_CONFIG,
                   search.best || near ? "%sunknown key '%s.%.80s'; did you mean %s.%s?"
                                       : "%sunknown key '%s.%.80s'; the keys of %s are %s",
                   where, section, key, search.best ? section : of,
                   search.best ? search.best
                   : near      ? near
                               : keys);
}

static nd_status fail_section(const char *where, const char *key)
{
    char names[256] = "";
    nd_suggest search;
    nd_suggest_init(&search, key);
    for (int i = 0; i < ND_SECTION_COUNT; i++) {
        const size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", nd_sections[i].name);
        nd_suggest_offer(&search, nd_sections[i].name);
    }
    nd_names_offer(ND_MAP_TOP, &search);
    for (int m = ND_MAP_FSDP; m < ND_MAP_COUNT; m++) {
        nd_suggest_offer(&search, nd_maps[m].key);
    }
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        ND_REFUSE(strcmp(nd_fields[i].key, key) == 0,
                  "%sunknown section '%.80s'; the key belongs in a section: %s", where, key,
                  nd_fields[i].name);
    }
    return nd_fail(ND_ERR_CONFIG,
                   search.best ? "%sunknown section '%.80s'; did you mean %s?"
                               : "%sunknown section '%.80s'; the sections are %s",
                   where, key, search.best ? search.best : names);
}

static nd_status read_key(nd_reader *reader, const char *section, const nd_yaml_node *node,
                          const char *file)
{
    char where[WHERE_MAX], name[128], *text = NULL;
    snprintf(name, sizeof name, "%s.%s", section, node->key);
    const int id = nd_field_find(name);
    const bool is_null = nd_yaml_is_null(node);
    format_where(where, file, node);
    if (id < 0) {
        return fail_key(where, section, node->key);
    }
    const nd_field *f = &nd_fields[id];
    const bool is_text = f->type == ND_FIELD_TYPE_LIST || f->type == ND_FIELD_TYPE_TEXT;
    const bool is_list = f->type == ND_FIELD_TYPE_LIST || f->type == ND_FIELD_TYPE_CHOICES ||
                         f->type == ND_FIELD_TYPE_PAIR;
    const bool sources = node->kind != ND_YAML_SCALAR && nd_field_is_sources((nd_field_id)id);
    ND_REFUSE(is_null && !is_text, "%s%s has no value; give one or remove the line (%s)", where,
              name, f->help);
    ND_REFUSE(node->kind == ND_YAML_SEQUENCE && !sources && !is_list,
              "%s%s is a list; it must be a single value (%s)", where, name, f->help);
    ND_TRY(sources ? nd_data_sources_flatten(file, name, node, &text)
                   : flatten(node, where, name, &text));
    const nd_setting setting = {where, name, is_null ? "" : text, sources || node->quoted};
    nd_status status = nd_reader_set(reader, (nd_field_id)id, &setting);
    free(text);
    return status;
}

static nd_status read_native(nd_reader *reader, const nd_yaml_node *root, const char *file)
{
    for (const nd_yaml_node *s = root->first; s; s = s->next) {
        char where[WHERE_MAX], what[128];
        format_where(where, file, s);
        if (nd_section_find(s->key) < 0) {
            return fail_section(where, s->key);
        }
        if (nd_yaml_is_null(s)) {
            continue;
        }
        if (s->kind != ND_YAML_MAP) {
            snprintf(what, sizeof what, "section %s", s->key);
            return fail_no_map(where, what, s);
        }
        for (const nd_yaml_node *n = s->first; n; n = n->next) {
            ND_TRY(read_key(reader, s->key, n, file));
        }
    }
    return ND_OK;
}

/* accelerate's files. */

/* Maps of engines that do not exist here; empty ones are taken. */
static bool is_foreign_map(const char *key)
{
    return strcmp(key, "deepspeed_config") == 0 || strcmp(key, "megatron_lm_config") == 0;
}

/* ND_MAP_TOP: none. */
static nd_map_id find_map(const char *key)
{
    nd_map_id m = ND_MAP_FSDP;
    while (m < ND_MAP_COUNT && strcmp(nd_maps[m].key, key) != 0) {
        m++;
    }
    return m < ND_MAP_COUNT ? m : ND_MAP_TOP;
}

static nd_status fail_foreign_key(nd_map_id map, const char *where, const char *name)
{
    nd_suggest search;
    nd_suggest_init(&search, name);
    nd_names_offer(map, &search);
    for (int m = ND_MAP_FSDP; map == ND_MAP_TOP && m < ND_MAP_COUNT; m++) {
        ND_REFUSE(nd_name_find((nd_map_id)m, name),
                  "%s%.80s is a key of %s; indent it, and the keys like it, below %s:", where, name,
                  nd_maps[m].key, nd_maps[m].key);
        nd_suggest_offer(&search, nd_maps[m].key);
    }
    return nd_fail(ND_ERR_CONFIG, "%sunknown key '%s%s%.80s' of an accelerate configuration%s%s%s",
                   where, nd_maps[map].key, map == ND_MAP_TOP ? "" : ".", name,
                   search.best ? "; did you mean " : "; remove it", search.best ? search.best : "",
                   search.best ? "?" : "");
}

static nd_status read_foreign_key(nd_reader *reader, nd_map_id map, const nd_yaml_node *node,
                                  const char *file)
{
    char where[WHERE_MAX], *text = NULL;
    const nd_name *name = nd_name_find(map, node->key);
    format_where(where, file, node);
    if (!name) {
        return fail_foreign_key(map, where, node->key);
    }
    if (name->kind == ND_NAME_IGNORED) {
        return nd_name_apply(reader, name, &(nd_setting){where, node->key, "", false});
    }
    if (nd_yaml_is_null(node)) {
        return ND_OK; /* accelerate's value for "not given" */
    }
    ND_REFUSE(name->kind == ND_NAME_SETS && reader->set_by[name->field] == reader->layer,
              "%s%s: the file gives this key under its other name too; keep one of them", where,
              node->key);
    ND_TRY(flatten(node, where, node->key, &text));
    nd_setting setting = {where, node->key, text, false};
    nd_status status = nd_name_apply(reader, name, &setting);
    free(text);
    return status;
}

static nd_status read_map(nd_reader *reader, nd_map_id map, const nd_yaml_node *node,
                          const char *file)
{
    char where[WHERE_MAX];
    if (nd_yaml_is_null(node)) {
        return ND_OK;
    }
    if (node->kind != ND_YAML_MAP) {
        return fail_no_map(format_where(where, file, node), node->key, node);
    }
    for (const nd_yaml_node *n = node->first; n; n = n->next) {
        ND_TRY(read_foreign_key(reader, map, n, file));
    }
    return ND_OK;
}

/* Refuses a file that lacks accelerate's own keys; other missing ones get accelerate's values. */
static nd_status complete_accelerate(nd_reader *reader, const char *file)
{
    const int64_t workers = reader->config->launch.workers;
    const int distributed = reader->state[ND_STATE_DISTRIBUTED];
    ND_REFUSE(distributed == 0,
              "%s has no distributed_type; accelerate's files need one of NO, MULTI_GPU, MULTI_CPU "
              "and FSDP",
              file);
    ND_REFUSE(distributed == ND_DISTRIBUTED_NO && workers > 1,
              "%s: distributed_type is NO but num_processes is %lld; use MULTI_GPU or FSDP, or one "
              "process",
              file, nd_ll(workers));
    if (distributed == ND_DISTRIBUTED_NO) {
        ND_TRY(nd_reader_put(reader, ND_FIELD_launch_workers, "1"));
    }
    if (reader->set_by[ND_FIELD_train_precision] != reader->layer && !reader->no_fp16[0]) {
        ND_TRY(nd_reader_put(reader, ND_FIELD_train_precision, "fp32"));
        nd_log_info("%s has no mixed_precision, so the precision is fp32, as in accelerate, unless "
                    "a flag such as --precision bf16 changes it",
                    file);
    }
    reader->config->from_accelerate = true; /* the reader sets the axes at its end */
    return ND_OK;
}

static nd_status read_accelerate(nd_reader *reader, const nd_yaml_node *root, const char *file)
{
    for (const nd_yaml_node *n = root->first; n; n = n->next) {
        const nd_map_id map = find_map(n->key);
        ND_REFUSE(is_foreign_map(n->key) && !nd_yaml_is_null(n) && n->count > 0,
                  "%s:%d: %s: this engine does not exist here; use distributed_type: FSDP with "
                  "fsdp_config and parallelism_config",
                  file, n->line, n->key);
        if (!is_foreign_map(n->key)) {
            ND_TRY(map == ND_MAP_TOP ? read_foreign_key(reader, map, n, file)
                                     : read_map(reader, map, n, file));
        }
    }
    return complete_accelerate(reader, file);
}

nd_status nd_read_yaml(nd_reader *reader, const nd_yaml_node *root, const char *file)
{
    const nd_yaml_node *native = NULL, *accelerate = NULL;
    ND_REFUSE(root->kind != ND_YAML_MAP, "%s:%d: the file is %s; it must be a map of sections",
              file, root->line, nd_yaml_kind_name(root->kind));
    for (const nd_yaml_node *n = root->first; n; n = n->next) {
        native = !native && nd_section_find(n->key) >= 0 ? n : native;
        if (!accelerate && (nd_name_find(ND_MAP_TOP, n->key) || find_map(n->key) != ND_MAP_TOP ||
                            is_foreign_map(n->key))) {
            accelerate = n;
        }
    }
    ND_REFUSE(native && accelerate,
              "%s holds the section %s (line %d) and accelerate's key %s (line %d); write the file "
              "in one of the two forms",
              file, native->key, native->line, accelerate->key, accelerate->line);
    return accelerate ? read_accelerate(reader, root, file) : read_native(reader, root, file);
}
