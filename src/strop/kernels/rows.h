/* The functions of kernels.c for one storage type, REAL. Included once per type. */

/* RMS norm of x + added; `added` may be null, then the sum is x and `sum` is not written.
   x, added, sum, normed: (rows, width); inverse_rms: (rows). Rounds where transformers' Llama does:
   the normalised row first, its product with the weight after. */
void NAME(add_rms_norm)(const REAL *x, const REAL *added, const REAL *weight, REAL *sum, REAL *normed,
                        float *inverse_rms, int64_t rows, int64_t width, float epsilon)
{
#pragma omp parallel for schedule(static) if (rows * width > PARALLEL_ABOVE)
    for (int64_t row = 0; row < rows; row++) {
        const REAL *in = x + row * width;
        floats squares = {};
        if (added) {
            for (int64_t i = 0; i < width; i += LANES) {
                floats value = ROUNDED(LOAD(in + i) + LOAD(added + row * width + i));
                STORE(sum + row * width + i, value);
                squares += value * value;
            }
            in = sum + row * width;
        } else {
            for (int64_t i = 0; i < width; i += LANES)
                squares += LOAD(in + i) * LOAD(in + i);
        }
        float scale = 1.0f / sqrtf(sum_lanes(squares) / (float)width + epsilon);
        inverse_rms[row] = scale;
        for (int64_t i = 0; i < width; i += LANES)
            STORE(normed + row * width + i, LOAD(weight + i) * ROUNDED(LOAD(in + i) * scale));
    }
}

/* Gradient of add_rms_norm: grad_x = grad_sum + what flows through the norm (the same for x and added).
   grad_sum may be null. grad_weight: (width) fp32, overwritten; partial: (threads, width) fp32, scratch. */
void NAME(add_rms_norm_backward)(const REAL *grad_normed, const REAL *grad_sum, const REAL *x,
                                 const REAL *weight, const float *inverse_rms, REAL *grad_x,
                                 float *grad_weight, float *partial, int64_t shares, int64_t rows,
                                 int64_t width)
{
    int64_t step = (rows + shares - 1) / shares;
#pragma omp parallel for schedule(static)
    for (int64_t share = 0; share < shares; share++) {
        float *mine = partial + share * width;
        memset(mine, 0, sizeof(float) * (size_t)width);
        int64_t end = (share + 1) * step < rows ? (share + 1) * step : rows;
        for (int64_t row = share * step; row < end; row++) {
            const REAL *in = x + row * width, *upstream = grad_normed + row * width;
            float scale = inverse_rms[row];
            floats dots = {};
            for (int64_t i = 0; i < width; i += LANES) {
                floats unit = LOAD(in + i) * scale, grad = LOAD(upstream + i);
                dots += grad * LOAD(weight + i) * unit;
                store_f32(mine + i, load_f32(mine + i) + grad * ROUNDED(unit));
            }
            float mean = sum_lanes(dots) / (float)width;
            for (int64_t i = 0; i < width; i += LANES) {
                floats unit = LOAD(in + i) * scale;
                floats grad = (LOAD(upstream + i) * LOAD(weight + i) - unit * mean) * scale;
                if (grad_sum)
                    grad += LOAD(grad_sum + row * width + i);
                STORE(grad_x + row * width + i, grad);
            }
        }
    }
    for (int64_t i = 0; i < width; i += LANES) {
        floats total = {};
        for (int64_t share = 0; share < shares; share++)
            total += load_f32(partial + share * width + i);
        store_f32(grad_weight + i, total);
    }
}

static inline void NAME(rotate_head)(const REAL *in, const REAL *cosine, const REAL *sine, REAL *out,
                                     int64_t width, float direction)
{
    int64_t half = width / 2, whole = half / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        floats low = LOAD(in + i), high = LOAD(in + half + i);
        STORE(out + i, low * LOAD(cosine + i) - high * LOAD(sine + i) * direction);
        STORE(out + half + i, high * LOAD(cosine + half + i) + low * LOAD(sine + half + i) * direction);
    }
    for (int64_t i = whole; i < half; i++) {
        float low = READ(in[i]), high = READ(in[half + i]);
        out[i] = WRITE(low * READ(cosine[i]) - high * READ(sine[i]) * direction);
        out[half + i] = WRITE(high * READ(cosine[half + i]) + low * READ(sine[half + i]) * direction);
    }
}

