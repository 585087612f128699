// CPU kernels of a decode step, and of a prompt where they are faster than torch: float32, caches of whole rows.
//
// Each takes one struct, whose fields are 8 bytes each in the order in which Python packs them. Nothing here allocates
// more than a few rows. Tokens are shared out among `threads` threads where OpenMP is there. Stores and rotations round
// as torch does: compile with -ffp-contract=off, only sums may fuse.
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "common.h"
#include "sums.h"

namespace {

// RoPE of the last `rope` of `dim` elements at the row of the table that is nearest to `position`; out may be x.
void rotate(float* out, const float* x, const float* table, i64 rows, i64 position, i64 dim, i64 rope, bool back) {
  const i64 row = position < 0 ? 0 : position >= rows ? rows - 1 : position;
  const float *cos = table + row * rope, *sin = cos + rope / 2;
  const i64 nope = dim - rope;
  if (out != x) std::memcpy(out, x, sizeof(float) * nope);
  for (i64 i = 0; i < rope / 2; ++i) {
    const float even = x[nope + 2 * i], odd = x[nope + 2 * i + 1], s = back ? -sin[i] : sin[i];
    out[nope + 2 * i] = even * cos[i] - odd * s;
    out[nope + 2 * i + 1] = even * s + odd * cos[i];
  }
}

}  // namespace

extern "C" {

struct KvRopeInsert {
  const float* kv;
  i64 stride;
  float* cache;
  const i64 *slots, *positions;
  const float* table;
  i64 tokens, capacity, dim, rope, rows;
};

void kv_rope_insert(const KvRopeInsert* a) {
  for (i64 t = 0; t < a->tokens; ++t)
    if (inside(a->slots[t], a->capacity))
      rotate(a->cache + a->slots[t] * a->dim, a->kv + t * a->stride, a->table, a->rows, a->positions[t], a->dim,
             a->rope, false);
}

struct QNormRope {
  const float* q;
  i64 stride;
  float* out;
  const i64* positions;
  const float* table;
  i64 tokens, heads, dim, rope, rows;
  double eps;
  i64 threads;
};

void q_norm_rope(const QNormRope* a) {
  [[maybe_unused]] const bool many = a->tokens * a->heads * a->dim >= MANY;
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(a->threads)) if (many)
  for (i64 t = 0; t < a->tokens; ++t)
    for (i64 h = 0; h < a->heads; ++h) {
      const float* x = a->q + t * a->stride + h * a->dim;
      float* out = a->out + (t * a->heads + h) * a->dim;
      const float scale = rms(x, a->dim, static_cast<float>(a->eps));
      for (i64 i = 0; i < a->dim; ++i) out[i] = x[i] * scale;
      rotate(out, out, a->table, a->rows, a->positions[t], a->dim, a->rope, false);
    }
}

struct Rope {
  const float* x;
  i64 stride;
  float* out;
  const i64* positions;
  const float* table;
  i64 tokens, heads, dim, rope, rows, back, threads;
};

void rope(const Rope* a) {
  [[maybe_unused]] const bool many = a->tokens * a->heads * a->dim >= MANY;
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(a->threads)) if (many)
  for (i64 t = 0; t < a->tokens; ++t)
    for (i64 h = 0; h < a->heads; ++h)
      rotate(a->out + (t * a->heads + h) * a->dim, a->x + t * a->stride + h * a->dim, a->table, a->rows,
             a->positions[t], a->dim, a->rope, a->back != 0);
}

struct RmsNorm {
  const float* x;
  i64 stride;
  const float* weight;
  float* out;
  i64 tokens, dim;
  double eps;
};

void rms_norm(const RmsNorm* a) {
  for (i64 t = 0; t < a->tokens; ++t) {
    const float* x = a->x + t * a->stride;
    const float scale = rms(x, a->dim, static_cast<float>(a->eps));
    for (i64 d = 0; d < a->dim; ++d) a->out[t * a->dim + d] = x[d] * scale * a->weight[d];
  }
}

struct SavePartialStates {
  const float* kv_score;
  i64 stride;
  const float* ape;
  float* states;
  const i64 *slots, *positions;
  i64 tokens, capacity, width, ratio;
};

