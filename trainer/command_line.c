// SPDX-License-Identifier: Apache-2.0
#include "trainer/command_line.h"

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
    char path[64];
    nd_command_line line = {0};
    size_t room = 0;
    snprintf(path, sizeof path, "/proc/%d/cmdline", pid);
    FILE *f = fopen(path, "re");
    if (!f) {
        return nd_fail(ND_ERR_IO, "%s cannot be read: %s", path, strerror(errno));
    }
    ssize_t size = getdelim(&line.text, &room, EOF, f); /* EOF is no byte: the whole file */
    fclose(f);
    nd_status status = size > 0 ? split(&line, (size_t)size)
                                : nd_fail(ND_ERR_IO, "%s holds no command line", path);
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
