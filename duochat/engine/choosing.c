/* What comes after a row of logits: a draft's best candidates (`choose`), and the target's own token (`sample`), exactly.

   Most of a row is visited once, for the greatest of each block. Of a small draft's token the forward takes less than a
   millisecond, and leaves none of this code in the caches. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
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

/* -log of a uniform number in (0, 1). */
static float waiting(int64_t token, uint32_t key) {
    uint32_t h = mix(mix((uint32_t)token) + key);
    return -logf((h >> 9) * 0x1p-23f + 0x1p-24f);
}

static float gumbel(int64_t token, uint32_t key) { return -logf(waiting(token, key)); }

/* Added up in an order that is the same however many numbers a vector holds. */
static float sum_up(float *weight) {
    for (int half = BLOCK / 2; half; half /= 2)
        for (int i = 0; i < half; i++) weight[i] += weight[i + half];
    return weight[0];
}

/* Of the blocks that hold row[from ... to - 1]: the greatest logit, and when `weight` is given the sum of
   exp(logit - greatest). from: a multiple of BLOCK. */
static void survey(const float *row, int from, int to, float *peak, float *weight) {
    for (int start = from; start < to; start += BLOCK) {
        int end = to < start + BLOCK ? to : start + BLOCK;
        float most = row[start], each[BLOCK] = {0};
        for (int i = start; i < end; i++) most = row[i] > most ? row[i] : most;
        peak[start / BLOCK] = most;
        if (!weight) continue;
        for (int i = start; i < end; i++) each[i - start] = exponential(row[i] - most);
        weight[start / BLOCK] = sum_up(each);
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
   NULL = its index. Probabilities are the softmax of the scores that count, with noise if there is any: with Gumbel
   noise g, exp(score + g) = exp(score) / waiting. */
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
            total += s = exponential(s) / waiting(names ? names[i] : i, key);
            if (found < c->count || s > probs[c->count - 1]) found = insert(s, i, probs, tokens, found, c->count);
        }
    }
    if (c->noisy && rank) kept = passing(score, kept, c);
    for (int i = 0; i < kept; i++) {
        float s = exponential(score[i]);
        if (c->noisy) total += s /= waiting(names ? names[place[i]] : place[i], key);
        if (found < c->count || s > probs[c->count - 1]) found = insert(s, place[i], probs, tokens, found, c->count);
    }
    for (int i = 0; i < found; i++) {
        probs[i] /= total;
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

/* ---- The target's own token. Built without -fassociative-math: sums keep their order, so a row gives the same bits
   wherever it lies in memory. ---- */

typedef struct {
    float value;
    int32_t token;
} Candidate;

/* What is left of a row: scaled logits from `least` on; among equals of that, tokens up to `last`. */
typedef struct {
    float least;
    int32_t last;
    double total; /* sum of exp(scaled - top) over what is left */
} Kept;

static int holds(const Kept *kept, float scaled, int token) {
    return scaled > kept->least || (scaled == kept->least && token <= kept->last);
}

/* The first of the greatest. */
static int first_best(const float *row, int n, const float *peak) {
    int best = 0, i;
    for (int b = 1; b * BLOCK < n; b++) best = peak[b] > peak[best] ? b : best;
    for (i = best * BLOCK; row[i] < peak[best];) i++;
    return i;
}

/* Add exp(scaled - top) of what is kept by value to weight[BLOCK]. Not inlined: a compiler then sees that it is plain. */
__attribute__((noinline)) static void add_weights(const float *restrict row, float scale, float top, float least,
                                                  float *restrict weight) {
    for (int i = 0; i < BLOCK; i++) {
        float scaled = row[i] * scale, e = exponential(scaled - top);
        weight[i] += scaled < least ? 0 : e;
    }
}

/* The sum of it over a row; a block that is all below e^-25 of the top adds nothing. */
static double sum_from(const float *row, int n, const float *peak, float scale, float top, float least) {
    float weight[BLOCK] = {0}, lowest = least > top - 25 ? least : top - 25, rest[BLOCK];
    for (int start = 0; start < n; start += BLOCK) {
        const float *logits = row + start;
        if (peak[start / BLOCK] * scale < lowest) continue;
        if (n - start < BLOCK) {
            for (int i = 0; i < BLOCK; i++) rest[i] = i < n - start ? logits[i] : -1e30f; /* adds nothing */
            logits = rest;
        }
        add_weights(logits, scale, top, least, weight);
    }
    return sum_up(weight);
}

/* The best of scaled logit + noise over what is kept; `token` is one of it. Noise is below 17, and of most tokens the
   hash alone says that theirs is too small. */
static int noisiest(const float *row, int n, const float *peak, float scale, const Kept *kept, int token, uint32_t key) {
    float best = row[token] * scale + gumbel(token, key);
    for (int start = 0; start < n; start += BLOCK) {
        float most = peak[start / BLOCK] * scale;
        if (most < kept->least || most + 17 < best) continue;
        /* to win, noise g = -log(-log(u)) needs u >= exp(-exp(-g)) >= 1 - exp(-g) */
        float rest = most < best ? 1.0001f * exponential(most - best) : 1;
        int32_t needed = (int32_t)((1 - rest) * 0x1p23f) - 4, drawn[BLOCK], greatest = -1;
        int size = n - start < BLOCK ? n - start : BLOCK;
        for (int i = 0; i < size; i++) {
            drawn[i] = (int32_t)(mix(mix((uint32_t)(start + i)) + key) >> 9);
            greatest = drawn[i] > greatest ? drawn[i] : greatest;
        }
        for (int i = 0; greatest >= needed && i < size; i++) {
            float scaled = row[start + i] * scale;
            if (drawn[i] < needed || !holds(kept, scaled, start + i)) continue;
            float score = scaled + gumbel(start + i, key);
            if (score > best || (score == best && start + i < token)) best = score, token = start + i;
        }
    }
    return token;
}

static int by_rank(const void *a, const void *b) {
    const Candidate *x = a, *y = b;
    if (x->value != y->value) return x->value < y->value ? 1 : -1;
    return x->token - y->token;
}

/* The tokens with scaled logits from `least` on. NULL without memory. */
static Candidate *within(const float *row, int n, const float *peak, float scale, float least, int *count) {
    int room = 1024, found = 0;
    Candidate *list = malloc(room * sizeof *list);
    for (int start = 0; list && start < n; start += BLOCK) {
        if (peak[start / BLOCK] * scale < least) continue;
        int end = n < start + BLOCK ? n : start + BLOCK;
        if (found + BLOCK > room) {
            Candidate *more = realloc(list, (room *= 2) * sizeof *list);
            if (!more) free(list);
            if (!(list = more)) break;
        }
        for (int i = start; i < end; i++)
            if (row[i] * scale >= least) list[found++] = (Candidate){row[i] * scale, i};
    }
    *count = found;
    return list;
}

/* Put the best of a list first: as few as hold `mass` of exp(value - top), and no more than `most`. Returns how many;
   the worst of them comes last, `sum` is what they hold. Not sorted: in a flat row they are half of a vocabulary. */
static int select_best(Candidate *list, int count, int most, double mass, float top, double *sum) {
    int low = 0, high = count;
    *sum = 0;
    while (high - low > 32) {
        Candidate pivot = list[low + (high - low) / 2];
        double better = 0;
        int middle = low;
        list[low + (high - low) / 2] = list[high - 1];
        for (int i = low; i < high - 1; i++)
            if (by_rank(&list[i], &pivot) < 0) {
                Candidate one = list[i];
                list[i] = list[middle], list[middle++] = one;
                better += exponential(one.value - top);
            }
        list[high - 1] = list[middle], list[middle] = pivot;
        if (middle >= most || *sum + better >= mass) {
            high = middle;
            continue;
        }
        *sum += better + exponential(pivot.value - top);
        low = middle + 1;
        if (low >= most || *sum >= mass) return low;
    }
    qsort(list + low, high - low, sizeof *list, by_rank);
    while (low < high && low < most && *sum < mass) *sum += exponential(list[low++].value - top);
    return low;
}

/* top-k, then top-p of what is left, then min-p. Looks at the tokens within reach of the best, and further down as long
   as these do not hold the answer. Returns 0 without memory, and where logits are no numbers. */
static int filter(const float *row, int n, const float *peak, float scale, float top, int top_k, float top_p,
                  float floor, Kept *kept) {
    int most = top_k && top_k < n ? top_k : n;
    double all = most < n ? 0 : sum_from(row, n, peak, scale, top, -3e38f);
    for (float reach = 8; reach < 1e30f; reach *= 2) {
        int count, left;
        Candidate *list = within(row, n, peak, scale, top - reach, &count);
        if (!list) return 0;
        if (most < n && count >= most) count = select_best(list, count, most, 1e300, top, &all);
        left = select_best(list, count, count, top_p * all, top, &kept->total);
        if (all > 0 && (left < count || count >= most)) {
            kept->least = list[left - 1].value, kept->last = list[left - 1].token;
            free(list);
            if (kept->least >= top + floor) return 1;
            kept->least = top + floor, kept->last = n;
            kept->total = sum_from(row, n, peak, scale, top, kept->least);
            return 1;
        }
        free(list);
    }
    return 0;
}

/* The token of row[n]; probs[asked + 1] become its probability and those of tokens[asked], noise apart.

   scale: 1/T, and 1 when greedy (no filter then). floor: log(min_p), or hugely negative. Returns -1 as filter's 0. */
int sample(const float *row, int n, float scale, int noisy, uint32_t key, int top_k, float top_p, float floor,
           int asked, const int32_t *tokens, float *probs) {
    float peak[n / BLOCK + 1];
    survey(row, 0, n, peak, NULL);
    int token = first_best(row, n, peak);
    float top = row[token] * scale;
    Kept kept = {top + floor, n, 0};
    if (top_k || top_p < 1) {
        if (!filter(row, n, peak, scale, top, top_k, top_p, floor, &kept)) return -1;
    } else
        kept.total = sum_from(row, n, peak, scale, top, kept.least);
    if (noisy) token = noisiest(row, n, peak, scale, &kept, token, key);
    for (int i = 0; i <= asked; i++) {
        int32_t one = i ? tokens[i - 1] : token;
        float scaled = row[one] * scale;
        probs[i] = holds(&kept, scaled, one) ? (float)(exponential(scaled - top) / kept.total) : 0;
    }
    return token;
}
