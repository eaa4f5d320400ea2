// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>

#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tests/drawn/draw.h"
#include "tests/unit/runtime/comm/cases.h"

static const int sizes[] = {1, 2, 3, 4, 8, 11}; /* 11: more than take the direct plans */

static void run(int size, nd_status (*body)(nd_transport *, void *), void *context)
{
    nd_ranks ranks = {.size = size, .body = body, .context = context};
    nd_status status = nd_ranks_run_threads(&ranks);
    cr_assert_eq(status, ND_OK, "%d ranks: %s", size, nd_error_last()->message);
}

Test(local, collectives_match_the_serial_model)
{
    for (int s = 0; s < 6; s++) {
        case_collectives *c = case_shared(sizeof *c);
        *c = (case_collectives){.counts = {0, 1, 7, 1000, 2049, -1}};
        run(sizes[s], case_collectives_body, c);
    }
}

Test(local, large_buffers_go_through_the_staging_in_rounds)
{
    for (int s = 1; s < 6; s++) {
        case_collectives *c = case_shared(sizeof *c);
        *c = (case_collectives){.counts = {-1}, .large = sizes[s] == 2 ? 1.2 : 2.3};
        run(sizes[s], case_collectives_body, c);
    }
}

/* Each member's slice of a sum alone is more than two rounds, and a round and a part of one. */
Test(local, slices_of_an_all_reduce_have_several_rounds)
{
    for (int size = 2; size <= 4; size++) {
        case_collectives *c = case_shared(sizeof *c);
        *c = (case_collectives){.counts = {-1}, .large = size * (size == 3 ? 1.4 : 2.3)};
        run(size, case_collectives_body, c);
    }
}

Test(local, slices_that_fill_whole_rounds_but_for_one_element)
{
    run(2, case_uneven_body, NULL);
    run(3, case_uneven_body, NULL);
}

Test(local, the_same_bits_every_time)
{
    case_collectives *a = case_shared(sizeof *a), *b = case_shared(sizeof *b);
    *a = *b = (case_collectives){.counts = {3, 70000, -1}};
    run(4, case_collectives_body, a);
    run(4, case_collectives_body, b);
    cr_assert_eq(memcmp(a->digest, b->digest, sizeof a->digest), 0);
}

Test(local, operations_of_several_groups_are_pending_together)
{
    run(1, case_pending_body, NULL);
    run(2, case_pending_body, NULL);
    run(5, case_pending_body, NULL);
}

Test(local, a_stale_event_does_not_wait_for_the_next_operation_in_its_place)
{
    case_stale *c = case_shared(sizeof *c);
    run(2, case_stale_body, c);
}

Test(local, groups_of_a_mesh)
{
    run(8, case_groups_body, NULL);
}

Test(local, nan_reaches_every_member)
{
    run(3, case_nan_body, NULL);
}

static void expect_fault(case_fault fault, int64_t count, nd_status status,
                         const char *const *words)
{
    const case_expected expected = {fault, count, status, words};
    cr_assert_eq(case_check_fault(&expected, nd_ranks_run_threads), ND_OK, "%s",
                 nd_error_last()->message);
}

Test(local, a_rank_that_skips_is_named_with_what_it_does)
{
    const char *words[] = {"all_reduce of world, operation 3", "for rank 2;",
                           "rank 2 has not entered it: phase backward, step 41", NULL};
    expect_fault(CASE_SKIP, 10, ND_ERR_HANG, words);
    expect_fault(CASE_SKIP, 200000, ND_ERR_HANG, words);
}

/* Rank 0 waits alone, when all others wait in another group. */
static nd_status part_body(nd_transport *transport, void *context)
{
    const nd_mesh mesh = {{1, 1, transport->size, 1, 1}};
    nd_comm *world = NULL, *shards = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(case_world(transport, &world));
    ND_TRY_OUT(nd_comm_create(transport, &mesh, ND_GROUP_DP_SHARD, 0, &shards));
    for (int rank = 1; transport->rank == 0 && rank < transport->size; rank++) {
        const nd_progress_slot *slot = &transport->page->slots[rank];
        for (int ms = 0; ms < 60000 && (slot->sequence != 1 || slot->since_ns == 0); ms++) {
            usleep(1000);
        }
    }
    transport->timeout_seconds = transport->rank == 0 ? 0.2 : 60;
    status = nd_comm_barrier(transport->rank == 0 ? world : shards);
out:
    nd_comm_destroy(shards);
    nd_comm_destroy(world);
    return status;
}

