// SPDX-License-Identifier: Apache-2.0
/*
 * Our own BF16 products, table by table: the bits against their definition (gemm.h), the same for
 * each number of threads.
 *
 * Operands end where a page ends that is followed by one without access, and have NaN between
 * their rows, so that reading an element too many is noticed.
 */
#include "kernels/cpu/gemm.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/cpu/isa.h"
#include "kernels/ops.h"
#include "runtime/base/math.h"
#include "runtime/base/rng.h"
#include "runtime/base/status.h"
#include "runtime/tensor/fp8.h"
#include "tests/support/skip.h"

typedef struct table {
    const char *name;
    const nd_gemm_kernels *kernels;
    nd_cpu_isa needs;
    bool tiles;
} table;

static const table tables[] = {
    {"amx_emulated", &nd_gemm_amx_emulated, ND_CPU_ISA_BASELINE, true},
    {"amx_emulated_avx512", &nd_gemm_amx_emulated_avx512, ND_CPU_ISA_AVX512, true},
    {"amx", &nd_gemm_amx, ND_CPU_ISA_AMX, true},
    {"avx512_bf16", &nd_gemm_avx512_bf16, ND_CPU_ISA_AVX512_BF16, false},
    {"avx512", &nd_gemm_avx512, ND_CPU_ISA_AVX512, false}};

/* memory */

typedef struct guarded {
    void *map;
    size_t bytes;
} guarded;

enum { MAPS = 16 };
static guarded maps[MAPS];
static int map_count;

/* `bytes` that end where access ends. */
static void *guarded_memory(size_t bytes)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), data = nd_round_up_bytes(bytes, page);
    char *map = mmap(NULL, data + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq(map, MAP_FAILED);
    cr_assert_eq(mprotect(map + data, page, PROT_NONE), 0);
    cr_assert_lt(map_count, MAPS);
    maps[map_count++] = (guarded){map, data + page};
    return map + data - bytes;
}

static void free_memory(void)
{
    while (map_count > 0) {
        map_count--;
        cr_assert_eq(munmap(maps[map_count].map, maps[map_count].bytes), 0);
    }
}

/* A matrix whose memory ends with its last element. With a scale its BF16 stand for the values of
 * FP8 codes (nd_gemm_operand). */
typedef struct matrix {
    void *data;
    int64_t rows, columns, stride;
    nd_dtype dtype, format;
    const float *scale;
    bool per_row, per_column;
} matrix;

static size_t matrix_bytes(const matrix *x)
{
    return (size_t)((x->rows - 1) * x->stride + x->columns) * nd_dtype_size(x->dtype);
}

static void put(matrix *x, int64_t at, float value)
{
    switch (x->dtype) {
    case ND_DTYPE_BF16:
        ((nd_bf16 *)x->data)[at] = nd_bf16_from_f32(value);
        break;
    case ND_DTYPE_F32:
        ((float *)x->data)[at] = value;
        break;
    default:
        ((uint8_t *)x->data)[at] = nd_fp8_from_f32(x->dtype, value);
        break;
    }
}

static float get(const matrix *x, int64_t i, int64_t j)
{
    const int64_t at = i * x->stride + j;
    switch (x->dtype) {
    case ND_DTYPE_BF16: {
        const float value = nd_bf16_to_f32(((const nd_bf16 *)x->data)[at]);
        const int64_t scale = x->per_row ? i : x->per_column ? j : 0;
        return x->scale
                   ? nd_fp8_to_f32(x->format, nd_fp8_from_f32(x->format, value * x->scale[scale]))
                   : value;
    }
    case ND_DTYPE_F32:
        return ((const float *)x->data)[at];
    default:
        return nd_fp8_to_f32(x->dtype, ((const uint8_t *)x->data)[at]);
    }
}

static matrix draw(nd_dtype dtype, int64_t rows, int64_t columns, int64_t gap, uint64_t seed)
{
    matrix x = {.rows = rows, .columns = columns, .stride = columns + gap, .dtype = dtype};
    x.data = guarded_memory(matrix_bytes(&x));
    for (int64_t at = 0; at < (rows - 1) * x.stride + columns; at++) {
        const uint64_t bits = nd_rng_u64(seed, 3, (uint64_t)at);
        const bool inside = at % x.stride < columns;
        put(&x, at, inside ? (float)(int64_t)(bits >> 40) * 0x1p-23f - 1.0f : NAN);
    }
    return x;
}

