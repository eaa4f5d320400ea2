// SPDX-License-Identifier: Apache-2.0
#include "kernels/rope.h"

#include <math.h>

#include "runtime/base/status.h"

static const double two_pi = 6.283185307179586476925286766559;

/* Slows one frequency by its wavelength (rope.h). */
static double llama3_frequency(const nd_rope_config *c, double frequency)
{
    double wavelength = two_pi / frequency;
    double original = (double)c->original_max_positions;
    if (wavelength < original / c->high_freq_factor) {
        return frequency;
    }
    if (wavelength > original / c->low_freq_factor) {
        return frequency / c->factor;
    }
    double smooth =
        (original / wavelength - c->low_freq_factor) / (c->high_freq_factor - c->low_freq_factor);
    return (1.0 - smooth) * frequency / c->factor + smooth * frequency;
}

/* The number of the pair, as a real one, that turns `turns` times within the original positions. */
static double pair_that_turns(const nd_rope_config *c, int64_t head_dim, double turns)
{
    return (double)head_dim * log((double)c->original_max_positions / (turns * two_pi)) /
           (2.0 * log(c->theta));
}

static double yarn_frequency(const nd_rope_config *c, int64_t head_dim, int64_t pair,
                             double frequency)
{
    double low = pair_that_turns(c, head_dim, c->beta_fast);
    double high = pair_that_turns(c, head_dim, c->beta_slow);
    low = fmax(c->exact_range ? low : floor(low), 0.0);
    high = fmin(c->exact_range ? high : ceil(high), (double)head_dim - 1.0);
    high += high == low ? 0.001 : 0.0;
    const double slowed = fmin(fmax(((double)pair - low) / (high - low), 0.0), 1.0);
    return frequency * (1.0 - slowed) + frequency / c->factor * slowed;
}

double nd_rope_frequency(const nd_rope_config *c, int64_t head_dim, int64_t pair)
{
    double frequency = pow(c->theta, -2.0 * (double)pair / (double)head_dim);
    switch (c->type) {
    case ND_ROPE_DEFAULT:
    case ND_ROPE_DYNAMIC:
    case ND_ROPE_LONGROPE:
        return frequency;
    case ND_ROPE_LINEAR:
        return frequency / c->factor;
    case ND_ROPE_LLAMA3:
        return llama3_frequency(c, frequency);
    case ND_ROPE_YARN:
        return yarn_frequency(c, head_dim, pair, frequency);
    case ND_ROPE_TYPES:
        break;
    }
    ND_ASSERT(!"a RoPE type that nd_rope_table knows");
    return frequency;
}

/* The factor that the cosines and sines of a position get. */
static double size_of(const nd_rope_config *c, int64_t position, bool queries)
{
    const bool has = c->type == ND_ROPE_YARN || c->type == ND_ROPE_LONGROPE;
    const double size = has ? c->attention_factor : 1.0;
    return queries && c->query_beta > 0
               ? size *
                     (1 + c->query_beta * log(1 + (double)(position / c->original_max_positions)))
               : size;
}

void nd_rope_table(const nd_rope_config *config, int64_t head_dim, int64_t positions, bool queries,
                   float *cos_out, float *sin_out)
{
    ND_ASSERT(head_dim > 0 && head_dim % 2 == 0 && positions >= 0);
    int64_t half = head_dim / 2;
    const float *slowed = config->type != ND_ROPE_LONGROPE             ? NULL
                          : positions > config->original_max_positions ? config->long_factor
                                                                       : config->short_factor;
    ND_ASSERT(!slowed || half <= ND_ROPE_LONG_PAIRS);
    for (int64_t pair = 0; pair < half; pair++) {
        double frequency = nd_rope_frequency(config, head_dim, pair);
        frequency /= slowed ? (double)slowed[pair] : 1.0;
        for (int64_t p = 0; p < positions; p++) {
            const double size = size_of(config, p, queries);
            cos_out[p * half + pair] = (float)(size * cos((double)p * frequency));
            sin_out[p * half + pair] = (float)(size * sin((double)p * frequency));
        }
    }
}
