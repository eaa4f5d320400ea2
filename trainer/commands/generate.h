// SPDX-License-Identifier: Apache-2.0
#ifndef ND_COMMANDS_GENERATE_H
#define ND_COMMANDS_GENERATE_H
/*
 * `ndtrain generate` and `ndtrain eval`: use of a model. Both have flags of their own, which stand
 * among the settings of a run (--precision, --tp-size, --seed, ...), and run on the ranks of a job:
 * tp ranks share a model, dp_replicate ranks share the work.
 *
 *   session.c   model, tokenizer, ranks
 *   standard_input.c   what rank 0 reads
 *   texts.c     ids to text: decoder and stop texts
 *   generate.c, with generate_run.c; eval.c, with eval_requests.c
 */
#include "runtime/config/commands.h"
#include "trainer/commands/command.h"
#include "trainer/generate/choices.h"
#include "trainer/generate/generate.h"
#include "trainer/generate/model_files.h"
#include "trainer/generate/requests.h"
#include "trainer/generate/stops.h"

/* A session. */

typedef struct nd_session {
    const nd_config *config;
    nd_worker *worker;
    nd_model_files model;
    nd_tokenizer *tokenizer; /* NULL: the model has none */
    char *tokenizer_path;    /* NULL: bytes, or none */
    double next_word;        /* when a word on how far it is is due */
    bool checks;             /* before workers start: says nothing but errors */
    bool form_said;          /* which chat form was found */
} nd_session;

/* Adds the ids that end a text: what the model's files name (nd_ends_read), or for a checkpoint
 * without such files its own eos_id, or the end of text of its tokenizer. */
nd_status nd_session_ends(const nd_session *session, nd_ids *ends);

/* Mesh and inputs of the command; the session has the model and no ranks. It may replace the
 * session's config. */
typedef nd_status nd_session_check_use(nd_session *session, const void *context);
/* What ndlaunch has checked before workers start: the model's files with their checksums, what the
 * command does with them, and the room that a worker of this host needs before it knows its plan.
 * `tokenizer`: as below. */
nd_status nd_session_check(const nd_command_call *call, const char *model, const char *tokenizer,
                           nd_session_check_use *check_use, const void *context);
/* Opens the model by its name (nd_model_files_open), and joins the job. `tokenizer`: NULL is the
 * model's own. Where no ndlaunch has done it, one rank of a host verifies the model (model.verify).
 */
nd_status nd_session_open(nd_session *session, const nd_command_call *call, const char *model,
                          const char *tokenizer);
void nd_session_close(nd_session *session);
/* Rank 0's bytes reach all ranks: *text (*size) is read on rank 0 and, owned by the caller, set on
 * the others. `read` (the status of rank 0's reading) is that of all ranks afterwards. */
nd_status nd_session_share(nd_session *session, nd_status read, char **text, size_t *size);
/* Host memory of the rank `root` of a group reaches the others; `own`: this rank is the root. */
nd_status nd_session_broadcast(nd_session *session, nd_group_kind group, void *data, int64_t bytes,
                               int root, bool own);
/* Every rank returns the worst status of all; the reason, that it could not `what`, stays with the
 * rank that has it. Collective. */
nd_status nd_session_agree_status(nd_session *session, nd_status status, const char *what);
/* ND_ERR_CONFIG on all ranks when the settings, the command line or the model's shape of one differ
 * from those of rank 0. */
nd_status nd_session_agree(nd_session *session, const nd_command_call *call);
/* Whether this host and the limits of this process leave room for the plan of a worker on the CPU,
 * whose threads run already: ND_ERR_RESOURCE with the numbers. */
nd_status nd_session_check_memory(const nd_session *session, const nd_memplan *plan);
/* ND_ERR_CONFIG when the mesh has several replicas, but only `what` is done at a time. */
nd_status nd_session_check_single(const nd_mesh *mesh, const char *what);
/* A generator with the session's weights. */
nd_status nd_session_generator(nd_session *session, const nd_generate_options *options,
                               nd_generator **out);

/*
 * nd_job_begin with stop signals, which `ask` reads alike on the ranks of a group. A worker that is
 * a job by itself ends at once, with ND_ERR_PREEMPTED; several are ended by ndlaunch after less
 * than a second.
 */
nd_status nd_session_begin(nd_worker *worker);
nd_status nd_session_ask_stop(nd_session *session, nd_group_kind group, bool *stop);
/* Replicas ask for themselves, each before its own calls. Behind the part that each has done, all
 * learn here whether one of them was stopped: then all end with ND_ERR_PREEMPTED, and none waits
 * for results that do not come. `status`: how this rank's part ended. Another error is returned at
 * once. Collective over all ranks. */
nd_status nd_session_end_wave(nd_session *session, nd_status status);

int nd_session_signal(void); /* 0: none came */
/* Around a row of output, with its flush: a worker that a signal ends completes the row, unless a
 * second signal comes. */
void nd_session_row_begin(void);
void nd_session_row_end(void);
/* Of long work: on rank 0, true every few seconds. */
bool nd_session_word_is_due(nd_session *session);

/* Standard input. */

enum { ND_STDIN_BYTES_MAX = 1 << 30 };

/* All of rank 0's standard input on all ranks, owned by the caller. Collective over all ranks.
 * ND_ERR_PREEMPTED: one of them got a stop signal. */
nd_status nd_stdin_read(nd_session *session, char **text, size_t *size);
/* Calls `take` on all ranks with each line, without its end. On a terminal the prompt is shown
 * before it. Collective, as above. */
nd_status nd_stdin_each_line(nd_session *session, const char *prompt,
                             nd_status (*take)(void *context, const char *line, size_t size),
                             void *context);

/* The command generate. */

typedef struct nd_generate_call {
    const char *model, *tokenizer, *prompt, *prompt_file; /* NULL: not given */
    bool jsonl, chat, ignore_eos, interactive;
    bool max_new_fits; /* nobody asked for max_new: a text ends where the model has no more room */
    int64_t max_new, batch, rows, context;
    nd_sampling sampling; /* without the seed, which is a setting */
    nd_stops stops;
} nd_generate_call;

typedef struct nd_generate_input {
    nd_requests requests;
    nd_ids ends; /* ids that end a text */
} nd_generate_input;

typedef struct nd_generate_task {
    nd_session *session;
    const nd_generate_call *options;
    const nd_generate_input *in;
    nd_generator *generator;
    int64_t batch;  /* of the generator */
    uint64_t first; /* number of the first request, for the draws */
} nd_generate_task;

/* Runs the requests and prints their results on rank 0. The text of the last one is appended to
 * *last, unless that is NULL, on every rank. Collective. */
nd_status nd_generate_run(const nd_generate_task *task, nd_bytes *last);
/* The command eval. */

enum { ND_EVAL_DATA_MAX = 64 };

typedef struct nd_eval_call {
    const char *model, *tokenizer, *requests; /* NULL: not given */
    const char *data[ND_EVAL_DATA_MAX];
    int data_count;
    bool jsonl, add_special, serve;
    int64_t rows, context;
} nd_eval_call;

/* Requests, and how they are answered, before there are ranks. */
nd_status nd_eval_check_requests(nd_session *session, const nd_eval_call *call);
/* Reads the requests, scores them, and prints the results. */
nd_status nd_eval_requests(nd_session *session, const nd_eval_call *call);
/* Answers each line of standard input, a request, with a line. */
nd_status nd_eval_serve(nd_session *session, const nd_eval_call *call);

#endif
