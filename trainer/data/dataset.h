// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DATA_DATASET_H
#define ND_DATA_DATASET_H
/*
 * The structure of a dataset: a flat array of ids in a mapped file (text, llm.c, Megatron, or the
 * cache of an encoded text), or several datasets. Private to trainer/data.
 */
#include <string.h>

#include "runtime/base/fs.h"
#include "trainer/corpus/token_file.h"
#include "trainer/data/data.h"

typedef struct nd_token_type {
    uint8_t width;  /* bytes of an id; 0: no type */
    bool is_signed; /* an id that is negative is damage */
} nd_token_type;

/* Reads the id at p, which need not be aligned. Files are little-endian, and so are the machines
 * that this program runs on. */
static inline int64_t nd_id_at(const uint8_t *p, nd_token_type type)
{
    const int rest = 64 - 8 * type.width;
    uint64_t id = 0;
    memcpy(&id, p, type.width);
    return type.is_signed ? (int64_t)(id << rest) >> rest : (int64_t)id;
}

typedef struct nd_format {
    const char *name; /* as in data.format */
    bool holds_ids;   /* token ids; otherwise the file holds text, and ids are its bytes */
    uint64_t number;  /* in digests */
    /* Checks dataset->map and fills tokens and what the format needs; under nd_fs_map_guard. NULL:
     * files of this format are encoded into a cache. */
    nd_status (*open)(void *dataset);
} nd_format;

/* A Megatron .idx. */
typedef struct nd_index {
    char *path;    /* owned */
    nd_fs_map map; /* closed when documents are joined; owned */
    nd_token_type type;
    uint64_t sequences, borders; /* borders: the beginnings of documents and the end of the last */
    const uint8_t *lengths;      /* (sequences) i32 */
    const uint8_t *pointers;     /* (sequences) i64, in bytes of the .bin */
    const uint8_t *documents;    /* (borders) i64, in sequences */
    uint64_t digest[2];          /* of the map, as it was when it was checked */
} nd_index;

/* Describes data whose documents are separate. */
typedef struct nd_documents {
    int32_t end_of_text; /* the id that ends a document, beside borders; -1: none does */
    uint64_t borders;    /* of documents, in the cache or the index */
    bool drops;          /* rows that are longer than a block are left out */
    /* The rest is for rows that stay whole. The first token of each of their pieces, block by
     * block; NULL: a block begins where the one before ends; owned. */
    int64_t *firsts;
    int64_t *begins;   /* (blocks + 1): the first piece of each; owned */
    int64_t rows;      /* that are read */
    int64_t long_rows; /* that are longer than a block */
    int64_t kept;      /* tokens of all blocks */
    int64_t inputs;    /* of all blocks, without what fills them */
} nd_documents;

/* Limits of the order of sources (blend.c). */
enum {
    ND_MIX_PERIOD = 1 << 20,
    ND_MIX_LEAST_PERIOD = 1 << 16,
    ND_MIX_PLACES = 1 << 22,
    ND_MIX_SOURCES = 256
};

typedef struct nd_blend {
    nd_dataset_part *parts; /* (count); owned, with data and names */
    int64_t *firsts;        /* (count): the first block of each part; owned */
    int count;
    bool named;                  /* the parts are told apart */
    struct nd_mix_phase *phases; /* of sources that are mixed; NULL: they are one text; owned */
    uint32_t *places;            /* of all phases; owned */
    int64_t samples;             /* INT64_MAX when some source has no limit */
    int64_t period;              /* P of the first phase */
} nd_blend;

/* The part that has a block: the last one that begins at or before it. */
int nd_blend_part_of(const nd_blend *blend, int64_t block);

typedef struct nd_sample_place {
    int source;
    int64_t index; /* of the source's samples, from 0; it may be any number of its epochs */
} nd_sample_place;

/* The place of sample i of sources that are mixed, 0 <= i < blend->samples. */
nd_sample_place nd_blend_sample(const nd_blend *blend, int64_t i);

struct nd_dataset {
    char *path; /* the file that holds the tokens, for messages; owned */
    const nd_format *format;
    nd_fs_map map;
    nd_token_type type; /* of the flat array */
    size_t first_byte;  /* where it begins in the map */
    int64_t tokens;
    int64_t vocab;
    int64_t sequence; /* S */
    int64_t blocks;
    nd_token_cache *cache;         /* of an encoded text, which owns the map; else NULL; owned */
    nd_index index;                /* of Megatron files; else zeros */
    uint8_t *mask;                 /* the loss mask beside Megatron files; else NULL; owned */
    const char *mask_digest;       /* its own, of ND_LOSS_MASK_DIGEST_BYTES */
    uint64_t spans;                /* of tokens that do not count in the loss */
    const uint8_t *span_pairs;     /* (spans) pairs of u64: tokens [begin, end), in order */
    nd_documents *documents;       /* NULL: joined, and of a blend; owned */
    nd_blend *blend;               /* several sources, and no map; else NULL; owned */
    char content[ND_HASH_HEX_MAX]; /* nd_dataset_content, once it is known; "": not yet, or empty */
};

/* Returns whether the dataset's blocks have whole rows. */
static inline bool nd_dataset_is_packed(const nd_dataset *dataset)
{
    return dataset->documents && dataset->documents->firsts;
}

/*
 * Checks a Megatron .idx of `size` bytes against the .bin's size; fills all but the path, the map
 * and the digest. Apart from the dataset so that it can be fuzzed. `idx` and `bin` are names for
 * messages.
 */
nd_status nd_index_parse(const uint8_t *data, size_t size, uint64_t bin_bytes, const char *idx,
                         const char *bin, nd_index *out);

#endif
