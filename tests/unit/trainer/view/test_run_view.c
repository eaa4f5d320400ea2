// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/run_view.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tests/support/tempdir.h"
#include "trainer/view/page.h"

static tempdir dir;

static void make(void)
{
    tempdir_make(&dir);
}

static void clean(void)
{
    tempdir_remove(&dir);
}

TestSuite(run_view, .init = make, .fini = clean);

static void write_file(const char *name, const char *text)
{
    tempdir_write(&dir, name, text, strlen(text));
}

/* Steps 1 to `steps`, with losses that fall from 5 by 0.5. */
static void write_metrics(int steps, const char *further)
{
    FILE *out = fopen(tempdir_file(&dir, "metrics.jsonl"), "w");
    cr_assert_not_null(out);
    for (int step = 1; step <= steps; step++) {
        fprintf(out,
                "{\"step\":%d,\"loss\":%g,\"step_ms\":%d,\"data_wait_ms\":1,\"tokens_seen\":%d,"
                "\"tokens_per_second\":%d,\"peak_memory_bytes\":2097152}\n",
                step, 5.5 - 0.5 * step, step <= 2 ? 1000 : 10, 64 * step, 100 * step);
    }
    fputs(further, out);
    fclose(out);
}

static const char record[] =
    "{\"config\":{\"train.steps\":6,\"train.seed\":42,\"optimizer.lr\":0.001,"
    "\"optimizer.betas\":[0.9,0.95],\"output.dir\":\"<run>\",\"later.key\":true},"
    "\"model\":{\"planned_bytes\":1048576,\"parameters\":1000},\"command\":[\"ndlaunch\"]}";

static nd_run_view open_view(int64_t now)
{
    nd_run_view view;
    assert_ok(nd_run_view_open(dir.path, now, &view));
    return view;
}

Test(run_view, figures_of_a_finished_run)
{
    char text[ND_VERDICT_MAX];
    write_metrics(6, "{\"step\":3,\"validation_loss\":2,\"validation_ms\":5}\n"
                     "{\"step\":6,\"validation_loss\":2.5,\"validation_ms\":5}\n");
    write_file("run.json", record);
    nd_run_view view = open_view((int64_t)time(NULL));
    const nd_run_figures *f = &view.figures;
    cr_assert_eq(view.end, ND_RUN_FINISHED);
    cr_assert_str_eq(nd_run_verdict(&view, text), "finished: all 6 steps");
    cr_assert_eq(f->first_loss, 5);
    cr_assert_eq(f->last_loss, 2.5);
    cr_assert_eq(f->end_loss, 2.5);
    cr_assert_eq(f->step_ms, 10, "the first two steps do not count");
    cr_assert_eq(f->tokens_per_second, 450);
    cr_assert_float_eq(f->training_seconds, 2.04, 1e-9);
    cr_assert_float_eq(f->data_wait_share, 6 / 2040.0, 1e-9);
    cr_assert(f->best_validation == 2 && f->best_validation_step == 3 && f->last_validation == 2.5);
    cr_assert(f->planned_bytes == 1048576 && f->peak_bytes == 2097152 && f->tokens_seen == 384);
    nd_run_view_close(&view);
}

Test(run_view, how_a_run_ended)
{
    int64_t now = (int64_t)time(NULL);
    write_file("run.json", record);
    write_metrics(4, "");
    nd_run_view view = open_view(now);
    cr_assert_eq(view.end, ND_RUN_RECENT);
    nd_run_view_close(&view);
    view = open_view(now + 3600);
    cr_assert_eq(view.end, ND_RUN_ENDED_EARLY);
    nd_run_view_close(&view);
    write_metrics(4, "{\"event\":\"checkpoint\",\"step\":4,\"reason\":\"signal\"}\n");
    view = open_view(now + 3600);
    cr_assert_eq(view.end, ND_RUN_STOPPED);
    nd_run_view_close(&view);
    write_metrics(4, "{\"event\":\"early_stopped\",\"step\":4,\"why\":\"<no> better\"}\n");
    view = open_view(now + 3600);
    char verdict[ND_VERDICT_MAX];
    cr_assert_eq(view.end, ND_RUN_STOPPED_EARLY);
    cr_assert_not_null(strstr(nd_run_verdict(&view, verdict), "step 4 of 6: <no> better"));
    nd_run_view_close(&view);
    unlink(tempdir_file(&dir, "run.json"));
    write_metrics(4, "");
    view = open_view(now + 3600);
    cr_assert_eq(view.end, ND_RUN_UNKNOWN);
    nd_run_view_close(&view);
}