/* Rotary embedding by halves, over the first `rotated` of `heads` heads; later ones are copied.
   in: (rows, heads, width) with rows in_stride apart; out the same with out_stride; cosine, sine:
   (rows, width). direction -1 turns back, which is the gradient. width is any even number; in may be out. */
void NAME(rotate)(const REAL *in, int64_t in_stride, const REAL *cosine, const REAL *sine, REAL *out,
                  int64_t out_stride, int64_t rows, int64_t heads, int64_t rotated, int64_t width,
                  float direction)
{
#pragma omp parallel for schedule(static) if (rows * heads * width > PARALLEL_ABOVE)
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t head = 0; head < heads; head++) {
            const REAL *from = in + row * in_stride + head * width;
            REAL *to = out + row * out_stride + head * width;
            if (head < rotated)
                NAME(rotate_head)(from, cosine + row * width, sine + row * width, to, width, direction);
            else
                memcpy(to, from, sizeof(REAL) * (size_t)width);
        }
    }
}

/* out = silu(gate) * up. in: (rows, 2 * width), gate first; out: (rows, width). */
void NAME(gated)(const REAL *in, REAL *out, int64_t rows, int64_t width)
{
#pragma omp parallel for schedule(static) if (rows * width > PARALLEL_ABOVE)
    for (int64_t row = 0; row < rows; row++) {
        const REAL *gate = in + row * 2 * width, *up = gate + width;
        for (int64_t i = 0; i < width; i += LANES) {
            floats g = LOAD(gate + i);
            STORE(out + row * width + i, g * sigmoid(g) * LOAD(up + i));
        }
    }
}

/* Gradient of gated. grad_in: (rows, 2 * width). */
void NAME(gated_backward)(const REAL *grad_out, const REAL *in, REAL *grad_in, int64_t rows, int64_t width)
{
#pragma omp parallel for schedule(static) if (rows * width > PARALLEL_ABOVE)
    for (int64_t row = 0; row < rows; row++) {
        const REAL *gate = in + row * 2 * width, *up = gate + width;
        REAL *grad_gate = grad_in + row * 2 * width, *grad_up = grad_gate + width;
        for (int64_t i = 0; i < width; i += LANES) {
            floats g = LOAD(gate + i), s = sigmoid(g), grad = LOAD(grad_out + row * width + i);
            STORE(grad_gate + i, grad * LOAD(up + i) * s * (1.0f + g * (1.0f - s)));
            STORE(grad_up + i, grad * g * s);
        }
    }
}

/* Scores of `count` queries against stored keys of their head, from slot `begin`, one tile of slots at a
   time. Inlined with a constant count, so that all sums stay in registers. keys: tiles of
   (width, LANES); soon: what will be read next at the same offsets. */
static inline __attribute__((always_inline)) void NAME(score_keys)(const REAL *keys, const REAL *soon,
                                                                   const float *queries, float *scores,
                                                                   int64_t begin, int64_t length,
                                                                   int64_t count, int64_t width,
                                                                   int64_t slots)
{
    for (int64_t start = begin; start < length; start += LANES) {
        const REAL *tile = keys + start * width;
        floats even[GROUP] = {}, odd[GROUP] = {};
        for (int64_t i = 0; i < width; i += 2) {
            floats first = LOAD(tile + i * LANES), second = LOAD(tile + (i + 1) * LANES);
            __builtin_prefetch(soon + start * width + i * LANES);
            for (int64_t head = 0; head < count; head++) {
                even[head] += first * queries[head * width + i];
                odd[head] += second * queries[head * width + i + 1];
            }
        }
        for (int64_t head = 0; head < count; head++)
            store_f32(scores + head * slots + start, even[head] + odd[head]);
    }
}

/* Values mixed by the weights of `count` heads from slot `begin` on: those before slot `shared` from one
   place, the others from another. Weights between length and the end of its tile are 0. */
