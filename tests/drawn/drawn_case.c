// SPDX-License-Identifier: Apache-2.0
#include "tests/drawn/drawn_case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/isa.h"
#include "runtime/base/math.h"
#include "runtime/config/config.h"
#include "trainer/shape/shape.h"
#include "tests/drawn/draw.h"

const char *const drawn_filters[] = {"accelerate", "mlp", "gate_proj,down_proj,layers.0"};
/* "": the best one of this CPU. */
const char *const drawn_isas[] = {"", "avx2", "avx512", "amx_emulated"};
const char *const drawn_packed[] = {"", "anew", "kept"};

enum {
    NUMBERS = sizeof(drawn_case) / sizeof(int64_t),
    MULTIPLE = 16,               /* of sizes and tokens of FP8 products */
    MOST_WORK = 60 * 1000 * 1000 /* products of a weight and a token in a step */
};

static const struct {
    const char *name;
    int64_t least;
} numbers[NUMBERS] = {
#define DRAWN_NUMBER(name, least) {#name, least},
    DRAWN_EACH_NUMBER(DRAWN_NUMBER)
#undef DRAWN_NUMBER
};

static int64_t *number(drawn_case *c, int i)
{
    return (int64_t *)(void *)c + i;
}

/* Up to two axes are above 1, in any order of size, more often than three. */
static void draw_mesh(nd_draw *d, drawn_case *c)
{
    int64_t *axes[] = {&c->replicate, &c->shard, &c->cp, &c->tp};
    for (int i = 0; i < 4; i++) {
        *axes[i] = 1;
    }
    for (int64_t left = draw_range(d, 0, 3); left > 0; left--) {
        int64_t *axis = axes[draw_range(d, 0, 3)];
        int64_t size = draw_range(d, 2, 5);
        if (*axis == 1 && c->replicate * c->shard * c->cp * c->tp * size <= DRAWN_RANKS_MAX) {
            *axis = size;
        }
    }
}

static int64_t model_extent(nd_draw *d)
{
    return draw_once_in(d, 3) ? draw_range(d, 1, 70)
                              : DRAW(d, 3, 15, 16, 17, 31, 32, 33, 47, 48, 64, 65);
}

/* Around multiples of 16, and around the blocks of attention. */
static int64_t draw_sequence(nd_draw *d)
{
    const int64_t n = draw_once_in(d, 4) ? DRAW(d, 4, 8, 16, 24, 32) : draw_range(d, 1, 4);
    return 16 * n + draw_range(d, -1, 1);
}

static void draw_model(nd_draw *d, drawn_case *c)
{
    c->layers = DRAW(d, 1, 1, 2, 2, 3, 4);
    c->kv_heads = draw_range(d, 1, 3);
    c->group = draw_range(d, 1, 3);
    c->head_dim = DRAW(d, 2, 4, 6, 8, 10, 14, 16, 18, 24, 32, 34, 66);
    c->hidden = model_extent(d);
    c->ffn = model_extent(d);
    c->vocab =
        draw_once_in(d, 4) ? DRAW(d, 255, 257, 511, 1023, 1025, 2049, 3001) : draw_range(d, 5, 130);
    c->tied = draw_once_in(d, 3);
    c->rope = DRAW(d, 0, 0, 1, 2);
    c->sequence = draw_sequence(d);
}

