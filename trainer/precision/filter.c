// SPDX-License-Identifier: Apache-2.0
#include "trainer/precision/precision.h"

#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>

enum { MULTIPLE = 16, MAX_NAME = 96 };

static bool size_fits(const nd_shape *shape, int linear)
{
    int64_t out, in;
    nd_linear_sizes(shape, linear, 1, &out, &in);
    return out % MULTIPLE == 0 && in % MULTIPLE == 0;
}

/* Source of the thresholds: torchao 0.18, float8/float8_linear_utils.py, measured there on an
 * H100. */
static bool is_small(const nd_shape *shape, int linear, nd_fp8_recipe recipe)
{
    int64_t n, k;
    nd_linear_sizes(shape, linear, 1, &n, &k);
    if (nd_fp8_recipe_is_per_tensor(recipe)) {
        return k <= 4096 && n <= 1024;
    }
    return n <= 2048 || k <= 1024 || (n <= 4096 && k <= 2048);
}

static void module_name(char name[MAX_NAME], int64_t layer, int linear)
{
    snprintf(name, MAX_NAME, "model.layers.%lld.%s", (long long)layer, nd_linears[linear].module);
}

static nd_filter_reason reason_by_rule(const nd_config *config, const nd_shape *shape,
                                       int64_t layer, int linear)
{
    const bool automatic = config->fp8.filter && strcmp(config->fp8.filter, "auto") == 0;
    const bool small = automatic && is_small(shape, linear, config->fp8.recipe);
    return !size_fits(shape, linear)                 ? ND_FILTER_SIZE
           : small                                   ? ND_FILTER_SMALL
           : !automatic && layer == 0 && linear == 0 ? ND_FILTER_FIRST
                                                     : ND_FILTER_CONVERTED;
}

/* "mlp.gate_proj, mlp.up_proj": linear `first` + i where bit i of the mask is set; returns
 * buffer. */
static const char *linears_text(int first, int mask, char *buffer, size_t size)
{
    size_t used = 0;
    buffer[0] = '\0';
    for (int i = 0; first + i < ND_LINEAR_COUNT; i++) {
        if (mask >> i & 1) {
            used += (size_t)snprintf(buffer + used, size - used, "%s%.40s", used ? ", " : "",
                                     nd_linears[first + i].module);
        }
    }
    return buffer;
}

/* Marks what one pattern matches. */
static nd_status apply_pattern(nd_filter *f, const nd_shape *shape, const char *pattern)
{
    int matched = 0;
    for (int64_t i = 0; i < f->layers * ND_LINEAR_COUNT; i++) {
        char name[MAX_NAME];
        int64_t out, in;
        int linear = (int)(i % ND_LINEAR_COUNT);
        module_name(name, i / ND_LINEAR_COUNT, linear);
        if (strpbrk(pattern, "*?[") ? fnmatch(pattern, name, 0) != 0 : !strstr(name, pattern)) {
            continue;
        }
        matched++;
        f->reasons[i] = ND_FILTER_CONVERTED;
        if (!size_fits(shape, linear)) {
            nd_linear_sizes(shape, linear, 1, &out, &in);
            return nd_fail(ND_ERR_CONFIG,
                           "fp8.filter %s names %s of %lld x %lld, but FP8 products need sizes "
                           "divisible by 16; leave it out, or use fp8.filter: accelerate, which "
                           "keeps such linears in BF16",
                           pattern, name, (long long)out, (long long)in);
        }
    }
    if (matched == 0) {
        char names[256];
        return nd_fail(ND_ERR_CONFIG,
                       "fp8.filter %s matches no linear; they are model.layers.0 to %lld with %s "
                       "(lm_head always stays in BF16)",
                       pattern, (long long)f->layers - 1, linears_text(0, -1, names, sizeof names));
    }
    return ND_OK;
}

static nd_status apply_patterns(nd_filter *f, const nd_config *config, const nd_shape *shape)
{
    char *list = strdup(config->fp8.filter), *rest = NULL;
    nd_status status = list ? ND_OK : nd_fail_memory("fp8.filter");
    for (int64_t i = 0; i < f->layers * ND_LINEAR_COUNT; i++) {
        f->reasons[i] = ND_FILTER_UNMATCHED;
    }
    for (char *p = list ? strtok_r(list, ", ", &rest) : NULL; p && status == ND_OK;
         p = strtok_r(NULL, ", ", &rest)) {
        status = apply_pattern(f, shape, p);
    }
    free(list);
    return status;
}

