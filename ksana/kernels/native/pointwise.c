/* Norms, rotary embedding, gated activations, the KV write. A row's result is a function of that row alone.
 *
 * They are short: work is shared among threads only when there is much of it.
 */
#include "ksana.h"

enum { SMALL = 1 << 15 }; /* elements that one thread does faster than it wakes another */

static void share(ksana_work fn, void *context, int items, int64_t elements) {
    if (elements <= SMALL)
        for (int item = 0; item < items; item++) fn(context, item);
    else
        ksana_parallel(fn, context, items);
}

enum { ROWS_PER_TASK = 8 };
static int num_tasks(int64_t rows) { return (int)((rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK); }
static int64_t task_end(int task, int64_t rows) {
    int64_t end = ((int64_t)task + 1) * ROWS_PER_TASK;
    return end < rows ? end : rows;
}

/* --- RMS norm: sum of squares in 2 * VL lanes over rising columns, lanes added in a tree ------------------- */

typedef struct {
    const float *x, *weight;
    float *residual, *out; /* residual NULL: plain norm of x */
    int64_t rows, columns;
    float eps, offset;
} Norm;

static void norm_row(const Norm *p, int64_t row) {
    const float *x = p->x + row * p->columns;
    float *out = p->out + row * p->columns;
    int64_t columns = p->columns;
    if (p->residual) {
        float *residual = p->residual + row * columns;
        for (int64_t i = 0; i < columns; i++) residual[i] += x[i];
        x = residual;
    }
    vf even = vf_set(0.0f), odd = vf_set(0.0f);
    int64_t i = 0;
    for (; i + 2 * VL <= columns; i += 2 * VL) {
        vf a = vf_load(x + i), b = vf_load(x + i + VL);
        even = vf_fma(a, a, even);
        odd = vf_fma(b, b, odd);
    }
    for (; i < columns; i += VL) {
        vf a = columns - i >= VL ? vf_load(x + i) : vf_load_part(x + i, (int)(columns - i));
        even = vf_fma(a, a, even);
    }
    float scale = 1.0f / sqrtf(vf_sum(even + odd) / (float)columns + p->eps);
    for (i = 0; i < columns; i++) out[i] = x[i] * scale * (p->weight[i] + p->offset);
}

static void norm_rows(void *context, int task) {
    const Norm *p = context;
    for (int64_t row = (int64_t)task * ROWS_PER_TASK; row < task_end(task, p->rows); row++) norm_row(p, row);
}

/* residual [rows, columns] += x (when not NULL); out = norm * (weight + offset). out may be x. */
EXPORT int ksana_rms_norm(const float *x, float *residual, const float *weight, float *out, int64_t rows,
                          int64_t columns, float eps, float offset) {
    Norm p = {x, weight, residual, out, rows, columns, eps, offset};
    share(norm_rows, &p, num_tasks(rows), rows * columns);
    return 0;
}

/* --- gated activations ------------------------------------------------------------------------------------ */

typedef struct {
    const float *gate_up;
    float *out;
    int64_t rows, columns;
    int gelu;
} Gated;

/* silu(x) = x / (1 + exp(-x)); gelu's tanh form is x / (1 + exp(-2 sqrt(2/pi) (x + 0.044715 x^3))). */
INLINE vf gated(vf gate, vf up, int gelu) {
    vf inner = -gate;
    if (gelu) {
        vf cube = gate * gate * gate;
        inner = vf_fma(cube, vf_set(0.044715f), gate) * vf_set(-1.5957691216057308f);
    }
    return gate / (vf_set(1.0f) + vf_exp(inner)) * up;
}

static void gated_rows(void *context, int task) {
    const Gated *p = context;
    for (int64_t row = (int64_t)task * ROWS_PER_TASK; row < task_end(task, p->rows); row++) {
        const float *gate = p->gate_up + row * 2 * p->columns, *up = gate + p->columns;
        float *out = p->out + row * p->columns;
        int64_t i = 0;
        for (; i + VL <= p->columns; i += VL) vf_store(out + i, gated(vf_load(gate + i), vf_load(up + i), p->gelu));
        int left = (int)(p->columns - i);
        if (left == 0) continue;
        vf last = gated(vf_load_part(gate + i, left), vf_load_part(up + i, left), p->gelu);
        vf_store_part(out + i, last, left);
    }
}

/* gate_up [rows, 2 * columns] -> out [rows, columns]. */
EXPORT int ksana_gated(const float *gate_up, float *out, int64_t rows, int64_t columns, int gelu) {
    Gated p = {gate_up, out, rows, columns, gelu};
    share(gated_rows, &p, num_tasks(rows), rows * columns * 8); /* exp costs more than a copy */
    return 0;
}

/* --- rotary embedding ------------------------------------------------------------------------------------- */

typedef struct {
    float *q, *k;
    const int64_t *positions;
    const float *cos, *sin;
    int64_t tokens, q_stride, k_stride;
    int q_heads, k_heads, half;
} Rope;

static void rotate(float *head, const float *cos, const float *sin, int half) {
    int i = 0;
    for (; i + VL <= half; i += VL) {
        vf a = vf_load(head + i), b = vf_load(head + half + i), c = vf_load(cos + i), s = vf_load(sin + i);
        vf_store(head + i, a * c - b * s);
        vf_store(head + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = head[i], b = head[half + i];
        head[i] = a * cos[i] - b * sin[i];
        head[half + i] = b * cos[i] + a * sin[i];
    }
}

static void rope_tokens(void *context, int task) {
    const Rope *p = context;
    for (int64_t token = (int64_t)task * ROWS_PER_TASK; token < task_end(task, p->tokens); token++) {
        const float *cos = p->cos + p->positions[token] * p->half, *sin = p->sin + p->positions[token] * p->half;
        for (int h = 0; h < p->q_heads; h++) rotate(p->q + token * p->q_stride + h * 2 * p->half, cos, sin, p->half);
        for (int h = 0; h < p->k_heads; h++) rotate(p->k + token * p->k_stride + h * 2 * p->half, cos, sin, p->half);
    }
}

/* q [tokens, q_heads, 2 * half] with token stride q_stride, k alike; cos, sin [num_positions, half]. */
EXPORT int ksana_rope(float *q, float *k, const int64_t *positions, const float *cos, const float *sin, int64_t tokens,
                      int64_t q_heads, int64_t k_heads, int64_t half, int64_t q_stride, int64_t k_stride,
                      int64_t num_positions) {
    for (int64_t i = 0; i < tokens; i++)
        if (positions[i] < 0 || positions[i] >= num_positions)
            return ksana_fail("rope: position %lld of token %lld is not from 0 to %lld", (long long)positions[i],
                              (long long)i, (long long)num_positions - 1);
    Rope p = {q, k, positions, cos, sin, tokens, q_stride, k_stride, (int)q_heads, (int)k_heads, (int)half};
    share(rope_tokens, &p, num_tasks(tokens), tokens * (q_heads + k_heads) * half * 2);
    return 0;
}

/* --- KV write --------------------------------------------------------------------------------------------- */

typedef struct {
    const float *k, *v;
    float *k_cache, *v_cache;
    const int64_t *slots;
    int64_t tokens, k_stride, v_stride, block_size;
    int heads, dim;
} Write;

static void write_tokens(void *context, int task) {
    const Write *p = context;
    for (int64_t token = (int64_t)task * ROWS_PER_TASK; token < task_end(task, p->tokens); token++) {
        int64_t slot = p->slots[token];
        if (slot < 0) continue;
        int64_t block = slot / p->block_size, offset = slot % p->block_size;
        for (int h = 0; h < p->heads; h++) {
            int64_t to = ((block * p->heads + h) * p->block_size + offset) * p->dim;
            memcpy(p->k_cache + to, p->k + token * p->k_stride + h * p->dim, (size_t)p->dim * 4);
            memcpy(p->v_cache + to, p->v + token * p->v_stride + h * p->dim, (size_t)p->dim * 4);
        }
    }
}

/* k, v [tokens, heads, dim] with token strides; caches [num_blocks, heads, block_size, dim]; slot -1: not written. */
EXPORT int ksana_write_kv(const float *k, const float *v, float *k_cache, float *v_cache, const int64_t *slots,
                          int64_t tokens, int64_t heads, int64_t dim, int64_t k_stride, int64_t v_stride,
                          int64_t num_blocks, int64_t block_size) {
    for (int64_t i = 0; i < tokens; i++)
        if (slots[i] < -1 || slots[i] >= num_blocks * block_size)
            return ksana_fail("write_kv: slot %lld of token %lld is not from -1 to %lld", (long long)slots[i],
                              (long long)i, (long long)(num_blocks * block_size) - 1);
    Write p = {k, v, k_cache, v_cache, slots, tokens, k_stride, v_stride, block_size, (int)heads, (int)dim};
    share(write_tokens, &p, num_tasks(tokens), tokens * heads * dim);
    return 0;
}
