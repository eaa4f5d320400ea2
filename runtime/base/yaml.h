// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_YAML_H
#define ND_BASE_YAML_H
/*
 * YAML as a small tree of nodes with line numbers, on libyaml's event API: the part of YAML that
 * configuration files use (maps, sequences, scalars of any style, comments). A UTF-8 byte order
 * mark at the beginning is skipped.
 *
 * Refused with a sentence (ND_ERR_CONFIG, "FILE:LINE: ..."): broken syntax, tabs as indentation, a
 * doubled key, keys that are not plain names, anchors, aliases and tags, several documents, zero
 * bytes, too large or too deep input. The tree owns all its strings; every pointer into it is valid
 * until nd_yaml_destroy.
 */
#include <stdbool.h>
#include <stddef.h>

#include "runtime/base/status.h"

enum { ND_YAML_MAX_BYTES = 256 * 1024, ND_YAML_MAX_DEPTH = 16, ND_YAML_MAX_NODES = 4096 };

typedef enum nd_yaml_kind { ND_YAML_SCALAR = 0, ND_YAML_SEQUENCE, ND_YAML_MAP } nd_yaml_kind;

typedef struct nd_yaml_node {
    nd_yaml_kind kind;
    int line;    /* from 1; of the key when the node is an entry of a map */
    char *key;   /* entry of a map; else NULL */
    char *text;  /* scalar; else NULL */
    bool quoted; /* scalar in quotes or a block scalar: never null, a number or a boolean */
    int count;   /* children of a map or sequence */
    struct nd_yaml_node *first, *next;
} nd_yaml_node;

/* `name` stands for the text in messages. An empty text has no root and fails. *out is owned by the
 * caller. */
nd_status nd_yaml_parse(const char *text, size_t bytes, const char *name, nd_yaml_node **out);
nd_status nd_yaml_read(const char *path, nd_yaml_node **out);
void nd_yaml_destroy(nd_yaml_node *root);

/* Entry of a map, NULL when absent (or when `map` is no map). */
const nd_yaml_node *nd_yaml_find(const nd_yaml_node *map, const char *key);

/* A plain scalar that YAML reads as nothing: empty, ~ or null. */
bool nd_yaml_is_null(const nd_yaml_node *node);

const char *nd_yaml_kind_name(nd_yaml_kind kind); /* "a map", "a list", "a single value" */

#endif
