// SPDX-License-Identifier: Apache-2.0
/* The emulated tile instructions: against their definition by fmaf, against the CPU's own where it
 * has them, and what they refuse. */
#define ND_AMX_EMULATED
#include "kernels/cpu/amx.h"

#include <criterion/criterion.h>
#include <math.h>
#include <signal.h>
#include <string.h>

#include "kernels/cpu/isa.h"
#include "runtime/base/rng.h"
#include "runtime/tensor/dtype.h"
#include "tests/ops/amx_products.h"
#include "tests/support/skip.h"

typedef struct operands {
    float c[16][16];
    uint32_t a[16][16], b[16][16];
} operands;

/* The ranges of exponents that draws are from: ordinary numbers, numbers whose products and sums
 * are near the smallest normal one (subnormal ones among them), and near the largest. */
typedef enum range { ORDINARY, TINY, HUGE_ONES, RANGES } range;

static const int first_exponent[RANGES] = {120, 56, 186}, exponents[RANGES] = {14, 16, 8};

static uint32_t draw_bits(uint64_t seed, uint64_t index, range r)
{
    const uint64_t draw = nd_rng_u64(seed, 7, index);
    uint32_t exponent = (uint32_t)(first_exponent[r] + (int)(draw >> 40) % exponents[r]);
    if (draw >> 60 == 0) {
        exponent = 0; /* zeros and subnormal numbers */
    }
    return (uint32_t)(draw & 0x807fffff) | exponent << 23;
}

static void draw(operands *o, uint64_t seed, range r)
{
    for (int i = 0; i < 256; i++) {
        const uint64_t at = 8 * (uint64_t)i;
        uint32_t bits = draw_bits(seed, at, r);
        /* An F32 near the products of two BF16: twice their exponent. */
        const uint32_t exponent = bits >> 23 & 0xff;
        if (exponent > 0 && r != ORDINARY) {
            const int doubled = 2 * (int)exponent - 127;
            bits = (bits & 0x807fffff) | (uint32_t)(doubled > 0 ? doubled : 0) << 23;
        }
        memcpy(&o->c[i / 16][i % 16], &bits, sizeof bits);
        o->a[i / 16][i % 16] =
            draw_bits(seed, at + 1, r) >> 16 | (draw_bits(seed, at + 2, r) & 0xffff0000);
        o->b[i / 16][i % 16] =
            draw_bits(seed, at + 3, r) >> 16 | (draw_bits(seed, at + 4, r) & 0xffff0000);
    }
}

static void emulate(operands *o, int rows, int columns, int words)
{
    nd_multiply_tiles(o->c, (const uint32_t(*)[16])o->a, (const uint32_t(*)[16])o->b, rows, columns,
                      words);
}

static float flush(float x)
{
    return fpclassify(x) == FP_SUBNORMAL ? copysignf(0.0f, x) : x;
}

static float half(uint32_t word, int odd)
{
    return flush(nd_bf16_to_f32((nd_bf16)(odd ? word >> 16 : word)));
}

/* By the definition. */
static float defined_sum(const operands *o, int m, int n, int words)
{
    float sums[2] = {0.0f, 0.0f};
    for (int k = 0; k < words; k++) {
        for (int odd = 0; odd < 2; odd++) {
            sums[odd] = flush(fmaf(half(o->a[m][k], odd), half(o->b[k][n], odd), sums[odd]));
        }
    }
    return flush(flush(o->c[m][n]) + flush(sums[0] + sums[1]));
}

static bool same(float x, float y)
{
    return memcmp(&x, &y, sizeof x) == 0 || (isnan(x) && isnan(y));
}

/* Whole tiles and smaller ones. */
static int extent_of(uint64_t draw)
{
    return draw % 4 == 0 ? 16 : 1 + (int)(draw / 4 % 16);
}

static void compare_with_definition(uint64_t seed, range r)
{
    const uint64_t bits = nd_rng_u64(seed, 11, r);
    const int rows = extent_of(bits & 0xffff), columns = extent_of(bits >> 16 & 0xffff),
              words = extent_of(bits >> 32 & 0xffff);
    operands o, before;
    draw(&before, seed, r);
    o = before;
    emulate(&o, rows, columns, words);
    for (int m = 0; m < 16; m++) {
        for (int n = 0; n < 16; n++) {
            const bool written = m < rows && n < columns;
            const float want = written ? defined_sum(&before, m, n, words) : before.c[m][n];
            cr_assert(same(o.c[m][n], want),
                      "range %d, %d x %d x %d, sum (%d, %d): %a, by the definition %a", r, rows,
                      columns, words, m, n, o.c[m][n], want);
        }
    }
}

Test(amx, emulation_follows_the_definition)
{
    for (uint64_t seed = 1; seed <= 200; seed++) {
        for (range r = ORDINARY; r < RANGES; r++) {
            compare_with_definition(seed, r);
        }
    }
}

/* All draws of one range. */
static void compare_with_hardware(range r)
{
    for (uint64_t seed = 1; seed <= 1000; seed++) {
        const int rows = 1 + (int)(seed % 16), columns = 1 + (int)(seed / 16 % 16),
                  words = 1 + (int)(seed / 7 % 16);
        operands o, hardware;
        draw(&o, seed, r);
        hardware = o;
        emulate(&o, rows, columns, words);
        nd_multiply_tiles_in_hardware(hardware.c, (const uint32_t(*)[16])hardware.a,
                                      (const uint32_t(*)[16])hardware.b, rows, columns, words);
        for (int i = 0; i < 256; i++) {
            const float got = o.c[i / 16][i % 16], want = hardware.c[i / 16][i % 16];
            cr_assert(same(got, want), "range %d, seed %d, sum %d: emulated %a, in hardware %a", r,
                      (int)seed, i, got, want);
        }
    }
}

Test(amx, emulation_leaves_the_bits_of_the_hardware)
{
    if (nd_cpu_isa_detect() != ND_CPU_ISA_AMX) {
        cr_assert_neq(nd_cpu_isa_detect(), ND_CPU_ISA_AMX_EMULATED);
        skip_test("not compared with the tile instructions: this CPU has none");
    }
    for (range r = ORDINARY; r < RANGES; r++) {
        compare_with_hardware(r);
    }
}

/* Faults that end a process on the CPU end it here. */

Test(amx, refuses_a_tile_that_is_not_configured, .signal = SIGABRT)
{
    nd_amx_zero(0);
}

Test(amx, refuses_a_tile_without_extents, .signal = SIGABRT)
{
    nd_amx_configure((&(nd_amx_config){.palette = 1, .row_bytes = {64}, .rows = {16}}));
    nd_amx_zero(1);
}

Test(amx, refuses_extents_beyond_a_tile, .signal = SIGABRT)
{
    nd_amx_configure((&(nd_amx_config){.palette = 1, .row_bytes = {64}, .rows = {17}}));
}

Test(amx, refuses_products_of_extents_that_do_not_fit, .signal = SIGABRT)
{
    nd_amx_configure((&(nd_amx_config){
        .palette = 1, .row_bytes = {64, 64, 64}, .rows = {16, 16, 15}})); /* k: 16 and 15 */
    nd_amx_multiply(0, 1, 2);
}
