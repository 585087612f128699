// Sums of the CPU kernels: several at a time in registers, so that each value that is loaded counts more than once.
//
// A sum of a block is taken in the lanes of one vector, then over its lanes, then over what is left, whatever the size
// of the block: one row has the same bits alone and among others. `dot` has an order of its own, for sums that are
// never part of a block.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

#include "common.h"

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
typedef float Vector __attribute__((vector_size(LANES * sizeof(float))));

// Rows, and columns, of a block; and rows where a block has no columns.
constexpr int BLOCK = 4, WIDE_BLOCK = 8;

static inline Vector load(const float* x) {
  Vector v;
  std::memcpy(&v, x, sizeof v);
  return v;
}

// a * b + c, rounded once where the CPU has such an instruction. Left to themselves, compilers fuse for one size of a
// block and not for the next: some avoid chains of fused sums on some CPUs, others vectorise half of a scalar loop.
static inline float fused(float a, float b, float c) {
#ifdef __FMA__
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

static inline Vector fused(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
  return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

static inline Vector all(float x) { return x - Vector{}; }

// The sum of all lanes, halves first.
static inline float over_lanes(Vector v) {
  typedef float Half __attribute__((vector_size(sizeof(Vector) / 2)));
  typedef float Four __attribute__((vector_size(4 * sizeof(float))));
  constexpr int FOURS = sizeof(Half) / sizeof(Four);
  Half halves[2];
  std::memcpy(halves, &v, sizeof v);
  const Half half = halves[0] + halves[1];
  Four fours[FOURS];
  std::memcpy(fours, &half, sizeof half);
  const Four four = FOURS > 1 ? fours[0] + fours[FOURS - 1] : fours[0];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

template <int R, int C>
static void dot_block(const float* const* a, const float* const* b, i64 n, float* out, i64 stride) {
  Vector parts[R][C] = {};
  i64 i = 0;
  for (; i + LANES <= n; i += LANES) {
    Vector x[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) x[r] = load(a[r] + i);
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      const Vector y = load(b[c] + i);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) parts[r][c] = fused(x[r], y, parts[r][c]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      float sum = over_lanes(parts[r][c]);
      for (i64 j = i; j < n; ++j) sum = fused(a[r][j], b[c][j], sum);
      out[r * stride + c] = sum;
    }
}

template <int R>
static void weighted_block(const float* weights, i64 stride, const float* const* rows, i64 count, i64 n,
                           float* const* out) {
  i64 i = 0;
  for (; i + 2 * LANES <= n; i += 2 * LANES) {
    Vector parts[R][2] = {};
    for (i64 k = 0; k < count; ++k) {
      const Vector x[2] = {load(rows[k] + i), load(rows[k] + i + LANES)};
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Vector weight = all(weights[r * stride + k]);
        parts[r][0] = fused(weight, x[0], parts[r][0]);
        parts[r][1] = fused(weight, x[1], parts[r][1]);
      }
    }
    for (int r = 0; r < R; ++r) std::memcpy(out[r] + i, parts[r], sizeof parts[r]);
  }
  for (; i < n; ++i)
    for (int r = 0; r < R; ++r) {
      float sum = 0.0f;
      for (i64 k = 0; k < count; ++k) sum = fused(weights[r * stride + k], rows[k][i], sum);
      out[r][i] = sum;
    }
}

// One sum, in parts that do not wait for each other: not in the order of `dots`.
static inline float dot(const float* a, const float* b, i64 n) {
  constexpr int PARTS = 8;
  Vector parts[PARTS] = {};
  i64 i = 0;
  for (; i + PARTS * LANES <= n; i += PARTS * LANES)
#pragma GCC unroll 8
    for (int p = 0; p < PARTS; ++p) parts[p] = fused(load(a + i + p * LANES), load(b + i + p * LANES), parts[p]);
  for (; i + LANES <= n; i += LANES) parts[0] = fused(load(a + i), load(b + i), parts[0]);
#pragma GCC unroll 8
  for (int half = PARTS / 2; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int p = 0; p < half; ++p) parts[p] += parts[p + half];
  float sum = over_lanes(parts[0]);
  for (; i < n; ++i) sum = fused(a[i], b[i], sum);
  return sum;
}

static inline float total(const float* x, i64 n) {
  Vector parts = {};
  i64 i = 0;
  for (; i + LANES <= n; i += LANES) parts += load(x + i);
  float sum = over_lanes(parts);
  for (; i < n; ++i) sum += x[i];
  return sum;
}

// out[r][c] is the sum of a[r] times b[c], both of n elements; rows of `out` are `stride` apart.
static inline void dots(const float* const* a, i64 rows, const float* const* b, i64 columns, i64 n, float* out,
                        i64 stride) {
  using Block = void (*)(const float* const*, const float* const*, i64, float*, i64);
  static constexpr Block blocks[][BLOCK] = {
      {dot_block<1, 1>, dot_block<1, 2>, dot_block<1, 3>, dot_block<1, 4>},
      {dot_block<2, 1>, dot_block<2, 2>, dot_block<2, 3>, dot_block<2, 4>},
      {dot_block<3, 1>, dot_block<3, 2>, dot_block<3, 3>, dot_block<3, 4>},
      {dot_block<4, 1>, dot_block<4, 2>, dot_block<4, 3>, dot_block<4, 4>},
  };
  for (i64 c = 0; c < columns; c += BLOCK)
    for (i64 r = 0; r < rows; r += BLOCK)
      blocks[std::min<i64>(BLOCK, rows - r) - 1][std::min<i64>(BLOCK, columns - c) - 1](a + r, b + c, n,
                                                                                     out + r * stride + c, stride);
}

// out[r], for at most WIDE_BLOCK rows, is the sum of `count` rows of n elements, each times its weight.
static inline void weighted(const float* weights, i64 stride, i64 outs, const float* const* rows, i64 count, i64 n,
                            float* const* out) {
  using Block = void (*)(const float*, i64, const float* const*, i64, i64, float* const*);
  static constexpr Block blocks[WIDE_BLOCK] = {
      weighted_block<1>, weighted_block<2>, weighted_block<3>, weighted_block<4>,
      weighted_block<5>, weighted_block<6>, weighted_block<7>, weighted_block<8>,
  };
  blocks[outs - 1](weights, stride, rows, count, n, out);
}

static inline float rms(const float* x, i64 n, float eps) {
  return 1.0f / std::sqrt(dot(x, x, n) / static_cast<float>(n) + eps);
}

// The largest of n elements, -inf of none, NaN if there is one.
static inline float largest(const float* x, i64 n) {
  float top = -std::numeric_limits<float>::infinity();
  int nan = 0;
#pragma omp simd reduction(max : top) reduction(| : nan)
  for (i64 i = 0; i < n; ++i) {
    top = x[i] > top ? x[i] : top;
    nan |= x[i] != x[i];
  }
  return nan ? std::numeric_limits<float>::quiet_NaN() : top;
}
