// Parts that the CPU kernels share: threads, slots, and functions of one element.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#ifdef _OPENMP
#include <omp.h>
#endif

using i64 = int64_t;

// This thread's number in its team, and the team's size.
#ifdef _OPENMP
static inline i64 thread() { return omp_get_thread_num(); }
static inline i64 team() { return omp_get_num_threads(); }
#else
static inline i64 thread() { return 0; }
static inline i64 team() { return 1; }
#endif

// Multiplications from which a second thread gains more than it takes to wake it.
constexpr i64 MANY = 1 << 17;

static inline bool inside(i64 slot, i64 capacity) { return slot >= 0 && slot < capacity; }

// Exponential within two units in the last place, in operations that a loop over elements has vectors for.
static inline float exponential(float x) {
  constexpr float LOWEST = -87.0f, HIGHEST = 88.0f, SHIFT = 12582912.0f;  // 1.5 * 2^23 leaves an integer in the bits
  const float near = x < LOWEST ? LOWEST : x > HIGHEST ? HIGHEST : x;
  const float shifted = near * 1.44269504f + SHIFT, power = shifted - SHIFT;
  const float rest = near - power * 0.693359375f + power * 2.12194440e-4f;
  float value = 1.9875691500e-4f;
  for (const float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    value = value * rest + factor;
  value = value * rest * rest + rest + 1.0f;
  int32_t bits, steps;
  std::memcpy(&bits, &value, sizeof bits);
  std::memcpy(&steps, &shifted, sizeof steps);
  bits += static_cast<int32_t>(static_cast<uint32_t>(steps) << 23);
  std::memcpy(&value, &bits, sizeof value);
  return x != x ? x : x < LOWEST ? 0.0f : x > HIGHEST ? std::numeric_limits<float>::infinity() : value;
}

// Gate and up of an expert, clamped; NaN stays.
static inline float swiglu(float gate, float up, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return gate / (1.0f + exponential(-gate)) * up;
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
