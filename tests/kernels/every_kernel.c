/* Runs every kernel on fixed inputs and prints what it computes, one number a line: another processor must
   print the same up to rounding. Compiled together with kernels.c by test_processors.py. */

#include <stdio.h>

#include "kernels.c"

enum { ROWS = 3, WIDTH = 48, WIDE = 301, SLOTS = 32, KV_HEADS = 2, RATIO = 3, HEAD = 16 };

/* Numbers between -1 and 1 that every machine makes alike. */
static float next_number(void)
{
    static uint32_t state = 12345;
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / 8388608.0f - 1.0f;
}

static void show_floats(const char *name, const float *values, int count)
{
    for (int i = 0; i < count; i++)
        printf("%s[%d] %.9g\n", name, i, values[i]);
}

#define SHOW(name, values, count, read)        \
    for (int i = 0; i < (int)(count); i++)     \
        printf("%s[%d] %.9g\n", name, i, read((values)[i]));
#define FILL(values, count, write)             \
    for (int i = 0; i < (int)(count); i++)     \
        (values)[i] = write(next_number());

#define TRY_ALL(type, suffix, read, write)                                                                   \
    static void try_rows_##suffix(void)                                                                      \
    {                                                                                                        \
        type x[ROWS * WIDTH], added[ROWS * WIDTH], weight[WIDTH], sum[ROWS * WIDTH], normed[ROWS * WIDTH];   \
        type grad_x[ROWS * WIDTH], half[ROWS * WIDTH / 2], turned[ROWS * WIDTH];                             \
        float scale[ROWS], grad_weight[WIDTH], partial[2 * WIDTH];                                           \
        FILL(x, ROWS * WIDTH, write);                                                                        \
        FILL(added, ROWS * WIDTH, write);                                                                    \
        FILL(weight, WIDTH, write);                                                                          \
        add_rms_norm_##suffix(x, added, weight, sum, normed, scale, ROWS, WIDTH, 1e-5f);                     \
        SHOW("norm", normed, ROWS * WIDTH, read);                                                            \
        show_floats("scale", scale, ROWS);                                                                   \
        add_rms_norm_backward_##suffix(x, added, sum, weight, scale, grad_x, grad_weight, partial, 2, ROWS,  \
                                       WIDTH);                                                               \
        SHOW("norm_grad", grad_x, ROWS * WIDTH, read);                                                       \
        show_floats("norm_weight_grad", grad_weight, WIDTH);                                                 \
        rotate_##suffix(x, WIDTH, added, sum, turned, WIDTH, ROWS, 3, 2, HEAD, 1.0f);                        \
        SHOW("rotate", turned, ROWS * WIDTH, read);                                                          \
        /* Rows of 32 values: the gate and the other half. */                                                \
        gated_##suffix(x, half, ROWS, 16);                                                                   \
        SHOW("gated", half, ROWS * 16, read);                                                                \
        gated_backward_##suffix(half, x, grad_x, ROWS, 16);                                                  \
        SHOW("gated_grad", grad_x, ROWS * 32, read);                                                         \
    }                                                                                                        \
    static void try_head_##suffix(void)                                                                      \
    {                                                                                                        \
        type logits[ROWS * WIDE];                                                                            \
        float sums[ROWS], grads[] = {0.5f, -1.0f, 0.25f, 2.0f}, inverse[] = {1.25f, 0.0f, 1.0f};             \
        float logprobs[ROWS];                                                                                \
        double uniforms[] = {0.3, 0.9, 0.999999};                                                            \
        int64_t first[] = {0, 2, 2, 4}, targets[] = {7, 7, 300, 12}, tokens[ROWS];                           \
        FILL(logits, ROWS * WIDE, write);                                                                    \
        draw_tokens_##suffix(logits, uniforms, inverse, tokens, logprobs, ROWS, WIDE);                       \
        for (int i = 0; i < ROWS; i++)                                                                       \
            printf("token[%d] %lld\n", i, (long long)tokens[i]);                                             \
        show_floats("logprob", logprobs, ROWS);                                                              \
        log_sum_exp_##suffix(logits, sums, ROWS, WIDE, 1.25f);                                               \
        show_floats("log_sum", sums, ROWS);                                                                  \
        token_gradient_##suffix(logits, sums, first, targets, grads, ROWS, WIDE, 1.25f);                     \
        SHOW("token_grad", logits, ROWS * WIDE, read);                                                       \
    }                                                                                                        \
    static void try_attention_##suffix(void)                                                                 \
    {                                                                                                        \
        type keys[ROWS * KV_HEADS * SLOTS * HEAD], values[ROWS * KV_HEADS * SLOTS * HEAD];                   \
        type query[ROWS * KV_HEADS * RATIO * HEAD], key[ROWS * KV_HEADS * HEAD], value[ROWS * KV_HEADS * HEAD]; \
        type out[ROWS * KV_HEADS * RATIO * HEAD];                                                            \
        int64_t lengths[] = {17, 20, 3}, owners[] = {0, 0, 2}, shared[] = {0, 16, 0};                        \
        int64_t strides[] = {KV_HEADS * RATIO * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD};                     \
        FILL(keys, sizeof keys / sizeof *keys, write);                                                       \
        FILL(values, sizeof values / sizeof *values, write);                                                 \
        FILL(query, sizeof query / sizeof *query, write);                                                    \
        FILL(key, sizeof key / sizeof *key, write);                                                          \
        FILL(value, sizeof value / sizeof *value, write);                                                    \
        for (int64_t window = 0; window <= 6; window += 6) {                                                 \
            decode_attention_##suffix(keys, values, KV_HEADS *SLOTS *HEAD, lengths, owners, shared, query,   \
                                      key, value, strides, out, ROWS, KV_HEADS, RATIO, HEAD, SLOTS, window,  \
                                      0.25f);                                                                \
            SHOW(window ? "windowed" : "attention", out, sizeof out / sizeof *out, read);                    \
        }                                                                                                    \
    }

TRY_ALL(float, f32, read_f32, write_f32)
TRY_ALL(bf16, bf16, read_bf16, write_bf16)

int main(void)
{
    try_rows_f32();
    try_head_f32();
    try_attention_f32();
    try_rows_bf16();
    try_head_bf16();
    try_attention_bf16();
    float sum[WIDTH];
    bf16 addend[WIDTH];
    FILL(sum, WIDTH, write_f32);
    FILL(addend, WIDTH, write_bf16);
    accumulate(sum, addend, WIDTH - 1);
    show_floats("accumulate", sum, WIDTH);
    return 0;
}
