// SPDX-License-Identifier: Apache-2.0
#ifndef ND_COMMANDS_TOKENIZE_H
#define ND_COMMANDS_TOKENIZE_H
/* What `ndtrain tokenize` is to do. */
#include "trainer/commands/command.h"
#include "trainer/corpus/corpus.h"

typedef struct nd_tokenize_call {
    const char *tokenizer; /* a tokenizer.json or its folder */
    const char *prefix;    /* of the output */
    nd_corpus_files files;
    nd_corpus_rules rules; /* without those of `chat` */
    nd_chat_choice chat;
    char *separator; /* owned, as `files` is */
    int threads;
    int64_t skip_bad;
    bool overwrite;
} nd_tokenize_call;

/* ND_ERR_CONFIG for wrong usage, ND_ERR_DATA for inputs that are not there. */
nd_status nd_tokenize_parse(const nd_command_flags *line, nd_tokenize_call *out);
void nd_tokenize_call_fini(nd_tokenize_call *call);

#endif
