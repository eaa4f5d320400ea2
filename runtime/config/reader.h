// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CONFIG_READER_H
#define ND_CONFIG_READER_H
/*
 * What happens between defaults and a filled nd_config: layers (file, command line) that set
 * fields, and what accelerate's keys leave to be settled when a layer is complete. Internal to
 * runtime/config.
 */
#include <stdint.h>

#include "runtime/base/yaml.h"
#include "runtime/config/fields.h"

typedef enum nd_layer { ND_LAYER_DEFAULT = 0, ND_LAYER_FILE, ND_LAYER_FLAGS } nd_layer;

typedef enum nd_distributed {
    ND_DISTRIBUTED_UNSAID = 0,
    ND_DISTRIBUTED_NO,
    ND_DISTRIBUTED_REPLICATE, /* MULTI_GPU, MULTI_CPU */
    ND_DISTRIBUTED_FSDP
} nd_distributed;

typedef struct nd_reader {
    nd_config *config;  /* borrowed */
    bool notes_origins; /* where paths were given is kept, as users wrote it */
    nd_layer layer;     /* being read */
    uint8_t set_by[ND_FIELD_COUNT];

    /* What accelerate's keys said in this layer. */
    nd_distributed distributed;
    bool no_shard, hybrid_shard; /* fsdp_sharding_strategy */
    bool parallelism;            /* a parallelism_config with a size */
    bool fp8_ao, fp8_te;         /* fp8_config.backend */
    char main_ip[256];           /* "" unless given */
    int64_t main_port;           /* -1 unless given */
    char notices[1024];          /* keys without a meaning here, comma-separated */

    char no_fp16[768]; /* of all layers: why the precision that was said last is refused, or "" */
} nd_reader;

void nd_reader_init(nd_reader *reader, nd_config *config);
void nd_reader_begin(nd_reader *reader, nd_layer layer);
/* Settles what only a complete layer can: which model, main address, notices. `where` is a
 * message's beginning. */
nd_status nd_reader_end(nd_reader *reader, const char *where);

/* After the last layer: refuses what no later value has replaced. */
nd_status nd_reader_finish(const nd_reader *reader);

nd_status nd_reader_set(nd_reader *reader, nd_field_id id, const nd_given *given);
/* The same with a value of our own choosing, named by its key. */
nd_status nd_reader_put(nd_reader *reader, nd_field_id id, const char *text);
void nd_reader_notice(nd_reader *reader, const char *key);
/* true or false as files and flags write it. */
nd_status nd_reader_switch(const nd_given *given, bool *out);
/* ND_ERR_CONFIG: "<where><name> is <text>: <sentence>". */
nd_status nd_reader_refuse(const nd_given *given, const char *sentence);

/* A scalar or a list of scalars as text: *out is owned by the caller; a map or a nested list
 * fails. */
nd_status nd_reader_flatten(const nd_yaml_node *node, const char *where, const char *name,
                            char **out);

/* Either kind of file, told apart by its top-level keys. */
nd_status nd_read_yaml(nd_reader *reader, const nd_yaml_node *root, const char *file);
nd_status nd_read_native(nd_reader *reader, const nd_yaml_node *root, const char *file);
nd_status nd_read_accelerate(nd_reader *reader, const nd_yaml_node *root, const char *file);

bool nd_accelerate_is_top_key(const char *key);
/*
 * A flag that is one of accelerate's YAML keys ("fsdp_version", '_' only), NULL when it is none;
 * *is_bool tells whether it may stand without a value: a switch, or a key that has no meaning here.
 */
typedef struct nd_accelerate_key nd_accelerate_key;
const nd_accelerate_key *nd_accelerate_find_flag(const char *flag, bool *is_bool);
nd_status nd_accelerate_apply(nd_reader *reader, const nd_accelerate_key *key,
                              const nd_given *given);
/* Calls offer(context, name) for every flag spelling of accelerate's keys: for "did you mean". */
void nd_accelerate_each_flag(void (*offer)(void *, const char *), void *context);
/* Calls offer for every top-level key of its files. */
void nd_accelerate_each_top_key(void (*offer)(void *, const char *), void *context);

extern const char nd_checkpoint_sentence[];

#endif