/* Gives BF16 one scale, or one for each row or column, that take its values from codes of 0 up to
 * the largest ones. */
static void leave_to_cast(matrix *x, nd_dtype format, bool per_line, bool by_rows)
{
    const int64_t count = !per_line ? 1 : by_rows ? x->rows : x->columns;
    float *scale = guarded_memory((size_t)count * sizeof *scale);
    for (int64_t i = 0; i < count; i++) {
        const int power = (int)(nd_rng_u64(7, (uint64_t)count, (uint64_t)i) % 20) - 11;
        scale[i] = ldexpf(format == ND_DTYPE_F8_E4M3 ? 1.75f : 224.0f, power);
    }
    x->format = format;
    x->scale = scale;
    x->per_row = per_line && by_rows;
    x->per_column = per_line && !by_rows;
}

static nd_gemm_operand operand_of(const matrix *x)
{
    return (nd_gemm_operand){.data = x->data,
                             .dtype = x->dtype,
                             .stride = x->stride,
                             .format = x->format,
                             .scale = x->scale,
                             .scale_per_line = x->per_row || x->per_column};
}

/* the definition */

static float flush(float x)
{
    return fpclassify(x) == FP_SUBNORMAL ? copysignf(0.0f, x) : x;
}

typedef struct problem {
    nd_gemm_product p;
    matrix a, b, c;                       /* c as it was */
    const float *lines_of_a, *lines_of_b; /* the values of op(a) (m, k) and of op(b)^T (n, k) */
    nd_gemm_factors factors;
} problem;

/* (lines, k), from a matrix whose lines are its rows or its columns. */
static const float *lines_of(const matrix *x, bool in_rows)
{
    const int64_t lines = in_rows ? x->rows : x->columns, k = in_rows ? x->columns : x->rows;
    float *values = guarded_memory((size_t)(lines * k) * sizeof *values);
    for (int64_t i = 0; i < lines; i++) {
        for (int64_t l = 0; l < k; l++) {
            values[i * k + l] = in_rows ? get(x, i, l) : get(x, l, i);
        }
    }
    return values;
}

/* One step of tiles: 32 of k, or as many as are left. */
static float add_step(const problem *q, float sum, int64_t i, int64_t j, int64_t first)
{
    enum { STEP = 32 };
    const int64_t k = q->p.k, end = nd_min(first + STEP, k);
    const float *a = q->lines_of_a + i * k, *b = q->lines_of_b + j * k;
    float halves[2] = {0.0f, 0.0f};
    for (int64_t l = first; l < end; l++) {
        float *half = &halves[(l - first) % 2];
        *half = flush(fmaf(flush(a[l]), flush(b[l]), *half));
    }
    return flush(sum + flush(halves[0] + halves[1]));
}

/* The sum of a block of AVX-512's: of two k the odd one first. */
static float sum_block(const problem *q, int64_t i, int64_t j, int64_t first, int64_t end)
{
    const float *a = q->lines_of_a + i * q->p.k, *b = q->lines_of_b + j * q->p.k;
    float sum = 0.0f;
    for (int64_t l = first; l < end; l += 2) {
        for (int64_t x = nd_min(l + 1, end - 1); x >= l; x--) {
            sum = fmaf(a[x], b[x], sum);
        }
    }
    return sum;
}

/* c is what the sum begins with, or 0. */
static float sum_all(const problem *q, const table *t, int64_t i, int64_t j, float c)
{
    const int64_t k = q->p.k, blocks = nd_ceil_div(k, 1024);
    const int64_t step = t->tiles ? 32 : nd_round_up(nd_ceil_div(k, blocks), 32);
    float sum = c;
    for (int64_t l = 0; l < k; l += step) {
        sum =
            t->tiles ? add_step(q, sum, i, j, l) : sum + sum_block(q, i, j, l, nd_min(l + step, k));
    }
    return sum;
}

static float defined(const problem *q, const table *t, int64_t i, int64_t j)
{
    const nd_gemm_factors *f = q->p.factors;
    const bool from_c = q->p.accumulate && !q->p.c_bf16 && !f;
    float sum = sum_all(q, t, i, j, from_c ? get(&q->c, i, j) : 0.0f);
    if (f) {
        sum *= f->rows ? f->all * f->rows[i] : f->all;
        sum *= f->columns ? f->columns[j] : 1.0f;
    }
    if (q->p.accumulate && !from_c) {
        sum += get(&q->c, i, j);
    }
    return q->p.c_bf16 ? nd_bf16_to_f32(nd_bf16_from_f32(flush(sum))) : sum;
}

