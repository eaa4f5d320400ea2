// SPDX-License-Identifier: Apache-2.0
/*
 * The product of nd_tile_ops by AMX: 2 x 2 tiles of C, so that four loads of A and B serve four
 * products. Compiled twice (amx.h) with -DND_ISA=<name>.
 *
 * A and B have the form that the tiles want. Nothing is read beyond their extents: what is left
 * behind the last whole tile of m or k is multiplied with tiles that have fewer rows or bytes. To
 * give tiles other extents loses their contents, so each of these parts is a pass of its own over
 * its C. With m and n a multiple of 16 and k one of 32, as for D = 64 and 128, there is none.
 */
#include <stddef.h>

#include "kernels/cpu/amx.h"
#include "kernels/cpu/tile.h"

#define PASTE_(a, b) a##_##b
#define PASTE(a, b)  PASTE_(a, b)

enum { ROWS = ND_AMX_ROWS, WORDS = ND_AMX_ROW_BYTES / 4 };

static void configure(int rows, int words)
{
    nd_amx_config config = {.palette = 1};
    for (int i = 0; i < ND_AMX_TILES; i++) {
        config.rows[i] = (uint8_t)(i < 6 ? rows : words);
        config.row_bytes[i] = (uint16_t)(i == 4 || i == 5 ? 4 * words : ND_AMX_ROW_BYTES);
    }
    nd_amx_configure(&config);
}

/* The extents of the tiles, and how many of them k has. */
typedef struct extents {
    int rows, words, steps;
} extents;

/* c (mt tiles, nt tiles) = a b (+ c), with c in tiles: mt and nt, each 1 or 2, are constants where
 * this is inlined. */
static inline __attribute__((always_inline)) void block(const int mt, const int nt,
                                                        const extents *e, const nd_word *a,
                                                        int64_t lda, const nd_word *b, int64_t ldb,
                                                        float *c, int64_t ldc, bool add)
{
    nd_amx_load_sums(mt, nt, add ? c : NULL, ldc);
    for (int l = 0; l < e->steps; l++, a += e->words, b += e->words * ldb) {
        nd_amx_add_step(mt, nt, a, a + ROWS * lda, 4 * lda, b, 4 * ldb);
    }
    nd_amx_store_sums(mt, nt, c, ldc);
}

/* A product whose m is a multiple of the tiles' rows. */
typedef struct product {
    extents extents;
    int m, n;
    const nd_word *a, *b;
    float *c;
    int64_t lda, ldb, ldc;
    bool add;
} product;

/* The block of c from row i and column j on. */
static void block_at(const product *p, int i, int j)
{
    const bool high = p->m - i > ROWS, wide = p->n - j > WORDS;
    const nd_word *a = p->a + i * p->lda, *b = p->b + j;
    float *c = p->c + i * p->ldc + j;
    if (high && wide) {
        block(2, 2, &p->extents, a, p->lda, b, p->ldb, c, p->ldc, p->add);
    } else if (high) {
        block(2, 1, &p->extents, a, p->lda, b, p->ldb, c, p->ldc, p->add);
    } else if (wide) {
        block(1, 2, &p->extents, a, p->lda, b, p->ldb, c, p->ldc, p->add);
    } else {
        block(1, 1, &p->extents, a, p->lda, b, p->ldb, c, p->ldc, p->add);
    }
}

/* All blocks of c, in the order that leaves the smaller one of A and B in L1. */
static void multiply(const product *p)
{
    if (p->m < p->n) {
        for (int j = 0; j < p->n; j += 2 * WORDS) {
            for (int i = 0; i < p->m; i += 2 * ROWS) {
                block_at(p, i, j);
            }
        }
    } else {
        for (int i = 0; i < p->m; i += 2 * ROWS) {
            for (int j = 0; j < p->n; j += 2 * WORDS) {
                block_at(p, i, j);
            }
        }
    }
}

void PASTE(nd_tile_begin, ND_ISA)(void)
{
    configure(ROWS, WORDS);
}

void PASTE(nd_tile_end, ND_ISA)(void)
{
    nd_amx_release();
}

/* The tiles have all rows and bytes when this is called, and when it returns. */
void PASTE(nd_tile_gemm, ND_ISA)(int m, int n, int words, const nd_word *a, int64_t lda,
                                 const nd_word *b, int64_t ldb, float *c, int64_t ldc, bool add)
{
    const int steps = words / WORDS, whole_m = m / ROWS * ROWS;
    const extents whole = {ROWS, WORDS, steps}, low = {m - whole_m, WORDS, steps};
    const extents narrow = {ROWS, words % WORDS, 1}, corner = {low.rows, narrow.words, 1};
    const nd_word *a_rest = a + steps * WORDS, *b_rest = b + steps * WORDS * ldb;
    const nd_word *a_low = a + whole_m * lda, *a_corner = a_rest + whole_m * lda;
    float *c_low = c + whole_m * ldc;
    const bool add_rest = add || steps > 0;
    if (whole_m > 0 && steps > 0) {
        multiply(&(product){whole, whole_m, n, a, b, c, lda, ldb, ldc, add});
    }
    if (whole_m > 0 && narrow.words > 0) {
        configure(narrow.rows, narrow.words);
        multiply(&(product){narrow, whole_m, n, a_rest, b_rest, c, lda, ldb, ldc, add_rest});
    }
    if (low.rows > 0 && steps > 0) {
        configure(low.rows, low.words);
        multiply(&(product){low, low.rows, n, a_low, b, c_low, lda, ldb, ldc, add});
    }
    if (low.rows > 0 && corner.words > 0) {
        configure(corner.rows, corner.words);
        multiply(&(product){corner, low.rows, n, a_corner, b_rest, c_low, lda, ldb, ldc, add_rest});
    }
    if (low.rows > 0 || narrow.words > 0) {
        configure(ROWS, WORDS);
    }
}
