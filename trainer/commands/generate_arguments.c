// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>

#include "runtime/base/text.h"
#include "trainer/commands/generate.h"

enum { DEFAULT_MAX_NEW = 128, DEFAULT_CONTEXT = 4096 };

static nd_status apply(void *context, int flag, const char *value)
{
    nd_generate_call *o = context;
    switch (flag) {
    case ND_GENERATE_MODEL:
        o->model = value;
        break;
    case ND_GENERATE_TOKENIZER:
        o->tokenizer = value;
        break;
    case ND_GENERATE_PROMPT:
        if (o->prompt) {
            return nd_fail(ND_ERR_CONFIG, "--prompt is given twice, but it is one text; give "
                                          "several as rows of --prompt-file FILE.jsonl");
        }
        o->prompt = value;
        break;
    case ND_GENERATE_PROMPT_FILE:
        o->prompt_file = value;
        break;
    case ND_GENERATE_JSONL:
        o->jsonl = true;
        break;
    case ND_GENERATE_INTERACTIVE:
        o->interactive = true;
        break;
    case ND_GENERATE_CONTEXT:
        return nd_command_flag_whole(&nd_generate_flags.list[flag], value, 2, &o->context);
    case ND_GENERATE_CHAT:
        o->chat = true;
        break;
    case ND_GENERATE_MAX_NEW:
        return nd_command_flag_whole(&nd_generate_flags.list[flag], value, 1, &o->max_new);
    case ND_GENERATE_TEMPERATURE:
        return nd_command_flag_real(&nd_generate_flags.list[flag], value, &o->sampling.temperature);
    case ND_GENERATE_TOP_K:
        return nd_command_flag_whole(&nd_generate_flags.list[flag], value, 0, &o->sampling.top_k);
    case ND_GENERATE_TOP_P:
        return nd_command_flag_real(&nd_generate_flags.list[flag], value, &o->sampling.top_p);
    case ND_GENERATE_MIN_P:
        return nd_command_flag_real(&nd_generate_flags.list[flag], value, &o->sampling.min_p);
    case ND_GENERATE_STOP:
        return nd_stops_add(&o->stops, value);
    case ND_GENERATE_IGNORE_EOS:
        o->ignore_eos = true;
        break;
    case ND_GENERATE_BATCH:
        return nd_command_flag_whole(&nd_generate_flags.list[flag], value, 1, &o->batch);
    case ND_GENERATE_ROWS:
        return nd_command_flag_whole(&nd_generate_flags.list[flag], value, 1, &o->rows);
    default:
        break;
    }
    return ND_OK;
}

static nd_status check_effect(const nd_sampling *s)
{
    const char *idle = s->top_k > 0 ? "--top-k" : s->top_p < 1 ? "--top-p" : "--min-p";
    if (s->temperature > 0 || (s->top_k == 0 && s->top_p == 1 && s->min_p == 0)) {
        return ND_OK;
    }
    return nd_fail(ND_ERR_CONFIG,
                   "%s has no effect at --temperature 0, the default, which takes the likeliest "
                   "token; give --temperature 1 as well, or leave %s out",
                   idle, idle);
}

/* argv[0] is the command. */
nd_status nd_generate_parse(int argc, char **argv, nd_generate_call *o)
{
    *o = (nd_generate_call){.batch = 32, .rows = 512, .sampling = {.top_p = 1}};
    ND_TRY(nd_command_flags_read(&nd_generate_flags, argc, argv, apply, o));
    if (o->max_new == 0) {
        o->max_new = DEFAULT_MAX_NEW;
        o->max_new_fits = !o->interactive; /* lines share their --context */
    }
    if (o->prompt && o->prompt_file) {
        return nd_fail(ND_ERR_CONFIG, "--prompt is one text; leave out --prompt-file, or --prompt");
    }
    if (o->interactive && (o->prompt || o->prompt_file)) {
        return nd_fail(ND_ERR_CONFIG, "--interactive reads prompts from the terminal; leave out "
                                      "--prompt and --prompt-file");
    }
    if (o->context > 0 && !o->interactive) {
        return nd_fail(ND_ERR_CONFIG, "--context is the room of --interactive, and has no effect "
                                      "without it; the room follows from the prompt and "
                                      "--max-new-tokens");
    }
    o->context = o->context > 0 ? o->context : DEFAULT_CONTEXT;
    o->jsonl |= o->prompt_file && nd_is_name_of_rows(o->prompt_file);
    ND_TRY(nd_sampling_check(&o->sampling));
    return check_effect(&o->sampling);
}

nd_status nd_generate_take_flags(int argc, char **argv, char ***rest, int *count)
{
    nd_generate_call o;
    ND_TRY(nd_command_flags_split(&nd_generate_flags, argc, argv, false, rest, count));
    return nd_generate_parse(argc, argv, &o); /* before the job is joined */
}

void nd_generate_print_help(void)
{
    printf(
        "usage: ndtrain generate --model PATH --prompt TEXT [flags]\n\n"
        "Continues texts, and prints them as they come. Settings of a run are flags too:\n"
        "--precision bf16|fp32|fp8, --tp-size N, --chat-format, --seed; ndtrain --help all.\n\n");
    nd_command_flags_print(&nd_generate_flags);
    printf("\nExit codes: 0 done, 2 wrong usage, 65 bad model, prompt or tokenizer, 70 logits that "
           "are\nnot finite, 71 out of memory, 73 output that cannot be written, 75 stopped by a "
           "signal.\n");
}
