/* y = x w^T for few rows of x: the products of a decode step, bound by the reading of w.

   w is stored as panels of 8 outputs, each [inputs][8], so that it is read once, in order, whatever the number of
   rows up to 12; further rows meet the same panel again while it lies in the cache. */

#include <stddef.h>

typedef float vec __attribute__((vector_size(32), aligned(4)));

enum {
    PANEL = 8,      /* outputs of a panel */
    ROWS = 12,      /* accumulators in registers, beside one vector of w and one of x */
    BLOCK = 512,    /* inputs of a panel that stay in the first-level cache between groups of rows */
    AHEAD = 1024,   /* floats to fetch ahead: the hardware alone does not keep up with the arithmetic */
    LINE = 16       /* floats of a cache line */
};

/* One group of rows against one panel. chains: sums that run side by side for each row, to hide the latency of one.
   reads: the panel comes from memory. A lone row is fast enough without fetching ahead. */
static inline __attribute__((always_inline)) void tile(const int rows, const int chains, const int reads,
                                                       const float *w, const float *x, float *y, int inputs,
                                                       int stride, int first, int outputs, int kept) {
    vec sum[16];
    for (int s = 0; s < rows * chains; s++) sum[s] = (vec){0};
    int i = 0;
    for (; i + chains <= inputs; i += chains) {
        if (reads && rows > 1)
            for (int line = 0; line * LINE < chains * PANEL; line++)
                if (chains > 1 || i % 2 == 0) __builtin_prefetch(w + (size_t)i * PANEL + AHEAD + line * LINE, 0, 3);
#pragma GCC unroll 8
        for (int c = 0; c < chains; c++) {
            vec v = *(const vec *)(w + (size_t)(i + c) * PANEL);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) sum[r * chains + c] += v * x[(size_t)r * stride + i + c];
        }
    }
    for (; i < inputs; i++)
        for (int r = 0; r < rows; r++)
            sum[r * chains] += *(const vec *)(w + (size_t)i * PANEL) * x[(size_t)r * stride + i];
    for (int r = 0; r < rows; r++) {
        for (int c = 1; c < chains; c++) sum[r * chains] += sum[r * chains + c];
        for (int j = 0; j < kept; j++) {
            float *to = y + (size_t)r * outputs + j;
            *to = first ? sum[r * chains][j] : *to + sum[r * chains][j];
        }
    }
}

#define ARGUMENTS const float *w, const float *x, float *y, int inputs, int stride, int first, int outputs, int kept
#define TILE(R, C)                                                                                                     \
    static __attribute__((noinline)) void again##R(ARGUMENTS) {                                                        \
        tile(R, C, 0, w, x, y, inputs, stride, first, outputs, kept);                                                  \
    }                                                                                                                  \
    static __attribute__((noinline)) void fresh##R(ARGUMENTS) {                                                        \
        tile(R, C, 1, w, x, y, inputs, stride, first, outputs, kept);                                                  \
    }
TILE(1, 8)
TILE(2, 4)
TILE(3, 4)
TILE(4, 2)
TILE(5, 2)
TILE(6, 2)
TILE(7, 1)
TILE(8, 1)
TILE(9, 1)
TILE(10, 1)
TILE(11, 1)
TILE(12, 1)

static void (*const tiles[2][ROWS])(ARGUMENTS) = {
    {again1, again2, again3, again4, again5, again6, again7, again8, again9, again10, again11, again12},
    {fresh1, fresh2, fresh3, fresh4, fresh5, fresh6, fresh7, fresh8, fresh9, fresh10, fresh11, fresh12},
};

static void panel(const float *w, const float *x, float *y, int rows, int inputs, int outputs, int kept) {
    const int groups = (rows + ROWS - 1) / ROWS, block = groups > 1 ? BLOCK : inputs;
    for (int b = 0; b < inputs; b += block) {
        const int length = inputs - b < block ? inputs - b : block;
        for (int g = 0, r = 0; g < groups; g++) {
            const int share = (rows - r + groups - g - 1) / (groups - g);
            tiles[g == 0][share - 1](w + (size_t)b * PANEL, x + (size_t)r * inputs + b, y + (size_t)r * outputs,
                                     length, inputs, b == 0, outputs, kept);
            r += share;
        }
    }
}

/* x: (rows, inputs), y: (rows, outputs), w: (ceil(outputs / 8), inputs, 8). */
void skinny(const float *w, const float *x, float *y, int rows, int inputs, int outputs, int threads) {
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
#endif
    for (int p = 0; p < outputs; p += PANEL)
        panel(w + (size_t)p * inputs, x, y + p, rows, inputs, outputs, outputs - p < PANEL ? outputs - p : PANEL);
}