static nd_status list_setting(void *context, const char *key, const char *value, const char *was,
                              bool differs)
{
    char *list = context;
    size_t used = strlen(list);
    snprintf(list + used, 1024 - used, "%s=%s was %s%s;", key, value, was, differs ? "!" : "");
    return ND_OK;
}

Test(run_view, settings_that_differ_come_first)
{
    char list[1024] = "";
    write_metrics(3, "");
    write_file("run.json", record);
    nd_run_view view = open_view(0);
    assert_ok(nd_run_view_each_setting(&view, list_setting, list));
    const char *lr = strstr(list, "optimizer.lr=0.001 was "), *seed = strstr(list, "train.seed=42");
    cr_assert(lr && seed && lr < seed, "%s", list);
    cr_assert_not_null(strstr(list, "output.dir=<run> was !"), "%s", list);
    cr_assert_not_null(strstr(list, "later.key=true was !"), "%s", list);
    const char *betas = strstr(list, "optimizer.betas=");
    cr_assert(betas && betas > lr, "the default betas are not among those that differ: %s", list);
    nd_run_view_close(&view);
}

Test(run_view, what_is_no_run_is_refused)
{
    nd_run_view view;
    assert_fails(nd_run_view_open("/tmp/nd_no_such_folder", 0, &view), ND_ERR_DATA, "no folder");
    assert_fails(nd_run_view_open(dir.path, 0, &view), ND_ERR_DATA, "no metrics.jsonl");
    write_file("metrics.jsonl", "");
    assert_fails(nd_run_view_open(dir.path, 0, &view), ND_ERR_DATA, "no step yet");
    write_metrics(1, "");
    write_file("run.json", "{\"config\":");
    assert_fails(nd_run_view_open(dir.path, 0, &view), ND_ERR_DATA, "run.json");
}

/* The newest start has the settings that count. */
Test(run_view, of_several_starts_the_last_one_counts)
{
    write_metrics(6, "");
    write_file("run.json", "{\"config\":{\"train.steps\":4}}");
    write_file("run-2.json", record);
    nd_run_view view = open_view(0);
    cr_assert_eq(view.starts, 2);
    cr_assert_eq(view.steps_wanted, 6);
    nd_run_view_close(&view);
}

static char *page_of(nd_doc_kind kind, const nd_run_view *views, int count)
{
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    cr_assert_not_null(out);
    const nd_page page = {.runs = views, .count = count, .kind = kind, .now = 0};
    assert_ok(nd_page_write(&page, out));
    cr_assert_eq(fclose(out), 0);
    return text;
}

Test(run_view, a_page_of_one_run_and_of_two)
{
    write_metrics(6, "{\"step\":6,\"validation_loss\":2.5,\"validation_ms\":5}\n");
    write_file("run.json", record);
    nd_run_view views[2] = {open_view(0), open_view(0)};
    for (int count = 1; count <= 2; count++) {
        char *html = page_of(ND_DOC_HTML, views, count);
        cr_assert_eq(strncmp(html, nd_page_mark, strlen(nd_page_mark)), 0);
        cr_assert_not_null(strstr(html, "id=\"loss\""));
        cr_assert_not_null(strstr(html, "polyline class=\"line c0\""));
        cr_assert_eq(count > 1, strstr(html, "polyline class=\"line c1\"") != NULL);
        cr_assert_not_null(strstr(html, "&lt;run&gt;"));
        cr_assert_null(strstr(html, "<run>"));
        cr_assert_null(strstr(html, "http:"));
        cr_assert_null(strstr(html, "https:"));
        free(html);
        char *markdown = page_of(ND_DOC_MARKDOWN, views, count);
        cr_assert_not_null(strstr(markdown, "finished: all 6 steps"));
        cr_assert_null(strstr(markdown, "<run>"));
        cr_assert_null(strstr(markdown, "<svg"));
        free(markdown);
    }
    nd_run_view_close(&views[0]);
    nd_run_view_close(&views[1]);
}