static inline __attribute__((always_inline)) void NAME(mix_values)(const REAL *prefix, const REAL *values,
                                                                   const REAL *soon, const float *weights,
                                                                   REAL *out, int64_t begin,
                                                                   int64_t shared, int64_t length,
                                                                   int64_t count, int64_t width,
                                                                   int64_t slots)
{
    for (int64_t i = 0; i < width; i += LANES) {
        floats even[GROUP] = {}, odd[GROUP] = {};
        for (int64_t t = begin; t < length; t += 2) {
            const REAL *from = (t < shared ? prefix : values) + t * width + i;
            floats first = LOAD(from), second = LOAD(from + width);
            __builtin_prefetch(soon + t * width + 2 * i);
            for (int64_t head = 0; head < count; head++) {
                even[head] += first * weights[head * slots + t];
                odd[head] += second * weights[head * slots + t + 1];
            }
        }
        for (int64_t head = 0; head < count; head++)
            STORE(out + head * width + i, even[head] + odd[head]);
    }
}

/* Where one row's keys and values of one head lie. */
typedef struct {
    const REAL *prefix_keys, *prefix_values; /* read before slot `shared`, a multiple of LANES */
    const REAL *keys, *values;               /* read from there on */
    const REAL *next_keys;                   /* what the next call will read */
    int64_t first;                           /* slot from which on keys are seen */
    int64_t shared, length, width, slots;
} NAME(stored);

static inline __attribute__((always_inline)) void NAME(attend_constant)(const NAME(stored) *at,
                                                                        const float *queries,
                                                                        float *scores, REAL *out,
                                                                        int64_t count)
{
    int64_t begin = at->first / LANES * LANES, own = begin > at->shared ? begin : at->shared;
    NAME(score_keys)(at->prefix_keys, at->prefix_values, queries, scores, begin, at->shared, count,
                     at->width, at->slots);
    NAME(score_keys)(at->keys, at->values, queries, scores, own, at->length, count, at->width, at->slots);
    for (int64_t head = 0; head < count; head++) {
        for (int64_t t = begin; t < at->first; t++)
            scores[head * at->slots + t] = -INFINITY;
        softmax_row(scores + head * at->slots + begin, at->length - begin);
    }
    NAME(mix_values)(at->prefix_values, at->values, at->next_keys, scores, out, begin, at->shared,
                     at->length, count, at->width, at->slots);
}

/* Attention of up to GROUP query heads that share stored keys and values. */
static void NAME(attend_heads)(const NAME(stored) *at, const float *queries, float *scores, REAL *out,
                               int64_t count)
{
    switch (count) {
    case 1: NAME(attend_constant)(at, queries, scores, out, 1); break;
    case 2: NAME(attend_constant)(at, queries, scores, out, 2); break;
    case 3: NAME(attend_constant)(at, queries, scores, out, 3); break;
    default: NAME(attend_constant)(at, queries, scores, out, GROUP);
    }
}

/* One token per row over a KV cache: store its key and value, attend over the last `window` tokens stored
   so far, this one included; a window of 0 is none.
   keys: (rows, kv_heads, slots / LANES, width, LANES), values: (rows, kv_heads, slots, width), with
   cache_stride elements from row to row; lengths: (rows), tokens stored before; the first shared[r]
   slots of row r are read from row owners[r], which holds the same: rows of one prompt then read it from
   the processor's cache. query:
   (rows, kv_heads * ratio, width), key and value: (rows, kv_heads, width), each with the row stride in
   strides[0..2]; out: (rows, kv_heads * ratio, width). slots is a multiple of LANES. */
