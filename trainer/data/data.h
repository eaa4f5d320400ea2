// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DATA_DATA_H
#define ND_DATA_DATA_H
/*
 * Training and validation data: a dataset is a file cut into blocks, a loader gives this rank its
 * part of each step's blocks. docs/formats.md has the formats, and how samples follow from a file;
 * docs/documents.md has separate documents.
 *
 * Dataset. All documents are concatenated and cut into blocks of S + 1 tokens: inputs are the
 * first S, labels the last S. What a block lacks has input 0 and label -100. Files are mapped into
 * memory, and a block is decoded when it is asked for. JSON lines are always encoded into a cache,
 * also when their ids are bytes: one reader has one set of rules. Where documents are separate
 * (nd_dataset_set_documents), rows with prompts stay whole (blocks.c).
 *
 * Blend: a dataset of several sources, whose blocks are those of the first source, then those of
 * the second, and so on. blend.c has the order of the samples.
 *
 * Loader. A prefetch thread reads one step ahead. Validation reads blocks 0, 1, 2, ... Past the
 * end of a validation, or of a blend whose sources are all limited, all labels are -100, so every
 * rank makes the same number of calls. tp and cp peers get the same blocks; with context
 * parallelism this rank holds its part of each (deal.h), whose labels were shifted before and
 * whose positions are those in the whole sequence.
 */
#include <stdint.h>

#include "runtime/base/status.h"
#include "runtime/config/config.h"
#include "trainer/corpus/token_cache.h"
#include "trainer/context/deal.h"
#include "trainer/rank.h"

typedef struct nd_dataset nd_dataset;

/* The label of a position that does not count: the short last block, prompts of JSONL, what a loss
 * mask leaves out, validation past the end. */
enum { ND_LABEL_IGNORED = -100 };

/*
 * Megatron files may have a loss mask beside them (trainer/corpus/token_file.h).
 *
 * vocab: the model's; every id is checked against it when a block is read.
 * ND_ERR_DATA names file and offset, and what to do: missing, empty, truncated, token id >= vocab,
 * .idx that disagrees with its .bin. ND_ERR_CONFIG: byte tokenizer with a vocab that is not 256.
 * Not for JSON lines and compressed texts that are read as bytes, which are encoded text.
 */
nd_status nd_dataset_open(const char *path, nd_data_format format, const char *tokenizer,
                          int64_t vocab, int64_t sequence, nd_dataset **out);
/* Finds whether nd_dataset_open would take this file for one of token ids, and whether it is only
 * read as a stream, as encoded text: JSON lines, and texts whose names end in .gz or .zst. */
nd_status nd_data_holds(const char *path, nd_data_format format, bool *ids, bool *streamed);

/*
 * Encodes text into a cache (trainer/corpus/token_cache.h), or finds it there; its tokens are the
 * concatenation of all documents. path: a file, a folder or a pattern, as for nd_corpus_files_add,
 * whose files become those of the request. ND_ERR_CONFIG: the tokenizer has more ids than the
 * model, or ids are bytes and the model has not 256.
 */
nd_status nd_dataset_open_text(const char *path, nd_data_format format,
                               nd_token_cache_request request, int64_t sequence, nd_dataset **out);
void nd_dataset_close(nd_dataset *dataset);

typedef struct nd_document_rules {
    nd_documents_rule rule; /* auto: rows with prompts are separate, other data joined */
    int64_t end_of_text; /* ends documents, also within those of a cache or an index; -1: in a file
                            of ids without either model_end does */
    int64_t model_end;   /* of the model's config.json; -1: it names none */
    bool drop_long;      /* rows longer than a block are left out, else cut */
} nd_document_rules;

/*
 * Before the data are read, and before they become part of a blend. A cache and a Megatron index
 * say where documents end; a file of text without either is one document. ND_ERR_CONFIG: nothing
 * says it, or end_of_text is not below the vocabulary. ND_ERR_DATA: the id that should end
 * documents does not occur (a warning where several are listed), or no row is short enough.
 */