/* the comparison */

/* Properties of a product that vary beside its extents; bits of `flags`. */
enum { A_TRANSPOSED = 1, B_TRANSPOSED = 2, ACCUMULATE = 4, OUT_BF16 = 8, FLAGS = 16 };

/* The factors of the sums: none, one number, that and one per column, or also one per row. */
enum { NO_FACTORS, ALL, ALL_COLUMNS, ALL_ROWS_COLUMNS, FACTORS };

/* The types of a and b: stored as this type, or BF16 that is cast to it while it is packed. */
static const struct {
    nd_dtype a, b;
    bool cast_a, cast_b;
} types[] = {{ND_DTYPE_BF16, ND_DTYPE_BF16, false, false},
             {ND_DTYPE_F8_E4M3, ND_DTYPE_F8_E4M3, false, false},
             {ND_DTYPE_F8_E4M3, ND_DTYPE_F8_E4M3, true, true},
             {ND_DTYPE_F8_E5M2, ND_DTYPE_F8_E4M3, false, false},
             {ND_DTYPE_F8_E5M2, ND_DTYPE_F8_E4M3, true, false},
             {ND_DTYPE_F8_E4M3, ND_DTYPE_F8_E5M2, false, true}};

enum { TYPES = sizeof types / sizeof *types };

/* a or b, with its lines in rows or in columns. */
static matrix draw_operand(nd_dtype type, bool cast, int64_t lines, int64_t k, bool in_rows,
                           int64_t gap, uint64_t seed)
{
    matrix x =
        draw(cast ? ND_DTYPE_BF16 : type, in_rows ? lines : k, in_rows ? k : lines, gap, seed);
    if (cast) {
        leave_to_cast(&x, type, (lines + k) % 2 != 0, in_rows);
    }
    return x;
}

/* One product as the tests name it. */
typedef struct shape {
    int64_t m, n, k;
    int flags, factors, types;
} shape;

static void make(problem *q, shape s)
{
    const bool at = s.flags & A_TRANSPOSED, bt = s.flags & B_TRANSPOSED, out = s.flags & OUT_BF16;
    const int64_t m = s.m, n = s.n, k = s.k;
    q->a = draw_operand(types[s.types].a, types[s.types].cast_a, m, k, !at, 3, 1);
    q->b = draw_operand(types[s.types].b, types[s.types].cast_b, n, k, bt, 5, 2);
    q->lines_of_a = lines_of(&q->a, !at);
    q->lines_of_b = lines_of(&q->b, bt);
    q->c = draw(out ? ND_DTYPE_BF16 : ND_DTYPE_F32, m, n, 7, 3);
    const float *rows = draw(ND_DTYPE_F32, 1, m, 0, 4).data;
    const float *columns = draw(ND_DTYPE_F32, 1, n, 0, 5).data;
    q->factors = (nd_gemm_factors){.all = 0.7f,
                                   .rows = s.factors == ALL_ROWS_COLUMNS ? rows : NULL,
                                   .columns = s.factors >= ALL_COLUMNS ? columns : NULL};
    q->p = (nd_gemm_product){.m = m,
                             .n = n,
                             .k = k,
                             .a = operand_of(&q->a),
                             .b = operand_of(&q->b),
                             .a_transposed = at,
                             .b_transposed = bt,
                             .accumulate = s.flags & ACCUMULATE,
                             .factors = s.factors == NO_FACTORS ? NULL : &q->factors,
                             .c_stride = q->c.stride,
                             .c_bf16 = out};
}

/* The objects that multiply, by their number of threads, kept from product to product: each holds
 * megabytes, which a new one would touch first. */
enum { MOST_THREADS = 7 };
static struct {
    const nd_gemm_kernels *kernels;
    nd_team *team;
    nd_gemm *gemm;
} kept[MOST_THREADS + 1];

static nd_gemm *gemm_of(const table *t, int threads)
{
    nd_team **team = &kept[threads].team;
    nd_gemm **gemm = &kept[threads].gemm;
    cr_assert_leq(threads, MOST_THREADS);
    if (!*gemm) {
        cr_assert_eq(nd_team_create(threads, team), ND_OK);
        cr_assert_eq(nd_gemm_create(t->kernels, *team, gemm), ND_OK);
        kept[threads].kernels = t->kernels;
    }
    cr_assert_eq(kept[threads].kernels, t->kernels, "end_gemms was not called after a table");
    return *gemm;
}

