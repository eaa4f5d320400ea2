// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/yaml.h"

#include <stdlib.h>
#include <string.h>
#include <yaml.h>

#include "runtime/base/fs.h"

typedef struct reader {
    yaml_parser_t parser;
    const char *name; /* borrowed */
    int nodes;
} reader;

static int line_of(const yaml_event_t *event)
{
    return (int)event->start_mark.line + 1;
}

/*
 * Tabs first: libyaml's own message for them is obscure, and inside some constructs it lets them
 * through. Only the white space a line begins with matters.
 */
static nd_status refuse_tabs(const char *text, size_t bytes, const char *name)
{
    int line = 1;
    for (size_t i = 0; i < bytes; i++, line++) {
        bool tab = false;
        for (; i < bytes && (text[i] == ' ' || text[i] == '\t'); i++) {
            tab |= text[i] == '\t';
        }
        if (tab) {
            return nd_fail(ND_ERR_CONFIG,
                           "%s:%d: the line is indented with a tab; YAML allows only spaces there",
                           name, line);
        }
        while (i < bytes && text[i] != '\n') {
            i++;
        }
    }
    return ND_OK;
}

static nd_status next_event(reader *r, yaml_event_t *event)
{
    if (yaml_parser_parse(&r->parser, event)) {
        return ND_OK;
    }
    const yaml_parser_t *p = &r->parser;
    if (p->error == YAML_MEMORY_ERROR) {
        return nd_fail_memory("reading %s", r->name);
    }
    if (p->error == YAML_READER_ERROR) {
        return nd_fail(ND_ERR_CONFIG, "%s: not a YAML text: %s at byte %zu (value 0x%02x)", r->name,
                       p->problem ? p->problem : "unreadable text", p->problem_offset,
                       (unsigned)p->problem_value);
    }
    return nd_fail(
        ND_ERR_CONFIG,
        "%s:%zu:%zu: broken YAML (%s%s%s); in this line and those above it the keys of a "
        "section need the same indentation and a colon with a space behind it, and "
        "quotes and brackets need their ends",
        r->name, p->problem_mark.line + 1, p->problem_mark.column + 1,
        p->problem ? p->problem : "unreadable text", p->context ? ", " : "",
        p->context ? p->context : "");
}

static nd_status refuse_decoration(const reader *r, const yaml_event_t *event, const char *anchor,
                                   const char *tag)
{
    if (anchor) {
        return nd_fail(ND_ERR_CONFIG,
                       "%s:%d: '&%.40s' is a YAML anchor; anchors and aliases are not supported, "
                       "write the value out in each place",
                       r->name, line_of(event), anchor);
    }
    if (tag) {
        return nd_fail(ND_ERR_CONFIG,
                       "%s:%d: '%.40s' is a YAML tag; remove it, tags have no use here", r->name,
                       line_of(event), tag);
    }
    return ND_OK;
}

static nd_status new_node(reader *r, const yaml_event_t *event, nd_yaml_kind kind,
                          nd_yaml_node **out)
{
    if (++r->nodes > ND_YAML_MAX_NODES) {
        return nd_fail(ND_ERR_CONFIG, "%s:%d: more than %d values; is it the right file?", r->name,
                       line_of(event), ND_YAML_MAX_NODES);
    }
    nd_yaml_node *node;
    ND_TRY(ND_ALLOC(1, &node));
    node->kind = kind;
    node->line = line_of(event);
    *out = node;
    return ND_OK;
}

/* The text of a scalar event, owned by the caller. */
static nd_status take_text(const reader *r, const yaml_event_t *event, char **out)
{
    const char *value = (const char *)event->data.scalar.value;
    size_t length = event->data.scalar.length;
    if (memchr(value, '\0', length)) {
        return nd_fail(ND_ERR_CONFIG, "%s:%d: the value holds a zero byte", r->name,
                       line_of(event));
    }
    char *text;
    ND_TRY(ND_ALLOC(length + 1, &text));
    memcpy(text, value, length);
    *out = text;
    return ND_OK;
}

static nd_status build_node(reader *r, const yaml_event_t *event, int depth, nd_yaml_node **out);

