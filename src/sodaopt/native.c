/* x <- x + lam (z - x) over lists of tensors in one pass: what `native.py` calls.

   The pull is bound by reading memory, and a core that walks two arrays from end to end does not
   read as fast as it could: the hardware fetches ahead within a page of 4 KiB only, and begins
   again at each. Several pages side by side hide these beginnings.

   Threads are OpenMP's, of the runtime that torch has loaded: this file is linked without one, so
   that there are not two with a pool each. */

#include <stdint.h>
#include <string.h>

#include <omp.h>

#ifdef __clang__
#error "clang calls another OpenMP than the one that torch brings"
#endif
_Static_assert(sizeof(void *) == sizeof(int64_t), "pointers come as 64-bit numbers");

#define LINE 64     /* bytes of a cache line */
#define PAGE 4096   /* bytes within which the hardware fetches ahead */
#define SIDE 4      /* pages that are walked side by side */
#define GRAIN 32768 /* elements below which another thread does not pay */

#if defined(__x86_64__) && defined(__gnu_linux__)
#define CLONES __attribute__((target_clones("fma", "default")))
#else
#define CLONES
#endif

static inline float from_float(float z) { return z; }
static inline double from_double(double z) { return z; }
static inline float from_bfloat16(uint16_t z) {
    uint32_t bits = (uint32_t)z << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* NAME: for x of type X and z0 of type Z, which FROM widens. One tensor after the other, as they
   may share memory, and each in equal shares of whole lines. */
#define PULL(NAME, X, Z, FROM)                                                                     \
    CLONES static void NAME##_part(X *restrict x, const Z *restrict z, X lam, int64_t n) {         \
        enum { line = LINE / sizeof(X), page = PAGE / sizeof(X) };                                 \
        int64_t i = 0;                                                                             \
        for (; i + SIDE * page <= n; i += SIDE * page)                                             \
            for (int64_t j = i; j < i + page; j += line)                                           \
                for (int64_t k = j; k < j + SIDE * page; k += page)                                \
                    _Pragma("omp simd") for (int64_t e = k; e < k + line; e++)                     \
                        x[e] += lam * (FROM(z[e]) - x[e]);                                         \
        for (; i < n; i++) x[i] += lam * (FROM(z[i]) - x[i]);                                      \
    }                                                                                              \
                                                                                                   \
    void NAME(int64_t count, X *const *x, const Z *const *z, const int64_t *n, double lam,         \
              int64_t threads) {                                                                   \
        int64_t total = 0, line = LINE / sizeof(X);                                                \
        for (int64_t c = 0; c < count; c++) total += n[c];                                         \
        int64_t wanted = total / GRAIN + 1;                                                        \
        _Pragma("omp parallel num_threads(wanted < threads ? wanted : threads)")                   \
        for (int64_t c = 0; c < count; c++) {                                                      \
            int64_t share = n[c] / omp_get_num_threads() + 1;                                      \
            share = (share + line - 1) / line * line;                                              \
            int64_t begin = share * omp_get_thread_num(), size = n[c] - begin;                     \
            if (size > 0) NAME##_part(x[c] + begin, z[c] + begin, lam, size < share ? size : share); \
            _Pragma("omp barrier")                                                                 \
        }                                                                                          \
    }

PULL(pull_float32_float32, float, float, from_float)
PULL(pull_float64_float64, double, double, from_double)
PULL(pull_float32_bfloat16, float, uint16_t, from_bfloat16)
