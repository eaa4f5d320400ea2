// SPDX-License-Identifier: Apache-2.0
/* `ndtrain generate`: continues prompts. */
#include "trainer/commands/generate.h"

#include <stdio.h>
#include <stdlib.h>

#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/math.h"

/* Of all replicas. The times are those of the one that took longest: replicas work at once.
 * Collective over all ranks, which have all done their part. */
static nd_status sum_counts(nd_session *session, nd_generate_counts *c)
{
    nd_rank *r = &session->worker->rank;
    nd_comm *replicas = r->groups.by_kind[ND_GROUP_DP_REPLICATE];
    int64_t sums[] = {c->calls, c->prompt_tokens, c->new_tokens, c->decode_tokens};
    int64_t ns[] = {(int64_t)(c->prompt_seconds * 1e9), (int64_t)(c->decode_seconds * 1e9)};
    ND_TRY(nd_comm_all_reduce(replicas, &r->stream, sums, 4, ND_DTYPE_I64, ND_REDOP_SUM, NULL));
    ND_TRY(nd_comm_all_reduce(replicas, &r->stream, ns, 2, ND_DTYPE_I64, ND_REDOP_MAX, NULL));
    *c = (nd_generate_counts){.calls = sums[0],
                              .prompt_tokens = sums[1],
                              .new_tokens = sums[2],
                              .decode_tokens = sums[3],
                              .prompt_seconds = (double)ns[0] * 1e-9,
                              .decode_seconds = (double)ns[1] * 1e-9};
    return ND_OK;
}

/* ", 12.3 a second", or nothing: a prompt of one token is computed with new tokens, and has no time
 * of its own. */
static const char *rate_text(int64_t tokens, double seconds, const char *when, char text[64])
{
    text[0] = '\0';
    if (seconds > 0) {
        snprintf(text, 64, ", %.1f a second%s", (double)tokens / seconds, when);
    }
    return text;
}

static const char *plural(int64_t count)
{
    return count == 1 ? "" : "s";
}

static void log_speed(const nd_generate_counts *c, size_t texts, double seconds)
{
    char new_rate[64], prompt_rate[64];
    nd_log_info(
        "%zu text%s in %.2f s: %lld new token%s%s; %lld prompt token%s%s; %lld call%s", texts,
        plural((int64_t)texts), seconds, (long long)c->new_tokens, plural(c->new_tokens),
        rate_text(c->decode_tokens, c->decode_seconds, " while no prompt was computed", new_rate),
        (long long)c->prompt_tokens, plural(c->prompt_tokens),
        rate_text(c->prompt_tokens, c->prompt_seconds, "", prompt_rate), (long long)c->calls,
        plural(c->calls));
}

/* All requests at once, with a cache for the longest. */
static nd_status run_requests(nd_session *session, const nd_generate_call *o,
                              const nd_generate_input *in)
{
    const nd_rank *r = &session->worker->rank;
    const size_t count = in->requests.count;
    const int64_t each = nd_ceil_div((int64_t)count, r->mesh.size[ND_AXIS_DP_REPLICATE]);
    const int64_t batch = nd_min(o->batch, each), capacity = nd_max(in->requests.longest, 2);
    const nd_generate_options sizes = {.batch = batch,
                                       .rows = nd_max(nd_min(o->rows, batch * capacity), batch),
                                       .capacity = capacity};
    nd_generator *generator = NULL;
    ND_TRY(nd_session_generator(session, &sizes, &generator));
    const nd_generate_task task = {
        .session = session, .options = o, .in = in, .generator = generator, .batch = batch};
    const double begin = nd_clock_seconds();
    nd_status status = nd_generate_run(&task, NULL);
    const double seconds = nd_clock_seconds() - begin;
    nd_generate_counts counts = nd_generator_counts(generator);
    status = status == ND_OK ? sum_counts(session, &counts) : status;
    if (status == ND_OK && r->rank == 0) {
        log_speed(&counts, count, seconds);
    }
    nd_generator_destroy(generator);
    return status;
}

static nd_status read_and_run(nd_session *session, const nd_generate_call *o)
{
    nd_generate_input in = {0};
    char *text = NULL;
    size_t size = 0;
    nd_status status = nd_generate_read(session, o, &text, &size);
    status = status == ND_OK ? nd_generate_encode(session, o, text, size, &in) : status;
    free(text);
    if (status == ND_OK && in.requests.count > 0) {
        status = run_requests(session, o, &in);
    }
    nd_generate_input_fini(&in);
    return status;
}

static nd_status run(const nd_command_call *call)
{
    nd_session session = {0};
    nd_generate_call o;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_generate_parse(call->argc - 1, call->argv + 1, &o));
    o.sampling.seed = (uint64_t)call->config->train.seed;
    ND_TRY_OUT(nd_session_open(&session, call, o.model, o.tokenizer));
    ND_TRY_OUT(nd_session_agree(&session, call));
    status = o.interactive ? nd_generate_converse(&session, &o) : read_and_run(&session, &o);
out:
    nd_session_close(&session);
    return status;
}

static nd_status check_use(nd_session *s, const void *context)
{
    ND_TRY(nd_generate_check_job(s->config, &s->model.shape, &s->config->resolved_mesh));
    return nd_generate_check_input(s, context);
}

static nd_status check(const nd_command_call *call)
{
    nd_generate_call o;
    ND_TRY(nd_generate_parse(call->argc - 1, call->argv + 1, &o));
    return nd_session_check(call, o.model, o.tokenizer, check_use, &o);
}

const nd_command nd_command_generate = {.name = "generate",
                                        .trains = true,
                                        .begin = nd_session_begin,
                                        .run = run,
                                        .check = check,
                                        .decodes = true,
                                        .own = ND_COMMAND_GENERATE,
                                        .check_flags = nd_generate_check_flags};
