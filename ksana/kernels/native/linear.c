/* out[M, N] = x[M, K] * w[N, K]^T + bias, float32.
 *
 * Every output is sum over k = 0, 1, .. K-1 of x[m, k] * w[n, k], one fused multiply-add each, in that order,
 * starting from 0; then the bias is added. Neither M, nor blocking, nor threads, nor the vector length change
 * that: they only choose which outputs are in registers at the same time.
 *
 * Layout of packed weights: panels of PANEL output columns, w[panel][k][column], zero columns behind N.
 * x is repacked on the fly to tiles of at most TILE_ROWS rows, x[tile][k][row].
 *
 * Blocking: a task is BLOCK_ROWS rows by some panels. Within it k runs in blocks of about BLOCK_K (partial sums
 * rest in `out`, which is exact), so that a panel's block stays in the first-level cache over all row tiles and
 * the rows' block in the second. With few rows k is not blocked: every weight is read once, in order.
 */
#include "ksana.h"

enum {
    PANEL = 32,
    TILE_VECTORS = 2,
    TILE_COLUMNS = TILE_VECTORS * VL,
    TILES_PER_PANEL = PANEL / TILE_COLUMNS,
    TILE_ROWS = VL == 8 ? 6 : 12, /* accumulators: 24 of 32 registers, or 12 of 16 */
    BLOCK_ROWS = 144,
    BLOCK_K = 384,
    PREFETCH_FLOATS = 1024,
};

typedef struct {
    const float *x, *w, *bias;
    float *out;
    int64_t ldx;
    int m, n, k, num_column_tiles, column_tiles_per_task, tasks_per_row_block;
    int failed;
} Product;

/* One register tile: `rows` x (columns * TILE_VECTORS vectors) outputs over `k` steps. `first`: start at zero. */
INLINE void multiply(int rows, int columns, const float *a, const float *const *b, int k, float *const *out,
                     int64_t ldc, int first) {
    vf sum[TILE_ROWS][4 * TILE_VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int c = 0; c < columns * TILE_VECTORS; c++)
            sum[r][c] = first ? vf_set(0.0f)
                              : vf_load(out[c / TILE_VECTORS] + r * ldc + (c % TILE_VECTORS) * VL);
    const float *panel[4];
#pragma GCC unroll 4
    for (int c = 0; c < columns; c++) panel[c] = b[c];
    for (int i = 0; i < k; i++) {
        vf w[4 * TILE_VECTORS];
#pragma GCC unroll 16
        for (int c = 0; c < columns * TILE_VECTORS; c++)
            w[c] = vf_load(panel[c / TILE_VECTORS] + (int64_t)i * PANEL + (c % TILE_VECTORS) * VL);
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            __builtin_prefetch(panel[c] + (int64_t)i * PANEL + PREFETCH_FLOATS);
            if (TILE_COLUMNS > 16) __builtin_prefetch(panel[c] + (int64_t)i * PANEL + PREFETCH_FLOATS + 16);
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            vf x = vf_set(a[i * rows + r]);
#pragma GCC unroll 16
            for (int c = 0; c < columns * TILE_VECTORS; c++) sum[r][c] = vf_fma(x, w[c], sum[r][c]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int c = 0; c < columns * TILE_VECTORS; c++)
            vf_store(out[c / TILE_VECTORS] + r * ldc + (c % TILE_VECTORS) * VL, sum[r][c]);
}

typedef void (*multiply_fn)(const float *a, const float *const *b, int k, float *const *out, int64_t ldc, int first);

#define KERNEL(rows, columns)                                                                                          \
    static void multiply_##rows##x##columns(const float *a, const float *const *b, int k, float *const *out,           \
                                            int64_t ldc, int first) {                                                  \
        if (first)                                                                                                     \
            multiply(rows, columns, a, b, k, out, ldc, 1);                                                             \
        else                                                                                                           \
            multiply(rows, columns, a, b, k, out, ldc, 0);                                                             \
    }
KERNEL(1, 1) KERNEL(1, 4)
KERNEL(2, 1) KERNEL(3, 1) KERNEL(3, 2)
KERNEL(4, 1) KERNEL(5, 1) KERNEL(6, 1)
#if VL != 8
KERNEL(2, 4) KERNEL(4, 2) KERNEL(5, 2) KERNEL(6, 2)
KERNEL(7, 1) KERNEL(8, 1) KERNEL(9, 1) KERNEL(10, 1) KERNEL(11, 1) KERNEL(12, 1)
#define WIDE(wide, narrow) wide
#else
KERNEL(2, 2)
#define multiply_2x4 multiply_2x2
#define WIDE(wide, narrow) narrow
#endif

