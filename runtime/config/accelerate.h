// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CONFIG_ACCELERATE_H
#define ND_CONFIG_ACCELERATE_H
/* The table of accelerate's keys, made of accelerate_keys.def. Internal to read_accelerate.c,
 * accelerate_take.c. */
#include "runtime/config/reader.h"

/* The file itself and its sub-maps. */
typedef enum nd_accelerate_map {
    ND_ACCELERATE_TOP = 0,
    ND_ACCELERATE_FSDP,
    ND_ACCELERATE_PARALLELISM,
    ND_ACCELERATE_FP8,
    ND_ACCELERATE_DYNAMO,
    ND_ACCELERATE_MAP_COUNT
} nd_accelerate_map;

struct nd_accelerate_key {
    nd_accelerate_map map;
    const char *name;
    nd_field_id field;    /* ND_FIELD_COUNT: none */
    const char *values;   /* what alone is accepted, or NULL */
    const char *sentence; /* why the rest is not */
    nd_status (*take)(nd_reader *reader, const nd_accelerate_key *key, const nd_given *given);
};

extern const nd_accelerate_key nd_accelerate_keys[];
extern const int nd_accelerate_key_count;

/* It has no meaning here: named in a notice. */
bool nd_accelerate_is_idle(const nd_accelerate_key *key);
/* As a flag it may stand without a value. */
bool nd_accelerate_is_switch(const nd_accelerate_key *key);

#endif