/* After the last product of a table. */
static void end_gemms(void)
{
    for (int threads = 1; threads <= MOST_THREADS; threads++) {
        nd_gemm_destroy(kept[threads].gemm);
        nd_team_destroy(kept[threads].team);
        kept[threads].gemm = NULL;
        kept[threads].team = NULL;
    }
}

static matrix multiply(const problem *q, const table *t, int threads)
{
    matrix c = q->c;
    c.data = guarded_memory(matrix_bytes(&c));
    memcpy(c.data, q->c.data, matrix_bytes(&c));
    nd_gemm_product p = q->p;
    p.c = c.data;
    nd_gemm_multiply(gemm_of(t, threads), &p);
    return c;
}

static void expect_defined(const problem *q, const table *t, const matrix *c)
{
    const nd_gemm_product *p = &q->p;
    for (int64_t i = 0; i < p->m; i++) {
        for (int64_t j = 0; j < p->n; j++) {
            const float got = get(c, i, j), want = defined(q, t, i, j);
            cr_assert(
                memcmp(&got, &want, sizeof got) == 0 || (isnan(got) && isnan(want)),
                "%s, %d x %d x %d, %s %s, cast %d %d, transposed %d %d, + c %d, (%d, %d): %a, by "
                "the definition %a",
                t->name, (int)p->m, (int)p->n, (int)p->k, nd_dtype_name(p->a.dtype),
                nd_dtype_name(p->b.dtype), p->a.scale != NULL, p->b.scale != NULL, p->a_transposed,
                p->b_transposed, p->accumulate, (int)i, (int)j, (double)got, (double)want);
        }
    }
}

/* Between the rows of c nothing is written. */
static void expect_gaps_kept(const problem *q, const table *t, const matrix *c)
{
    const int64_t size = (int64_t)nd_dtype_size(c->dtype);
    for (int64_t i = 0; i + 1 < c->rows; i++) {
        const int64_t at = (i * c->stride + c->columns) * size;
        cr_assert_eq(memcmp((char *)c->data + at, (char *)q->c.data + at,
                            (size_t)((c->stride - c->columns) * size)),
                     0, "%s: something was written behind row %d", t->name, (int)i);
    }
}

/* One product by one table and each of these numbers of threads. */
static void compare(const table *t, shape s, const int *threads, int count)
{
    problem q;
    make(&q, s);
    const matrix first = multiply(&q, t, threads[0]);
    expect_defined(&q, t, &first);
    expect_gaps_kept(&q, t, &first);
    for (int i = 1; i < count; i++) {
        const matrix c = multiply(&q, t, threads[i]);
        cr_assert_eq(memcmp(first.data, c.data, matrix_bytes(&c)), 0,
                     "%s, %d x %d x %d, flags %d: other bits with %d threads", t->name, (int)s.m,
                     (int)s.n, (int)s.k, s.flags, threads[i]);
    }
    free_memory();
}

static bool can_run(const table *t)
{
    return nd_cpu_isa_detect() >= t->needs;
}

/* Names the kernels that all tests of this file leave out. */
Test(gemm, kernels_that_this_cpu_lacks)
{
    char names[128] = "";
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        const size_t used = strlen(names);
        if (!can_run(&tables[i])) {
            snprintf(names + used, sizeof names - used, "%s%s", used > 0 ? ", " : "",
                     tables[i].name);
        }
    }
    if (names[0]) {
        fprintf(stderr, "skipped: products by kernels for %s: this CPU has %s at most\n", names,
                nd_cpu_isa_name(nd_cpu_isa_detect()));
        cr_skip("this CPU lacks instructions");
    }
}

/* Every extent around the edges of tiles, groups and panels. */
static void check_extents(const table *t)
{
    static const int one[] = {1};
    for (int extent = 1; extent <= 70; extent++) {
        for (int i = 0; i < 4; i++) {
            const int flags = (5 * extent + 5 * i) % FLAGS, factors = (extent + i) % FACTORS,
                      kind = (extent / 4 + i) % TYPES;
            compare(t, (shape){extent, 21, 37, flags, factors, kind}, one, 1);
            compare(t, (shape){19, extent, 34, flags, factors, kind}, one, 1);
            compare(t, (shape){5, 18, extent, flags, factors, kind}, one, 1);
        }
    }
}