void NAME(decode_attention)(REAL *keys, REAL *values, int64_t cache_stride, const int64_t *lengths,
                            const int64_t *owners, const int64_t *shared, const REAL *query, const REAL *key, const REAL *value,
                            const int64_t *strides, REAL *out, int64_t rows, int64_t kv_heads,
                            int64_t ratio, int64_t width, int64_t slots, int64_t window, float scaling)
{
#pragma omp parallel
    {
        float *scores = malloc(sizeof(float) * (size_t)(GROUP * (slots + width)));
        float *queries = scores + GROUP * slots;
#pragma omp for schedule(static)
        for (int64_t pair = 0; pair < rows * kv_heads; pair++) {
            int64_t row = pair / kv_heads, head = pair % kv_heads, length = lengths[row];
            int64_t next = pair + 1 < rows * kv_heads ? pair + 1 : pair;
            int64_t place = row * cache_stride + head * slots * width;
            int64_t first_place = owners[row] * cache_stride + head * slots * width;
            NAME(stored) at = {
                .prefix_keys = keys + first_place,
                .prefix_values = values + first_place,
                .keys = keys + place,
                .values = values + place,
                .next_keys = keys + next / kv_heads * cache_stride + next % kv_heads * slots * width,
                .first = window > 0 && length + 1 > window ? length + 1 - window : 0,
                .shared = shared[row],
                .length = length + 1,
                .width = width,
                .slots = slots,
            };
            const REAL *new_key = key + row * strides[1] + head * width;
            REAL *slot = keys + place + length / LANES * width * LANES + length % LANES;
            for (int64_t i = 0; i < width; i++)
                slot[i * LANES] = new_key[i];
            memcpy(values + place + length * width, value + row * strides[2] + head * width,
                   sizeof(REAL) * (size_t)width);
            for (int64_t first = 0; first < ratio; first += GROUP) {
                int64_t count = ratio - first < GROUP ? ratio - first : GROUP;
                const REAL *in = query + row * strides[0] + (head * ratio + first) * width;
                for (int64_t i = 0; i < count * width; i += LANES)
                    store_f32(queries + i, LOAD(in + i) * scaling);
                NAME(attend_heads)(&at, queries, scores, out + (pair * ratio + first) * width, count);
            }
        }
        free(scores);
    }
}

/* Largest entry of a row of any width; NaN if there is one. */
static inline float NAME(largest)(const REAL *in, int64_t width)
{
    floats most = broadcast(-INFINITY);
    integers is_nan = {};
    int64_t whole = width / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        floats value = LOAD(in + i);
        most = choose(value > most, value, most);
        is_nan |= value != value;
    }
    float top = max_lanes(most);
    for (int64_t i = whole; i < width; i++) {
        top = READ(in[i]) > top ? READ(in[i]) : top;
        is_nan[0] |= READ(in[i]) != READ(in[i]);
    }
    for (int lane = 0; lane < LANES; lane++)
        top = is_nan[lane] ? NAN : top;
    return top;
}

/* Sum of e^(in * inverse - top) over [start, end). */
static inline float NAME(mass)(const REAL *in, int64_t start, int64_t end, float top, float inverse)
{
    floats sums = {};
    int64_t i = start;
    for (; i + LANES <= end; i += LANES)
        sums += exponential(LOAD(in + i) * inverse - top);
    float total = sum_lanes(sums);
    for (; i < end; i++)
        total += exponential(broadcast(READ(in[i]) * inverse - top))[0];
    return total;
}

static inline int64_t NAME(first_equal)(const REAL *in, int64_t width, float value)
{
    for (int64_t i = 0; i < width; i++)
        if (READ(in[i]) == value)
            return i;
    return 0; /* no entry equals a NaN */
}

/* First token whose cumulated mass exceeds the target; at the top end, where rounding may leave none,
   the last with any mass. */
static inline int64_t NAME(find_token)(const REAL *in, const double *masses, int64_t width, float top,
                                       float inverse, double target)
{
    int64_t blocks = (width + BLOCK - 1) / BLOCK, block = 0, last = 0;
    double before = 0.0;
    for (; block < blocks; block++) {
        if (before + masses[block] > target)
            break;
        before += masses[block];
        last = masses[block] > 0.0 ? block : last;
    }
    if (block == blocks) {
        block = last;
        target = INFINITY;
    }
    int64_t start = block * BLOCK, end = start + BLOCK < width ? start + BLOCK : width, found = start;
    for (int64_t i = start; i < end; i++) {
        double p = exponential(broadcast(READ(in[i]) * inverse - top))[0];
        found = p > 0.0 ? i : found;
        before += p;
        if (before > target)
            return i;
    }
    return found;
}

