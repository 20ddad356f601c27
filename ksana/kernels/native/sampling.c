/* One token per row of logits. Defined by ksana/sampling (noise.py, noise_torch.py, candidates.py), to the bit:
 * float32 steps that IEEE 754 rounds exactly, never fused, and masses as integers, exact in any order.
 */
#include "noise.h"

#include <stdlib.h>

enum { NAN_LOGIT = -1, INFINITE_LOGIT = -2, NOTHING_LEFT = -3, NO_MEMORY = -4 };
enum { RADIX_BITS = 11, BUCKETS = 1 << RADIX_BITS, FEW = 48 };

/* How to sample a row; laid out as ksana.kernels.sampling packs it. */
typedef struct {
    uint64_t seed;
    uint32_t choice, position;
    float temperature; /* 0: greedy */
    float min_p;
    double top_p;
    int64_t top_k; /* 0: off */
    int64_t suppressed_start, suppressed_end;
} Row;

typedef struct {
    const float *logits;
    int64_t row_stride, vocabulary;
    const Row *rows;
    const int64_t *suppressed;
    int64_t *tokens;
} Batch;

/* ---- candidates ------------------------------------------------------------------------------------------ */

/* exp(z) for z <= 0, 0 below -87; coefficients: Cephes' expf. */
INLINE vf exp_weight(vf z) {
    vf x = vf_max(z, vf_set(-87.0f));
    vf shifted = x * vf_set(1.44269504088896341f) + vf_set(0.5f);
    vi whole = __builtin_convertvector(shifted, vi);
    vf n = to_float(whole);
    n = n - vf_select(n > shifted, vf_set(1.0f), vf_set(0.0f)); /* floor */
    vf r = (x - n * vf_set(0.693359375f)) - n * vf_set(-2.12194440e-4f);
    vf p = vf_set(1.9875691500e-4f);
    p = p * r + vf_set(1.3981999507e-3f);
    p = p * r + vf_set(8.3334519073e-3f);
    p = p * r + vf_set(4.1665795894e-2f);
    p = p * r + vf_set(1.6666665459e-1f);
    p = p * r + vf_set(5.0000001201e-1f);
    vf y = (p * (r * r) + r) + vf_set(1.0f);
    vf scale = (vf)((__builtin_convertvector(n, vi) + 127) << 23);
    return (vf)((vi)(y * scale) & ~(z < vf_set(-87.0f)));
}

static int64_t mass_of(float weight) { return (int64_t)(weight * 0x1p42f); }

/* Sum of the masses of all tokens. */
static int64_t total_mass(const float *z, int64_t count) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; i += VL) {
        float weight[VL];
        vf_store(weight, exp_weight(vf_load(z + i)));
        for (int lane = 0; lane < VL; lane++) total += mass_of(weight[lane]);
    }
    return total;
}

/* Bit i: lane i is at least `limit`. */
INLINE uint32_t lanes_at_least(vf x, float limit) {
#if VL == 16
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_GE_OQ);
#elif VL == 8
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps((__m256)x, _mm256_set1_ps(limit), _CMP_GE_OQ));
#else
    uint32_t bits = 0;
    for (int lane = 0; lane < VL; lane++) bits |= (uint32_t)(x[lane] >= limit) << lane;
    return bits;
#endif
}

/* Tokens that may be drawn, in the order of their ids. A key ranks a token: the magnitude of z (never positive)
 * above, the id below, so that smaller is better and no two are equal. */
typedef struct {
    uint64_t *keys;
    int64_t *masses;
    int64_t count, mass;
} Candidates;

static float z_of(uint64_t key) {
    uint32_t bits = (uint32_t)(key >> 32) | 0x80000000u;
    float z;
    memcpy(&z, &bits, 4);
    return z;
}

/* exp(z) of up to VL candidates from `start`; returns how many. */
static int weigh(const Candidates *c, int64_t start, float *weight) {
    int lanes = c->count - start < VL ? (int)(c->count - start) : VL;
    memset(weight, 0, VL * 4);
    for (int lane = 0; lane < lanes; lane++) weight[lane] = z_of(c->keys[start + lane]);
    vf_store(weight, exp_weight(vf_load(weight)));
    return lanes;
}

