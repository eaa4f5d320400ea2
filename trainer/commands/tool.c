// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/log.h"
#include "runtime/base/process.h"
#include "trainer/commands/command.h"

nd_status nd_tool_run(nd_command_id command, nd_tool *run, int argc, char **argv, int *code)
{
    nd_command_flags line;
    if (nd_command_wants_help(argc, argv)) {
        nd_command_print_help(command);
        return ND_OK;
    }
    ND_TRY(nd_command_flags_read(command, argc, argv, &line));
    return run(&line, code);
}

int nd_tool_end(nd_status status, int code)
{
    if (status != ND_OK) {
        nd_log_error("%s", nd_error_last()->message);
        code = (int)status;
    }
    status = nd_process_flush_output();
    if (status != ND_OK) {
        nd_log_error("%s", nd_error_last()->message);
        code = (int)status;
    }
    return code;
}