void save_partial_states(const SavePartialStates* a) {
  for (i64 t = 0; t < a->tokens; ++t) {
    if (!inside(a->slots[t], a->capacity)) continue;
    const float* x = a->kv_score + t * a->stride;
    float* out = a->states + a->slots[t] * 2 * a->width;
    const i64 place = ((a->positions[t] % a->ratio) + a->ratio) % a->ratio;
    const float* bias = a->ape + place * a->width;
    std::memcpy(out, x, sizeof(float) * a->width);
    for (i64 i = 0; i < a->width; ++i) out[a->width + i] = x[a->width + i] + bias[i];
  }
}

struct Compress {
  const float* states;
  const i64 *state_slots, *positions, *slots;
  const int32_t *block_table, *requests;
  const float *norm_weight, *table;
  float* cache;
  i64 tokens, state_capacity, capacity, table_rows, table_columns, rows, dim, rope, ratio, groups, block;
  double eps;
};

void compress_norm_rope_insert(const Compress* a) {
  const i64 window = a->groups * a->ratio, dim = a->dim;
  std::vector<float> top(dim), total(dim), entry(dim);
  std::vector<const float*> present(window);
  for (i64 t = 0; t < a->tokens; ++t) {
    const i64 position = a->positions[t], request = a->requests[t];
    if (position < 0 || (position + 1) % a->ratio != 0 || !inside(a->slots[t], a->capacity) ||
        !inside(a->state_slots[t], a->state_capacity))
      continue;
    std::fill(top.begin(), top.end(), -std::numeric_limits<float>::infinity());
    for (i64 w = 0; w < window; ++w) {
      present[w] = nullptr;
      const i64 at = position + w + 1 - window, column = at / a->block;
      if (at < 0 || !inside(request, a->table_rows) || column >= a->table_columns) continue;
      const i64 page = a->block_table[request * a->table_columns + column], slot = page * a->block + at % a->block;
      if (page < 0 || !inside(slot, a->state_capacity)) continue;
      // Each group of positions has columns of its own, values before scores.
      present[w] = a->states + (slot * 2 * a->groups + w / a->ratio) * dim;
      const float* score = present[w] + a->groups * dim;
      for (i64 d = 0; d < dim; ++d) top[d] = score[d] > top[d] || score[d] != score[d] ? score[d] : top[d];
    }
    std::fill(total.begin(), total.end(), 0.0f);
    std::fill(entry.begin(), entry.end(), 0.0f);
    for (i64 w = 0; w < window; ++w) {
      if (present[w] == nullptr) continue;
      const float* score = present[w] + a->groups * dim;
#pragma omp simd
      for (i64 d = 0; d < dim; ++d) {
        // With nothing present the maximum is -inf: select, never subtract.
        const float weight = top[d] == -std::numeric_limits<float>::infinity() ? 0.0f : exponential(score[d] - top[d]);
        total[d] += weight;
        entry[d] += weight * present[w][d];
      }
    }
    for (i64 d = 0; d < dim; ++d) entry[d] = total[d] == 0.0f ? 0.0f : entry[d] / total[d];
    const float scale = rms(entry.data(), dim, static_cast<float>(a->eps));
    for (i64 d = 0; d < dim; ++d) entry[d] = entry[d] * scale * a->norm_weight[d];
    float* out = a->cache + a->slots[t] * dim;
    rotate(out, entry.data(), a->table, a->rows, position / a->ratio * a->ratio, dim, a->rope, false);
  }
}

struct Post {
  const float *streams, *output, *post, *comb;
  float* out;
  i64 tokens, count, dim, threads;
};

void mhc_post(const Post* a) {
  const i64 n = a->count, dim = a->dim;
  [[maybe_unused]] const bool many = a->tokens * n * n * dim >= MANY;
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(a->threads)) if (many)
  for (i64 t = 0; t < a->tokens; ++t)
    for (i64 k = 0; k < n; ++k) {
      float* out = a->out + (t * n + k) * dim;
      const float *x = a->streams + t * n * dim, *y = a->output + t * dim;
      const float post = a->post[t * n + k];
      for (i64 d = 0; d < dim; ++d) out[d] = post * y[d];
      for (i64 j = 0; j < n; ++j) {
        const float comb = a->comb[(t * n + j) * n + k];
        for (i64 d = 0; d < dim; ++d) out[d] = out[d] + comb * x[j * dim + d];
      }
    }
}

