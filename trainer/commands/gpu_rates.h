// SPDX-License-Identifier: Apache-2.0
#ifndef ND_COMMANDS_GPU_RATES_H
#define ND_COMMANDS_GPU_RATES_H
/* Rates of Hopper (SXM) that plans are estimated by; `scripts/gpu/visit results` writes them, and
 * docs/cuda.md has the sources of the others. */
#define ND_RATES_FROM "those of NVIDIA H200 were measured (commit 9069328d, changed)"

enum { ND_RATED_GPUS = 2 };
static const struct nd_gpu_rates {
    const char *name;
    double bytes_per_second, gib;                  /* by the data sheet; what the driver shows */
    double bf16_flops, fp8_flops, attention_flops; /* a second */
    double memory_share;                           /* of bytes_per_second, by other ops */
} nd_gpu_rates[ND_RATED_GPUS] = {
    {"H100", 3.35e12, 79.6, 650e12, 1140e12, 450e12, 0.92},
    {"H200", 4.8e12, 140.4, 691e12, 1324e12, 504e12, 0.80},
};

#endif