/* Log of the sum of e^(logit * inverse_temperature) of each row. Any width. */
void NAME(log_sum_exp)(const REAL *logits, float *result, int64_t rows, int64_t width,
                       float inverse_temperature)
{
    int64_t whole = width / LANES * LANES;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const REAL *in = logits + row * width;
        float top = NAME(largest)(in, width) * inverse_temperature;
        double total = 0.0;
        for (int64_t start = 0; start < whole; start += BLOCK)
            total += NAME(mass)(in, start, start + BLOCK < whole ? start + BLOCK : whole, top,
                                inverse_temperature);
        for (int64_t i = whole; i < width; i++)
            total += exponential(broadcast(READ(in[i]) * inverse_temperature - top))[0];
        result[row] = top + (float)log(total);
    }
}

/* Turn logits into the gradient of a loss on some tokens' log-probabilities, in place:
   sum over the row's tokens of grad * (onehot(target) - p) * inverse_temperature.
   Tokens of row r are first[r] to first[r + 1]; targets, grads: by token; log_sums: (rows). Any width. */
void NAME(token_gradient)(REAL *logits, const float *log_sums, const int64_t *first,
                          const int64_t *targets, const float *grads, int64_t rows, int64_t width,
                          float inverse_temperature)
{
    int64_t whole = width / LANES * LANES;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        REAL *at = logits + row * width;
        float total = 0.0f;
        for (int64_t token = first[row]; token < first[row + 1]; token++)
            total += grads[token];
        float scale = -total * inverse_temperature;
        /* A target's entry is summed in fp32 before it is rounded, so it is worked out from the logit. */
        int64_t count = first[row + 1] - first[row];
        float *exact = malloc(sizeof(float) * (size_t)(count + 1));
        for (int64_t a = 0; a < count; a++) {
            int64_t target = targets[first[row] + a];
            float sum = 0.0f;
            for (int64_t b = 0; b < count; b++)
                sum += targets[first[row] + b] == target ? grads[first[row] + b] : 0.0f;
            float p = exponential(broadcast(READ(at[target]) * inverse_temperature - log_sums[row]))[0];
            exact[a] = p * scale + sum * inverse_temperature;
        }
        for (int64_t i = 0; i < whole; i += LANES)
            STORE(at + i, exponential(LOAD(at + i) * inverse_temperature - log_sums[row]) * scale);
        for (int64_t i = whole; i < width; i++)
            at[i] = WRITE(exponential(broadcast(READ(at[i]) * inverse_temperature - log_sums[row]))[0]
                          * scale);
        for (int64_t a = 0; a < count; a++)
            at[targets[first[row] + a]] = WRITE(exact[a]);
        free(exact);
    }
}

/* Draw one token per row: the first whose cumulated probability exceeds uniform * total. A row whose
   inverse temperature is 0 is greedy: its largest logit, with the log-probability at temperature 1.
   logits: (rows, width) of any width; uniforms, inverse_temperatures: (rows). */
void NAME(draw_tokens)(const REAL *logits, const double *uniforms, const float *inverse_temperatures,
                       int64_t *tokens, float *logprobs, int64_t rows, int64_t width)
{
    int64_t blocks = (width + BLOCK - 1) / BLOCK;
#pragma omp parallel
    {
        double *masses = malloc(sizeof(double) * (size_t)blocks);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            const REAL *in = logits + row * width;
            int is_greedy = inverse_temperatures[row] == 0.0f;
            float inverse = is_greedy ? 1.0f : inverse_temperatures[row];
            float top = NAME(largest)(in, width) * inverse;
            double total = 0.0;
            for (int64_t block = 0; block < blocks; block++) {
                int64_t start = block * BLOCK, end = start + BLOCK < width ? start + BLOCK : width;
                masses[block] = NAME(mass)(in, start, end, top, inverse);
                total += masses[block];
            }
            int64_t token = is_greedy ? NAME(first_equal)(in, width, top)
                                      : NAME(find_token)(in, masses, width, top, inverse,
                                                         uniforms[row] * total);
            tokens[row] = token;
            logprobs[row] = READ(in[token]) * inverse - top - (float)log(total);
        }
        free(masses);
    }
}
