// SPDX-License-Identifier: Apache-2.0
#include "trainer/commands/ckpt.h"

#include <stdio.h>
#include <string.h>

#include "runtime/base/log.h"
#include "runtime/base/process.h"
#include "runtime/base/suggest.h"
#include "trainer/commands/command.h"

static const struct {
    nd_command_id command;
    nd_tool *run;
} verbs[] = {{ND_COMMAND_CKPT_LS, nd_ckpt_ls},         {ND_COMMAND_CKPT_VERIFY, nd_ckpt_verify},
             {ND_COMMAND_CKPT_EXPORT, nd_ckpt_export}, {ND_COMMAND_CKPT_GGUF, nd_ckpt_gguf},
             {ND_COMMAND_CKPT_DIFF, nd_ckpt_diff},     {ND_COMMAND_CKPT_PRUNE, nd_ckpt_prune}};
enum { VERBS = sizeof verbs / sizeof *verbs };

/* "ls" */
static const char *verb_name(int verb)
{
    return nd_command_name(verbs[verb].command) + sizeof "ckpt";
}

static const char about[] =
    "Tools for checkpoints. RUN is a run folder, CHECKPOINT one of its folders checkpoint-STEP; "
    "where\na CHECKPOINT is asked for, RUN means its newest one.\n";
static void print_help(void)
{
    printf("usage: ndtrain ckpt VERB ...\n\n%s\n", about);
    for (int i = 0; i < VERBS; i++) {
        printf("  %-6s %s\n", verb_name(i), nd_command_usage(verbs[i].command));
    }
    printf("\nndtrain ckpt VERB --help says what a verb does, and its exit codes.\n");
}

static nd_status fail_verb(const char *name)
{
    nd_suggest search;
    nd_suggest_init(&search, name);
    for (int i = 0; i < VERBS; i++) {
        nd_suggest_offer(&search, verb_name(i));
    }
    return nd_fail(ND_ERR_CONFIG, "ndtrain ckpt has no verb \"%.60s\"; %s%s%s", name,
                   search.best ? "did you mean "
                               : "it has ls, verify, export, gguf, diff and prune",
                   search.best ? search.best : "", search.best ? "?" : "");
}

static nd_status run(int argc, char **argv, int *code)
{
    const char *name = argc > 1 ? argv[1] : "";
    if (argc < 2) {
        return nd_fail(ND_ERR_CONFIG, "a verb is missing: ls, verify, export, gguf, diff or prune; "
                                      "ndtrain ckpt --help says more");
    }
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0 || strcmp(name, "help") == 0) {
        print_help();
        return ND_OK;
    }
    if (strcmp(name, "--version") == 0) {
        nd_version_print();
        return ND_OK;
    }
    for (int i = 0; i < VERBS; i++) {
        if (strcmp(verb_name(i), name) == 0) {
            return nd_tool_run(verbs[i].command, verbs[i].run, argc - 1, argv + 1, code);
        }
    }
    return fail_verb(name);
}

int nd_ckpt_main(int argc, char **argv)
{
    int code = 0;
    nd_status status = run(argc, argv, &code);
    return nd_tool_end(status, code);
}
