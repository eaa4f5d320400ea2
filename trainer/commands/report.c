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

/* Refuses a path where something other than a report is already. */
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

static nd_status write_report(nd_run_view *views, int count, const char *output)
{
    char *text = NULL, *path = NULL, verdict[ND_VERDICT_MAX];
    bool twice[ND_WORDS_MAX] = {false};
    size_t size = 0;
    nd_status status = ND_OK;
    for (int i = 0; i < count; i++) {
        for (int k = 0; k < count; k++) {
            twice[i] |= k != i && strcmp(views[i].name, views[k].name) == 0;
        }
    }
    for (int i = 0; i < count; i++) { /* two runs with one name are told apart by their paths */
        views[i].name = twice[i] ? views[i].folder : views[i].name;
    }
    ND_TRY_OUT(output ? nd_fs_format(&path, "%s", output)
                      : nd_fs_format(&path, "%s/report.html", views[0].folder));
    ND_TRY_OUT(check_replaceable(path));
    FILE *out = open_memstream(&text, &size);
    if (out) {
        status = nd_page_write(views, count, (int64_t)time(NULL), out);
    }
    const bool failed = !out || ferror(out) != 0;
    if ((out && fclose(out) != 0) || failed) {
        status = status == ND_OK ? nd_fail_memory("the report") : status;
    }
    ND_TRY_OUT(status);
    ND_TRY_OUT(nd_fs_write_atomic(path, text, size));
    for (int i = 0; i < count; i++) {
        printf("%s: %s\n", views[i].name, nd_run_verdict(&views[i], verdict));
    }
    printf("report: %s\n", path);
out:
    free(text);
    free(path);
    return status;
}

nd_status nd_report(const nd_command_flags *line)
{
    const char *output = line->values[ND_REPORT_OUTPUT].text;
    nd_run_view *views = NULL;
    int count = 0;
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(line->words, &views));
    if (output && (!output[0] || strcmp(output, "-") == 0 || nd_ends_with(output, ".md"))) {
        status = nd_fail(ND_ERR_CONFIG,
                         "--output is \"%s\", and the report is a page of HTML; give a name that "
                         "ends in .html",
                         output);
        goto out;
    }
    for (; count < line->words; count++) {
        ND_TRY_OUT(nd_run_view_open(line->word[count], (int64_t)time(NULL), &views[count]));
    }
    if (count > 1 && !output) {
        status = nd_fail(ND_ERR_CONFIG, "the report of several runs needs -o FILE");
        goto out;
    }
    status = write_report(views, count, output);
out:
    for (int i = 0; i < count; i++) {
        nd_run_view_close(&views[i]);
    }
    free(views);
    return status;
}