nd_status nd_dataset_set_documents(nd_dataset *dataset, const nd_document_rules *rules);
/* Join or separate; auto: those of some parts of a blend are separate, those of others joined. */
nd_documents_rule nd_dataset_documents(const nd_dataset *dataset);
/* Returns whether the documents of any part are separate. */
bool nd_dataset_is_separate(const nd_dataset *dataset);

/* A source of a blend. */
typedef struct nd_dataset_part {
    nd_dataset *data;
    const char *name;      /* copied; "": of all parts, which are then not told apart */
    double weight, epochs; /* both 0: see below */
} nd_dataset_part;

/*
 * Takes over the data of the parts, also when it fails. With weights or epochs the parts are mixed
 * as blend.c says. With neither in any part they are one text: perm goes over all their blocks, so
 * that an epoch reads each of them once.
 */
nd_status nd_dataset_blend(nd_dataset_part *parts, int count, nd_dataset **out);
/* 1 for a dataset that is no blend, or a blend of parts without names, as files of a folder are:
 * its only source is number 0, has no name (""), and is the dataset itself. */
int nd_dataset_sources(const nd_dataset *dataset);
const char *nd_dataset_source_name(const nd_dataset *dataset, int source);
/* The data of one source. Borrowed. */
const nd_dataset *nd_dataset_source(const nd_dataset *dataset, int source);
/* Training samples in order: the block of sample i, or the number of blocks past the last one. */
int64_t nd_dataset_sample(const nd_dataset *dataset, int64_t seed, int64_t i);
/* Counts what each source gives of the first `samples` training samples: (sources) numbers. Their
 * sum is `samples`. Without weights all blocks are shuffled together, and it is what the source's
 * size lets expect: false then, unless these are whole epochs. */
bool nd_dataset_count_samples(const nd_dataset *dataset, int64_t samples, int64_t *counts);
/* The facts about its data that a run records; texts are borrowed. */
typedef struct nd_dataset_facts {
    const char *path;   /* of several files the first, and how many more */
    const char *format; /* "jsonl", "encoded text" */
    const char *cache;  /* the file that holds the ids of an encoded text; else NULL */
    int64_t documents;  /* that are read, without what data.end_of_text ends; -1: not known */
    /* Where rows stay whole, `long_rows` are longer than a block, `drops` says whether these are
     * left out, and `padding` is the share of inputs that fill blocks. */
    int64_t long_rows;
    bool drops;
    double padding;
    size_t lists;    /* bytes of what says which rows blocks have; 0: rows do not stay whole */
    int64_t samples; /* of a training; INT64_MAX unless all sources of a blend are limited */
    int64_t epoch;   /* samples: all blocks, or what a blend of epochs without weights gives */
    int64_t period;  /* samples until the order of sources repeats (blend.c); 0: no weights */
} nd_dataset_facts;
nd_dataset_facts nd_dataset_facts_of(const nd_dataset *dataset);

int64_t nd_dataset_blocks(const nd_dataset *dataset); /* >= 1 */
int64_t nd_dataset_tokens(const nd_dataset *dataset); /* without those of rows that are left out */
/* Counts the tokens that are read but never count as labels: those of prompts, and those that a
 * loss mask leaves out. Reads all spans, 16 bytes for each, and no ids; those of an encoded text
 * are compared with their checksums (ND_ERR_DATA). */
nd_status nd_dataset_ignored(const nd_dataset *dataset, int64_t *tokens);

/* Arrays are the caller's, I32 (S). */
typedef struct nd_block {
    int32_t *inputs, *labels;
    /* For each input the place of the first token of its document, or 0 where that began before or
     * documents are joined; NULL: not wanted. */
    int32_t *first_keys;
    /* Inputs that are tokens; the others, which see themselves alone, fill the block. Of joined
     * documents all. */
    int64_t filled;
} nd_block;

/* Block `index`, or the one past the end, which is only filled. Thread-safe (read only). */
nd_status nd_dataset_block(const nd_dataset *dataset, int64_t index, nd_block *block);