struct ClampedSwiGlu {
  const float* x;
  float* out;
  i64 tokens, inner;
  double limit;
  i64 threads;
};

void clamped_swiglu(const ClampedSwiGlu* a) {
  const float limit = static_cast<float>(a->limit);
  [[maybe_unused]] const bool many = a->tokens * a->inner >= MANY;
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(a->threads)) if (many)
  for (i64 t = 0; t < a->tokens; ++t) {
    const float *gate = a->x + 2 * t * a->inner, *up = gate + a->inner;
    float* out = a->out + t * a->inner;
#pragma omp simd
    for (i64 i = 0; i < a->inner; ++i) out[i] = swiglu(gate[i], up[i], limit);
  }
}

// Rows of an expert, each times the weight of its place among those of all tokens, are added to their tokens.
struct AddRows {
  const float* x;
  const i64* places;
  const float* weights;
  float* out;
  i64 rows, dim, top_k;
};

void add_rows(const AddRows* a) {
  for (i64 r = 0; r < a->rows; ++r) {
    const float weight = a->weights[a->places[r]], *x = a->x + r * a->dim;
    float* out = a->out + a->places[r] / a->top_k * a->dim;
#pragma omp simd
    for (i64 d = 0; d < a->dim; ++d) out[d] += weight * x[d];
  }
}

struct Slots {
  const int32_t *entries, *requests, *block_table;
  const uint8_t* valid;
  int32_t *slots, *counts;
  i64 tokens, top_k, rows, columns, block;
};

void global_topk(const Slots* a) {
  for (i64 t = 0; t < a->tokens; ++t) {
    const i64 request = a->requests[t];
    int32_t count = 0;
    for (i64 k = 0; k < a->top_k; ++k) {
      const i64 entry = a->entries[t * a->top_k + k];
      const bool known = entry >= 0 && inside(request, a->rows) && entry / a->block < a->columns;
      const i64 page = known ? a->block_table[request * a->columns + entry / a->block] : -1;
      const i64 slot = page * a->block + entry % a->block;
      const bool kept = page >= 0 && slot <= std::numeric_limits<int32_t>::max();
      a->slots[t * a->top_k + k] = kept ? static_cast<int32_t>(slot) : -1;
      count += kept;
    }
    a->counts[t] = a->valid[t] ? count : 0;
  }
}

struct TokenSlots {
  const i64 *positions, *requests;
  const int32_t* table;
  i64* slots;
  i64 tokens, rows, columns, ratio, block;
};

void token_slots(const TokenSlots* a) {
  for (i64 t = 0; t < a->tokens; ++t) {
    const i64 position = a->positions[t], request = a->requests[t], row = position / a->ratio;
    const bool known = position >= 0 && (position + 1) % a->ratio == 0 && row / a->block < a->columns;
    const i64 page = known && inside(request, a->rows) ? a->table[request * a->columns + row / a->block] : -1;
    a->slots[t] = page >= 0 ? page * a->block + row % a->block : -1;
  }
}

struct ListedSlots {
  const i64 *begins, *counts, *requests;
  const int32_t* table;
  int32_t* slots;
  i64 tokens, width, rows, columns, block;
};

void listed_slots(const ListedSlots* a) {
  for (i64 t = 0; t < a->tokens; ++t) {
    int32_t* out = a->slots + t * a->width;
    const i64 request = a->requests[t], begin = a->begins[t], count = std::min(a->counts[t], a->width);
    i64 column = begin / a->block, offset = begin % a->block, j = 0;
    while (j < count && inside(request, a->rows) && column < a->columns) {
      const i64 page = a->table[request * a->columns + column];
      for (; j < count && offset < a->block; ++j, ++offset)
        out[j] = page >= 0 ? static_cast<int32_t>(page * a->block + offset) : -1;
      ++column, offset = 0;
    }
    std::fill(out + j, out + a->width, -1);
  }
}

}  // extern "C"
