// SPDX-License-Identifier: Apache-2.0
/*
 * Compiled with -DND_ISA=<name> for AMX, with ND_AMX_EMULATED for every CPU (amx.h), and with
 * ND_AMX_VECTORS too for those that have AVX-512: see meson.build. All leave the same bits.
 *
 * Four tiles hold 32 x 32 sums of c; a step of 32 of k multiplies two tiles of A and two of B into
 * them. That reads 4 KiB in the 64 cycles that the four products take: 64 bytes a cycle, of which
 * the first cache gives 128 and the second about 48. So B and A of 32 lines are multiplied in runs
 * of STEPS steps, of which 16 KiB each stay in the first cache: there B is read again for each 32
 * rows, while A, which is packed in the order in which it is read, streams from the second cache.
 * Between runs sums wait in F32, which changes no bit of them.
 */
#include "kernels/cpu/gemm.h"

#include <math.h>
#include <string.h>

#include "kernels/cpu/amx.h"
#include "runtime/tensor/fp8.h"

#define PASTE_(a, b) a##_##b
#define PASTE(a, b)  PASTE_(a, b)
#define INLINE       static inline __attribute__((always_inline))

enum {
    CACHE_LINE = 64,
    ROWS = 2 * ND_AMX_ROWS,
    COLUMNS = 32,
    WORDS = 16,                    /* of k: a step */
    PANEL = 768,                   /* rows of a packed A, at most */
    STEPS = 8,                     /* of a run */
    STEP_A = ROWS * WORDS,         /* words: both tiles of A of a step lie together */
    STEP_B = WORDS * COLUMNS,      /* words */
    TILE_BYTES = ND_AMX_ROW_BYTES, /* stride of the rows of A */
    B_BYTES = COLUMNS * (int)sizeof(nd_gemm_word)
};