/* Reads one key of a map; *end is set at the end of the map. */
static nd_status read_key(reader *r, const nd_yaml_node *map, bool *end, int *line, char **key)
{
    yaml_event_t event;
    ND_TRY(next_event(r, &event));
    nd_status status = ND_OK;
    *end = event.type == YAML_MAPPING_END_EVENT;
    if (*end) {
        goto out;
    }
    *line = line_of(&event);
    if (event.type == YAML_ALIAS_EVENT) {
        status = nd_fail(ND_ERR_CONFIG, "%s:%d: '*%.40s' is a YAML alias, which is not supported",
                         r->name, *line, (const char *)event.data.alias.anchor);
        goto out;
    }
    if (event.type != YAML_SCALAR_EVENT) {
        status = nd_fail(ND_ERR_CONFIG, "%s:%d: a key must be a plain name, not a map or a list",
                         r->name, *line);
        goto out;
    }
    ND_TRY_OUT(refuse_decoration(r, &event, (const char *)event.data.scalar.anchor,
                                 (const char *)event.data.scalar.tag));
    ND_TRY_OUT(take_text(r, &event, key));
    const nd_yaml_node *first = nd_yaml_find(map, *key);
    if (first) {
        status = nd_fail(ND_ERR_CONFIG, "%s:%d: the key '%.80s' is given twice, first on line %d",
                         r->name, *line, *key, first->line);
        free(*key);
        *key = NULL;
    }
out:
    yaml_event_delete(&event);
    return status;
}

/* Fills a map or a sequence up to its end event. Children hang on the parent at once, so one
 * destroy frees all. */
static nd_status fill_children(reader *r, nd_yaml_node *parent, int depth)
{
    nd_yaml_node **tail = &parent->first;
    for (;;) {
        char *key = NULL;
        int line = 0;
        if (parent->kind == ND_YAML_MAP) {
            bool end;
            ND_TRY(read_key(r, parent, &end, &line, &key));
            if (end) {
                return ND_OK;
            }
        }
        yaml_event_t event;
        nd_status status = next_event(r, &event);
        if (status != ND_OK) {
            free(key);
            return status;
        }
        bool end = event.type == YAML_SEQUENCE_END_EVENT;
        if (!end) {
            status = build_node(r, &event, depth, tail);
        }
        yaml_event_delete(&event);
        if (*tail && key) {
            (*tail)->key = key;
            (*tail)->line = line;
        } else {
            free(key);
        }
        if (status != ND_OK || end) {
            return status;
        }
        tail = &(*tail)->next;
        parent->count++;
    }
}

/* The node that begins with `event`. *out is set even on failure when a part of it exists: the tree
 * owns it. */
static nd_status build_node(reader *r, const yaml_event_t *event, int depth, nd_yaml_node **out)
{
    if (depth > ND_YAML_MAX_DEPTH) {
        return nd_fail(ND_ERR_CONFIG, "%s:%d: nested deeper than %d levels", r->name,
                       line_of(event), ND_YAML_MAX_DEPTH);
    }
    switch (event->type) {
    case YAML_SCALAR_EVENT:
        /* A quoted scalar carries no tag unless one is written; "!" alone is written too. */
        ND_TRY(refuse_decoration(r, event, (const char *)event->data.scalar.anchor,
                                 (const char *)event->data.scalar.tag));
        ND_TRY(new_node(r, event, ND_YAML_SCALAR, out));
        (*out)->quoted = event->data.scalar.style != YAML_PLAIN_SCALAR_STYLE;
        return take_text(r, event, &(*out)->text);
    case YAML_SEQUENCE_START_EVENT:
        ND_TRY(refuse_decoration(r, event, (const char *)event->data.sequence_start.anchor,
                                 (const char *)event->data.sequence_start.tag));
        ND_TRY(new_node(r, event, ND_YAML_SEQUENCE, out));
        return fill_children(r, *out, depth + 1);
    case YAML_MAPPING_START_EVENT:
        ND_TRY(refuse_decoration(r, event, (const char *)event->data.mapping_start.anchor,
                                 (const char *)event->data.mapping_start.tag));
        ND_TRY(new_node(r, event, ND_YAML_MAP, out));
        return fill_children(r, *out, depth + 1);
    case YAML_ALIAS_EVENT:
        return nd_fail(ND_ERR_CONFIG,
                       "%s:%d: '*%.40s' is a YAML alias; anchors and aliases are not supported, "
                       "write the value out in each place",
                       r->name, line_of(event), (const char *)event->data.alias.anchor);
    default:
        return nd_fail(ND_ERR_CONFIG, "%s:%d: unexpected end of a YAML value", r->name,
                       line_of(event));
    }
}