/* Beyond the blocks of rows, k and columns; more columns and rows than threads' units. */
static void check_blocks(const table *t)
{
    static const int64_t extents[][3] = {{70, 90, 40},   {3, 5, 1600},  {40, 33, 1537},
                                         {800, 3, 34},   {800, 2, 770}, {5, 1030, 34},
                                         {3, 1030, 800}, {1100, 70, 2}};
    static const int threads[] = {1, 2, 3, 7};
    for (int i = 0; i < (int)(sizeof extents / sizeof *extents); i++) {
        const int64_t *e = extents[i];
        for (int flags = i % 2; flags < FLAGS; flags += 3) {
            compare(
                t, (shape){e[0], e[1], e[2], flags, (flags + i) % FACTORS, (flags / 3 + i) % TYPES},
                threads, 4);
        }
    }
}

static void for_each_table(void (*check)(const table *t))
{
    int checked = 0;
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        if (can_run(&tables[i])) {
            check(&tables[i]);
            end_gemms();
            checked++;
        }
    }
    cr_assert_gt(checked, 0);
}

Test(gemm, every_extent_has_the_defined_bits)
{
    for_each_table(check_extents);
}

Test(gemm, blocks_and_threads_change_no_bit)
{
    for_each_table(check_blocks);
}

/* Kernels that count the panels of B which they pack. */
static struct {
    const nd_gemm_kernels *real;
    atomic_int packed;
} counted;

static void count_b_rows(nd_gemm_word *to, nd_gemm_operand x, int lines, int depth)
{
    counted.packed++;
    counted.real->pack_b_rows(to, x, lines, depth);
}

static void count_b_columns(nd_gemm_word *to, nd_gemm_operand x, int lines, int depth)
{
    counted.packed++;
    counted.real->pack_b_columns(to, x, lines, depth);
}

/* B is packed by all threads before the products, some columns at a time: every panel once. */
static void check_together(const table *t)
{
    static const int64_t extents[][3] = {
        {800, 64, 40}, {40, 33, 1537}, {5, 1030, 34}, {9, 230, 1600}};
    static const int threads[] = {1, 2, 3, 7};
    nd_gemm_kernels kernels = *t->kernels;
    table together = *t;
    counted.real = t->kernels;
    together.kernels = &kernels;
    kernels.pack_b_rows = count_b_rows;
    kernels.pack_b_columns = count_b_columns;
    kernels.b_time = 1 << 20; /* so that it is worth while for small products too */
    kernels.least_together = 1;
    kernels.together_bytes = 2 * kernels.columns * 1600 * (int)sizeof(nd_bf16);
    for (int i = 0; i < 4 * (int)(sizeof extents / sizeof *extents); i++) {
        const int64_t *e = extents[i / 4];
        const int flags = (3 * i + i / 4) % FLAGS;
        const int64_t panels = nd_ceil_div(e[1], kernels.columns),
                      blocks = nd_ceil_div(e[2], kernels.k_block);
        counted.packed = 0;
        compare(&together, (shape){e[0], e[1], e[2], flags, i % FACTORS, i / 2 % TYPES}, threads,
                4);
        cr_assert_eq(counted.packed, 4 * panels * blocks, "%s: %d panels of B were packed, not %d",
                     t->name, (int)counted.packed, (int)(4 * panels * blocks));
    }
}

Test(gemm, columns_that_threads_pack_together_change_no_bit)
{
    for_each_table(check_together);
}

/* The cut into pieces of a weight gradient (m, n) of 1,024 tokens for two threads. */
static nd_gemm_cut cut_of_gradient(int64_t m, int64_t n)
{
    const nd_gemm_operand x = {.dtype = ND_DTYPE_BF16};
    const nd_gemm_product p = {.m = m, .n = n, .k = 1024, .a = x, .b = x, .a_transposed = true};
    return nd_gemm_choose_cut(&nd_gemm_avx512_bf16, &p, 2);
}

/* Every column of pieces packs A once more, which takes as long as 12 columns of the result. */
Test(gemm, pieces_share_the_operand_that_takes_longer_to_pack)
{
    cr_expect_eq(cut_of_gradient(1408, 512).columns, 1);
    cr_expect_leq(cut_of_gradient(512, 512).columns, 2);
    cr_expect_leq(cut_of_gradient(512, 1408).columns, 2);
    /* A piece with so many rows packs A anew for every 512 columns. */
    cr_expect_eq(cut_of_gradient(4096, 4096).rows, 1);
}