static void configure_tiles(void)
{
    const nd_amx_config config = {.palette = 1,
                                  .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
                                  .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    nd_amx_configure(&config);
}

static void release_tiles(void)
{
    nd_amx_release();
}

/* The end of a product, for rows of sums, and packing. */
#if defined(ND_AMX_EMULATED) && !defined(ND_AMX_VECTORS)
#include "kernels/cpu/gemm_amx_plain.inc"
#else
#include "kernels/cpu/gemm_amx_vectors.inc"
#endif

/* products */

/* Rows of c, or of what its sums begin with, that the next run needs. */
typedef struct wanted {
    const char *from;
    int64_t row_bytes;
    int rows, bytes; /* bytes: of a row, two lines at most */
    int per_step;
    bool write;
} wanted;

/* The operands of one run of 32 x 32 sums. */
typedef struct group {
    const nd_gemm_word *a, *b;
    int steps;
    wanted next;
} group;

/* Fetches the next of the wanted rows. */
INLINE void fetch_some(wanted *w)
{
    for (int i = 0; i < w->per_step && w->rows > 0; i++, w->rows--, w->from += w->row_bytes) {
        fetch(w->from, w->write);
        if (w->bytes > CACHE_LINE) {
            fetch(w->from + CACHE_LINE, w->write);
        }
    }
}

INLINE void add_steps(const int mr, const int nv, const group *g)
{
    const nd_gemm_word *a = g->a, *b = g->b;
    wanted next = g->next;
    for (int s = 0; s < g->steps; s++, a += STEP_A, b += STEP_B) {
        fetch_some(&next);
        nd_amx_add_step(mr, nv, a, a + ND_AMX_ROWS * WORDS, TILE_BYTES, b, B_BYTES);
    }
}

/* At most 32 rows, and whether a run is the first or the last of their k. */
typedef struct stretch {
    int64_t row;
    int rows;
    bool first, last;
} stretch;

/* Copies `rows` x `columns` of F32 to rows of COLUMNS, with zeros around. */
static void copy_edge(float edge[ROWS][COLUMNS], const float *from, int64_t stride, int rows,
                      int columns)
{
    memset(edge, 0, sizeof(float[ROWS][COLUMNS]));
    for (int i = 0; i < rows; i++) {
        memcpy(edge[i], from + i * stride, (size_t)columns * sizeof(float));
    }
}

/* Returns what the next group of rows needs of c. After its first run that is what its sums begin
 * with, in its last run it is where they go. */
static wanted next_rows(const nd_gemm_tile *t, const stretch *s, int steps)
{
    const int64_t row = s->row + ROWS, size = t->bf16 ? 2 : 4;
    const int rows = (int)(t->rows - row < ROWS ? t->rows - row : ROWS);
    const int per_step = (rows + steps - 1) / steps;
    if (rows > 0 && s->last) {
        return (wanted){(const char *)t->c + row * t->c_row * size,
                        t->c_row * size,
                        rows,
                        t->columns * (int)size,
                        per_step,
                        true};
    }
    if (rows > 0 && s->first && t->from) {
        return (wanted){(const char *)(t->from + row * t->from_row),
                        t->from_row * 4,
                        rows,
                        t->columns * 4,
                        per_step,
                        false};
    }
    return (wanted){.rows = 0};
}

/* One run of at most 32 rows; mr and nv are constants where this is inlined. */
INLINE void multiply_run(const int mr, const int nv, const nd_gemm_tile *t, const group *g,
                         const stretch *s)
{
    _Alignas(64) float edge[ROWS][COLUMNS];
    const bool whole = s->rows == 16 * mr && t->columns == 16 * nv;
    const bool plain =
        !t->bf16 && !t->add && !t->row_factors && !t->column_factors && t->factor == 1.0f;
    float *sums = t->sums + s->row * COLUMNS;
    if (!s->first) {
        nd_amx_load_sums(mr, nv, sums, COLUMNS);
    } else if (t->from && !whole) {
        copy_edge(edge, t->from + s->row * t->from_row, t->from_row, s->rows, t->columns);
        nd_amx_load_sums(mr, nv, edge[0], COLUMNS);
    } else {
        nd_amx_load_sums(mr, nv, t->from ? t->from + s->row * t->from_row : NULL, t->from_row);
    }
    add_steps(mr, nv, g);
    if (!s->last) {
        nd_amx_store_sums(mr, nv, sums, COLUMNS);
    } else if (whole && plain) {
        nd_amx_store_sums(mr, nv, (float *)t->c + s->row * t->c_row, t->c_row);
    } else {
        nd_amx_store_sums(mr, nv, edge[0], COLUMNS);
        finish_rows(t, s->row, s->rows, edge[0]);
    }
}

static void choose_tiles(const nd_gemm_tile *t, const group *g, const stretch *s)
{
    if (s->rows > ND_AMX_ROWS) {
        if (t->columns > 16) {
            multiply_run(2, 2, t, g, s);
        } else {
            multiply_run(2, 1, t, g, s);
        }
    } else if (t->columns > 16) {
        multiply_run(1, 2, t, g, s);
    } else {
        multiply_run(1, 1, t, g, s);
    }
}

static void multiply(const nd_gemm_tile *t)
{
    const nd_gemm_word *a = (const nd_gemm_word *)(const void *)t->a;
    const int steps = t->words / WORDS;
    const int64_t group_words = (int64_t)steps * STEP_A;
    for (int k = 0; k < steps; k += STEPS) {
        const int run = steps - k < STEPS ? steps - k : STEPS;
        for (int64_t row = 0; row < t->rows; row += ROWS) {
            const stretch s = {.row = row,
                               .rows = (int)(t->rows - row < ROWS ? t->rows - row : ROWS),
                               .first = k == 0,
                               .last = k + run == steps};
            const group g = {.a = a + row / ROWS * group_words + k * STEP_A,
                             .b = t->b + (int64_t)k * STEP_B,
                             .steps = run,
                             .next = next_rows(t, &s, run)};
            choose_tiles(t, &g, &s);
        }
    }
}

const nd_gemm_kernels PASTE(nd_gemm, ND_ISA) = {
    .rows = ROWS,
    .columns = COLUMNS,
    .panel = PANEL,
    .words = WORDS,
    .packs_a = true,
    .k_block = 768,
    .most_packed = PANEL,
    .most_of_a = 1 << 19,       /* 1 MiB, half of the second cache; B, c and sums share the rest */
    .shared_columns = 0,        /* all threads pack B together instead */
    .together_bytes = 16 << 20, /* 2,048 columns with 4,096 of k, in the third cache */
    .least_together = 512,
    .partial_columns = 1024, /* 3 MiB: 5 bytes a cycle of the third cache */
    .a_time = 110,           /* 0.35 cycles an element, and a step of 32 x 32 sums takes 110 */
    .b_time = 150,           /* 0.5 */
    .b_read_time = 20,
    .cast_time = 100, /* 0.33 */
    .begin = configure_tiles,
    .end = release_tiles,
    .multiply = multiply,
    .pack_b_rows = pack_b_rows,
    .pack_b_columns = pack_b_columns,
    .pack_a_rows = pack_a_rows,
    .pack_a_columns = pack_a_columns};