/* By number of rows: the widest kernel that keeps the multiply-add units busy, and its width in column tiles. */
static const struct {
    multiply_fn wide;
    int width;
    multiply_fn narrow;
} KERNELS[TILE_ROWS + 1] = {
    {0, 0, 0},
    {multiply_1x4, 4, multiply_1x1},
    {multiply_2x4, WIDE(4, 2), multiply_2x1},
    {multiply_3x2, 2, multiply_3x1},
    {WIDE(multiply_4x2, multiply_4x1), WIDE(2, 1), multiply_4x1},
    {WIDE(multiply_5x2, multiply_5x1), WIDE(2, 1), multiply_5x1},
    {WIDE(multiply_6x2, multiply_6x1), WIDE(2, 1), multiply_6x1},
#if VL != 8
    {multiply_7x1, 1, multiply_7x1},
    {multiply_8x1, 1, multiply_8x1},
    {multiply_9x1, 1, multiply_9x1},
    {multiply_10x1, 1, multiply_10x1},
    {multiply_11x1, 1, multiply_11x1},
    {multiply_12x1, 1, multiply_12x1},
#endif
};

/* x rows [first, first + rows) to tiles: all k of a tile together, x[k][row]. */
static void pack_rows(const Product *p, int first, int rows, float *to) {
    for (int tile = 0; tile < rows; tile += TILE_ROWS) {
        int tile_rows = rows - tile < TILE_ROWS ? rows - tile : TILE_ROWS;
        for (int r = 0; r < tile_rows; r++) {
            const float *from = p->x + (first + tile + r) * p->ldx;
            for (int i = 0; i < p->k; i++) to[(int64_t)i * tile_rows + r] = from[i];
        }
        to += (int64_t)tile_rows * p->k;
    }
}

/* `width` column tiles from `column` by one row tile, k in [k0, k1). Columns behind N go through a buffer. */
static void multiply_tile(const Product *p, multiply_fn kernel, int column, int width, int row, int rows,
                          const float *a, int k0, int k1) {
    const float *b[4];
    float *out[4], edge[TILE_ROWS * 4 * TILE_COLUMNS];
    int left = p->n - column * TILE_COLUMNS, cut = left < width * TILE_COLUMNS;
    int64_t ldc = cut ? 4 * TILE_COLUMNS : p->n;
    for (int c = 0; c < width; c++) {
        int tile = column + c;
        b[c] = p->w + ((int64_t)(tile / TILES_PER_PANEL) * p->k + k0) * PANEL + tile % TILES_PER_PANEL * TILE_COLUMNS;
        out[c] = cut ? edge + c * TILE_COLUMNS : p->out + (int64_t)row * p->n + (int64_t)tile * TILE_COLUMNS;
    }
    if (cut && k0 > 0)
        for (int r = 0; r < rows; r++)
            memcpy(edge + r * ldc, p->out + (int64_t)(row + r) * p->n + column * TILE_COLUMNS, (size_t)left * 4);
    kernel(a + (int64_t)k0 * rows, b, k1 - k0, out, ldc, k0 == 0);
    if (cut)
        for (int r = 0; r < rows; r++)
            memcpy(p->out + (int64_t)(row + r) * p->n + column * TILE_COLUMNS, edge + r * ldc, (size_t)left * 4);
}

static void add_bias(const Product *p, int first_row, int rows, int first_column, int end_column) {
    for (int r = first_row; r < first_row + rows; r++)
        for (int c = first_column; c < end_column; c++) p->out[(int64_t)r * p->n + c] += p->bias[c];
}

