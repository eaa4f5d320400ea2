// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "runtime/base/process.h"
#include "runtime/base/suggest.h"
#include "trainer/commands/command.h"
#include "trainer/view/page.h"

static const char help[] = "usage: ndtrain report RUN ... [-o FILE] [--markdown]\n\n"
                           "Draws one run, or several side by side, as one page of HTML that needs "
                           "no network. RUN is a run\n"
                           "folder; it may belong to a run that goes on.\n\n"
                           "  -o, --output FILE  where to write, - for standard output; without it "
                           "the page of one run is\n"
                           "                     RUN/report.html, and Markdown goes to standard "
                           "output. An earlier report\n"
                           "                     is replaced, another file never\n"
                           "  --markdown         text and tables without curves, as Markdown\n\n"
                           "Exit codes: 0 done, 2 wrong usage, 65 no run or a damaged file, 71 out "
                           "of memory, 73 a report\n"
                           "that cannot be written, 74 a failing disk.\n";

typedef struct report_call {
    bool help, markdown;
    const char *output; /* NULL: not given */
    const char *runs[ND_PAGE_RUNS_MAX];
    int count;
} report_call;

static nd_status fail_flag(const char *argument)
{
    static const char *const flags[] = {"-o", "--output", "--markdown", "--help"};
    nd_suggest search;
    nd_suggest_init(&search, argument);
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        nd_suggest_offer(&search, flags[i]);
    }
    return nd_fail(ND_ERR_CONFIG, "ndtrain report has no flag %.60s; %s%s%s", argument,
                   search.best ? "did you mean " : "ndtrain report --help lists them",
                   search.best ? search.best : "", search.best ? "?" : "");
}

static nd_status take_output(report_call *call, const char *value)
{
    if (call->output) {
        return nd_fail(ND_ERR_CONFIG, "-o is given twice; give it once");
    }
    if (!value || !value[0]) {
        return nd_fail(ND_ERR_CONFIG, "-o needs a value: the file to write");
    }
    call->output = value;
    return ND_OK;
}

static nd_status take_argument(report_call *call, int argc, char **argv, int *i)
{
    const char *argument = argv[*i];
    if (strcmp(argument, "-o") == 0 || strcmp(argument, "--output") == 0) {
        *i += 1;
        return take_output(call, *i < argc ? argv[*i] : NULL);
    }
    if (strncmp(argument, "--output=", 9) == 0) {
        return take_output(call, argument + 9);
    }
    if (strcmp(argument, "--markdown") == 0) {
        call->markdown = true;
        return ND_OK;
    }
    if (argument[0] == '-') {
        return fail_flag(argument);
    }
    if (call->count == ND_PAGE_RUNS_MAX) {
        return nd_fail(ND_ERR_CONFIG,
                       "more than %d runs are given; a report compares at most as "
                       "many",
                       ND_PAGE_RUNS_MAX);
    }
    call->runs[call->count++] = argument;
    return ND_OK;
}

static nd_status parse(report_call *call, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        call->help |= strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0;
    }
    for (int i = 1; i < argc && !call->help; i++) {
        ND_TRY(take_argument(call, argc, argv, &i));
    }
    if (call->count == 0 && !call->help) {
        return nd_fail(ND_ERR_CONFIG, "a run folder is missing; usage: ndtrain report RUN ... "
                                      "[-o FILE] [--markdown]");
    }
    if (call->count > 1 && !call->output && !call->markdown) {
        return nd_fail(ND_ERR_CONFIG, "the report of several runs needs -o FILE");
    }
    return ND_OK;
}

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
    const nd_page page = {.runs = views,
                          .count = call->count,
                          .kind = call->markdown ? ND_DOC_MARKDOWN : ND_DOC_HTML,
                          .now = now};
    status = write_report(call, &page);
out:
    for (int i = 0; i < call->count; i++) {
        nd_run_view_close(&views[i]);
    }
    free(views);
    return status;
}

int nd_report_main(int argc, char **argv)
{
    report_call call = {0};
    nd_status status = parse(&call, argc, argv);
    if (status == ND_OK && call.help) {
        fputs(help, stdout);
    } else if (status == ND_OK) {
        status = report(&call);
    }
    status = status == ND_OK ? nd_process_flush_output() : status;
    if (status != ND_OK) {
        nd_log_error("%s", nd_error_last()->message);
    }
    return (int)status;
}
