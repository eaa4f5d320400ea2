// SPDX-License-Identifier: Apache-2.0
#include "trainer/commands/ckpt.h"

#include <stdio.h>
#include <string.h>

#include "runtime/base/log.h"
#include "runtime/base/process.h"
#include "runtime/base/suggest.h"
#include "trainer/commands/command.h"

static const nd_ckpt_verb *const verbs[] = {&nd_ckpt_ls,   &nd_ckpt_verify, &nd_ckpt_export,
                                            &nd_ckpt_gguf, &nd_ckpt_diff,   &nd_ckpt_prune};
enum { VERBS = sizeof verbs / sizeof *verbs };

static const char about[] =
    "Tools for checkpoints. RUN is a run folder, CHECKPOINT one of its folders checkpoint-STEP; "
    "where\na CHECKPOINT is asked for, RUN means its newest one.\n";
static const char codes[] =
    "Exit codes: 0 done, 2 wrong usage, 65 a bad or damaged folder, 73 output that cannot be\n"
    "written, 74 a failing disk, 71 out of memory. diff ends with 1 when the states differ.\n";

static void print_help(void)
{
    printf("usage: ndtrain ckpt VERB ...\n\n%s\n", about);
    for (int i = 0; i < VERBS; i++) {
        printf("  %-6s %s\n", verbs[i]->name, verbs[i]->usage);
    }
    printf("\nndtrain ckpt VERB --help says what a verb does.\n%s", codes);
}

static void print_verb_help(const nd_ckpt_verb *verb)
{
    printf("usage: ndtrain ckpt %s %s\n\n%s\n", verb->name, verb->usage, verb->help);
    for (const nd_ckpt_flag *flag = verb->flags; flag->name; flag++) {
        char name[64];
        snprintf(name, sizeof name, "%s%s%s", flag->name, flag->value ? " " : "",
                 flag->value ? flag->value : "");
        printf("  %-22s %s\n", name, flag->help);
    }
    printf("%s%s", verb->flags[0].name ? "\n" : "", codes);
}

static bool is_help(const char *argument)
{
    return strcmp(argument, "--help") == 0 || strcmp(argument, "-h") == 0;
}

static const nd_ckpt_verb *find_verb(const char *name)
{
    for (int i = 0; i < VERBS; i++) {
        if (strcmp(verbs[i]->name, name) == 0) {
            return verbs[i];
        }
    }
    return NULL;
}

static nd_status fail_verb(const char *name)
{
    nd_suggest search;
    nd_suggest_init(&search, name);
    for (int i = 0; i < VERBS; i++) {
        nd_suggest_offer(&search, verbs[i]->name);
    }
    return nd_fail(ND_ERR_CONFIG, "ndtrain ckpt has no verb \"%.60s\"; %s%s%s", name,
                   search.best ? "did you mean "
                               : "it has ls, verify, export, gguf, diff and prune",
                   search.best ? search.best : "", search.best ? "?" : "");
}

static nd_status run(int argc, char **argv, int *code)
{
    nd_ckpt_call call;
    if (argc < 2) {
        return nd_fail(ND_ERR_CONFIG, "a verb is missing: ls, verify, export, gguf, diff or prune; "
                                      "ndtrain ckpt --help says more");
    }
    if (is_help(argv[1]) || strcmp(argv[1], "help") == 0) {
        print_help();
        return ND_OK;
    }
    if (strcmp(argv[1], "--version") == 0) {
        nd_version_print();
        return ND_OK;
    }
    const nd_ckpt_verb *verb = find_verb(argv[1]);
    if (!verb) {
        return fail_verb(argv[1]);
    }
    for (int i = 2; i < argc; i++) {
        if (is_help(argv[i])) {
            print_verb_help(verb);
            return ND_OK;
        }
    }
    ND_TRY(nd_ckpt_parse(verb, argc - 1, argv + 1, &call));
    return verb->run(&call, code);
}

int nd_ckpt_main(int argc, char **argv)
{
    int code = 0;
    nd_status status = run(argc, argv, &code);
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
