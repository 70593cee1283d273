/* The best candidates of one row of logits, in one visit: what choosing.py does with a dozen of NumPy's kernels.

   Of a small draft's token the forward takes less than a millisecond, and leaves none of that code in the caches. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK = 64 }; /* logits that share a maximum */

typedef struct {
    float scale;        /* 1/T, and 1 when greedy; a score is scale * (logit - greatest) */
    float reach;        /* only scores no more than this below 0 count */
    float top_p, least; /* least: log(min_p), asked where `most` is; min-p alone is a shorter reach */
    int32_t most;       /* top-k, or as many as top-p looks at; 0 = neither filter is on */
    int32_t noisy, count;
    int64_t seed;
} Choice;

/* exp(x) for x < 80, to some millionths: 2^n times a polynomial of the rest. Vectors of it need no library. */
static inline float exponential(float x) {
    x = x < -80 ? -80 : x;
    float y = x * 1.44269504f, n = (float)((int)(y + 256.5f) - 256), f = (y - n) * 0.69314718f;
    int32_t power = ((int32_t)n + 127) << 23;
    float two;
    memcpy(&two, &power, 4);
    return two * (1 + f * (1 + f * (0.5f + f * (1.f / 6 + f * (1.f / 24 + f * (1.f / 120))))));
}

/* As sampling.py: the same bits. */
static inline uint32_t mix(uint32_t x) {
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    return x ^ x >> 16;
}

static uint32_t noise_key(int64_t seed, int position) {
    return mix((uint32_t)position ^ mix((uint32_t)(seed >> 32) ^ mix((uint32_t)seed)));
}

static float gumbel(int64_t token, uint32_t key) {
    uint32_t h = mix(mix((uint32_t)token) + key);
    return -logf(-logf((h >> 9) * 0x1p-23f + 0x1p-24f));
}

/* Of the blocks that hold row[from ... to - 1]: the greatest logit, and when `weight` is given the sum of
   exp(logit - greatest). from: a multiple of BLOCK. */
static void survey(const float *row, int from, int to, float *peak, float *weight) {
    for (int start = from; start < to; start += BLOCK) {
        int end = to < start + BLOCK ? to : start + BLOCK;
        float most = row[start], sum = 0;
        for (int i = start; i < end; i++) most = row[i] > most ? row[i] : most;
        for (int i = start; weight && i < end; i++) sum += exponential(row[i] - most);
        peak[start / BLOCK] = most;
        if (weight) weight[start / BLOCK] = sum;
    }
}

/* Put a score in its place among the best, which stand in order; the last one goes. */
static int insert(float score, int index, float *best, int32_t *place, int found, int count) {
    int at = found < count ? found++ : count - 1;
    for (; at > 0 && best[at - 1] < score; at--) best[at] = best[at - 1], place[at] = place[at - 1];
    best[at] = score, place[at] = index;
    return found;
}

/* How many of the scores, in order, pass top-p and min-p. */
static int passing(const float *score, int found, const Choice *c) {
    float all = 0, before = 0;
    for (int i = 0; i < found; i++) all += exponential(score[i]);
    int n = 0;
    for (; n < found && score[n] >= c->least && (c->top_p >= 1 || before < c->top_p * all); n++)
        before += exponential(score[n]);
    return n;
}

/* A surveyed row[n] -> tokens[count] and probs[count], best first; returns how many. names: of each logit the token,
   NULL = its index. Probabilities are the softmax of the scores that count, with noise if there is any. */
static int pick(const float *row, int n, const int64_t *names, const Choice *c, int position, const float *peak,
                const float *weight, int32_t *tokens, float *probs) {
    float top = peak[0], total = 0;
    for (int b = 0; b * BLOCK < n; b++) top = peak[b] > top ? peak[b] : top;
    for (int b = 0; b * BLOCK < n && !c->noisy; b++) total += weight[b] * exponential(peak[b] - top);
    uint32_t key = noise_key(c->seed, position);
    int rank = !c->noisy ? c->count : c->most, kept = 0, found = 0; /* how many to rank before the noise; 0: none */
    float score[rank + 1];
    int32_t place[rank + 1];
    for (int start = 0; start < n; start += BLOCK) {
        float least = kept && kept == rank ? score[rank - 1] : -c->reach;
        if ((peak[start / BLOCK] - top) * c->scale < least) continue;
        int end = n < start + BLOCK ? n : start + BLOCK;
        for (int i = start; i < end; i++) {
            float s = (row[i] - top) * c->scale;
            if (s < least) continue;
            if (rank && (kept < rank || s > score[rank - 1])) kept = insert(s, i, score, place, kept, rank);
            if (rank) continue;
            total += exponential(s += gumbel(names ? names[i] : i, key));
            if (found < c->count || s > probs[c->count - 1]) found = insert(s, i, probs, tokens, found, c->count);
        }
    }
    if (c->noisy && rank) kept = passing(score, kept, c);
    for (int i = 0; i < kept; i++) {
        float s = score[i];
        if (c->noisy) total += exponential(s += gumbel(names ? names[place[i]] : place[i], key));
        if (found < c->count || s > probs[c->count - 1]) found = insert(s, place[i], probs, tokens, found, c->count);
    }
    for (int i = 0; i < found; i++) {
        probs[i] = exponential(probs[i]) / total;
        tokens[i] = names ? (int32_t)names[tokens[i]] : tokens[i];
    }
    return found;
}

/* `pick` for a row of its own. */
int choose(const float *row, int n, const int64_t *names, const Choice *c, int position, int32_t *tokens,
           float *probs) {
    float peak[n / BLOCK + 1], weight[n / BLOCK + 1];
    survey(row, 0, n, peak, c->noisy ? NULL : weight);
    return pick(row, n, names, c, position, peak, weight, tokens, probs);
}
