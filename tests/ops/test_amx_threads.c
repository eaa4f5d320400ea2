// SPDX-License-Identifier: Apache-2.0
/* The threads of a device leave no tiles configured behind an op, since oneDNN configures its own:
 * seen in the emulation, which aborts where a thread uses a tile without that, and on a CPU with
 * tiles by XGETBV. */
#define ND_AMX_EMULATED
#include "kernels/cpu/amx.h"

#include <criterion/criterion.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "kernels/cpu/context.h"
#include "runtime/base/process.h"
#include "tests/ops/amx_products.h"
#include "tests/ops/attend.h"
#include "tests/support/skip.h"

enum { THREADS = 3, PATIENCE_SECONDS = 60 };

typedef struct look {
    _Atomic int here;
    bool configured[THREADS];
    _Atomic bool missed;
    bool of_the_cpu; /* not the emulated ones */
} look;

static void use_tile(void *unused)
{
    nd_amx_zero(0);
}

/* A piece waits for all others, so that each thread does one. */
static void look_at_tiles(void *arg, int64_t piece)
{
    look *l = arg;
    const time_t end = time(NULL) + PATIENCE_SECONDS;
    l->configured[nd_team_thread()] =
        l->of_the_cpu ? nd_tiles_are_in_use() : nd_abort_guard(ND_ABORT_ANY, use_tile, NULL);
    atomic_fetch_add(&l->here, 1);
    while (atomic_load(&l->here) < THREADS) {
        if (time(NULL) > end) {
            atomic_store(&l->missed, true);
            return;
        }
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
}

/* Each thread has tiles, or none, when it has run `look_at`. */
static void expect_tiles(const nd_side *side, nd_team_body look_at, bool expected,
                         const char *after)
{
    const nd_cpu_context *context = side->device->native;
    look l = {.of_the_cpu = context->isa == ND_CPU_ISA_AMX};
    nd_team_run(context->team, THREADS, look_at, &l);
    cr_assert_not(l.missed, "a thread did two pieces");
    for (int i = 0; i < THREADS; i++) {
        cr_expect_eq(l.configured[i], expected, "thread %d has %s tiles after %s", i,
                     expected ? "no" : "its", after);
    }
}

static void expect_no_tiles(const nd_side *side, const char *after)
{
    expect_tiles(side, look_at_tiles, false, after);
}

static void configure_tiles(void *arg, int64_t piece)
{
    const look *l = arg;
    if (l->of_the_cpu) {
        nd_configure_tiles_in_hardware();
    } else {
        nd_amx_configure(&(nd_amx_config){.palette = 1, .rows = {1}, .row_bytes = {4}});
    }
    look_at_tiles(arg, piece);
}

static void check_products(const nd_side *side)
{
    const nd_tensor a = nd_random_2d(ND_DTYPE_BF16, 300, 160, 0, 1.0f);
    const nd_tensor b = nd_random_2d(ND_DTYPE_BF16, 160, 300, 0, 1.0f);
    const nd_tensor c = nd_random_2d(ND_DTYPE_BF16, 300, 300, 0, 1.0f);
    ND_RUN(side, product, .c = c, .a = nd_rows(a), .b = nd_rows(b));
    expect_no_tiles(side, "a product");
    nd_case_free();
}

static void check_attention(const nd_side *side)
{
    static const nd_attention a = {2, 200, 300, 2, 1, 64, 100, 0.125f};
    nd_tensor in[ND_ATTEND_INPUTS], results[ND_ATTEND_RESULTS];
    nd_attend_draw(&a, ND_DTYPE_BF16, in);
    nd_attend_forward(side, &a, in, nd_clone(in[0]),
                      nd_random_1d(ND_DTYPE_F32, a.batch * a.heads * a.sq, 0.0f));
    expect_no_tiles(side, "attention's forward");
    nd_attend(side, &a, in, results);
    expect_no_tiles(side, "attention's backward");
    nd_case_free();
}

/* So that the checks above would notice them. */
static void check_that_tiles_are_seen(const nd_side *side)
{
    expect_tiles(side, configure_tiles, true, "a configuration");
}

static void with_side(nd_cpu_isa isa, void (*check)(const nd_side *side))
{
    nd_side side;
    setenv("ND_CPU_ISA", nd_cpu_isa_name(isa), 1);
    nd_side_open_cpu(&side, THREADS);
    check(&side);
    nd_side_close(&side);
}

Test(amx_threads, release_their_tiles_after_products)
{
    with_side(ND_CPU_ISA_AMX_EMULATED, check_products);
}

Test(amx_threads, release_their_tiles_after_attention)
{
    with_side(ND_CPU_ISA_AMX_EMULATED, check_attention);
}

Test(amx_threads, with_tiles_are_seen)
{
    with_side(ND_CPU_ISA_AMX_EMULATED, check_that_tiles_are_seen);
}

Test(amx_threads, release_the_tiles_of_the_cpu)
{
    if (nd_cpu_isa_detect() != ND_CPU_ISA_AMX) {
        skip_test("this CPU has no tiles");
    }
    with_side(ND_CPU_ISA_AMX, check_products);
    with_side(ND_CPU_ISA_AMX, check_attention);
    with_side(ND_CPU_ISA_AMX, check_that_tiles_are_seen);
}
