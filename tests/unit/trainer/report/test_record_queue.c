// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <string.h>

#include "tests/support/tempdir.h"
#include "trainer/report/sink_thread.h"

static bool push_step(nd_record_queue *queue, int64_t step, int sources)
{
    char name[2][48] = {"web", "code"}; /* gone when the record is read */
    const nd_source_loss list[] = {{name[0], 0.5, step}, {name[1], 0.25, -step}};
    const nd_step_record record = {.step = step, .sources = list, .source_count = sources};
    return nd_record_queue_push(queue, &(nd_record){ND_RECORD_STEP, step, &record});
}

static void expect_step(nd_record_queue *queue, int64_t step, int sources)
{
    const nd_record *first = nd_record_queue_first(queue);
    cr_assert_not_null(first);
    const nd_step_record *record = first->of;
    cr_assert_eq(first->step, step);
    cr_assert_eq(record->step, step);
    cr_assert_eq(record->source_count, sources);
    for (int i = 0; i < sources; i++) {
        cr_assert_str_eq(record->sources[i].name, i == 0 ? "web" : "code");
        cr_assert_eq(record->sources[i].tokens, i == 0 ? step : -step);
    }
    nd_record_queue_pop(queue);
}

/* Records of two sizes, in a queue with room for about seven, so that its end is passed often. */
Test(record_queue, records_come_back_in_their_order_with_all_they_point_to)
{
    nd_record_queue queue;
    assert_ok(nd_record_queue_init(&queue, 2048));
    int64_t in = 0, out = 0;
    for (int round = 0; round < 1000; round++) {
        int pushed = 0;
        while (pushed <= round % 5 && push_step(&queue, in, (int)(in % 3))) {
            in++;
            pushed++;
        }
        for (int k = 0; k <= round % 4 && out < in; k++, out++) {
            expect_step(&queue, out, (int)(out % 3));
        }
    }
    cr_assert_gt(in, 1000);
    for (; out < in; out++) {
        expect_step(&queue, out, (int)(out % 3));
    }
    cr_assert_null(nd_record_queue_first(&queue));
    nd_record_queue_fini(&queue);
}

Test(record_queue, one_that_finds_no_room_changes_nothing)
{
    nd_record_queue queue;
    assert_ok(nd_record_queue_init(&queue, 2048));
    int64_t in = 0;
    while (push_step(&queue, in, 2)) {
        in++;
    }
    cr_assert_gt(in, 2);
    cr_assert_eq(queue.count, in);
    for (int64_t step = 0; step < in; step++) {
        expect_step(&queue, step, 2);
    }
    nd_record_queue_fini(&queue);
}

Test(record_queue, an_event_has_its_texts_and_meshes)
{
    nd_record_queue queue;
    assert_ok(nd_record_queue_init(&queue, 2048));
    nd_mesh now = {{1, 1, 2, 1, 2}}, was = {{1, 1, 4, 1, 1}};
    char path[] = "/run/checkpoint-3";
    const nd_run_event event = {
        .kind = ND_RUN_EVENT_RESUMED, .step = 3, .path = path, .mesh = &now, .mesh_was = &was};
    cr_assert(nd_record_queue_push(&queue, &(nd_record){ND_RECORD_EVENT, 3, &event}));
    memset(path, 'x', strlen(path));
    memset(&now, 0, sizeof now);
    const nd_run_event *copy = nd_record_queue_first(&queue)->of;
    cr_expect_str_eq(copy->path, "/run/checkpoint-3");
    cr_expect_null(copy->reason);
    cr_expect_null(copy->sink);
    cr_expect_eq(copy->mesh->size[2], 2);
    cr_expect_eq(copy->mesh_was->size[2], 4);
    nd_record_queue_fini(&queue);
}