/* Sums and what is rounded to BF16 near the smallest normal number; not a number and infinity. */
static void check_special(const table *t)
{
    static const float values[] = {0x1p-63f,   0x1.8p-63f, -0x1p-64f, 0x1p-126f,
                                   -0x1p-130f, INFINITY,   -0.0f,     0x1p120f,
                                   1.0f,       0x1p-60f,   0x1.1p-7f, -INFINITY};
    problem q;
    if (!t->tiles) {
        return; /* without tiles the flushing differs from CPU to CPU (bf16_words.h) */
    }
    make(&q, (shape){20, 20, 40, OUT_BF16, NO_FACTORS, 0});
    for (int64_t l = 0; l < 40; l++) {
        for (int64_t i = 0; i < 20; i++) {
            const uint64_t bits = nd_rng_u64(9, (uint64_t)l, (uint64_t)i);
            put(&q.a, i * q.a.stride + l, values[bits % (i < 4 ? 12 : 5)]);
            put(&q.b, l * q.b.stride + i, values[(bits >> 32) % (i < 4 ? 12 : 5)]);
        }
    }
    q.lines_of_a = lines_of(&q.a, true);
    q.lines_of_b = lines_of(&q.b, false);
    const matrix c = multiply(&q, t, 1);
    expect_defined(&q, t, &c);
    free_memory();
}

Test(gemm, small_sums_are_flushed_and_others_kept)
{
    for_each_table(check_special);
}

/* Packing by AVX-512 and in plain C, which any CPU with AVX-512 can compare. `columns`: of a panel
 * of B; 0: a panel of A, whose rows that are not there are zeros. */
static void compare_packed(nd_gemm_pack *vectors, nd_gemm_pack *plain, bool of_rows, int columns,
                           int lines, int depth, const char *what)
{
    enum { MOST_LINES = 96, MOST_WORDS = 48 };
    static nd_gemm_word got[MOST_LINES * MOST_WORDS], want[MOST_LINES * MOST_WORDS];
    const int type = (lines + depth / 3) % TYPES;
    const matrix x = draw_operand(types[type].a, types[type].cast_a, lines, depth, of_rows, 3, 5);
    const nd_gemm_operand operand = operand_of(&x);
    memset(got, 0x5a, sizeof got);
    memset(want, 0x5a, sizeof want);
    vectors(got, operand, lines, depth);
    plain(want, operand, lines, depth);
    for (int i = 0; i < MOST_WORDS && columns > 0; i++) { /* columns that are not there */
        memset(&got[i * columns + lines], 0, (size_t)(columns - lines) * sizeof *got);
        memset(&want[i * columns + lines], 0, (size_t)(columns - lines) * sizeof *want);
    }
    cr_assert_eq(memcmp(got, want, sizeof got), 0, "%s, %d lines, %d of k", what, lines, depth);
    free_memory();
}

/* Without the sign of zeros. */
Test(gemm, vectors_and_plain_c_pack_the_same)
{
    const nd_gemm_kernels *v = &nd_gemm_amx, *p = &nd_gemm_amx_emulated;
    if (nd_cpu_isa_detect() < ND_CPU_ISA_AVX512) {
        skip_test("packing by AVX-512 is not compared: this CPU lacks it");
    }
    for (int lines = 1; lines <= 70; lines++) {
        for (int depth = 1; depth <= 70; depth++) {
            compare_packed(v->pack_a_rows, p->pack_a_rows, true, 0, lines, depth, "A from rows");
            compare_packed(v->pack_a_columns, p->pack_a_columns, false, 0, lines, depth,
                           "A from columns");
            if (lines <= v->columns) {
                compare_packed(v->pack_b_rows, p->pack_b_rows, true, v->columns, lines, depth,
                               "B from rows");
                compare_packed(v->pack_b_columns, p->pack_b_columns, false, v->columns, lines,
                               depth, "B from columns");
            }
        }
    }
}

/* A device's texts about itself with ND_CPU_ISA and ND_CPU_PRODUCTS set, or the error. */
typedef struct said {
    nd_status status;
    char machine[32], products[128];
} said;

