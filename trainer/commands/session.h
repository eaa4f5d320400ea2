// SPDX-License-Identifier: Apache-2.0
#ifndef ND_COMMANDS_SESSION_H
#define ND_COMMANDS_SESSION_H
/*
 * `ndtrain generate` and `ndtrain eval`: use of a model. Both have flags of their own, which stand
 * among the settings of a run (--precision, --tp-size, --seed, ...), and run on the ranks of a job:
 * tp ranks share a model, dp_replicate ranks share the work.
 *
 *   session.c            model, tokenizer, ranks, and what rank 0 reads from standard input
 *   generate.c, eval.c   what is done with the model
 */
#include "runtime/config/commands.h"
#include "trainer/commands/command.h"
#include "trainer/generate/choices.h"
#include "trainer/generate/generate.h"
#include "trainer/generate/model_files.h"
#include "trainer/generate/requests.h"
#include "trainer/generate/texts.h"

typedef struct nd_session {
    const nd_command_call *call;
    const nd_flag_value *flags; /* those of the command's own, by nd_own_flag_id */
    nd_config config;           /* the call's, and eval's length of blocks; borrows its strings */
    nd_worker *worker;
    nd_model_files model;
    nd_tokenizer *tokenizer; /* NULL: the model has none */
    char *tokenizer_path;    /* NULL: bytes, or none */
    double next_word;        /* when a word on how far it is is due */
    bool checks;             /* the call's: says nothing but errors */
} nd_session;

/*
 * Runs a command that uses a model: opens the model by its name (nd_model_files_open), joins the
 * job, and calls `use`. Where no ndlaunch has done it, one rank of a host verifies
 * the model (model.verify). A call that only checks does before there are ranks what ndlaunch asks
 * for: it looks at the model's files with their checksums, what the command does with them, and the
 * room that a worker of this host needs before it knows its plan.
 */
nd_status nd_session_run(const nd_command_call *call);

/* Adds the ids that end a text: what the model's files name (nd_ends_read), or for a checkpoint
 * without such files its own eos_id, or the end of text of its tokenizer. */
nd_status nd_session_ends(const nd_session *session, nd_ids *ends);
/* The token that the post-processor puts before a text; -1: none. */
int32_t nd_session_beginning(nd_encoder *encoder);

/* Ranks. All of these are collective over the group, or over all ranks. */

/* Rank 0's bytes reach all ranks: *text (*size) is read on rank 0 and, owned by the caller, set on
 * the others. `read` (the status of rank 0's reading) is that of all ranks afterwards. Without
 * ranks nothing is shared. */
nd_status nd_session_share(nd_session *session, nd_status read, char **text, size_t *size);
/* ND_ERR_CONFIG on all ranks when the settings, the command line or the model's shape of one differ
 * from those of rank 0. Without ranks they agree. */
nd_status nd_session_agree(nd_session *session);
/* ND_ERR_CONFIG when the mesh has several replicas, but only `what` is done at a time. */
nd_status nd_session_check_single(const nd_session *session, const char *what);

/* Checks that this host and the limits of this process leave room for the plan of a worker on the
 * CPU, whose threads run already: ND_ERR_RESOURCE with the numbers. */
nd_status nd_session_check_memory(const nd_session *session, const nd_memplan *plan);
/* A generator with the session's weights. */
nd_status nd_session_generator(nd_session *session, const nd_generate_options *options,
                               nd_generator **out);

/*
 * nd_worker_begin with stop signals, which `ask` reads alike on the ranks of a group. A worker that
 * is a job by itself ends at once, with ND_ERR_PREEMPTED; several are ended by ndlaunch after less
 * than a second.
 */
nd_status nd_session_begin(nd_worker *worker);
nd_status nd_session_ask_stop(nd_session *session, nd_group_kind group, bool *stop);
/* Replicas ask for themselves, each before its own calls. Behind the part that each has done, all
 * learn here whether one of them was stopped: then all end with ND_ERR_PREEMPTED, and none waits
 * for results that do not come. `status`: how this rank's part ended. Another error is returned at
 * once. Collective over all ranks. */
nd_status nd_session_end_wave(nd_session *session, nd_status status);

bool nd_session_is_stopped(void); /* a stop signal came */
/* Prints a row of output, with its end: a worker that a signal ends completes the row, unless a
 * second signal comes. */
nd_status nd_print_line(const char *text, size_t size);
/* Returns true, on rank 0 and every few seconds, when long work is to print how far it is. */
bool nd_session_word_is_due(nd_session *session);

/* Standard input. */

enum { ND_STDIN_BYTES_MAX = 1 << 30 };

/* Calls `take` on all ranks with each line of rank 0's standard input, without its end; on a
 * terminal the prompt is shown before it. Without a prompt, once with all of the input. Collective
 * over all ranks. ND_ERR_PREEMPTED: one of them got a stop signal. */
nd_status nd_stdin_each(nd_session *session, const char *prompt,
                        nd_status (*take)(void *context, const char *text, size_t size),
                        void *context);

#endif
