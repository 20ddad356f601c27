/* Shared by all kernels: vectors of floats, work sharing, scratch memory, errors.
 *
 * Vectors: `vf` has VL lanes, 16 with AVX-512, 8 with AVX2 and FMA, else 4. vf_fma is one rounding where the
 * machine has it; the library is compiled with -ffp-contract=off, so nothing else is ever fused and every
 * result is a fixed function of its inputs.
 *
 * Functions return 0, or -1 with a text in ksana_error().
 */
#pragma once

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define VL 16
#define KSANA_ISA "AVX-512"
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define VL 8
#define KSANA_ISA "AVX2"
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#define VL 4
#define KSANA_ISA "NEON"
#else
#define VL 4
#define KSANA_ISA "portable vectors, no FMA"
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef vf vf_unaligned __attribute__((aligned(4), may_alias));

INLINE vf vf_load(const float *p) { return *(const vf_unaligned *)p; }
INLINE void vf_store(float *p, vf x) { *(vf_unaligned *)p = x; }

INLINE vf vf_set(float x) {
#if VL == 16
    return (vf)_mm512_set1_ps(x);
#elif VL == 8
    return (vf)_mm256_set1_ps(x);
#else
    return (vf){x, x, x, x};
#endif
}

/* a * b + c */
INLINE vf vf_fma(vf a, vf b, vf c) {
#if VL == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VL == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE vf vf_select(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

/* a > b ? a : b, so that a NaN in b survives. */
INLINE vf vf_max(vf a, vf b) {
#if VL == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif VL == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return vf_select(a > b, a, b);
#endif
}

/* Sum of the lanes: halves are added until one is left, always in this order. */
INLINE float vf_sum(vf x) {
    float lane[VL];
    vf_store(lane, x);
    for (int half = VL / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

INLINE float vf_largest(vf x) {
#if VL == 16
    return _mm512_reduce_max_ps((__m512)x);
#else
    float lane[VL];
    vf_store(lane, x);
    float largest = lane[0];
    for (int i = 1; i < VL; i++) largest = lane[i] > largest ? lane[i] : largest;
    return largest;
#endif
}

/* The first n < VL floats, zeros behind. */
INLINE vf vf_load_part(const float *p, int n) {
    float lane[VL] = {0};
    memcpy(lane, p, (size_t)n * 4);
    return vf_load(lane);
}
INLINE void vf_store_part(float *p, vf x, int n) {
    float lane[VL];
    vf_store(lane, x);
    memcpy(p, lane, (size_t)n * 4);
}

/* The first VL / 2 floats, zeros behind. */
INLINE vf vf_load_half(const float *p) {
#if VL == 16
    return (vf)_mm512_maskz_loadu_ps(0xFF, p);
#else
    return vf_load_part(p, VL / 2);
#endif
}
INLINE void vf_store_half(float *p, vf x) {
#if VL == 16
    _mm512_mask_storeu_ps(p, 0xFF, (__m512)x);
#else
    vf_store_part(p, x, VL / 2);
#endif
}

/* exp(x) within 2 units in the last place for -87 <= x <= 88, 0 below, inf above; NaN stays NaN, exp(0) is 1.
 * x = n log 2 + r with |r| <= log(2)/2; the polynomial is the minimax one of the Cephes library's expf. */
INLINE vf vf_exp(vf x) {
    const vf magic = vf_set(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
    vf y = vf_max(vf_set(-87.0f), x);
    y = vf_select(y > vf_set(88.0f), vf_set(88.0f), y);
    vf shifted = vf_fma(y, vf_set(1.44269504088896341f), magic);
    vf n = shifted - magic;
    vf r = vf_fma(n, vf_set(-0.693359375f), y);
    r = vf_fma(n, vf_set(2.12194440e-4f), r);
    vf p = vf_fma(vf_set(1.9875691500e-4f), r, vf_set(1.3981999507e-3f));
    p = vf_fma(p, r, vf_set(8.3334519073e-3f));
    p = vf_fma(p, r, vf_set(4.1665795894e-2f));
    p = vf_fma(p, r, vf_set(1.6666665459e-1f));
    p = vf_fma(p, r, vf_set(5.0000001201e-1f));
    p = vf_fma(p, r * r, r) + vf_set(1.0f);
    vi scale = ((vi)shifted << 23) + 0x3F800000;
    p = p * (vf)scale;
    p = vf_select(x > vf_set(88.0f), vf_set(HUGE_VALF), p);
    return (vf)((vi)p & ~(x < vf_set(-87.0f)));
}

/* Calls fn(context, item) for every item in 0..num_items-1, on the pool's threads and the caller's. */
typedef void (*ksana_work)(void *context, int item);
void ksana_parallel(ksana_work fn, void *context, int num_items);
int ksana_threads(void);

/* This thread's scratch memory, 64-byte aligned, good until the same `which` is asked for again.
 * NULL when there is no memory. */
enum { SCRATCH_PLAN, SCRATCH_OPERAND, SCRATCH_STATE, SCRATCH_KINDS };
void *ksana_scratch(int which, size_t bytes);

int ksana_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