static said with(const char *isa, const char *products)
{
    nd_device *device = NULL;
    const nd_ops *ops = NULL;
    said x;
    setenv("ND_CPU_ISA", isa, 1);
    setenv("ND_CPU_PRODUCTS", products, 1);
    cr_assert_eq(nd_device_open_cpu(1, &device), ND_OK);
    x.status = nd_ops_cpu(device, &ops);
    snprintf(x.machine, sizeof x.machine, "%s", nd_ops_machine(device));
    snprintf(x.products, sizeof x.products, "%s", nd_ops_products(device));
    nd_device_close(device);
    unsetenv("ND_CPU_PRODUCTS");
    unsetenv("ND_CPU_ISA");
    return x;
}

/* %s: oneDNN's version. */
static void expect_said(const char *isa, const char *products, const char *format)
{
    char expected[128];
    const said x = with(isa, products);
    cr_assert_eq(x.status, ND_OK, "%s", nd_error_last()->message);
    cr_expect_str_eq(x.machine, isa);
    snprintf(expected, sizeof expected, format, nd_ops_library_version());
    cr_expect_str_eq(x.products, expected);
}

#define F32_BY_ONEDNN ", F32 by oneDNN %s"
#define WIDENED       "F32 products by oneDNN %s, BF16 and FP8 widened to F32"

Test(gemm, who_makes_products_can_be_chosen_and_is_said)
{
    static const struct {
        nd_cpu_isa isa;
        const char *own, *onednn;
    } levels[] = {
        {ND_CPU_ISA_BASELINE, WIDENED, WIDENED},
        {ND_CPU_ISA_AVX2, WIDENED, WIDENED},
        {ND_CPU_ISA_AVX512, "BF16 and FP8 products by ndtrain's AVX-512 kernels" F32_BY_ONEDNN,
         WIDENED},
        {ND_CPU_ISA_AVX512_BF16,
         "BF16 and FP8 products by ndtrain's AVX512_BF16 kernels" F32_BY_ONEDNN,
         "BF16 and F32 products by oneDNN %s, FP8 widened to F32"},
        {ND_CPU_ISA_AMX, "BF16 and FP8 products by ndtrain's AMX kernels" F32_BY_ONEDNN,
         "BF16 and F32 products by oneDNN %s, FP8 widened to F32"},
    };
    const nd_cpu_isa vectors = nd_cpu_isa_of_vectors(ND_CPU_ISA_AMX_EMULATED);
    expect_said("amx_emulated", "own",
                "BF16 and FP8 products by ndtrain's emulated AMX kernels" F32_BY_ONEDNN);
    expect_said("amx_emulated", "onednn", levels[vectors].onednn);
    /* Downwards: oneDNN keeps the level of the first device of a process. */
    for (int i = (int)nd_cpu_isa_detect(); i >= 0; i--) {
        expect_said(nd_cpu_isa_name(levels[i].isa), "", levels[i].own);
        expect_said(nd_cpu_isa_name(levels[i].isa), "onednn", levels[i].onednn);
    }
}

Test(gemm, the_limit_of_onednn_is_one_of_all_kernels)
{
    if (nd_cpu_isa_detect() < ND_CPU_ISA_AVX2) {
        skip_test("this CPU has nothing above SSE2");
    }
    setenv("ONEDNN_MAX_CPU_ISA", "SSE41", 1);
    const said x = with("", "");
    cr_assert_eq(x.status, ND_OK, "%s", nd_error_last()->message);
    cr_expect_str_eq(x.machine, "baseline");
}

Test(gemm, nd_cpu_isa_is_above_the_limit_of_onednn)
{
    setenv("ONEDNN_MAX_CPU_ISA", "SSE41", 1);
    expect_said(nd_cpu_isa_name(nd_cpu_isa_detect() < ND_CPU_ISA_AVX2 ? ND_CPU_ISA_BASELINE
                                                                      : ND_CPU_ISA_AVX2),
                "", WIDENED);
}

Test(gemm, a_choice_that_cannot_be_is_refused)
{
    cr_assert_eq(with("baseline", "own").status, ND_ERR_CONFIG);
    cr_assert(strstr(nd_error_last()->message, "need AVX-512"), "%s", nd_error_last()->message);
    nd_error_clear();
    cr_assert_eq(with("amx_emulated", "quick").status, ND_ERR_CONFIG);
    cr_assert(strstr(nd_error_last()->message, "\"quick\"; it may be own or onednn"), "%s",
              nd_error_last()->message);
}
