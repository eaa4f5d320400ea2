// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CONFIG_SOURCES_H
#define ND_CONFIG_SOURCES_H
/*
 * The files that data.path and data.validation_path name. Their value is one text:
 *   data/train.txt                                  a file, a folder or a pattern
 *   0.7 web 0.3 code                                weights and paths, as Megatron-LM writes them
 *   [a, b]                                          several, as one text
 *   [{path: a, weight: 0.7, epochs: 2, name: web}]  weight, epochs and name may be left out
 *   {web: a, code: {path: b, weight: 0.3}}          names and paths
 * In a file the last three may be written as YAML, over several lines. A text that is the name of
 * an existing file or folder is that one path.
 */
#include "runtime/base/status.h"
#include "runtime/base/yaml.h"

enum { ND_DATA_SOURCES_MAX = 256, ND_DATA_SOURCE_NAME = 48 };

typedef struct nd_data_source {
    char *path; /* owned */
    /* Given, or made of the path's last component; letters, digits, dot, underscore and hyphen;
     * unlike those of the other sources. */
    char name[ND_DATA_SOURCE_NAME];
    double weight, epochs; /* 0: not given */
    bool named;            /* the name was given */
} nd_data_source;

typedef struct nd_data_sources {
    nd_data_source *list; /* owned */
    int count;
} nd_data_sources;

/*
 * `key` is the setting's name in messages, and `where` what they begin with ("file.yaml:12: ", or
 * ""). All sources have weights, or none has; without weights all have epochs, or none has.
 * ND_ERR_CONFIG says what is wrong.
 */
nd_status nd_data_sources_read(const char *where, const char *key, const char *text,
                               nd_data_sources *out);
/* The text that nd_data_sources_read reads for a node of the YAML file; owned by the caller.
 * Messages have the file's lines. */
nd_status nd_data_sources_flatten(const char *file, const char *key, const nd_yaml_node *node,
                                  char **out);
void nd_data_sources_fini(nd_data_sources *sources); /* an all-zero one is legal */

#endif
