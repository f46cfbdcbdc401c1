/* Loops over rows that PyTorch would run as many small operators, each a pass through memory.

   Every function exists for bf16 and fp32 storage (rows.h is included once for each); sums and
   exponentials are fp32 in both. Rows are dealt to OpenMP threads in fixed shares, so results do not
   depend on timing. Widths are multiples of LANES unless a function says otherwise; the Python side
   checks. GCC's vector types are used because loops over them need no luck to be vectorised; clang
   has them too. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define BLOCK 256 /* entries of a row whose probability is summed at once when a token is drawn */
#define GROUP 4   /* query heads that attend together */

typedef float floats __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef int32_t integers __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));
/* The same in memory, where nothing is aligned to more than its elements. */
typedef float loose_floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t loose_halves __attribute__((vector_size(32), aligned(2), may_alias));

typedef struct {
    uint16_t bits;
} bf16;

static inline floats broadcast(float value) { return value - (floats){}; }

static inline float sum_lanes(floats x)
{
    float total = 0.0f;
    for (int lane = 0; lane < LANES; lane++)
        total += x[lane];
    return total;
}

static inline float max_lanes(floats x)
{
    float most = x[0];
    for (int lane = 1; lane < LANES; lane++)
        most = x[lane] > most ? x[lane] : most;
    return most;
}

static inline floats choose(integers where, floats yes, floats no)
{
    return (floats)(((integers)yes & where) | ((integers)no & ~where));
}

/* Round to nearest even; a NaN stays one, which adding to its bits could turn into infinity. */
static inline words round_bits(floats x)
{
    words bits = (words)x;
    words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words is_nan = (words)(x != x);
    return (rounded & ~is_nan) | (0x7fc0 & is_nan);
}

static inline floats load_bf16(const bf16 *at)
{
    return (floats)(__builtin_convertvector((halves)*(const loose_halves *)at, words) << 16);
}
static inline void store_bf16(bf16 *at, floats x)
{
    *(loose_halves *)at = (loose_halves)__builtin_convertvector(round_bits(x), halves);
}
static inline floats rounded_bf16(floats x) { return (floats)(round_bits(x) << 16); }
static inline float read_bf16(bf16 x)
{
    uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static inline bf16 write_bf16(float value)
{
    bf16 stored[LANES];
    store_bf16(stored, broadcast(value));
    return stored[0];
}

static inline floats load_f32(const float *at) { return (floats)*(const loose_floats *)at; }
static inline void store_f32(float *at, floats x) { *(loose_floats *)at = (loose_floats)x; }
static inline floats rounded_f32(floats x) { return x; }
static inline float read_f32(float x) { return x; }
static inline float write_f32(float value) { return value; }

#define LOWEST_EXPONENT -87.0f

/* e^x to about one unit in the last place of fp32; exactly 0 below the smallest normal result. NaN
   stays NaN. The polynomial is that of the Cephes library, for |r| <= ln(2) / 2. */
static inline floats exponential(floats x)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    integers too_low = x < LOWEST_EXPONENT;
    x = choose(too_low, broadcast(LOWEST_EXPONENT), x);
    x = choose(x > 88.0f, broadcast(88.0f), x);
    floats shifted = x * 1.44269504f + magic;
    floats whole = shifted - magic;
    floats r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    integers power = ((integers)shifted - (integers)broadcast(magic) + 127) << 23;
    return (floats)((integers)(p * (floats)power) & ~too_low);
}

static inline floats sigmoid(floats x) { return 1.0f / (1.0f + exponential(-x)); }

/* Turn scores into weights, in place; entries from `length` to the end of its tile become 0. */
static inline void softmax_row(float *scores, int64_t length)
{
    int64_t end = (length + LANES - 1) / LANES * LANES;
    for (int64_t i = length; i < end; i++)
        scores[i] = -INFINITY;
    floats most = broadcast(-INFINITY), total = {};
    for (int64_t i = 0; i < end; i += LANES)
        most = choose(load_f32(scores + i) > most, load_f32(scores + i), most);
    float top = max_lanes(most);
    for (int64_t i = 0; i < end; i += LANES) {
        floats weight = exponential(load_f32(scores + i) - top);
        store_f32(scores + i, weight);
        total += weight;
    }
    float scale = 1.0f / sum_lanes(total);
    for (int64_t i = 0; i < end; i += LANES)
        store_f32(scores + i, load_f32(scores + i) * scale);
}

/* Tell threads apart only where there is work for several. */
#define PARALLEL_ABOVE 8192

#define REAL bf16
#define NAME(function) function##_bf16
#define LOAD load_bf16
#define STORE store_bf16
#define ROUNDED rounded_bf16
#define READ read_bf16
#define WRITE write_bf16
#include "rows.h"
#undef REAL
#undef NAME
#undef LOAD
#undef STORE
#undef ROUNDED
#undef READ
#undef WRITE

#define REAL float
#define NAME(function) function##_f32
#define LOAD load_f32
#define STORE store_f32
#define ROUNDED rounded_f32
#define READ read_f32
#define WRITE write_f32
#include "rows.h"

/* sum += addend, in one pass. Any length. */
void accumulate(float *sum, const bf16 *addend, int64_t length)
{
    int64_t whole = length / LANES;
#pragma omp parallel for schedule(static) if (length > PARALLEL_ABOVE)
    for (int64_t i = 0; i < whole; i++)
        store_f32(sum + i * LANES, load_f32(sum + i * LANES) + load_bf16(addend + i * LANES));
    for (int64_t i = whole * LANES; i < length; i++)
        sum[i] += read_bf16(addend[i]);
}