/* All tokens with z >= limit, and their masses if wanted. */
static void collect(const float *z, int64_t count, float limit, int with_masses, Candidates *found) {
    found->count = 0;
    for (int64_t i = 0; i < count; i += VL) {
        uint32_t hits = lanes_at_least(vf_load(z + i), limit);
        for (; hits; hits &= hits - 1) {
            int64_t id = i + __builtin_ctz(hits);
            uint32_t bits;
            memcpy(&bits, z + id, 4);
            found->keys[found->count++] = (uint64_t)(bits & 0x7FFFFFFFu) << 32 | (uint64_t)id;
        }
    }
    found->mass = 0;
    if (!with_masses) return;
    for (int64_t i = 0; i < found->count; i += VL) {
        float weight[VL];
        int lanes = weigh(found, i, weight);
        for (int lane = 0; lane < lanes; lane++) found->mass += found->masses[i + lane] = mass_of(weight[lane]);
    }
}

static int smaller_key(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* The key of the token with which the best tokens' amount, their number or their mass, reaches `wanted` (or of the
 * last one). A radix search: narrows to one bucket of keys at a time, from the top bits down, and sorts the last few.
 * Reorders nothing; `work` has room for count keys and indices. */
static uint64_t reaching(const Candidates *c, int by_mass, double wanted, uint64_t *work) {
    int64_t buckets[BUCKETS], before = 0, num_left = c->count;
    uint64_t fixed = 0, mask = 0;
    for (int shift = 63; num_left > FEW && shift > 0;) {
        shift = shift > RADIX_BITS ? shift - RADIX_BITS : 0;
        int64_t members[BUCKETS];
        memset(buckets, 0, sizeof buckets);
        memset(members, 0, sizeof members);
        for (int64_t i = 0; i < c->count; i++) {
            if ((c->keys[i] & mask) != fixed) continue;
            uint64_t bucket = c->keys[i] >> shift & (BUCKETS - 1);
            buckets[bucket] += by_mass ? c->masses[i] : 1;
            members[bucket]++;
        }
        uint64_t bucket = 0, last = BUCKETS - 1;
        while (members[last] == 0) last--;
        while (bucket < last && (double)(before + buckets[bucket]) < wanted) before += buckets[bucket++];
        fixed |= bucket << shift;
        mask |= (uint64_t)(BUCKETS - 1) << shift;
        num_left = members[bucket];
    }
    int64_t few = 0;
    for (int64_t i = 0; i < c->count && few < num_left; i++)
        if ((c->keys[i] & mask) == fixed) work[2 * few] = c->keys[i], work[2 * few + 1] = (uint64_t)i, few++;
    qsort(work, (size_t)few, 2 * sizeof *work, smaller_key);
    for (int64_t i = 0; i < few; i++) {
        before += by_mass ? c->masses[work[2 * i + 1]] : 1;
        if ((double)before >= wanted || i == few - 1) return work[2 * i];
    }
    return UINT64_MAX;
}

static void keep_up_to(Candidates *c, uint64_t bound, int with_masses) {
    int64_t kept = 0;
    c->mass = 0;
    for (int64_t i = 0; i < c->count; i++)
        if (c->keys[i] <= bound) {
            if (with_masses) c->mass += c->masses[kept] = c->masses[i];
            c->keys[kept++] = c->keys[i];
        }
    c->count = kept;
}

static void keep_at_least(Candidates *c, float min_p) {
    int64_t kept = 0;
    for (int64_t i = 0; i < c->count; i += VL) {
        float weight[VL];
        int lanes = weigh(c, i, weight);
        for (int lane = 0; lane < lanes; lane++)
            if (weight[lane] >= min_p) c->keys[kept++] = c->keys[i + lane];
    }
    c->count = kept;
}

