// SPDX-License-Identifier: Apache-2.0
#include "trainer/worker/command_line.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Of the file's words, each with its NUL; the last may lack it. */
static nd_status split(nd_command_line *line, size_t size)
{
    int words = 0;
    for (size_t at = 0; at < size; at += strlen(line->text + at) + 1) {
        words++;
    }
    ND_TRY(ND_ALLOC(words > 0 ? words : 1, &line->argv));
    for (size_t at = 0; at < size; at += strlen(line->text + at) + 1) {
        line->argv[line->argc++] = line->text + at;
    }
    return ND_OK;
}

nd_status nd_command_line_read(int pid, nd_command_line *out)
{
    char path[64], bytes[4096];
    nd_command_line line = {0};
    size_t size = 0;
    snprintf(path, sizeof path, "/proc/%d/cmdline", pid);
    FILE *in = fopen(path, "re");
    if (!in) {
        return nd_fail(ND_ERR_IO, "%s cannot be read: %s", path, strerror(errno));
    }
    FILE *copy = open_memstream(&line.text, &size); /* it ends with a NUL that is not counted */
    for (size_t n; copy && (n = fread(bytes, 1, sizeof bytes, in)) > 0;) {
        fwrite(bytes, 1, n, copy);
    }
    fclose(in);
    if (copy) {
        fclose(copy);
    }
    nd_status status =
        size > 0 ? split(&line, size) : nd_fail(ND_ERR_IO, "%s holds no command line", path);
    if (status != ND_OK) {
        nd_command_line_free(&line);
        return status;
    }
    *out = line;
    return ND_OK;
}

void nd_command_line_free(nd_command_line *line)
{
    free(line->text);
    free(line->argv);
    *line = (nd_command_line){0};
}