drawn_case drawn_case_of_seed(uint64_t seed)
{
    nd_draw stream = {.seed = seed}, *d = &stream;
    drawn_case c = {0};
    draw_mesh(d, &c);
    draw_model(d, &c);
    c.ring = draw_once_in(d, 2);
    c.micro_batch = draw_range(d, 1, 3);
    c.accumulation = draw_range(d, 1, 3);
    c.zero2 = draw_once_in(d, 2);
    c.recompute = draw_range(d, 0, ND_RECOMPUTE_FULL);
    c.precision = draw_range(d, 0, 2);
    c.recipe = draw_range(d, 0, 3);
    c.codes = draw_once_in(d, 2);
    c.largest = draw_once_in(d, 2);
    c.history = draw_range(d, 1, 4);
    c.filter = draw_range(d, 0, 2);
    c.rows = draw_once_in(d, 4);
    c.sources = draw_once_in(d, 4) ? 2 : 1;
    c.sgd = draw_once_in(d, 2);
    c.clips = draw_once_in(d, 2);
    c.threads = DRAW(d, 1, 1, 2, 3);
    c.steps = draw_range(d, 2, 4);
    c.saved = draw_range(d, 1, 3);
    c.waits = draw_once_in(d, 2);
    c.other_threads = DRAW(d, 1, 2, 3);
    c.other_recompute = draw_range(d, 0, ND_RECOMPUTE_FULL);
    c.other_mesh = draw_once_in(d, 4);
    c.head_rows = DRAW(d, 0, 1, 3, 7, 16, 33);
    c.head_columns = DRAW(d, 0, 64, 64, 100);
    c.save_piece = DRAW(d, 0, 61, 256, 509, 1000);
    c.staging = DRAW(d, 0, 64, 192, 1024, 4096);
    c.isa = DRAW(d, 0, 0, 0, 0, 1, 1, 2, 2, 3);
    c.packed = draw_range(d, 0, 2);
    c.ulysses = draw_once_in(d, 3) ? c.cp : draw_range(d, 1, c.cp);
    c.copies = draw_once_in(d, 3) ? c.tp : DRAW(d, 1, 1, 2);
    c.family = draw_once_in(d, 2) ? draw_range(d, 0, ND_FAMILY_COUNT - 1) : ND_FAMILY_LLAMA;
    c.biases = draw_once_in(d, 2);
    c.window = draw_once_in(d, 2) ? draw_range(d, 1, c.sequence) : 0;
    drawn_case_settle(&c);
    return c;
}

static int64_t most(int64_t value, int64_t bound)
{
    return value < bound ? value : bound;
}

/* FP8 products need multiples of 16. Without tp a linear of another size stays in BF16, if the
 * filter finds it by rule. */
static void settle_fp8(drawn_case *c)
{
    c->hidden = nd_round_up(c->hidden, MULTIPLE);
    c->ffn = nd_round_up(c->ffn, MULTIPLE);
    c->recipe = most(c->recipe, 3);
    if (c->filter == 2 || (c->filter == 0 && c->tp > 1)) {
        c->head_dim = nd_round_up(c->head_dim, MULTIPLE);
    }
    if (c->recipe != ND_FP8_DELAYED) {
        c->largest = 0;
        c->history = 1;
    }
}

static void settle_sequence(drawn_case *c)
{
    for (;; c->sequence++) {
        const int64_t tokens = c->micro_batch * (c->sequence / c->cp);
        if (c->sequence % (c->cp > 1 ? 2 * c->cp : 1) == 0 && tokens % c->tp == 0 &&
            (c->precision != ND_PRECISION_FP8 || tokens % MULTIPLE == 0)) {
            return;
        }
    }
}

int64_t drawn_case_weights(const drawn_case *c)
{
    const int64_t heads = c->tp * c->kv_heads * (c->group + 1) * c->head_dim * 2;
    return c->layers * c->hidden * (heads + 3 * c->ffn * c->tp) + c->vocab * c->hidden;
}

static int64_t work_of(const drawn_case *c)
{
    const int64_t weights = drawn_case_weights(c);
    const int64_t tokens = c->replicate * c->shard * c->micro_batch * c->accumulation * c->sequence;
    return tokens *
           (weights + c->layers * c->tp * c->kv_heads * c->group * c->head_dim * c->sequence);
}

/* Lowers what makes it slow. */
static void settle_work(drawn_case *c)
{
    const int64_t bound = c->isa == 3 ? MOST_WORK / 8 : MOST_WORK;
    int64_t *all[] = {&c->accumulation, &c->micro_batch, &c->layers, &c->group,
                      &c->kv_heads,     &c->vocab,       &c->ffn,    &c->sequence};
    const int64_t least[] = {1, 1, 1, 1, 1, 97, 17, 17};
    for (int i = 0; i < 8 && work_of(c) > bound; i++) {
        while (work_of(c) > bound && *all[i] > least[i]) {
            *all[i] -= (*all[i] - least[i] + 1) / 2;
        }
    }
}