static nd_status decide(nd_filter *f, const nd_config *config, const nd_shape *shape)
{
    const char *filter = config->fp8.filter;
    bool by_rule = !filter || strcmp(filter, "accelerate") == 0 || strcmp(filter, "auto") == 0;
    if (!by_rule) {
        ND_TRY(apply_patterns(f, config, shape));
    }
    for (int64_t i = 0; i < f->layers * ND_LINEAR_COUNT; i++) {
        if (by_rule) {
            f->reasons[i] =
                reason_by_rule(config, shape, i / ND_LINEAR_COUNT, (int)(i % ND_LINEAR_COUNT));
        }
        f->converted += f->reasons[i] == ND_FILTER_CONVERTED;
    }
    if (f->converted == 0 && shape->hidden % MULTIPLE) { /* every linear has the hidden size */
        return nd_fail(
            ND_ERR_CONFIG,
            "train.precision is fp8, but the model's hidden size, %lld, is not a multiple "
            "of %d, as products of FP8 codes need it; use train.precision bf16",
            (long long)shape->hidden, MULTIPLE);
    }
    if (f->converted == 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "train.precision is fp8, but with fp8.filter %s no linear would run in FP8 "
                       "(hidden %lld, ffn %lld, %lld heads and %lld KV heads of %lld); use another "
                       "filter, or train.precision bf16",
                       filter ? filter : "accelerate", (long long)shape->hidden,
                       (long long)shape->ffn, (long long)shape->heads, (long long)shape->kv_heads,
                       (long long)shape->head_dim);
    }
    return ND_OK;
}

nd_status nd_filter_init(nd_filter *f, const nd_config *config, const nd_shape *shape)
{
    *f = (nd_filter){.layers = shape->layers};
    if (config->train.precision != ND_PRECISION_FP8) {
        return ND_OK;
    }
    ND_TRY(ND_ALLOC(shape->layers * ND_LINEAR_COUNT, &f->reasons));
    nd_status status = decide(f, config, shape);
    if (status != ND_OK) {
        nd_filter_fini(f);
    }
    return status;
}

void nd_filter_fini(nd_filter *f)
{
    free(f->reasons);
    f->reasons = NULL;
}

bool nd_filter_converts(const nd_filter *f, int64_t layer, int linear)
{
    return f->reasons && f->reasons[layer * ND_LINEAR_COUNT + linear] == ND_FILTER_CONVERTED;
}

int nd_filter_mask(const nd_filter *f, int64_t layer, nd_input input)
{
    int first, count = nd_input_linears(input, &first), mask = 0;
    for (int i = 0; i < count; i++) {
        mask |= nd_filter_converts(f, layer, first + i) << i;
    }
    return mask;
}

nd_status nd_filter_choose(nd_filter *f, const nd_linear_choice *choice)
{
    f->converted = 0;
    for (int64_t i = 0; f->reasons && i < f->layers * ND_INPUT_COUNT; i++) {
        int64_t layer = i / ND_INPUT_COUNT;
        nd_input input = (nd_input)(i % ND_INPUT_COUNT);
        int first, count = nd_input_linears(input, &first);
        int asked = nd_filter_mask(f, layer, input);
        int fp8 = choice->fp8[input][choice->forced ? 0 : asked];
        if (fp8 < 0 || (!choice->forced && (fp8 & ~asked))) {
            char names[160];
            return nd_fail(ND_ERR_DATA,
                           "autotune has no choice for what fp8.filter asks for in layer %lld "
                           "(%s); choose again with kernels.autotune, without "
                           "kernels.autotune_from",
                           (long long)layer, linears_text(first, asked, names, sizeof names));
        }
        for (int l = 0; l < count; l++) {
            nd_filter_reason *reason = &f->reasons[layer * ND_LINEAR_COUNT + first + l];
            bool converts = fp8 >> l & 1;
            *reason = converts                         ? ND_FILTER_CONVERTED
                      : *reason == ND_FILTER_CONVERTED ? ND_FILTER_SLOWER
                                                       : *reason;
            f->converted += converts;
        }
    }
    return ND_OK;
}

nd_status nd_filter_check(const nd_filter *f, const nd_config *config, const nd_shape *shape,
                          const nd_mesh *mesh)
{
    int64_t tp = mesh->size[ND_AXIS_TP], cp = mesh->size[ND_AXIS_CP];
    int64_t sequence = config->train.sequence_length, micro = config->train.micro_batch_size;
    for (int64_t i = 0; f->reasons && i < f->layers * ND_LINEAR_COUNT; i++) {
        char name[MAX_NAME];
        int64_t out, in, all_out, all_in;
        int linear = (int)(i % ND_LINEAR_COUNT);
        nd_linear_sizes(shape, linear, tp, &out, &in);
        nd_linear_sizes(shape, linear, 1, &all_out, &all_in);
        if (f->reasons[i] == ND_FILTER_CONVERTED && (out % MULTIPLE || in % MULTIPLE)) {
            module_name(name, i / ND_LINEAR_COUNT, linear);
            return nd_fail(ND_ERR_CONFIG,
                           "%s is %lld x %lld, on each of %lld tp ranks %lld x %lld; FP8 products "
                           "need sizes divisible by 16; use a smaller mesh.tp, or leave the linear "
                           "out by fp8.filter",
                           name, (long long)all_out, (long long)all_in, (long long)tp,
                           (long long)out, (long long)in);
        }
    }
    int64_t tokens = micro * (sequence / cp);
    if (f->reasons && tokens % MULTIPLE) {
        return nd_fail(ND_ERR_CONFIG,
                       "a rank's products have %lld tokens (train.micro_batch_size %lld x "
                       "train.sequence_length %lld / mesh.cp %lld); FP8 products need a number "
                       "divisible by 16; change the sequence length or the micro-batch",
                       (long long)tokens, (long long)micro, (long long)sequence, (long long)cp);
    }
    return ND_OK;
}

