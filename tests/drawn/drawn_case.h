// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_DRAWN_DRAWN_CASE_H
#define TESTS_DRAWN_DRAWN_CASE_H
/*
 * A drawn run: a model, a mesh and a step, as numbers. Each number has a least value, towards which
 * a case is shrunk. Any numbers that are not below the least ones make a case: drawn_case_settle
 * changes them until the program accepts the configuration, and until it is small.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* X(name, least). Sizes that tp or cp split are those of one of its ranks. */
#define DRAWN_EACH_NUMBER(X)                                                                       \
    X(replicate, 1)                                                                                \
    X(shard, 1)                                                                                    \
    X(cp, 1)                                                                                       \
    X(tp, 1)                                                                                       \
    X(ring, 0)                                                                                     \
    X(ulysses, 1) /* ranks that exchange heads */                                                  \
    X(micro_batch, 1)                                                                              \
    X(accumulation, 1)                                                                             \
    X(zero2, 0)                                                                                    \
    X(recompute, 0)                                                                                \
    X(precision, 0) /* nd_precision: 0 BF16, 1 F32, 2 FP8, see drawn_case.c */                     \
    X(recipe, 0)    /* nd_fp8_recipe */                                                            \
    X(codes, 0)     /* fp8.all_gather */                                                           \
    X(largest, 0)   /* fp8.amax_compute max */                                                     \
    X(history, 1)   /* fp8.amax_history_length */                                                  \
    X(filter, 0)    /* of drawn_filters */                                                         \
    X(layers, 1)                                                                                   \
    X(kv_heads, 1)                                                                                 \
    X(copies, 1) /* tp ranks that have the same KV head */                                         \
    X(group, 1)  /* query heads of a KV head, on a rank */                                         \
    X(head_dim, 2)                                                                                 \
    X(hidden, 12)                                                                                  \
    X(ffn, 1)                                                                                      \
    X(vocab, 5)                                                                                    \
    X(tied, 0)                                                                                     \
    X(rope, 0) /* nd_rope_type */                                                                  \
    X(sequence, 1)                                                                                 \
    X(rows, 0) /* JSON lines with prompts that do not count, of bytes */                           \
    X(sources, 1)                                                                                  \
    X(sgd, 0)                                                                                      \
    X(clips, 0)                                                                                    \
    X(threads, 1)                                                                                  \
    X(steps, 2)                                                                                    \
    X(saved, 1)         /* after this step */                                                      \
    X(waits, 0)         /* checkpoint.staging wait */                                              \
    X(other_threads, 1) /* of the run that is resumed */                                           \
    X(other_recompute, 0)                                                                          \
    X(other_mesh, 0) /* the run that is resumed is that of one worker */                           \
    X(head_rows, 0)  /* nd_internal_limits; 0: the program's own */                                \
    X(head_columns, 0)                                                                             \
    X(save_piece, 0)                                                                               \
    X(staging, 0) /* bytes of a round of a reduction, from each rank; 0: the program's own */      \
    X(isa, 0)     /* of drawn_isas */                                                              \
    X(packed, 0)  /* of drawn_packed */                                                            \
    X(family, 0)  /* nd_family */                                                                  \
    X(biases, 0)  /* where config.json decides */                                                  \
    X(window, 0)

typedef struct drawn_case {
#define DRAWN_MEMBER(name, least) int64_t name;
    DRAWN_EACH_NUMBER(DRAWN_MEMBER)
#undef DRAWN_MEMBER
} drawn_case;

enum { DRAWN_TEXT_MAX = 1024, DRAWN_RANKS_MAX = 12 };

extern const char *const drawn_filters[], *const drawn_isas[], *const drawn_packed[];

drawn_case drawn_case_of_seed(uint64_t seed);
void drawn_case_settle(drawn_case *c);
int64_t drawn_case_weights(const drawn_case *c); /* products of a token; a tied head counts once */
/* "shard=2 tp=3 ...": what is above the least; returns text. */
const char *drawn_case_text(const drawn_case *c, char text[DRAWN_TEXT_MAX]);
/* The inverse; false: it names something else. Settled. */
bool drawn_case_parse(const char *text, drawn_case *out);

/*
 * The smallest case that still fails, found by lowering one number after the other; `fails` runs a
 * case. At most `tries` runs.
 */
drawn_case drawn_case_shrink(drawn_case c, int tries,
                             bool (*fails)(void *context, const drawn_case *c), void *context);

#endif
