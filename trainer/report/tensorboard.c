// SPDX-License-Identifier: Apache-2.0
/* The sink that writes event files for TensorBoard, with the tags of transformers' Trainer where it
 * has one. */
#include "trainer/report/report.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/printable.h"
#include "trainer/report/event_file.h"

/* Of a text; the rest of its record stands around it. */
enum { TEXT_BYTES = ND_EVENT_BYTES_MAX - 1024 };

typedef struct tensorboard {
    nd_report_options options;
    nd_event_file *file;
} tensorboard;

/* "train/loss/web": a curve of each source. */
static void write_sources(tensorboard *s, const char *tag, const nd_source_loss *list, int count)
{
    char name[80];
    for (int i = 0; i < count; i++) {
        snprintf(name, sizeof name, "%s/%s", tag, list[i].name);
        nd_event_scalar(s->file, name, list[i].loss);
    }
}

static nd_status write_step(void *self, const nd_step_record *r)
{
    tensorboard *s = self;
    nd_speed speed = nd_speed_of(&s->options, r->step_seconds);
    double sent = 0;
    for (int k = 0; k < ND_TRAFFIC_COUNT; k++) {
        sent += (double)r->wire_bytes[k];
    }
    const struct {
        const char *tag;
        double value;
    } values[] = {
        {"train/loss", r->loss},
        {"train/grad_norm", r->grad_norm},
        {"train/learning_rate", r->lr},
        {"train/num_input_tokens_seen", (double)r->tokens_seen},
        {"train/train_tokens_per_second", speed.tokens_per_second},
        {"train/tflops_per_worker", speed.tflops_causal},
        {"train/step_ms", r->step_seconds * 1e3},
        {"train/data_wait_ms", r->data_wait_seconds * 1e3},
        {"train/sent_mib", sent / 1048576.0},
        {"train/peak_memory_gib", r->peak_memory_bytes / 1073741824.0},
        {"train/skipped", r->skipped},
    };
    nd_event_begin(s->file, r->step);
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        nd_event_scalar(s->file, values[i].tag, values[i].value);
    }
    write_sources(s, "train/loss", r->sources, r->source_count);
    return nd_event_end(s->file);
}

static nd_status write_validation(void *self, const nd_validation_record *r)
{
    tensorboard *s = self;
    nd_event_begin(s->file, r->step);
    nd_event_scalar(s->file, "eval/loss", r->loss);
    nd_event_scalar(s->file, "eval/runtime", r->seconds);
    write_sources(s, "eval/loss", r->sets, r->set_count);
    return nd_event_end(s->file);
}

/* A text as Markdown: lines that begin with four blanks are shown as they are. One that is too long
 * for a record is cut. */
static nd_status indented(const char *text, char **out)
{
    const size_t size = strlen(text);
    size_t used = 0, at = 0;
    ND_TRY(nd_alloc(TEXT_BYTES, 1, (void **)out));
    while (at < size && used < TEXT_BYTES - 16) {
        unsigned code;
        const int n = nd_utf8_decode(text + at, size - at, &code);
        const size_t bytes = n > 0 ? (size_t)n : 1;
        if (at == 0 || text[at - 1] == '\n') {
            used += (size_t)sprintf(*out + used, "    ");
        }
        memcpy(*out + used, text + at, bytes);
        used += bytes;
        at += bytes;
    }
    strcpy(*out + used, at < size ? "..." : "");
    return ND_OK;
}

static nd_status write_event(void *self, const nd_run_event *e)
{
    tensorboard *s = self;
    if (e->kind == ND_RUN_EVENT_SAMPLE) {
        /* A text of each prompt, with a slider over the steps. */
        char tag[96], prompt[80], *text = NULL;
        nd_escape(prompt, sizeof prompt, e->path, "");
        snprintf(tag, sizeof tag, "samples/%s", prompt);
        ND_TRY(indented(e->reason, &text));
        nd_event_begin(s->file, e->step);
        nd_event_text(s->file, tag, text);
        free(text);
        return nd_event_end(s->file);
    }
    if (e->kind == ND_RUN_EVENT_RESUMED) {
        /* `tensorboard --load_fast=false` takes the first mark of a folder for the start of the
         * run, and forgets nothing there. */
        ND_TRY(nd_event_restart(s->file, e->step + 1));
        return nd_event_restart(s->file, e->step + 1);
    }
    return ND_OK;
}

static nd_status write_settings(tensorboard *s)
{
    char *yaml = NULL, *text = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_config_to_yaml(s->options.config, false, &yaml));
    ND_TRY_OUT(indented(yaml, &text));
    nd_event_begin(s->file, 0);
    nd_event_text(s->file, "configuration", text);
    status = nd_event_end(s->file);
out:
    free(yaml);
    free(text);
    return status;
}

static void close_file(void *self)
{
    tensorboard *s = self;
    nd_event_file_close(s->file);
    free(s);
}

nd_status nd_tensorboard_sink_open(const nd_report_options *options, nd_sink *out)
{
    tensorboard *s = NULL;
    char *folder = NULL;
    int number = 0;
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(1, &s));
    s->options = *options;
    ND_TRY_OUT(nd_fs_format(&folder, "%s/tensorboard", options->dir));
    ND_TRY_OUT(nd_event_file_open(folder, options->writer, &number, &s->file));
    ND_TRY_OUT(write_settings(s));
    *out = (nd_sink){.name = "TensorBoard",
                     .self = s,
                     .has_file = true,
                     .file = number,
                     .step = write_step,
                     .validation = write_validation,
                     .event = write_event,
                     .close = close_file};
    s = NULL;
out:
    free(folder);
    if (s) {
        close_file(s);
    }
    return status;
}
