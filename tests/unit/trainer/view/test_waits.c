// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/parts.h"

#include <criterion/criterion.h>
#include <string.h>

#include "tests/support/tempdir.h"

static tempdir dir;
static FILE *out;

static void make(void)
{
    tempdir_make(&dir);
    out = fopen(tempdir_file(&dir, "profile.json"), "w");
    cr_assert_not_null(out);
}

static void clean(void)
{
    tempdir_remove(&dir);
}

TestSuite(waits, .init = make, .fini = clean);

static void call(int rank, double begin_us, double us, const char *group, int sequence)
{
    fprintf(out,
            "{\"name\":\"comm_all_reduce\",\"cat\":\"communication\",\"ph\":\"X\",\"ts\":%.3f,"
            "\"dur\":%.3f,\"pid\":%d,\"tid\":1,\"args\":{\"group\":\"%s\",\"op\":\"all_reduce\","
            "\"sequence\":%d,\"bytes\":8}},\n",
            begin_us, us, rank, group, sequence);
}

static const nd_mesh mesh = {.size = {[ND_AXIS_PP] = 1,
                                      [ND_AXIS_DP_REPLICATE] = 1,
                                      [ND_AXIS_DP_SHARD] = 2,
                                      [ND_AXIS_CP] = 1,
                                      [ND_AXIS_TP] = 2}};

/* Ranks 0 and 1 are one group of tp, 2 and 3 another, both with the same sequence numbers. */
Test(waits, the_last_of_each_group_is_waited_for)
{
    nd_waits w;
    fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n", out);
    fputs("{\"name\":\"step 3\",\"cat\":\"step\",\"ph\":\"X\",\"ts\":0,\"dur\":9000,\"pid\":0,"
          "\"tid\":0},\n",
          out);
    call(0, 1000, 4000, "tp", 7); /* waits 3 ms for rank 1 */
    call(1, 4000, 1000, "tp", 7);
    call(2, 1000, 500, "tp", 7); /* only begins it: half a millisecond at most */
    call(3, 8000, 100, "tp", 7);
    call(0, 6000, 2000, "tp", 8); /* is the last one of the next */
    call(1, 5500, 2500, "tp", 8);
    call(0, 9000, 100, "world", 1); /* the others are not in the file */
    call(9, 9000, 100, "world", 2); /* no rank of the mesh */
    call(1, 9000, 100, "what", 1);
    fputs("{\"name\":\"parts\",\"ph\":\"M\",\"pid\":0,\"args\":{\"ranks\":4,\"found\":4}}],\n",
          out);
    fclose(out);
    assert_ok(nd_waits_read(tempdir_file(&dir, "profile.json"), &mesh, &w));
    cr_assert_eq(w.count, 4);
    cr_assert_eq(w.steps, 1);
    cr_assert_eq(w.collectives, 3);
    const double waited[] = {3, 0.5, 0.5, 0}, caused[] = {0.5, 3, 0, 0.5};
    const int64_t last[] = {1, 1, 0, 1};
    for (int i = 0; i < 4; i++) {
        cr_assert_float_eq(w.ranks[i].waited_ms, waited[i], 1e-9, "rank %d", i);
        cr_assert_float_eq(w.ranks[i].caused_ms, caused[i], 1e-9, "rank %d", i);
        cr_assert_eq(w.ranks[i].last, last[i], "rank %d", i);
    }
    cr_assert_float_eq(w.ranks[0].communication_ms, 6.1, 1e-9);
    nd_waits_fini(&w);
}

Test(waits, another_file_is_refused)
{
    nd_waits w;
    fputs("[1, 2]\n", out);
    fclose(out);
    assert_fails(nd_waits_read(tempdir_file(&dir, "profile.json"), &mesh, &w), ND_ERR_DATA,
                 "no profile");
    assert_fails(nd_waits_read(tempdir_file(&dir, "none.json"), &mesh, &w), ND_ERR_DATA,
                 "none.json");
}
