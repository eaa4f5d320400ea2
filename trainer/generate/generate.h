// SPDX-License-Identifier: Apache-2.0
#ifndef ND_GENERATE_GENERATE_H
#define ND_GENERATE_GENERATE_H
/*
 * Sequences that a model continues, on one rank of a mesh: the model of training with a cache of
 * keys and values in the place of gradients and activations, and without files.
 *
 * A generator has `batch` slots of the cache. A sequence takes a free slot, its prompt is computed
 * in pieces, then one token at a time; when it ends, the next sequence takes its slot. A call of
 * the model computes the next rows of all slots at once, however many each has, up to `rows`: there
 * is no padding, and prefill and decode are one path.
 *
 * Meshes. The ranks of a tp group hold parts of one model: they run the same sequences and draw the
 * same tokens. Each replica (dp_replicate) runs sequences of its own, which is for the caller to
 * divide. Weights are not sharded (dp_shard 1): they would be gathered for each token. cp is 1.
 *
 * All memory is planned and allocated once; a token allocates nothing.
 */
#include "trainer/generate/sample.h"
#include "trainer/step/step.h"
#include "trainer/text/buffer.h"

typedef struct nd_generate_options {
    int64_t batch;    /* sequences at once */
    int64_t rows;     /* of a call at most; at least batch; rounded up to a multiple of tp */
    int64_t capacity; /* tokens of a sequence at most: prompt and new ones */
} nd_generate_options;

typedef enum nd_finish {
    ND_FINISH_NONE = 0,
    ND_FINISH_EOS,    /* an end token, which is the last id */
    ND_FINISH_STOP,   /* the visitor ended it */
    ND_FINISH_LENGTH, /* max_new ids */
    ND_FINISH_COUNT
} nd_finish;

/* A prompt that is continued, and its new tokens. */
typedef struct nd_sequence {
    const int32_t *prompt; /* [prompt_count], at least 1; borrowed */
    int64_t prompt_count;
    int64_t max_new;  /* at least 1; prompt_count + max_new <= capacity */
    uint64_t request; /* of the draws (nd_draw) */
    int32_t *ids;     /* [max_new], borrowed: the new tokens */
    int64_t count;    /* of them */
    nd_finish finish;
} nd_sequence;

/* Rules by which sequences are continued. */
typedef struct nd_generate_rules {
    nd_sampling sampling;
    const nd_ids *ends; /* ids that end a sequence; borrowed; NULL: none */
    /* Called for each new token, in the order of tokens of a sequence; *stop ends the sequence
     * with this token. On the tp ranks alike. NULL: nothing is called. */
    nd_status (*token)(void *context, int64_t sequence, int32_t id, bool *stop);
    /* Called when a sequence has ended; NULL: nothing is called. */
    nd_status (*end)(void *context, int64_t sequence);
    void *context;
    const nd_stop_check *check; /* asked before each call of the model; NULL: never stopped */
} nd_generate_rules;

typedef struct nd_generate_counts {
    int64_t calls;         /* of the model */
    int64_t prompt_tokens; /* computed */
    int64_t new_tokens;
    int64_t decode_tokens; /* of them, those of calls with one row of each sequence */
    double prompt_seconds; /* of calls with several rows of some sequence */
    double decode_seconds; /* of the others */
} nd_generate_counts;

/* A slot of the cache. */
typedef struct nd_generator_slot {
    int64_t sequence; /* -1: free */
    int64_t length;   /* tokens in the cache */
    int32_t next;     /* the last new token, which is not in the cache yet */
} nd_generator_slot;

/* Others read the plan and the counts, and load the weights into model->fsdp. */
typedef struct nd_generator {
    nd_rank *rank;
    nd_generate_options options;
    nd_kv_options cache;
    nd_memplan plan;
    nd_model *model;
    nd_candidate *candidates; /* [vocab] */
    nd_generator_slot *slots; /* [batch] */
    nd_kv_segment *segments;  /* [batch] of a call */
    int64_t *rows;            /* [batch] whose logits are wanted */
    int32_t *ids;             /* [rows of a call], as are positions */
    int32_t *positions;
    float *logits;   /* (batch, vocab); pinned where the device is a GPU */
    int32_t *scored; /* [capacity] what slot 0 holds, for nd_generator_score */
    int64_t scored_count;
    nd_generate_counts counts;
} nd_generator;

/* Checks what is known before there are ranks. ND_ERR_CONFIG: the FP8 recipe is not for generation,
 * or the mesh splits the model other than by tp and in equal parts. */
nd_status nd_generate_check_job(const nd_config *config, const nd_shape *shape,
                                const nd_mesh *mesh);
/* ND_ERR_CONFIG or ND_ERR_DATA names the number when mesh, sizes or device are not supported,
 * ND_ERR_RESOURCE when there is no plan of such sizes. */
nd_status nd_generate_check(const nd_rank *rank, const nd_generate_options *options);
/* Plans the memory; allocates none on the device. */
nd_status nd_generator_create(nd_rank *rank, const nd_generate_options *options,
                              nd_generator **out);
/* Allocates it. The weights are then for the caller to load. */
nd_status nd_generator_commit(nd_generator *generator);
void nd_generator_destroy(nd_generator *generator); /* NULL is legal */

/*
 * Continues all sequences, in their order as slots become free. Collective over tp: its ranks give
 * equal sequences and rules. ND_ERR_NUMERIC: logits are not finite. ND_ERR_PREEMPTED: `check`
 * stopped it; sequences that had not ended have ND_FINISH_NONE.
 */
nd_status nd_generator_run(nd_generator *generator, nd_sequence *sequences, int64_t count,
                           const nd_generate_rules *rules);

/*
 * Scores ids [from, count), each given all before it; from >= 1, count <= capacity + 1. What the
 * last call and this one have in common at their beginning, before `from`, is not computed again.
 * Collective over tp.
 */
nd_status nd_generator_score(nd_generator *generator, const int32_t *ids, int64_t count,
                             int64_t from, nd_token_score *scores);

#endif
