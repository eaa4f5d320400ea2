// SPDX-License-Identifier: Apache-2.0
/* The choices of autotune as lines of text, each with its reason. */
#include <stdio.h>
#include <string.h>

#include "runtime/tensor/dtype.h"
#include "trainer/tune/measure.h"

typedef struct printer {
    void (*line)(void *context, const char *text);
    void *context;
} printer;

/* "q_proj k_proj", or "none" */
static const char *names(nd_input input, int mask, char *buffer, size_t size)
{
    int first, count = nd_input_linears(input, &first);
    size_t used = 0;
    snprintf(buffer, size, "none");
    for (int i = 0; i < count; i++) {
        const char *name = strrchr(nd_linear_name(first + i), '.') + 1;
        if (mask >> i & 1) {
            used += (size_t)snprintf(buffer + used, size - used, "%s%.20s", used ? " " : "", name);
        }
    }
    return buffer;
}

static void print_linears(const printer *p, const nd_tuned_linears *l)
{
    char text[300], asked[96], fp8[96];
    names(l->input, l->asked, asked, sizeof asked);
    names(l->input, l->fp8, fp8, sizeof fp8);
    if (l->asked_seconds < 0.0) {
        snprintf(text, sizeof text, "  %s: fp8 as asked, there was no time to time it", asked);
    } else if (l->fp8 == l->asked) {
        snprintf(text, sizeof text, "  %s: fp8; a step takes %.3f ms of them, in bf16 %.3f ms",
                 asked, l->asked_seconds * 1e3, l->bf16_seconds * 1e3);
    } else {
        snprintf(text, sizeof text,
                 "  %s: in fp8 %s; a step takes %.3f ms of them, all in fp8 %.3f ms, in bf16 %.3f "
                 "ms",
                 asked, fp8, l->chosen_seconds * 1e3, l->asked_seconds * 1e3,
                 l->bf16_seconds * 1e3);
    }
    p->line(p->context, text);
}

/* Matrices are row-major here and column-major in the library, so its B is our a. */
static void print_choice(const printer *p, const nd_lt_choice *c)
{
    char text[340], why[160], limit[40] = "";
    const nd_lt_key *k = &c->key;
    if (c->candidates == 0) {
        snprintf(why, sizeof why, "the library's first algorithm, there was no time to time it");
    } else if (c->picked == 0) {
        snprintf(why, sizeof why, "the library's first algorithm is the fastest of %lld, %.4f ms",
                 (long long)c->candidates, c->seconds * 1e3);
    } else if (c->first_seconds == 0.0) {
        snprintf(why, sizeof why, "algorithm %lld of %lld, %.4f ms", (long long)c->picked + 1,
                 (long long)c->candidates, c->seconds * 1e3);
    } else {
        snprintf(why, sizeof why, "algorithm %lld of %lld, %.4f ms; the library's first %.4f ms",
                 (long long)c->picked + 1, (long long)c->candidates, c->seconds * 1e3,
                 c->first_seconds * 1e3);
    }
    if (k->processors > 0) {
        snprintf(limit, sizeof limit, ", for %d multiprocessors", (int)k->processors);
    }
    snprintf(text, sizeof text, "  %s (%lld, %lld) %s %s%s x %s%s, k %lld%s: %s",
             nd_dtype_name((nd_dtype)k->d), (long long)k->n, (long long)k->m, k->beta ? "+=" : "=",
             nd_dtype_name((nd_dtype)k->b), k->b_transposed ? "^T" : "",
             nd_dtype_name((nd_dtype)k->a), k->a_transposed ? "^T" : "", (long long)k->k, limit,
             why);
    p->line(p->context, text);
}

void nd_tuning_each_line(const nd_tuning *t, void (*line)(void *context, const char *text),
                         void *context)
{
    printer p = {line, context};
    char text[400];
    int other = 0;
    for (int i = 0; i < t->choice_count; i++) {
        other += t->choices[i].picked > 0;
    }
    int used =
        t->from
            ? snprintf(text, sizeof text,
                       "autotune: %d forms of products as %.200s has them, nothing timed",
                       t->choice_count, t->from)
            : snprintf(text, sizeof text, "autotune: %d forms of products, timed in %.1f s on %s",
                       t->choice_count, t->seconds, t->gpu);
    snprintf(text + used, sizeof text - (size_t)used,
             "; %d of them not by the first algorithm of cuBLASLt %lld%s", other,
             (long long)t->cublaslt, t->cut_short ? "; cut short" : "");
    line(context, text);
    for (int i = 0; i < t->linear_count; i++) {
        print_linears(&p, &t->linears[i]);
    }
    for (int i = 0; i < t->choice_count; i++) {
        print_choice(&p, &t->choices[i]);
    }
}
