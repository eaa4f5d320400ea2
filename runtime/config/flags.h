// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CONFIG_FLAGS_H
#define ND_CONFIG_FLAGS_H
/*
 * The command line: names and values of flags, what each does to a reader. Internal to
 * runtime/config.
 *
 * A name is written with '-' or '_'; the table's names use '-'. A word of a list such as "num-steps
 * steps" is compared whole.
 */
#include <stdbool.h>
#include <stddef.h>

#include "runtime/config/reader.h"

enum { ND_FLAG_NAME_MAX = 96 };

/* A flag that accelerate, torchrun or Finetrainers know and that is not simply a key's. */
typedef struct nd_flag {
    const char *names; /* space-separated */
    bool is_switch;
    nd_status (*take)(nd_reader *reader, const nd_given *given); /* NULL: refused */
    const char *sentence;                                        /* why */
} nd_flag;

extern const nd_flag nd_flags_known[];
extern const int nd_flags_known_count;

/* Does the space-separated list hold the name? */
bool nd_flag_list_holds(const char *list, const char *name);
/* Word number `index` of such a list into buffer; false when there are fewer. */
bool nd_flag_list_word(const char *list, int index, char *buffer, size_t size);

/* The field whose flag (or section.key) this is, -1 when none. */
int nd_flag_find_field(const char *name);

/* launch.nproc_per_node: a number, or torchrun's auto, gpu (the GPUs that are visible), cpu (NUMA
 * nodes). */
nd_status nd_flag_take_per_node(nd_reader *reader, const nd_given *given);

/* --config-file's value, or NULL; more than one fails. Also finds --help and --version. */
nd_status nd_flags_scan(int argc, char **argv, const char **config_file, nd_cli *cli);
/* Applies everything but --config-file, in order. */
nd_status nd_flags_apply(nd_reader *reader, nd_cli *cli, int argc, char **argv);

#endif