/* Each rank has KV heads of its own, or copies, also some of whose heads other ranks have and some
 * it shares with others. */
static void settle_copies(drawn_case *c)
{
    c->copies = c->tp % c->copies == 0 ? c->copies : 1;
    while (nd_gcd(c->kv_heads, c->copies) > 1) {
        c->kv_heads--;
    }
}

void drawn_case_settle(drawn_case *c)
{
    for (int i = 0; i < NUMBERS; i++) {
        *number(c, i) = *number(c, i) < numbers[i].least ? numbers[i].least : *number(c, i);
    }
    c->family = most(c->family, ND_FAMILY_COUNT - 1);
    c->window = nd_families[c->family].window == ND_WINDOW_NEVER ? 0 : c->window;
    c->rope = c->family == ND_FAMILY_LLAMA ? c->rope : ND_ROPE_DEFAULT;
    settle_copies(c);
    settle_work(c);
    c->head_dim += c->head_dim % 2;
    c->vocab = c->rows ? 256 : c->vocab;
    c->saved = most(c->saved, c->steps - 1);
    while (c->cp % c->ulysses != 0 || (c->kv_heads * c->group) % c->ulysses != 0 ||
           (c->kv_heads % c->ulysses != 0 && c->ulysses % c->kv_heads != 0)) {
        c->ulysses--;
    }
    c->ring = c->cp > c->ulysses ? c->ring : 0;
    if (c->precision == ND_PRECISION_FP8) {
        settle_fp8(c);
    } else {
        c->recipe = c->codes = c->largest = c->filter = 0;
        c->history = 1;
    }
    settle_sequence(c);
    const nd_cpu_isa cpu = nd_cpu_isa_detect();
    if ((c->isa == 1 && cpu < ND_CPU_ISA_AVX2) || (c->isa == 2 && cpu < ND_CPU_ISA_AVX512)) {
        c->isa = 0;
    }
}

const char *drawn_case_text(const drawn_case *c, char text[DRAWN_TEXT_MAX])
{
    drawn_case copy = *c;
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < NUMBERS; i++) {
        if (*number(&copy, i) != numbers[i].least) {
            used +=
                (size_t)snprintf(text + used, DRAWN_TEXT_MAX - used, "%s%s=%lld", used ? " " : "",
                                 numbers[i].name, (long long)*number(&copy, i));
        }
    }
    return text;
}

bool drawn_case_parse(const char *text, drawn_case *out)
{
    char copy[DRAWN_TEXT_MAX], *rest = NULL;
    *out = (drawn_case){0};
    snprintf(copy, sizeof copy, "%s", text);
    for (char *word = strtok_r(copy, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        char *value = strchr(word, '=');
        int i = 0;
        while (value && i < NUMBERS &&
               (strncmp(numbers[i].name, word, (size_t)(value - word)) != 0 ||
                numbers[i].name[value - word] != '\0')) {
            i++;
        }
        if (!value || i == NUMBERS) {
            return false;
        }
        *number(out, i) = strtoll(value + 1, NULL, 10);
    }
    drawn_case_settle(out);
    return true;
}

drawn_case drawn_case_shrink(drawn_case c, int tries,
                             bool (*fails)(void *context, const drawn_case *c), void *context)
{
    bool smaller = true;
    while (smaller && tries > 0) {
        smaller = false;
        for (int i = 0; i < NUMBERS && tries > 0; i++) {
            const int64_t value = *number(&c, i), least = numbers[i].least;
            const int64_t lower[] = {least, least + (value - least) / 2, value - 1};
            for (int k = 0; k < 3 && tries > 0 && value > least; k++) {
                drawn_case next = c;
                *number(&next, i) = lower[k];
                drawn_case_settle(&next);
                if (memcmp(&next, &c, sizeof c) == 0 || *number(&next, i) >= value) {
                    continue;
                }
                tries--;
                if (fails(context, &next)) {
                    c = next;
                    smaller = true;
                    break;
                }
            }
        }
    }
    return c;
}
