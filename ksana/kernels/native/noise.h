/* Counter-based noise, defined by ksana/sampling/noise.py and noise_torch.py, to the bit: float32 steps that
 * IEEE 754 rounds exactly, never fused, no library function.
 */
#pragma once

#include "ksana.h"

typedef uint32_t vu __attribute__((vector_size(VL * 4)));

static inline uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x85EBCA6Bu;
    x ^= x >> 13;
    x *= 0xC2B2AE35u;
    return x ^ x >> 16;
}

static inline void row_key(uint64_t seed, uint32_t choice, uint32_t position, uint32_t *key) {
    uint32_t words[4] = {(uint32_t)seed, (uint32_t)(seed >> 32), choice, position};
    uint32_t a = 0x9E3779B9u, b = 0x7F4A7C15u;
    for (int i = 0; i < 4; i++) {
        a = mix((a ^ words[i]) + 0x9E3779B9u);
        b = mix((b + words[i]) ^ a);
    }
    key[0] = a, key[1] = b;
}

INLINE vu hash(vu id, const uint32_t *key) {
    vu x = id ^ key[0];
    x ^= x >> 17;
    x *= 0xED5AD4BBu;
    x ^= x >> 11;
    x += key[1];
    x *= 0xAC4C1B51u;
    x ^= x >> 15;
    x *= 0x31848BABu;
    return x ^ x >> 14;
}

INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }

INLINE vf uniform(vu bits) {
    vf high = to_float((vi)(bits >> 16)) * vf_set(0x1p-16f);
    vf low = (to_float((vi)(bits & 0xFFFFu)) + vf_set(0.5f)) * vf_set(0x1p-32f);
    vf u = high + low, most = vf_set(1.0f - 0x1p-24f);
    return vf_select(u < most, u, most);
}

/* log(1 + f) + exponent * log 2; coefficients: Cephes' logf. */
INLINE vf log_1p(vf f, vf exponent) {
    vf square = f * f;
    vf p = vf_set(7.0376836292e-2f);
    p = p * f + vf_set(-1.1514610310e-1f);
    p = p * f + vf_set(1.1676998740e-1f);
    p = p * f + vf_set(-1.2420140846e-1f);
    p = p * f + vf_set(1.4249322787e-1f);
    p = p * f + vf_set(-1.6668057665e-1f);
    p = p * f + vf_set(2.0000714765e-1f);
    p = p * f + vf_set(-2.4999993993e-1f);
    p = p * f + vf_set(3.3333331174e-1f);
    vf tail = p * f * square + exponent * vf_set(-2.12194440e-4f);
    return (tail - square * vf_set(0.5f)) + f + exponent * vf_set(0.693359375f);
}

INLINE void split(vf x, vf *f, vf *exponent) {
    vi bits = (vi)x - 0x3F3504F3;
    *exponent = to_float(bits >> 23);
    *f = (vf)((bits & 0x007FFFFF) + 0x3F3504F3) - vf_set(1.0f);
}

INLINE vf exponential(vf u) {
    vf f, exponent;
    split(vf_set(1.0f) - u, &f, &exponent);
    vi near_one = u < vf_set(0.25f);
    f = vf_select(near_one, -u, f);
    exponent = vf_select(near_one, vf_set(0.0f), exponent);
    return -log_1p(f, exponent);
}

INLINE vf gumbel_of(vf u) {
    vf f, exponent;
    split(exponential(u), &f, &exponent);
    return -log_1p(f, exponent);
}

INLINE vf gumbel(vu id, const uint32_t *key) { return gumbel_of(uniform(hash(id, key))); }

static const float MOST_NOISE = 23.0f; /* the largest Gumbel of 32 bits is 22.9 */

/* No less than gumbel_of(u), from the exponent of u alone: -log(-log(1 - u)) <= -log(u) <= -exponent * log 2. */
INLINE vf most_gumbel(vf u) { return to_float(127 - ((vi)u >> 23)) * vf_set(0.6932f); }
