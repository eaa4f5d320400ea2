// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>

#include "runtime/base/text.h"
#include "trainer/commands/generate.h"

enum {
    FLAG_MODEL,
    FLAG_TOKENIZER,
    FLAG_PROMPT,
    FLAG_PROMPT_FILE,
    FLAG_JSONL,
    FLAG_CHAT,
    FLAG_MAX_NEW,
    FLAG_TEMPERATURE,
    FLAG_TOP_K,
    FLAG_TOP_P,
    FLAG_MIN_P,
    FLAG_STOP,
    FLAG_IGNORE_EOS,
    FLAG_BATCH,
    FLAG_ROWS,
    FLAG_COUNT
};

static const nd_flag flags[FLAG_COUNT] = {
    [FLAG_MODEL] = {"--model", "PATH",
                    "a model's folder, a run folder, a checkpoint, or ORG/NAME in the cache"},
    [FLAG_TOKENIZER] = {"--tokenizer", "PATH",
                        "a tokenizer.json or its folder, or bytes; the model's if not given"},
    [FLAG_PROMPT] = {"--prompt", "TEXT", "the text to continue"},
    [FLAG_PROMPT_FILE] = {"--prompt-file", "FILE",
                          "a file with it, - for standard input, which is read if there is no "
                          "prompt; .jsonl: one prompt a line"},
    [FLAG_JSONL] = {"--jsonl", NULL, "the file has JSON lines, and so has the output"},
    [FLAG_CHAT] = {"--chat", NULL,
                   "the prompt is a user's message; in the form of --chat-format, or the one that "
                   "the tokenizer has tokens for"},
    [FLAG_MAX_NEW] = {"--max-new-tokens", "N", "tokens of a text at most; 128"},
    [FLAG_TEMPERATURE] = {"--temperature", "T", "0: the likeliest token each time; 0"},
    [FLAG_TOP_K] = {"--top-k", "K", "draw among the K likeliest; 0: all"},
    [FLAG_TOP_P] = {"--top-p", "P", "draw among the likeliest that together reach P; 1: all"},
    [FLAG_MIN_P] = {"--min-p", "P", "draw among those with P times the greatest probability; 0"},
    [FLAG_STOP] = {"--stop", "TEXT", "ends a text before it; may be given several times"},
    [FLAG_IGNORE_EOS] = {"--ignore-eos", NULL, "end tokens are tokens like any other"},
    [FLAG_BATCH] = {"--max-batch", "N", "texts of a replica at once at most; 32"},
    [FLAG_ROWS] = {"--prefill-chunk", "N", "tokens of one call of the model at most; 512"},
};

static nd_status apply(void *context, int flag, const char *value)
{
    nd_generate_call *o = context;
    switch (flag) {
    case FLAG_MODEL:
        o->model = value;
        break;
    case FLAG_TOKENIZER:
        o->tokenizer = value;
        break;
    case FLAG_PROMPT:
        o->prompt = value;
        break;
    case FLAG_PROMPT_FILE:
        o->prompt_file = value;
        break;
    case FLAG_JSONL:
        o->jsonl = true;
        break;
    case FLAG_CHAT:
        o->chat = true;
        break;
    case FLAG_MAX_NEW:
        return nd_flag_whole(&flags[flag], value, 1, &o->max_new);
    case FLAG_TEMPERATURE:
        return nd_flag_real(&flags[flag], value, &o->sampling.temperature);
    case FLAG_TOP_K:
        return nd_flag_whole(&flags[flag], value, 0, &o->sampling.top_k);
    case FLAG_TOP_P:
        return nd_flag_real(&flags[flag], value, &o->sampling.top_p);
    case FLAG_MIN_P:
        return nd_flag_real(&flags[flag], value, &o->sampling.min_p);
    case FLAG_STOP:
        return nd_stops_add(&o->stops, value);
    case FLAG_IGNORE_EOS:
        o->ignore_eos = true;
        break;
    case FLAG_BATCH:
        return nd_flag_whole(&flags[flag], value, 1, &o->batch);
    case FLAG_ROWS:
        return nd_flag_whole(&flags[flag], value, 1, &o->rows);
    default:
        break;
    }
    return ND_OK;
}

/* argv[0] is the command. */
nd_status nd_generate_parse(int argc, char **argv, nd_generate_call *o)
{
    *o = (nd_generate_call){.max_new = 128, .batch = 32, .rows = 512, .sampling = {.top_p = 1}};
    ND_TRY(nd_flags_read(flags, FLAG_COUNT, argc, argv, apply, o));
    if (o->prompt && (o->prompt_file || o->jsonl)) {
        return nd_fail(ND_ERR_CONFIG, "--prompt is one text; leave out --prompt-file and --jsonl, "
                                      "or --prompt");
    }
    o->jsonl |= o->prompt_file &&
                (nd_ends_with(o->prompt_file, ".jsonl") || nd_ends_with(o->prompt_file, ".ndjson"));
    return nd_sampling_check(&o->sampling);
}

nd_status nd_generate_take_flags(int argc, char **argv, char ***rest, int *count)
{
    nd_generate_call o;
    ND_TRY(nd_generate_parse(argc, argv, &o)); /* before the job is joined */
    return nd_flags_rest(flags, FLAG_COUNT, argc, argv, nd_session_settings, rest, count);
}

void nd_generate_print_help(void)
{
    printf("usage: ndtrain generate --model PATH --prompt TEXT [flags]\n\n"
           "Continues texts, and prints them as they come. Settings of a run are flags too:\n"
           "--precision bf16|fp32, --tp-size N, --chat-format, --seed; ndtrain --help all.\n\n");
    nd_flags_print(flags, FLAG_COUNT);
    printf("\nExit codes: 0 done, 2 wrong usage, 65 bad model, prompt or tokenizer, 70 logits that "
           "are\nnot finite, 71 out of memory, 73 output that cannot be written, 75 stopped by a "
           "signal.\n");
}