/* Apply top_k, top_p, min_p. Tokens near the best are looked at first; the net is widened until it holds enough. */
static void find_candidates(const float *z, int64_t vocabulary, const Row *row, Candidates *c, uint64_t *work) {
    int by_count = row->top_k > 0 && row->top_k < vocabulary, by_mass = row->top_p < 1.0;
    double mass_wanted = by_mass && !by_count ? row->top_p * (double)total_mass(z, vocabulary) : 0.0;
    float depth = by_count || by_mass ? 4.0f : 0.01f - logf(row->min_p);
    for (;; depth *= 2.0f) {
        collect(z, vocabulary, depth > 80.0f ? -FLT_MAX : -depth, by_mass, c);
        int enough = by_count ? c->count >= row->top_k : (double)c->mass >= mass_wanted;
        if (enough || depth > 80.0f) break;
    }
    if (by_count) keep_up_to(c, reaching(c, 0, (double)row->top_k, work), by_mass);
    if (by_mass) keep_up_to(c, reaching(c, 1, by_count ? row->top_p * (double)c->mass : mass_wanted, work), by_mass);
    if (row->min_p > 0.0f) keep_at_least(c, row->min_p);
}

/* ---- drawing --------------------------------------------------------------------------------------------- */

static float noise_of(int64_t id, const uint32_t *key) {
    vu ids = {(uint32_t)id};
    return gumbel(ids, key)[0];
}

static int64_t first_equal(const float *x, int64_t count, float value) {
    int64_t i = 0;
    for (; i + VL <= count; i += VL)
        if (lanes_at_least(vf_load(x + i), value)) break;
    while (i < count && x[i] != value) i++;
    return i;
}

/* Most tokens cannot beat the best score so far whatever their noise (at most MOST_NOISE), or with the noise that
 * their hash allows: theirs is not computed. The likeliest token's score is the first to beat. */
static int64_t draw_from_all(const float *z, int64_t vocabulary, const uint32_t *key) {
    float to_beat = noise_of(first_equal(z, vocabulary, 0.0f), key);
    vf best = vf_set(-INFINITY);
    vi best_ids = {0};
    vu ids;
    for (int lane = 0; lane < VL; lane++) ids[lane] = (uint32_t)lane;
    for (int64_t i = 0; i < vocabulary; i += VL, ids += VL) {
        vf here = vf_load(z + i);
        if (!lanes_at_least(here, to_beat - MOST_NOISE)) continue;
        vf u = uniform(hash(ids, key));
        if (!lanes_at_least(here + most_gumbel(u), to_beat)) continue;
        vf score = here + gumbel_of(u);
        float most = vf_largest(score);
        to_beat = most > to_beat ? most : to_beat;
        vi better = score > best; /* strictly: the lower id stays */
        best = vf_select(better, score, best);
        best_ids = (vi)vf_select(better, (vf)(vi)ids, (vf)best_ids);
    }
    int first = 0;
    for (int lane = 1; lane < VL; lane++)
        if (best[lane] > best[first] || (best[lane] == best[first] && best_ids[lane] < best_ids[first])) first = lane;
    return best_ids[first];
}

static int64_t draw_from(const Candidates *c, const uint32_t *key) {
    float best = -INFINITY;
    int64_t best_token = NOTHING_LEFT;
    for (int64_t i = 0; i < c->count; i += VL) {
        int lanes = c->count - i < VL ? (int)(c->count - i) : VL;
        vu ids = {0};
        vf z = vf_set(0.0f);
        for (int lane = 0; lane < lanes; lane++) {
            ids[lane] = (uint32_t)c->keys[i + lane];
            z[lane] = z_of(c->keys[i + lane]);
        }
        vf score = z + gumbel(ids, key);
        for (int lane = 0; lane < lanes; lane++)
            if (score[lane] > best) best = score[lane], best_token = ids[lane];
    }
    return best_token;
}

