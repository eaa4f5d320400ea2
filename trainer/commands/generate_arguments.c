// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/text.h"
#include "trainer/commands/generate.h"

enum { DEFAULT_MAX_NEW = 128, DEFAULT_CONTEXT = 4096 };

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

nd_status nd_generate_parse(int argc, char **argv, nd_generate_call *o)
{
    nd_command_flags line;
    const nd_flag_value *v = line.values;
    const char *stop;
    ND_TRY(nd_command_flags_read(ND_COMMAND_GENERATE, argc, argv, &line));
    *o = (nd_generate_call){.model = v[ND_GENERATE_MODEL].text,
                            .tokenizer = v[ND_GENERATE_TOKENIZER].text,
                            .prompt = v[ND_GENERATE_PROMPT].text,
                            .prompt_file = v[ND_GENERATE_PROMPT_FILE].text,
                            .jsonl = v[ND_GENERATE_JSONL].given,
                            .chat = v[ND_GENERATE_CHAT].given,
                            .ignore_eos = v[ND_GENERATE_IGNORE_EOS].given,
                            .interactive = v[ND_GENERATE_INTERACTIVE].given,
                            .max_new = v[ND_GENERATE_MAX_NEW].whole,
                            .batch = v[ND_GENERATE_BATCH].whole,
                            .rows = v[ND_GENERATE_ROWS].whole,
                            .context = v[ND_GENERATE_CONTEXT].whole,
                            .sampling = {.temperature = v[ND_GENERATE_TEMPERATURE].real,
                                         .top_k = v[ND_GENERATE_TOP_K].whole,
                                         .top_p = v[ND_GENERATE_TOP_P].real,
                                         .min_p = v[ND_GENERATE_MIN_P].real}};
    for (int at = 0; (stop = nd_command_flags_next(&line, ND_GENERATE_STOP, &at));) {
        ND_TRY(nd_stops_add(&o->stops, stop));
    }
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

nd_status nd_generate_check_flags(int argc, char **argv)
{
    nd_generate_call o;
    return nd_generate_parse(argc, argv, &o);
}
