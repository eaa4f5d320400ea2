// SPDX-License-Identifier: Apache-2.0
#include "trainer/precision/table.h"

#include <stdio.h>

void nd_precision_each_line(const nd_scales *s, const nd_llama_shape *shape,
                            void (*line)(void *context, const char *text), void *context)
{
    const nd_recipe *recipe = &s->recipe;
    const nd_gemm_rule *rules[] = {&recipe->output, &recipe->input_gradient,
                                   &recipe->weight_gradient};
    static const char *const names[] = {"output", "input gradient", "weight gradient"};
    const char *filter = s->rank->config->fp8.filter;
    /* Only a GPU has fast accumulation: this worker's, or the one that a plan made anywhere is
     * for. */
    bool cuda =
        s->rank->device->kind == ND_DEVICE_CUDA || s->rank->config->launch.device == ND_CHOOSE_CUDA;
    char text[256], format[96];
    if (!recipe->name) {
        return;
    }
    snprintf(text, sizeof text,
             "fp8: recipe %s, filter %.60s: %lld of %lld linears in FP8, weights gathered %s",
             recipe->name, filter ? filter : "accelerate", (long long)s->filter.converted,
             (long long)(s->layers * ND_LINEARS_OF_BLOCK + 1),
             s->codes_gathered ? "as codes" : "in BF16");
    line(context, text);
    for (int i = 0; i < 3; i++) {
        nd_gemm_rule rule = *rules[i];
        rule.fast_accumulation = rule.fast_accumulation && cuda;
        snprintf(text, sizeof text, "  %s: %s", names[i],
                 nd_gemm_rule_format(&rule, format, sizeof format));
        line(context, text);
    }
    nd_filter_each_line(&s->filter, shape, line, context);
}
