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

double nd_rope_frequency(const nd_rope_config *c, int64_t head_dim, int64_t pair)
{
    double frequency = pow(c->theta, -2.0 * (double)pair / (double)head_dim);
    switch (c->type) {
    case ND_ROPE_DEFAULT:
        return frequency;
    case ND_ROPE_LINEAR:
        return frequency / c->factor;
    case ND_ROPE_LLAMA3:
        return llama3_frequency(c, frequency);
    }
    ND_ASSERT(!"a RoPE type that nd_rope_table knows");
    return frequency;
}

void nd_rope_table(const nd_rope_config *config, int64_t head_dim, int64_t positions,
                   float *cos_out, float *sin_out)
{
    ND_ASSERT(head_dim > 0 && head_dim % 2 == 0 && positions >= 0);
    int64_t half = head_dim / 2;
    for (int64_t pair = 0; pair < half; pair++) {
        double frequency = nd_rope_frequency(config, head_dim, pair);
        for (int64_t p = 0; p < positions; p++) {
            cos_out[p * half + pair] = (float)cos((double)p * frequency);
            sin_out[p * half + pair] = (float)sin((double)p * frequency);
        }
    }
}
