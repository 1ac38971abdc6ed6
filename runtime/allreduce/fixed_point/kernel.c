/* Block fixed point, see conversion.py and int8_blocks.py, which have the same functions in torch with the same bits.
   At the end: the sums of runtime/recovery/transfer/checksum.py, which has them in numpy.

   A value out of the integer's range, an infinity or a NaN gives an integer that means nothing; `top` tells the caller.
   Rounding is half to even, as in torch.round. No fast-math: the bits have to be those of every other machine. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_CPU
#endif

static inline int32_t nearest_int32(float value) { return (int32_t)rintf(value); }

/* As (int64_t)rint(value), below 2^62, in operations of which compilers make vectors: adding MAGIC rounds to an integer,
   which is then in the low bits of the sum. First the multiple of 2^32, whose rest is exact, then the rest. */
static inline int64_t nearest_int64(double value)
{
    const double magic = 6755399441055744.0; /* 1.5 * 2^52 */
    const double high = value * 0x1p-32 + magic;
    const double rest = value - (high - magic) * 0x1p32 + magic;
    int64_t of_magic, of_high, of_rest;
    memcpy(&of_magic, &magic, sizeof magic);
    memcpy(&of_high, &high, sizeof high);
    memcpy(&of_rest, &rest, sizeof rest);
    return (int64_t)((uint64_t)(of_high - of_magic) << 32) + (of_rest - of_magic);
}

/* out[i] = round(x[i] * scale[i / block]); top[b]: the largest bits without sign of a value in block b. */
#define ENCODE(name, real, bits, magnitude, integer, wide, nearest)                                                     \
    FOR_EACH_CPU void name(const real *restrict x, int64_t count, int64_t block, const wide *restrict scale,           \
                           integer *restrict out, bits *restrict top)                                                  \
    {                                                                                                                  \
        for (int64_t b = 0; b * block < count; b++) {                                                                  \
            const real *from = x + b * block;                                                                          \
            integer *to = out + b * block;                                                                             \
            const int64_t length = count - b * block < block ? count - b * block : block;                              \
            const wide factor = scale[b];                                                                              \
            bits largest = 0;                                                                                          \
            for (int64_t i = 0; i < length; i++) {                                                                     \
                bits raw;                                                                                              \
                memcpy(&raw, from + i, sizeof raw);                                                                    \
                raw &= magnitude;                                                                                      \
                largest = raw > largest ? raw : largest;                                                               \
                to[i] = nearest((wide)from[i] * factor);                                                               \
            }                                                                                                          \
            top[b] = largest;                                                                                          \
        }                                                                                                              \
    }

ENCODE(encode_float32_int32, float, int32_t, 0x7fffffff, int32_t, float, nearest_int32)
ENCODE(encode_float32_int64, float, int32_t, 0x7fffffff, int64_t, double, nearest_int64)
ENCODE(encode_float64_int64, double, int64_t, 0x7fffffffffffffff, int64_t, double, nearest_int64)

/* out[i] = sum[i] * scale[i / block], rounded once to double and once to the result. */
#define DECODE(name, integer, real)                                                                                    \
    FOR_EACH_CPU void name(const integer *restrict sum, int64_t count, int64_t block, const double *restrict scale,    \
                           real *restrict out)                                                                         \
    {                                                                                                                  \
        for (int64_t b = 0; b * block < count; b++) {                                                                  \
            const int64_t end = count < (b + 1) * block ? count : (b + 1) * block;                                     \
            const double factor = scale[b];                                                                            \
            for (int64_t i = b * block; i < end; i++)                                                                  \
                out[i] = (real)((double)sum[i] * factor);                                                              \
        }                                                                                                              \
    }

DECODE(decode_int32_float32, int32_t, float)
DECODE(decode_int64_float32, int64_t, float)
DECODE(decode_int64_float64, int64_t, double)

/* Blocks of 8 bits, see int8_blocks.py: CODES codes, then the step. */

#define CODES 252
#define BLOCK_BYTES 256

#ifdef __GNUC__ /* so that they are compiled for each CPU too */
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

INLINE void round_block(const float *restrict x, const int32_t *restrict dither, int8_t *restrict out)
{
    int32_t bits = 0;
    float largest, step, inverse;
    for (int i = 0; i < CODES; i++) {
        int32_t raw;
        memcpy(&raw, x + i, sizeof raw);
        raw &= 0x7fffffff;
        bits = raw > bits ? raw : bits;
    }
    memcpy(&largest, &bits, sizeof largest);
    if (bits >= 0x7f800000 || largest < 0x1p-100f) {
        bits = bits >= 0x7f800000 ? 0x7fc00000 : 0;
        memset(out, 0, CODES);
        memcpy(out + CODES, &bits, sizeof bits);
        return;
    }
    step = largest / 127.0f;
    inverse = 127.0f / largest;
    memcpy(&bits, &step, sizeof bits);
    memcpy(out + CODES, &step, sizeof step);
    const int32_t shift = (int32_t)(((uint64_t)bits * 0x9E3779B1u >> 8) & 0xFFFFFF);
    for (int i = 0; i < CODES; i++) {
        const float up = (float)(dither[i] ^ shift) * 0x1p-24f;
        float code = floorf(up + x[i] * inverse);
        code = code > 127.0f ? 127.0f : code < -127.0f ? -127.0f : code;
        out[i] = (int8_t)(int32_t)code;
    }
}

