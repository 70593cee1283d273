/* The best candidates of one row of draft logits, in one visit: what choosing.py does with a dozen of NumPy's kernels.

   Of a small draft's token the forward takes less than a millisecond, and leaves none of that code in the caches. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK = 64 }; /* logits that share a maximum */

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

static float gumbel(int64_t token, uint32_t key) {
    uint32_t h = mix(mix((uint32_t)token) + key);
    return -logf(-logf((h >> 9) * 0x1p-23f + 0x1p-24f));
}

/* The greatest of each block, and of all. */
static float peaks(const float *row, int n, float *peak) {
    float top = row[0];
    for (int b = 0; b * BLOCK < n; b++) {
        int end = n < (b + 1) * BLOCK ? n : (b + 1) * BLOCK;
        float most = row[b * BLOCK];
        for (int i = b * BLOCK; i < end; i++) most = row[i] > most ? row[i] : most;
        peak[b] = most;
        top = most > top ? most : top;
    }
    return top;
}

/* Put a score in its place among the best, which stand in order; the last one goes. */
static int insert(float score, int index, float *best, int32_t *place, int found, int count) {
    int at = found < count ? found++ : count - 1;
    for (; at > 0 && best[at - 1] < score; at--) best[at] = best[at - 1], place[at] = place[at - 1];
    best[at] = score, place[at] = index;
    return found;
}

/* logits row[n] -> tokens[count] and probs[count], best first; returns how many.

   scale: 1/T, and 1 when greedy. Scores are scale * (logit - greatest), and only what is no more than `reach` below 0
   counts; when noisy, with the noise of `key` added. names: the token of each logit, NULL = its index. */
int choose(const float *row, int n, const int64_t *names, float scale, int noisy, uint32_t key, float reach, int count,
           int32_t *tokens, float *probs) {
    float peak[n / BLOCK + 1], top = peaks(row, n, peak), total = 0;
    int found = 0;
    for (int start = 0; start < n; start += BLOCK) {
        int end = n < start + BLOCK ? n : start + BLOCK;
        if (!noisy)
            for (int i = start; i < end; i++) total += exponential(row[i] - top);
        float least = noisy || found < count ? -reach : probs[count - 1];
        if ((peak[start / BLOCK] - top) * scale < least) continue;
        for (int i = start; i < end; i++) {
            float score = (row[i] - top) * scale;
            if (score < least) continue;
            if (noisy) total += exponential(score += gumbel(names ? names[i] : i, key));
            if (found < count || score > probs[count - 1]) found = insert(score, i, probs, tokens, found, count);
        }
    }
    for (int i = 0; i < found; i++) {
        probs[i] = exponential(probs[i]) / total;
        tokens[i] = names ? (int32_t)names[tokens[i]] : tokens[i];
    }
    return found;
}
