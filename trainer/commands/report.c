// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/text.h"
#include "trainer/commands/command.h"
#include "trainer/view/view.h"

typedef struct report_call {
    bool markdown;
    const char *output; /* NULL: not given */
    const char *runs[ND_PAGE_RUNS_MAX];
    int count;
} report_call;

/* Two runs with one name are told apart by their paths. */
static void name_runs(nd_run_view *views, int count)
{
    bool twice[ND_PAGE_RUNS_MAX] = {false};
    for (int i = 0; i < count; i++) {
        for (int k = 0; k < count; k++) {
            twice[i] |= k != i && strcmp(views[i].name, views[k].name) == 0;
        }
    }
    for (int i = 0; i < count; i++) {
        views[i].name = twice[i] ? views[i].folder : views[i].name;
    }
}

/* What is there must be a report. */
static nd_status check_replaceable(const char *path)
{
    char begin[64] = "";
    size_t length = strlen(nd_page_mark);
    bool there = false;
    int fd = -1;
    ND_TRY(nd_fs_exists(path, &there));
    if (!there) {
        return ND_OK;
    }
    ND_TRY(nd_fs_open(path, ND_ERR_CANTCREATE, &fd, NULL));
    ssize_t got = read(fd, begin, length);
    close(fd);
    if (got != (ssize_t)length || memcmp(begin, nd_page_mark, length) != 0) {
        return nd_fail(ND_ERR_CANTCREATE,
                       "%s exists and is no report of ndtrain; remove it, or give another file as "
                       "-o",
                       path);
    }
    return ND_OK;
}

static nd_status draw(const nd_page *page, char **text, size_t *size)
{
    FILE *out = open_memstream(text, size);
    if (!out) {
        return nd_fail_memory("the report");
    }
    nd_status status = nd_page_write(page, out);
    bool failed = ferror(out) != 0;
    failed = fclose(out) != 0 || failed;
    if (status == ND_OK && failed) {
        status = nd_fail_memory("the report");
    }
    return status;
}

static nd_status write_report(const report_call *call, const nd_page *page)
{
    char *text = NULL, *path = NULL;
    size_t size = 0;
    nd_status status = ND_OK;
    const char *output = call->output ? call->output : call->markdown ? "-" : NULL;
    if (output) {
        ND_TRY_OUT(nd_fs_format(&path, "%s", output));
    } else {
        ND_TRY_OUT(nd_fs_format(&path, "%s/report.html", page->runs[0].folder));
    }
    if (strcmp(path, "-") == 0) {
        ND_TRY_OUT(draw(page, &text, &size));
        fwrite(text, 1, size, stdout); /* the caller flushes it and finds what is lost */
        goto out;
    }
    ND_TRY_OUT(check_replaceable(path));
    ND_TRY_OUT(draw(page, &text, &size));
    ND_TRY_OUT(nd_fs_write_atomic(path, text, size));
    printf("report: %s\n", path);
out:
    free(text);
    free(path);
    return status;
}

static nd_status report(const report_call *call)
{
    nd_run_view *views = NULL;
    int64_t now = (int64_t)time(NULL);
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(call->count, &views));
    for (int i = 0; i < call->count; i++) {
        ND_TRY_OUT(nd_run_view_open(call->runs[i], now, &views[i]));
    }
    name_runs(views, call->count);
    const nd_page page = {
        .runs = views, .count = call->count, .markdown = call->markdown, .now = now};
    status = write_report(call, &page);
out:
    for (int i = 0; i < call->count; i++) {
        nd_run_view_close(&views[i]);
    }
    free(views);
    return status;
}

nd_status nd_report(const nd_command_flags *line, int *code)
{
    report_call call = {.markdown = line->values[ND_REPORT_MARKDOWN].given,
                        .output = line->values[ND_REPORT_OUTPUT].text};
    const char *run;
    (void)code;
    for (int at = 0; (run = nd_command_flags_next(line, ND_NO_FLAG, &at));) {
        ND_ASSERT(call.count < ND_PAGE_RUNS_MAX);
        call.runs[call.count++] = run;
    }
    if (call.output && !call.output[0]) {
        return nd_fail(ND_ERR_CONFIG, "--output is empty; give the file to write");
    }
    if (call.output && !call.markdown && nd_ends_with(call.output, ".md")) {
        return nd_fail(ND_ERR_CONFIG,
                       "--output is %s, and the report would be HTML; add --markdown, or give a "
                       "name that ends in .html",
                       call.output);
    }
    if (call.count > 1 && !call.output && !call.markdown) {
        return nd_fail(ND_ERR_CONFIG, "the report of several runs needs -o FILE");
    }
    return report(&call);
}
