// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TUNE_TUNE_H
#define ND_TUNE_TUNE_H
/*
 * Autotune (kernels.autotune): before memory is planned, rank 0 times the products of a step and
 * what FP8 adds to them, and chooses an algorithm of cuBLASLt for each form and, for the linears
 * that the filter converts, FP8 or BF16. All ranks take its choices; run.json holds them, and
 * kernels.autotune_from replays them without timing.
 */
#include <stdbool.h>

#include "kernels/cuda/lt_choice.h"
#include "trainer/precision/precision.h"
#include "trainer/rank.h"

/* The decision for linears that share an input and that the filter converts together; masks as in
 * nd_linear_choice. */
typedef struct nd_tuned_linears {
    nd_input input;
    int asked;
    int32_t fp8; /* 1: they run in it */
    /* Seconds of a step that they take, in all layers together; negative or NaN: not timed. */
    double fp8_seconds, bf16_seconds;
} nd_tuned_linears;

enum { ND_TUNED_LINEARS_MAX = ND_INPUT_COUNT * ND_LINEAR_SETS };

typedef struct nd_tuning {
    char gpu[96]; /* "NVIDIA H200" */
    int64_t capability, cublaslt;
    char *from;     /* the file that was replayed, or NULL; owned */
    double seconds; /* how long timing took */
    bool cut_short; /* time ran out before everything was timed */
    nd_tuned_linears linears[ND_TUNED_LINEARS_MAX];
    int linear_count;
    nd_lt_choice *choices; /* owned */
    int choice_count;
    nd_linear_choice linear_choice; /* follows from linears */
    char *json;                     /* the record as text: run.json's "autotune"; owned */
} nd_tuning;

/* The number of the GPU's multiprocessors that products leave to the collectives beside them
 * (kernels.comm_blocks, kernels.product_processors); 0: none, or all but product_processors. */
int64_t nd_tuning_spared_processors(const nd_config *config);

/* Checks what can be checked without a GPU. ND_ERR_CONFIG or ND_ERR_DATA: autotune is asked for on
 * a CPU, or the record to replay is missing or made for another run. *out is NULL without keys of
 * autotune; the caller destroys it. */
nd_status nd_tuning_check(const nd_config *config, const nd_shape *shape, bool gpu,
                          nd_tuning **out);

/* All ranks call it, after their groups exist and before memory is planned. *out is NULL without
 * autotune; the caller destroys it. */
nd_status nd_tuning_make(nd_rank *rank, nd_tuning **out);
void nd_tuning_destroy(nd_tuning *tuning); /* NULL is legal */
/* After the steps, on rank 0: warns when products had forms that were not among the choices. */
void nd_tuning_warn(const nd_rank *rank, const nd_tuning *tuning);

/* Calls `line` for what was chosen in all, and for the linears of each input with their times. */
void nd_tuning_each_line(const nd_tuning *tuning, void (*line)(void *context, const char *text),
                         void *context);

#endif