INLINE void values_of(const int8_t *restrict block, float *restrict out)
{
    float step;
    memcpy(&step, block + CODES, sizeof step);
    for (int i = 0; i < CODES; i++)
        out[i] = (float)block[i] * step;
}

FOR_EACH_CPU void pack_int8(const float *x, int64_t count, const int32_t *dither, int8_t *out)
{
    float rest[CODES] = {0};
    for (; count >= CODES; count -= CODES, x += CODES, out += BLOCK_BYTES)
        round_block(x, dither, out);
    if (count > 0) {
        memcpy(rest, x, count * sizeof *x);
        round_block(rest, dither, out);
    }
}

FOR_EACH_CPU void unpack_int8(const int8_t *packed, int64_t count, float *out)
{
    float rest[CODES];
    for (; count >= CODES; count -= CODES, packed += BLOCK_BYTES, out += CODES)
        values_of(packed, out);
    if (count > 0) {
        values_of(packed, rest);
        memcpy(out, rest, count * sizeof *out);
    }
}

/* out may be left or right. */
FOR_EACH_CPU void add_int8(const int8_t *left, const int8_t *right, int64_t blocks, const int32_t *dither, int8_t *out)
{
    float a[CODES], b[CODES];
    for (int64_t at = 0; at < blocks * BLOCK_BYTES; at += BLOCK_BYTES) {
        values_of(left + at, a);
        values_of(right + at, b);
        for (int i = 0; i < CODES; i++)
            a[i] += b[i];
        round_block(a, dither, out + at);
    }
}

/* Rows of COLUMNS words of 64 bits, one behind the other: adds each row to `columns`, and fills sums[row]. */
#define COLUMNS 1024
#define ROW_BYTES (8 * COLUMNS)

FOR_EACH_CPU void sum_words(const uint8_t *restrict rows, int64_t count, uint64_t *restrict columns, uint64_t *restrict sums)
{
    for (int64_t row = 0; row < count; row++, rows += ROW_BYTES) {
        uint64_t sum = 0;
        for (int i = 0; i < COLUMNS; i++) {
            uint64_t word;
            memcpy(&word, rows + 8 * i, sizeof word);
            columns[i] += word;
            sum += word;
        }
        sums[row] = sum;
    }
}

/* Copies a row past the processor's caches: the script's data stay there, and the destination is not read before it is
   written. */
static void store_row(uint8_t *restrict to, const uint8_t *restrict from)
{
#ifdef __SSE2__
    if ((uintptr_t)to % 16 == 0) {
        for (int i = 0; i < ROW_BYTES; i += 16)
            _mm_stream_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
        return;
    }
#endif
    memcpy(to, from, ROW_BYTES);
}

/* Copies sources[k], of sizes[k] bytes, to body + at[k]; at only grows. The whole rows of the body are summed, as by
   sum_words: a row that lies in one piece while it is copied, others when nothing more is copied to them. summed: how
   many rows are summed already. Returns how many are then. */
int64_t copy_and_sum(const uint8_t *const *sources, const int64_t *at, const int64_t *sizes, int64_t pieces,
                     uint8_t *body, int64_t summed, uint64_t *columns, uint64_t *sums)
{
    for (int64_t k = 0; k < pieces; k++) {
        const int64_t begin = at[k], end = begin + sizes[k], complete = end / ROW_BYTES;
        int64_t row = (begin + ROW_BYTES - 1) / ROW_BYTES, copied = 0;
        if (row < complete) {
            copied = row * ROW_BYTES - begin;
            memcpy(body + begin, sources[k], copied);
            sum_words(body + summed * ROW_BYTES, row - summed, columns, sums + summed);
            for (; row < complete; row++, copied += ROW_BYTES) {
                sum_words(sources[k] + copied, 1, columns, sums + row);
                store_row(body + begin + copied, sources[k] + copied);
            }
            summed = complete;
        }
        memcpy(body + begin + copied, sources[k] + copied, sizes[k] - copied);
        if (complete > summed) {
            sum_words(body + summed * ROW_BYTES, complete - summed, columns, sums + summed);
            summed = complete;
        }
    }
#ifdef __SSE2__
    _mm_sfence(); /* others read the body as soon as its header is written */
#endif
    return summed;
}
