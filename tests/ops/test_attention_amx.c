// SPDX-License-Identifier: Apache-2.0
/* Attention on AMX tiles: its product of small tiles beside plain sums, and the bits of the
 * emulated tiles beside those of the CPU where it has AMX, and of other numbers of threads.
 * test_attention.c compares attention at the level amx_emulated with the reference. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/isa.h"
#include "kernels/cpu/tile.h"
#include "runtime/base/rng.h"
#include "tests/ops/attend.h"
#include "tests/support/skip.h"

/* Extents of a product, and operands with room around them. */
enum { M = 70, N = 80, WORDS = 50, LDA = 53, LDB = 96, LDC = 96 };

typedef struct product {
    nd_word a[M][LDA], b[WORDS][LDB];
    float c[M][LDC];
} product;

/* Multiples of 1/8 below 2: sums of products of some dozens are exact, whatever their order. */
static nd_bf16 small_number(uint64_t seed, int64_t at)
{
    return nd_bf16_from_f32((float)(int)(nd_rng_u64(seed, 3, (uint64_t)at) % 31) / 8.0f - 1.875f);
}

static nd_word two_numbers(uint64_t seed, int64_t at)
{
    return small_number(seed, 2 * at) | (nd_word)small_number(seed, 2 * at + 1) << 16;
}

/* Draws the operands and c; everything beyond the extents is NaN. */
static void draw(product *p, uint64_t seed, int m, int n, int words)
{
    const nd_word nan = 0x7fc07fc0;
    for (int i = 0; i < M; i++) {
        for (int l = 0; l < LDA; l++) {
            p->a[i][l] = i < m && l < words ? two_numbers(seed, (int64_t)i * LDA + l) : nan;
        }
        for (int j = 0; j < LDC; j++) {
            p->c[i][j] = i < m && j < n ? (float)(i % 5 - j % 3) : NAN;
        }
    }
    for (int l = 0; l < WORDS; l++) {
        for (int j = 0; j < LDB; j++) {
            p->b[l][j] = l < words && j < n ? two_numbers(seed + 1, (int64_t)l * LDB + j) : nan;
        }
    }
}

static float plain_sum(const product *p, int i, int j, int words, bool add)
{
    float sum = add ? p->c[i][j] : 0.0f;
    for (int l = 0; l < words; l++) {
        for (int half = 0; half < 2; half++) {
            sum += nd_bf16_to_f32((nd_bf16)(p->a[i][l] >> 16 * half)) *
                   nd_bf16_to_f32((nd_bf16)(p->b[l][j] >> 16 * half));
        }
    }
    return sum;
}

static void multiply(int m, int n, int words, bool add)
{
    static product before, after;
    draw(&before, (uint64_t)(m * 10007 + n * 101 + words), m, n, words);
    after = before;
    nd_tile_begin_amx_emulated();
    nd_tile_gemm_amx_emulated(m, n, words, after.a[0], LDA, after.b[0], LDB, after.c[0], LDC, add);
    nd_tile_end_amx_emulated();
    for (int i = 0; i < M; i++) {
        for (int j = 0; j < LDC; j++) {
            if (i < m && j < n) {
                cr_assert_eq(after.c[i][j], plain_sum(&before, i, j, words, add),
                             "%d x %d x %d words: element (%d, %d) is %g", m, n, words, i, j,
                             after.c[i][j]);
            } else {
                cr_assert(isnan(after.c[i][j]), "%d x %d x %d words: (%d, %d) was written", m, n,
                          words, i, j);
            }
        }
    }
}

Test(attention_amx, products_of_all_extents)
{
    static const int rows[] = {1, 15, 16, 17, 32, 47, 64, 70}, columns[] = {16, 32, 48, 64, 80};
    static const int words[] = {1, 5, 16, 17, 32, 40, 50};
    for (int m = 0; m < 8; m++) {
        for (int n = 0; n < 5; n++) {
            for (int l = 0; l < 7; l++) {
                multiply(rows[m], columns[n], words[l], false);
                multiply(rows[m], columns[n], words[l], true);
            }
        }
    }
}

/* A second product has the extents of whole tiles again. */
Test(attention_amx, products_one_after_the_other)
{
    static product tail, whole, want;
    draw(&tail, 5, 17, 16, 17);
    draw(&whole, 6, 64, 64, 32);
    want = whole;
    nd_tile_begin_amx_emulated();
    nd_tile_gemm_amx_emulated(64, 64, 32, want.a[0], LDA, want.b[0], LDB, want.c[0], LDC, true);
    nd_tile_gemm_amx_emulated(17, 16, 17, tail.a[0], LDA, tail.b[0], LDB, tail.c[0], LDC, true);
    nd_tile_gemm_amx_emulated(64, 64, 32, whole.a[0], LDA, whole.b[0], LDB, whole.c[0], LDC, true);
    nd_tile_end_amx_emulated();
    cr_expect_eq(memcmp(whole.c, want.c, sizeof want.c), 0);
}

/* Attention */

static const nd_attention cases[] = {
    {1, 130, 300, 2, 1, 64, 170, 0.125f}, {2, 70, 70, 4, 2, 16, 0, 0.25f},
    {1, 66, 99, 2, 1, 34, 33, 0.17f},     {1, 37, 81, 1, 1, 80, 81, 0.11f},
    {1, 200, 200, 2, 1, 128, 0, 0.09f},   {1, 18, 47, 1, 1, 256, 29, 0.06f},
};

enum { CASES = sizeof cases / sizeof *cases };

static void attend(nd_cpu_isa isa, const nd_attention *a, const nd_tensor in[ND_ATTEND_INPUTS],
                   nd_tensor results[ND_ATTEND_RESULTS])
{
    nd_side side;
    setenv("ND_CPU_ISA", nd_cpu_isa_name(isa), 1);
    nd_side_open_cpu(&side, 1);
    nd_attend(&side, a, in, results);
    nd_side_close(&side);
    unsetenv("ND_CPU_ISA");
}

Test(attention_amx, has_the_bits_of_its_emulation)
{
    if (nd_cpu_isa_detect() != ND_CPU_ISA_AMX) {
        skip_test("not compared with the tile instructions: this CPU has none");
    }
    for (int c = 0; c < CASES; c++) {
        nd_tensor in[ND_ATTEND_INPUTS], want[ND_ATTEND_RESULTS], got[ND_ATTEND_RESULTS];
        nd_attend_draw(&cases[c], ND_DTYPE_BF16, in);
        attend(ND_CPU_ISA_AMX_EMULATED, &cases[c], in, want);
        attend(ND_CPU_ISA_AMX, &cases[c], in, got);
        for (int r = 0; r < ND_ATTEND_RESULTS; r++) {
            nd_expect_same("amx", nd_attend_names[r], got[r], want[r]);
        }
        nd_case_free();
    }
}

/* Each thread has tiles of its own. */
Test(attention_amx, has_the_same_bits_with_any_number_of_threads)
{
    setenv("ND_CPU_ISA", nd_cpu_isa_name(ND_CPU_ISA_AMX_EMULATED), 1);
    for (int c = 0; c < CASES; c++) {
        nd_attend_with_all_threads(&cases[c], ND_DTYPE_BF16, (nd_tensor){0});
    }
}
