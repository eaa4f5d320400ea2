// SPDX-License-Identifier: Apache-2.0
#ifndef ND_WORKER_COMMAND_LINE_H
#define ND_WORKER_COMMAND_LINE_H
/* The command line that a user typed: that of ndlaunch, where it started this worker. */
#include "runtime/base/status.h"

typedef struct nd_command_line {
    char *text;  /* the words, each with its NUL; owned */
    char **argv; /* (argc), into text; owned */
    int argc;
} nd_command_line;

/* Of a running process. ND_ERR_IO when there is none, or when it is another user's. */
nd_status nd_command_line_read(int pid, nd_command_line *out);
void nd_command_line_free(nd_command_line *line);

#endif