/* Skips stream start and document start; after the root demands the end of document and stream. */
static nd_status read_document(reader *r, nd_yaml_node **root)
{
    for (;;) {
        yaml_event_t event;
        ND_TRY(next_event(r, &event));
        nd_status status = ND_OK;
        yaml_event_type_t type = event.type;
        if (type == YAML_STREAM_START_EVENT || type == YAML_DOCUMENT_END_EVENT ||
            (type == YAML_DOCUMENT_START_EVENT && !*root)) {
            /* nothing to keep */
        } else if (type == YAML_STREAM_END_EVENT) {
            if (!*root) {
                status = nd_fail(ND_ERR_CONFIG, "%s is empty: it holds no YAML value", r->name);
            }
        } else if (type == YAML_DOCUMENT_START_EVENT) {
            status = nd_fail(ND_ERR_CONFIG,
                             "%s:%d: a second YAML document begins here; a file holds one", r->name,
                             line_of(&event));
        } else {
            status = build_node(r, &event, 1, root);
        }
        yaml_event_delete(&event);
        if (status != ND_OK || type == YAML_STREAM_END_EVENT) {
            return status;
        }
    }
}

nd_status nd_yaml_parse(const char *text, size_t bytes, const char *name, nd_yaml_node **out)
{
    if (bytes > ND_YAML_MAX_BYTES) {
        return nd_fail(ND_ERR_CONFIG, "%s is larger than %d bytes; is it the right file?", name,
                       ND_YAML_MAX_BYTES);
    }
    if (bytes >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) {
        text += 3; /* a byte order mark, which libyaml would count as a column of indentation */
        bytes -= 3;
    }
    ND_TRY(refuse_tabs(text, bytes, name));
    reader r = {.name = name};
    if (!yaml_parser_initialize(&r.parser)) {
        return nd_fail_memory("reading %s", name);
    }
    yaml_parser_set_encoding(&r.parser, YAML_UTF8_ENCODING);
    yaml_parser_set_input_string(&r.parser, (const unsigned char *)text, bytes);
    nd_yaml_node *root = NULL;
    nd_status status = read_document(&r, &root);
    yaml_parser_delete(&r.parser);
    if (status != ND_OK) {
        nd_yaml_destroy(root);
        return status;
    }
    *out = root;
    return ND_OK;
}

nd_status nd_yaml_read(const char *path, nd_yaml_node **out)
{
    char *text = NULL;
    size_t bytes = 0;
    ND_TRY(nd_fs_read(path, ND_YAML_MAX_BYTES, ND_ERR_CONFIG, &text, &bytes));
    nd_status status = nd_yaml_parse(text, bytes, path, out);
    free(text);
    return status;
}

void nd_yaml_destroy(nd_yaml_node *root)
{
    /* Siblings in a loop, children by recursion: the depth is limited, the length is not. */
    while (root) {
        nd_yaml_node *next = root->next;
        nd_yaml_destroy(root->first);
        free(root->key);
        free(root->text);
        free(root);
        root = next;
    }
}

const nd_yaml_node *nd_yaml_find(const nd_yaml_node *map, const char *key)
{
    if (map && map->kind == ND_YAML_MAP) {
        for (const nd_yaml_node *n = map->first; n; n = n->next) {
            if (n->key && strcmp(n->key, key) == 0) {
                return n;
            }
        }
    }
    return NULL;
}

bool nd_yaml_is_null(const nd_yaml_node *node)
{
    return node->kind == ND_YAML_SCALAR && !node->quoted &&
           (!*node->text || strcmp(node->text, "~") == 0 || strcmp(node->text, "null") == 0 ||
            strcmp(node->text, "Null") == 0 || strcmp(node->text, "NULL") == 0);
}

const char *nd_yaml_kind_name(nd_yaml_kind kind)
{
    static const char *const names[] = {"a single value", "a list", "a map"};
    return names[kind];
}
