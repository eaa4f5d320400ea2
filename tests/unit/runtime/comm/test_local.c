// SPDX-License-Identifier: Apache-2.0
/* Ranks as threads. */
#define SUITE local
#define RUN   nd_ranks_run_threads
#include "tests/unit/runtime/comm/transport_tests.h"

#include <time.h>
#include <unistd.h>

#include "tests/drawn/draw.h"

/* Each member's slice of a sum alone is more than two rounds, and a round and a part of one. */
Test(local, slices_of_an_all_reduce_have_several_rounds)
{
    for (int size = 2; size <= 4; size++) {
        run_collectives(size, TOGETHER, (case_collectives){{-1}, size * (size == 3 ? 1.4 : 2.3)});
    }
}

Test(local, slices_that_fill_whole_rounds_but_for_one_element)
{
    run(2, TOGETHER, case_uneven_body, NULL);
    run(3, TOGETHER, case_uneven_body, NULL);
}

Test(local, a_stale_event_does_not_wait_for_the_next_operation_in_its_place)
{
    case_stale *c = case_shared(sizeof *c);
    run(2, TOGETHER, case_stale_body, c);
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

/* As a process the root may have sent all and ended. */
Test(local, different_roots_are_named)
{
    const char *words[] = {"different operations as number 3", NULL};
    expect_fault(CASE_OTHER_ROOT, 10, TOGETHER, ND_ERR_INTERNAL, words);
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