/* The largest logit, or NaN if there is one. */
static float largest_logit(const float *x, int64_t count) {
    vf largest = vf_set(-INFINITY);
    vi bad = {0};
    int64_t i = 0;
    for (; i + VL <= count; i += VL) {
        vf a = vf_load(x + i);
        largest = vf_max(largest, a);
        bad |= a != a;
    }
    float most = vf_largest(largest);
    for (int lane = 0; lane < VL; lane++)
        if (bad[lane]) return NAN;
    for (; i < count; i++) {
        if (x[i] != x[i]) return NAN;
        most = x[i] > most ? x[i] : most;
    }
    return most;
}

static int64_t sample_row(const Batch *batch, int index) {
    const Row *row = &batch->rows[index];
    const float *logits = batch->logits + index * batch->row_stride;
    int64_t vocabulary = batch->vocabulary, padded = (vocabulary + VL - 1) / VL * VL;
    int greedy = row->temperature <= 0.0f, suppressing = row->suppressed_end > row->suppressed_start;
    float *z = NULL;
    if (!greedy || suppressing) {
        z = ksana_scratch(SCRATCH_OPERAND, (size_t)padded * 4);
        if (z == NULL) return NO_MEMORY;
    }
    if (suppressing) {
        memcpy(z, logits, (size_t)vocabulary * 4);
        for (int64_t i = row->suppressed_start; i < row->suppressed_end; i++) {
            int64_t id = batch->suppressed[i];
            if (id >= 0 && id < vocabulary) z[id] = -INFINITY;
        }
        logits = z;
    }
    float largest = largest_logit(logits, vocabulary);
    if (largest != largest) return NAN_LOGIT;
    if (largest == INFINITY) return INFINITE_LOGIT;
    if (largest == -INFINITY) return NOTHING_LEFT;
    if (greedy) return first_equal(logits, vocabulary, largest);
    for (int64_t i = 0; i < vocabulary; i++) z[i] = (logits[i] - largest) / row->temperature;
    for (int64_t i = vocabulary; i < padded; i++) z[i] = -INFINITY;
    uint32_t key[2];
    row_key(row->seed, row->choice, row->position, key);
    if (row->top_p >= 1.0 && row->min_p <= 0.0f && (row->top_k <= 0 || row->top_k >= vocabulary))
        return draw_from_all(z, vocabulary, key);
    uint64_t *memory = ksana_scratch(SCRATCH_STATE, (size_t)padded * 16 + 16 * BUCKETS);
    if (memory == NULL) return NO_MEMORY;
    Candidates c = {.keys = memory, .masses = (int64_t *)(memory + padded)};
    uint64_t work[2 * FEW];
    find_candidates(z, vocabulary, row, &c, work);
    return draw_from(&c, key);
}

static void sample_one(void *context, int index) {
    const Batch *batch = context;
    batch->tokens[index] = sample_row(batch, index);
}

/* logits [num_rows, vocabulary]; tokens[num_rows] gets a token id, or what is wrong with the row (negative). */
EXPORT int ksana_sample(const float *logits, const void *rows, const int64_t *suppressed, int64_t *tokens,
                        int64_t num_rows, int64_t vocabulary, int64_t row_stride) {
    Batch batch = {logits, row_stride, vocabulary, rows, suppressed, tokens};
    ksana_parallel(sample_one, &batch, (int)num_rows);
    for (int64_t i = 0; i < num_rows; i++)
        if (tokens[i] == NO_MEMORY) return ksana_fail("sample: no memory for %lld tokens", (long long)vocabulary);
    return 0;
}

/* For tests: the Gumbel noise of ids 0..count-1 for the key of a row. */
EXPORT int ksana_gumbels(uint64_t seed, uint32_t choice, uint32_t position, float *out, int64_t count) {
    uint32_t key[2];
    row_key(seed, choice, position, key);
    for (int64_t i = 0; i < count; i += VL) {
        vu ids;
        for (int lane = 0; lane < VL; lane++) ids[lane] = (uint32_t)(i + lane);
        vf g = gumbel(ids, key);
        for (int lane = 0; lane < VL && i + lane < count; lane++) out[i + lane] = g[lane];
    }
    return 0;
}