/* Content digest for the comparison between nodes: SHA-256 of the size and of samples of the
 * content, in hexadecimal. Its time does not grow with the file. That of a blend covers each
 * source's digest, weight and epochs. */
nd_status nd_dataset_digest(const nd_dataset *dataset, char hex[65]);
/* A digest of more of the content, for the comparison at a resume: XXH3 of the size and of all
 * bytes of up to 64 MiB, else of 1024 samples of 64 KiB, which files of a blend share; of Megatron
 * data also of all of the .idx and of the loss mask. Empty for an encoded text, of which
 * nd_dataset_digest covers all ids. The first call computes it, the dataset keeps it. Not
 * thread-safe. */
nd_status nd_dataset_content(nd_dataset *dataset, char hex[33]);

typedef struct nd_loader nd_loader;

typedef struct nd_loader_options {
    nd_deal_of deal; /* of a row to the ranks of cp */
    int64_t micro_batch, accumulation;
    int dp_size, dp_index, cp_index;
    int64_t seed;
    bool validation;
    bool separate;         /* data may have separate documents */
    bool running;          /* positions run on over a block, else each document's begin at 0 */
    int64_t first_step;    /* 0 */
    int64_t samples_ahead; /* 0; nd_run_position */
} nd_loader_options;

/* The keys that queries of separate documents see in a step, in the samples of this rank and its cp
 * peers. */
typedef struct nd_step_sight {
    int64_t pairs;  /* of a query and a key that it sees; the mean of the layers */
    double balance; /* of each sample those of the rank with the most (deal.h), over the mean */
    double padding; /* share of inputs that fill blocks */
} nd_step_sight;

/* One step on this rank. Arrays are lent until the next nd_loader_next. s = S / cp. */
typedef struct nd_step_batch {
    const int32_t *inputs;    /* (accumulation, B, s) */
    const int32_t *labels;    /* (accumulation, B, s); -100 = not counted */
    const int32_t *positions; /* (accumulation, B, s), in the order of the inputs */
    /* (accumulation, B, S), of the whole sequence in the order of the text: for each token the
     * place of the first one of its document, or 0 where that began before; NULL: documents are
     * joined. */
    const int32_t *first_keys;
    const int32_t *places; /* (accumulation, B, S) likewise: what nd_deal made of them */
    nd_step_sight sight;   /* zeros: documents are joined */
    int64_t valid;         /* labels != -100 held by this rank in the whole step */
    /* Both are NULL unless the data have several sources. */
    const int *sources;          /* (accumulation, B): where each sample comes from */
    const int64_t *source_valid; /* (sources): the part of `valid` of each source */
    double wait_seconds;         /* how long this call waited for the prefetch thread */
} nd_step_batch;

/* Blocks of a step, of all ranks together: dp x accumulation x micro-batch. */
int64_t nd_step_blocks(const nd_config *config);
/* This rank's part of each step's batch, as the configuration says. */
nd_loader_options nd_loader_options_of(const nd_rank *rank, bool validation);
/* Host memory that a loader with these options holds. */
size_t nd_loader_bytes(const nd_loader_options *options);
/* The last of `steps` training steps that is full: fewer where the data end before them. */
int64_t nd_loader_last_step(const nd_dataset *dataset, const nd_loader_options *options,
                            int64_t steps);
/* Starts the prefetch thread; the dataset is borrowed until the loader is closed. */
nd_status nd_loader_open(const nd_dataset *dataset, const nd_loader_options *options,
                         nd_loader **out);
/*
 * Joins the thread. Returns false when the thread hangs in the file system; then the dataset must
 * stay open, since the thread still reads it.
 */
bool nd_loader_close(nd_loader *loader);
nd_status nd_loader_next(nd_loader *loader, nd_step_batch *out);
/* Validation: back to block 0, of another dataset of the same sequence length, borrowed like the
 * first, or of that one (NULL). */
void nd_loader_rewind(nd_loader *loader, const nd_dataset *dataset);
/* The number of nd_loader_next calls that cover all blocks once (validation: accumulation 1). */
int64_t nd_loader_validation_steps(const nd_dataset *dataset, const nd_loader_options *options);

#endif