static const char *why(nd_filter_reason reason)
{
    static const char *const text[] = {
        [ND_FILTER_CONVERTED] = "fp8",
        [ND_FILTER_FIRST] = "bf16: the first linear of the model",
        [ND_FILTER_LAST] = "bf16: the last linear of the model, fused with the loss",
        [ND_FILTER_SIZE] = "bf16: 16 does not divide its sizes",
        [ND_FILTER_SMALL] = "bf16: too small to gain from FP8",
        [ND_FILTER_SLOWER] = "bf16: FP8 takes longer here (autotune)",
        [ND_FILTER_UNMATCHED] = "bf16: no pattern of fp8.filter matches",
    };
    return text[reason];
}

/* Every linear with its sizes, its precision and the reason; layers with equal lines that follow
 * each other share one line. */
static void each_linear(const nd_filter *f, const nd_shape *shape,
                        void (*line)(void *context, const char *text), void *context)
{
    char text[256], name[MAX_NAME];
    for (int linear = 0; f->reasons && linear < ND_LINEAR_COUNT; linear++) {
        int64_t out, in, end;
        nd_linear_sizes(shape, linear, 1, &out, &in);
        for (int64_t begin = 0; begin < f->layers; begin = end) {
            nd_filter_reason reason = f->reasons[begin * ND_LINEAR_COUNT + linear];
            end = begin + 1;
            while (end < f->layers && f->reasons[end * ND_LINEAR_COUNT + linear] == reason) {
                end++;
            }
            int used = snprintf(name, sizeof name, "layers.%lld", (long long)begin);
            if (end > begin + 1) {
                used +=
                    snprintf(name + used, sizeof name - (size_t)used, "-%lld", (long long)end - 1);
            }
            snprintf(name + used, sizeof name - (size_t)used, ".%s", nd_linears[linear].module);
            snprintf(text, sizeof text, "  %-32s %6lld x %-6lld %s", name, (long long)out,
                     (long long)in, why(reason));
            line(context, text);
        }
    }
    if (f->reasons) {
        snprintf(text, sizeof text, "  %-32s %6lld x %-6lld %s", "lm_head", (long long)shape->vocab,
                 (long long)shape->hidden, why(ND_FILTER_LAST));
        line(context, text);
    }
}

static const char *operand(const nd_cast_rule *rule, char buffer[32])
{
    static const char *const along[] = {
        [ND_PER_TENSOR] = "tensor", [ND_PER_ROW] = "row", [ND_PER_COLUMN] = "column"};
    snprintf(buffer, 32, "%s per %s", rule->format == ND_DTYPE_F8_E4M3 ? "e4m3" : "e5m2",
             along[rule->granularity]);
    return buffer;
}

const char *nd_recipe_format(const nd_recipe *recipe, nd_role first, bool fast, char *buffer,
                             size_t size)
{
    const nd_cast_rule *a = &recipe->rules[first], *b = a + 1;
    char of_a[32], of_b[32];
    if (a->scaling == ND_SCALING_NONE) {
        snprintf(buffer, size, "bf16");
    } else {
        snprintf(buffer, size, "%s x %s%s", operand(a, of_a), operand(b, of_b),
                 fast ? ", fast accumulation" : "");
    }
    return buffer;
}

void nd_precision_each_line(const nd_scales *s, const nd_shape *shape,
                            void (*line)(void *context, const char *text), void *context)
{
    const nd_recipe *recipe = &s->recipe;
    static const char *const products[ND_ROLE_COUNT] = {[ND_X_OF_Y] = "output",
                                                        [ND_DY_OF_DX] = "input gradient",
                                                        [ND_DY_OF_DW] = "weight gradient"};
    const char *filter = s->rank->config->fp8.filter;
    /* Only a GPU has fast accumulation. A plan for GPUs may be made on a machine without one. */
    bool cuda =
        s->rank->device->kind == ND_DEVICE_CUDA || s->rank->config->launch.device == ND_CHOOSE_CUDA;
    char text[256], format[96];
    if (!recipe->name) {
        return;
    }
    snprintf(text, sizeof text,
             "fp8: recipe %s, filter %.60s: %lld of %lld linears in FP8, weights gathered %s",
             recipe->name, filter ? filter : "accelerate", (long long)s->filter.converted,
             (long long)(s->layers * ND_LINEAR_COUNT + 1),
             s->codes_gathered ? "as codes" : "in BF16");
    line(context, text);
    for (nd_role role = 0; role < ND_ROLE_COUNT; role += 2) {
        const bool fast = cuda && role == ND_X_OF_Y;
        snprintf(text, sizeof text, "  %s: %s", products[role],
                 nd_recipe_format(recipe, role, fast, format, sizeof format));
        line(context, text);
    }
    each_linear(&s->filter, shape, line, context);
}
