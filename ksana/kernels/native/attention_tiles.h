/* Register tiles of paged attention: scores, weighted values, and the transposing of keys. */
#pragma once

#include "ksana.h"

enum {
    TILE = 64,                 /* keys that share one step of the softmax */
    ROWS = 6,                  /* query rows of a register tile */
    VECTORS = VL == 8 ? 2 : 4, /* its width */
    KEY_GROUP = 16,            /* keys are transposed and scored in such groups */
};

/* sum[rows][vectors] += a[k][r] * b_k, for k in [k0, k1); a at a_row * r + a_k * k; b_k a row of floats. */
INLINE void accumulate(int rows, int vectors, int half, const float *a, int64_t a_row, int64_t a_k, const float *b,
                       int64_t b_stride, const float *const *b_rows, int64_t column, int k0, int k1, float *out,
                       int64_t ldc, int first) {
    vf sum[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            sum[r][v] = first  ? vf_set(0.0f)
                        : half ? vf_load_half(out + r * ldc)
                               : vf_load(out + r * ldc + v * VL);
    for (int k = k0; k < k1; k++) {
        const float *from = b_rows ? b_rows[k] + column : b + k * b_stride;
        vf w[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) w[v] = half ? vf_load_half(from) : vf_load(from + v * VL);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vf x = vf_set(a[r * a_row + k * a_k]);
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) sum[r][v] = vf_fma(x, w[v], sum[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            if (half)
                vf_store_half(out + r * ldc, sum[r][v]);
            else
                vf_store(out + r * ldc + v * VL, sum[r][v]);
}

/* Scores of one register tile of query rows with `vectors` vectors of keys, over all dimensions. */
#define SCORE(rows, vectors)                                                                                           \
    case vectors:                                                                                                      \
        accumulate(rows, vectors, 0, query, 1, rows, keys, TILE, 0, 0, 0, dim, scores, TILE, 1);                       \
        break;
#define VALUE(rows, vectors)                                                                                           \
    case vectors:                                                                                                      \
        accumulate(rows, vectors, 0, weights, TILE, 1, 0, 0, v, column, k0, k1, values + column, dim, 0);              \
        break;
#if VL == 8
#define WIDTHS(what, rows) what(rows, 1) what(rows, 2)
#else
#define WIDTHS(what, rows) what(rows, 1) what(rows, 2) what(rows, 3) what(rows, 4)
#endif

#define FOR_ROWS(rows)                                                                                                 \
    static void score_##rows(const float *query, const float *keys, int dim, int vectors, float *scores) {             \
        switch (vectors) { WIDTHS(SCORE, rows) }                                                                       \
    }                                                                                                                  \
    static void value_##rows(const float *weights, const float *const *v, int64_t column, int vectors, int half,       \
                             int k0, int k1, float *values, int64_t dim) {                                             \
        if (half)                                                                                                      \
            accumulate(rows, 1, 1, weights, TILE, 1, 0, 0, v, column, k0, k1, values + column, dim, 0);                \
        else                                                                                                           \
            switch (vectors) { WIDTHS(VALUE, rows) }                                                                   \
    }
FOR_ROWS(1) FOR_ROWS(2) FOR_ROWS(3) FOR_ROWS(4) FOR_ROWS(5) FOR_ROWS(6)

typedef void (*score_fn)(const float *, const float *, int, int, float *);
typedef void (*value_fn)(const float *, const float *const *, int64_t, int, int, int, int, float *, int64_t);
static const score_fn SCORES[ROWS + 1] = {0, score_1, score_2, score_3, score_4, score_5, score_6};
static const value_fn VALUES[ROWS + 1] = {0, value_1, value_2, value_3, value_4, value_5, value_6};

/* 16 key rows, dim floats each -> to[d * TILE + key]. */
static inline void transpose(const float *const *rows, int dim, float *to) {
#if VL == 16
    for (int d = 0; d < dim; d += 4) { /* four dimensions of keys 4l + i in lane l of vector i, then 4x4 in each lane */
        __m512 q[4];
        for (int i = 0; i < 4; i++) {
            q[i] = _mm512_castps128_ps512(_mm_loadu_ps(rows[i] + d));
            q[i] = _mm512_insertf32x4(q[i], _mm_loadu_ps(rows[4 + i] + d), 1);
            q[i] = _mm512_insertf32x4(q[i], _mm_loadu_ps(rows[8 + i] + d), 2);
            q[i] = _mm512_insertf32x4(q[i], _mm_loadu_ps(rows[12 + i] + d), 3);
        }
        __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(q[0], q[1]));
        __m512d b = _mm512_castps_pd(_mm512_unpacklo_ps(q[2], q[3]));
        __m512d c = _mm512_castps_pd(_mm512_unpackhi_ps(q[0], q[1]));
        __m512d e = _mm512_castps_pd(_mm512_unpackhi_ps(q[2], q[3]));
        _mm512_storeu_pd(to + d * TILE, _mm512_unpacklo_pd(a, b));
        _mm512_storeu_pd(to + (d + 1) * TILE, _mm512_unpackhi_pd(a, b));
        _mm512_storeu_pd(to + (d + 2) * TILE, _mm512_unpacklo_pd(c, e));
        _mm512_storeu_pd(to + (d + 3) * TILE, _mm512_unpackhi_pd(c, e));
    }
#elif VL == 8
    for (int half = 0; half < 16; half += 8)
        for (int d = 0; d < dim; d += 4) {
            __m256 q[4];
            for (int i = 0; i < 4; i++)
                q[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[half + i] + d)),
                                            _mm_loadu_ps(rows[half + 4 + i] + d), 1);
            __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(q[0], q[1]));
            __m256d b = _mm256_castps_pd(_mm256_unpacklo_ps(q[2], q[3]));
            __m256d c = _mm256_castps_pd(_mm256_unpackhi_ps(q[0], q[1]));
            __m256d e = _mm256_castps_pd(_mm256_unpackhi_ps(q[2], q[3]));
            float *out = to + half + d * TILE;
            _mm256_storeu_ps(out, _mm256_castpd_ps(_mm256_unpacklo_pd(a, b)));
            _mm256_storeu_ps(out + TILE, _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
            _mm256_storeu_ps(out + 2 * TILE, _mm256_castpd_ps(_mm256_unpacklo_pd(c, e)));
            _mm256_storeu_ps(out + 3 * TILE, _mm256_castpd_ps(_mm256_unpackhi_pd(c, e)));
        }
#else
    for (int d = 0; d < dim; d++)
        for (int key = 0; key < KEY_GROUP; key++) to[d * TILE + key] = rows[key][d];
#endif
}