Test(local, many_missing_ranks_are_named_with_where_they_wait)
{
    nd_ranks ranks = {.size = 8, .timeout_seconds = 60, .body = part_body};
    nd_ranks_run_threads(&ranks);
    const char *said = ranks.results[0].message;
    cr_expect_eq(ranks.results[0].status, ND_ERR_HANG);
    cr_expect(strstr(said, " for ranks 7, 6, 5, 4, 3, 2 and 1 more; rank 7 is in "), "%s", said);
    cr_expect(strstr(said, "; rank 2 is in barrier of dp_shard, operation 1, since "), "%s", said);
}

Test(local, a_rank_that_ends_is_named_before_the_deadline)
{
    const char *words[] = {"has ended while", "all_reduce of world, operation 3", NULL};
    expect_fault(CASE_LEAVE, 10, ND_ERR_IO, words);
}

Test(local, different_operations_are_named)
{
    const char *words[] = {"different operations as number 3", NULL};
    expect_fault(CASE_OTHER_COUNT, 10, ND_ERR_INTERNAL, words);
    expect_fault(CASE_OTHER_COUNT, 200000, ND_ERR_INTERNAL, words);
    expect_fault(CASE_OTHER_TYPE, 10, ND_ERR_INTERNAL, words);
    expect_fault(CASE_OTHER_SUM, 10, ND_ERR_INTERNAL, words);
    expect_fault(CASE_OTHER_ROOT, 10, ND_ERR_INTERNAL, words);
}

/* Seeds that are fixed and some of the day; a failure names the seed. */
enum { FIXED = 80, OF_THE_DAY = 40, DRAWS = FIXED + OF_THE_DAY };

static nd_draw draw_number(uint64_t i)
{
    const uint64_t today = (uint64_t)time(NULL) / 86400;
    return (nd_draw){.seed = i < FIXED ? i : today * 1000 + i};
}

/* Up to five rounds, of as few as 16 F32, and whole ones among them. */
Test(local, drawn_sizes_in_rounds)
{
    for (uint64_t i = 0; i < DRAWS; i++) {
        nd_draw d = draw_number(i);
        const int size = (int)draw_range(&d, 2, draw_once_in(&d, 4) ? 12 : 5);
        const int64_t place = 64 * draw_range(&d, 1, 6), round = place / 4;
        case_collectives *c = case_shared(sizeof *c);
        *c = (case_collectives){.staging = (size_t)(2 * place * (size - 1)), .counts = {-1}};
        for (int k = 0; k < 3; k++) {
            const int64_t rounds = draw_range(&d, 0, 4) * (draw_once_in(&d, 2) ? size : 1);
            const int64_t more =
                draw_once_in(&d, 3) ? draw_range(&d, 0, 1) : draw_range(&d, 0, round);
            c->counts[k] = rounds * round + more;
            c->counts[k + 1] = -1;
        }
        nd_ranks ranks = {.size = size, .body = case_collectives_body, .context = c};
        const nd_status status = nd_ranks_run_threads(&ranks);
        cr_assert_eq(status, ND_OK, "seed %llu: %d ranks: %s", (unsigned long long)d.seed, size,
                     nd_error_last()->message);
    }
}

/* One rank calls another operation: somebody says so, and nobody waits for a deadline. */
Test(local, drawn_operations_that_differ)
{
    for (uint64_t i = 0; i < DRAWS; i++) {
        nd_draw d = draw_number(i);
        const int size = (int)draw_range(&d, 2, 9), rank = (int)draw_range(&d, 0, size - 1);
        const nd_comm_op op = (nd_comm_op)draw_range(&d, 0, ND_COMM_OP_COUNT - 1);
        const nd_comm_op other =
            (nd_comm_op)((op + draw_range(&d, 1, ND_COMM_OP_COUNT - 1)) % ND_COMM_OP_COUNT);
        const int64_t count =
            draw_once_in(&d, 2) ? draw_range(&d, 1, 50) : draw_range(&d, 1, 30000);
        case_faulty *c = case_shared(sizeof *c);
        *c = (case_faulty){CASE_OTHER_OP, rank, count, op, other, 0};
        nd_ranks ranks = {
            .size = size, .timeout_seconds = 60, .body = case_fault_body, .context = c};
        nd_ranks_run_threads(&ranks);
        int named = 0;
        for (int r = 0; r < size; r++) {
            const nd_rank_result *result = &ranks.results[r];
            const char *message = result->message;
            named += strstr(message, "different operations as number 3") != NULL;
            cr_assert(result->status != ND_ERR_HANG,
                      "seed %llu: %s, and %s of rank %d: rank %d: %s", (unsigned long long)d.seed,
                      nd_comm_op_name(op), nd_comm_op_name(other), rank, r, message);
        }
        cr_assert_gt(named, 0, "seed %llu: %s, and %s of rank %d of %d: nobody named it: %s",
                     (unsigned long long)d.seed, nd_comm_op_name(op), nd_comm_op_name(other), rank,
                     size, ranks.results[rank].message);
    }
}