static void run_task(void *context, int task) {
    Product *p = context;
    int first_row = task / p->tasks_per_row_block * BLOCK_ROWS;
    int block_rows = p->m - first_row < BLOCK_ROWS ? p->m - first_row : BLOCK_ROWS;
    int first_column = task % p->tasks_per_row_block * p->column_tiles_per_task;
    int end_column = first_column + p->column_tiles_per_task;
    if (end_column > p->num_column_tiles) end_column = p->num_column_tiles;
    const float *rows = p->x + first_row * p->ldx;
    if (block_rows > 1) {
        float *packed = ksana_scratch(SCRATCH_OPERAND, (size_t)block_rows * (size_t)p->k * 4);
        if (packed == NULL) {
            p->failed = 1;
            return;
        }
        pack_rows(p, first_row, block_rows, packed);
        rows = packed;
    }
    int num_k_blocks = block_rows > TILE_ROWS ? (p->k + BLOCK_K - 1) / BLOCK_K : 1;
    int k_block = (p->k + num_k_blocks - 1) / num_k_blocks;
    for (int k0 = 0; k0 < p->k; k0 += k_block) {
        int k1 = k0 + k_block < p->k ? k0 + k_block : p->k;
        int column = first_column;
        while (column < end_column) {
            int tile_rows, advance = 1;
            for (int row = 0; row < block_rows; row += tile_rows) {
                tile_rows = block_rows - row < TILE_ROWS ? block_rows - row : TILE_ROWS;
                const float *a = rows + (int64_t)row * p->k;
                int width = block_rows <= TILE_ROWS ? KERNELS[tile_rows].width : 1;
                if (width > 1 && column + width <= end_column) {
                    multiply_tile(p, KERNELS[tile_rows].wide, column, width, first_row + row, tile_rows, a, k0, k1);
                    advance = width;
                } else
                    multiply_tile(p, KERNELS[tile_rows].narrow, column, 1, first_row + row, tile_rows, a, k0, k1);
            }
            column += advance;
        }
    }
    int end = end_column * TILE_COLUMNS < p->n ? end_column * TILE_COLUMNS : p->n;
    if (p->bias) add_bias(p, first_row, block_rows, first_column * TILE_COLUMNS, end);
}

/* x [m, k] with row stride ldx, packed w, bias [n] or NULL, out [m, n] dense. */
EXPORT int ksana_linear(const float *x, const float *w, const float *bias, float *out, int64_t m, int64_t n, int64_t k,
                        int64_t ldx) {
    if (m == 0) return 0;
    Product p = {.x = x, .w = w, .bias = bias, .out = out, .ldx = ldx, .m = (int)m, .n = (int)n, .k = (int)k};
    p.num_column_tiles = (int)((n + TILE_COLUMNS - 1) / TILE_COLUMNS);
    int row_blocks = (int)((m + BLOCK_ROWS - 1) / BLOCK_ROWS), threads = ksana_threads();
    int wanted = threads == 1 ? 1 : 6 * threads / row_blocks + 1;
    int per_task = (p.num_column_tiles + wanted - 1) / wanted;
    per_task = (per_task + 3) / 4 * 4;
    p.column_tiles_per_task = per_task;
    p.tasks_per_row_block = (p.num_column_tiles + per_task - 1) / per_task;
    int num_tasks = row_blocks * p.tasks_per_row_block;
    if ((double)m * (double)n * (double)k < 20000.0) /* a few microseconds: not worth waking anybody */
        for (int task = 0; task < num_tasks; task++) run_task(&p, task);
    else
        ksana_parallel(run_task, &p, num_tasks);
    return p.failed ? ksana_fail("linear: no memory for %d rows of %d", p.m, p.k) : 0;
}

EXPORT int64_t ksana_packed_floats(int64_t n, int64_t k) { return (n + PANEL - 1) / PANEL * PANEL * k; }

typedef struct {
    const float *weight;
    float *packed;
    int64_t n, k;
} Packing;

static void pack_panel(void *context, int panel) {
    Packing *p = context;
    float *to = p->packed + (int64_t)panel * p->k * PANEL;
    for (int c = 0; c < PANEL; c++) {
        int64_t column = (int64_t)panel * PANEL + c;
        for (int64_t i = 0; i < p->k; i++) to[i * PANEL + c] = column < p->n ? p->weight[column * p->k + i] : 0.0f;
    }
}

/* weight [n, k] dense -> packed[ksana_packed_floats(n, k)]. */
EXPORT int ksana_pack(const float *weight, float *packed, int64_t n, int64_t k) {
    Packing p = {weight, packed, n, k};
    ksana_parallel(pack_panel, &p, (int)((n + PANEL - 1) / PANEL));
    return 0;
}
