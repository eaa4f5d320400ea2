// SPDX-License-Identifier: Apache-2.0
/* Included before all sources of what runs in Bochs (scripts/try_amx). Its VCVTNE2PS2BF16 reads
 * beyond its first operand for the upper half of the result, so that two VCVTNEPS2BF16 take its
 * place. */
#ifdef __AVX512BF16__
#include <immintrin.h>
#define _mm512_cvtne2ps_pbh(high, low)                                                             \
    ((__m512bh)_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh(low)),        \
                                  (__m256i)_mm512_cvtneps_pbh(high), 1))
#endif
