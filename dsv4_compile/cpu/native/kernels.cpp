// CPU kernels of a decode step, and of a prompt where they are faster than torch: float32, caches of whole rows.
//
// Each takes one struct, whose fields are 8 bytes each in the order in which Python packs them. Nothing here allocates
// more than a few rows. Those that take longest share their rows out among `threads` threads where OpenMP is there; a
// sum is always of one thread. Stores and rotations round as torch does: compile with -ffp-contract=off, where sums may
// fuse they say so.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

using i64 = int64_t;

// Sums in LANES parts, so that a vector unit need not wait for its last addition.
float dot(const float* a, const float* b, i64 n) {
  constexpr i64 LANES = 64, FEW = 8;
  float parts[LANES] = {}, sum = 0.0f;
  i64 i = 0;
  for (; i + LANES <= n; i += LANES)
#pragma omp simd
    for (i64 j = 0; j < LANES; ++j) parts[j] = std::fma(a[i + j], b[i + j], parts[j]);
  for (; i + FEW <= n; i += FEW)
#pragma omp simd
    for (i64 j = 0; j < FEW; ++j) parts[j] = std::fma(a[i + j], b[i + j], parts[j]);
  for (; i < n; ++i) sum = std::fma(a[i], b[i], sum);
  for (i64 half = LANES / 2; half > 0; half /= 2)
    for (i64 j = 0; j < half; ++j) parts[j] += parts[j + half];
  return sum + parts[0];
}

void add_scaled(float* out, const float* x, float factor, i64 n) {
#pragma omp simd
  for (i64 i = 0; i < n; ++i) out[i] = std::fma(factor, x[i], out[i]);
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

float rms(const float* x, i64 n, float eps) { return 1.0f / std::sqrt(dot(x, x, n) / static_cast<float>(n) + eps); }

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

// This thread's number in its team, and the team's size.
#ifdef _OPENMP
i64 thread() { return omp_get_thread_num(); }
i64 team() { return omp_get_num_threads(); }
#else
i64 thread() { return 0; }
i64 team() { return 1; }
#endif

// Multiplications from which a second thread gains more than it takes to wake it.
constexpr i64 MANY = 1 << 17;

bool inside(i64 slot, i64 capacity) { return slot >= 0 && slot < capacity; }

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
};

void q_norm_rope(const QNormRope* a) {
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
  i64 tokens, heads, dim, rope, rows, back;
};

void rope(const Rope* a) {
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
      for (i64 d = 0; d < dim; ++d) {
        // With nothing present the maximum is -inf: select, never subtract.
        const float weight = top[d] == -std::numeric_limits<float>::infinity() ? 0.0f : std::exp(score[d] - top[d]);
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

struct Attend {
  const float* q;
  const float* caches[2];
  const int32_t* slots[2];
  const int32_t* lens[2];
  i64 capacity[2], width[2], stride[2];
  const float* sink;
  float *out, *lse;
  i64 tokens, heads, dim;
  double scale;
  i64 threads;
};

// Attention of the heads of token `t` whose turn it is: each `turns`-th, from `turn` on.
static void attend_token(const Attend* a, i64 t, i64 turn, i64 turns, std::vector<const float*>& keys,
                         std::vector<float>& weights) {
  const float none = -std::numeric_limits<float>::infinity();
  i64 count = 0;
  for (int c = 0; c < 2; ++c)
    for (i64 n = 0; n < a->width[c] && n < a->lens[c][t]; ++n) {
      const i64 slot = a->slots[c][t * a->stride[c] + n];
      if (inside(slot, a->capacity[c])) keys[count++] = a->caches[c] + slot * a->dim;
    }
  for (i64 h = turn; h < a->heads; h += turns) {
    const float* q = a->q + (t * a->heads + h) * a->dim;
    float* out = a->out + (t * a->heads + h) * a->dim;
    float top = none, total = 0.0f;
    for (i64 n = 0; n < count; ++n) {
      weights[n] = dot(q, keys[n], a->dim) * static_cast<float>(a->scale);
      top = weights[n] > top || weights[n] != weights[n] ? weights[n] : top;
    }
    std::memset(out, 0, sizeof(float) * a->dim);
    if (top == none) {
      a->lse[t * a->heads + h] = -none;
      continue;
    }
    for (i64 n = 0; n < count; ++n) {
      weights[n] = std::exp(weights[n] - top);
      total += weights[n];
      add_scaled(out, keys[n], weights[n], a->dim);
    }
    const float lse = top + std::log(total);
    a->lse[t * a->heads + h] = lse;
    const float norm = (a->sink == nullptr ? 1.0f : 1.0f / (1.0f + std::exp(a->sink[h] - lse))) / total;
    for (i64 d = 0; d < a->dim; ++d) out[d] *= norm;
  }
}

void attend(const Attend* a) {
  const i64 width = a->width[0] + a->width[1];
  [[maybe_unused]] const bool many = a->tokens * a->heads * width * a->dim >= MANY;
#pragma omp parallel num_threads(static_cast<int>(a->threads)) if (many)
  {
    std::vector<const float*> keys(width);
    std::vector<float> weights(width);
    for (i64 t = 0; t < a->tokens; ++t) attend_token(a, t, thread(), team(), keys, weights);
  }
}

// `mixed` is streams times fn, or null, for few tokens, where the product is taken here.
struct Mix {
  const float *streams, *fn, *base, *scale, *norm_weight, *mixed;
  float *y, *post, *comb;
  i64 tokens, count, dim, iterations;
  double norm_eps, hc_eps;
  i64 threads;
};

static void mix_token(const Mix* a, i64 t, float* mix, float* sums) {
  const i64 n = a->count, dim = a->dim, rows = (n + 2) * n;
  const float eps = static_cast<float>(a->hc_eps), norm_eps = static_cast<float>(a->norm_eps);
  const float* x = a->streams + t * n * dim;
  const float factor = rms(x, n * dim, norm_eps);
  for (i64 r = 0; r < rows; ++r) {
    const float scale = a->scale[r < n ? 0 : r < 2 * n ? 1 : 2];
    const float product = a->mixed != nullptr ? a->mixed[t * rows + r] : dot(x, a->fn + r * n * dim, n * dim);
    mix[r] = product * factor * scale + a->base[r];
  }
  float* y = a->y + t * dim;
  std::memset(y, 0, sizeof(float) * dim);
  for (i64 k = 0; k < n; ++k) {
    add_scaled(y, x + k * dim, sigmoid(mix[k]) + eps, dim);
    a->post[t * n + k] = 2.0f * sigmoid(mix[n + k]);
  }
  const float norm = rms(y, dim, norm_eps);
  for (i64 d = 0; d < dim; ++d) y[d] = y[d] * norm * a->norm_weight[d];
  float* comb = a->comb + t * n * n;
  for (i64 i = 0; i < n; ++i) {
    const float* logits = mix + (2 + i) * n;
    float top = logits[0], total = 0.0f;
    for (i64 j = 1; j < n; ++j) top = logits[j] > top || logits[j] != logits[j] ? logits[j] : top;
    for (i64 j = 0; j < n; ++j) total += comb[i * n + j] = std::exp(logits[j] - top);
    for (i64 j = 0; j < n; ++j) comb[i * n + j] = comb[i * n + j] / total + eps;
  }
  // Columns first: the softmax was the first row step.
  for (i64 step = 0; step < 2 * a->iterations - 1; ++step) {
    std::fill(sums, sums + n, eps);
    for (i64 i = 0; i < n; ++i)
      for (i64 j = 0; j < n; ++j) sums[step % 2 == 0 ? j : i] += comb[i * n + j];
    for (i64 i = 0; i < n; ++i)
      for (i64 j = 0; j < n; ++j) comb[i * n + j] /= sums[step % 2 == 0 ? j : i];
  }
}

void mhc_pre(const Mix* a) {
  const i64 work = a->mixed == nullptr ? 0 : a->tokens * a->count * a->dim;
#pragma omp parallel num_threads(static_cast<int>(a->threads)) if (work >= MANY)
  {
    std::vector<float> mix((a->count + 2) * a->count), sums(a->count);
    for (i64 t = thread(); t < a->tokens; t += team()) mix_token(a, t, mix.data(), sums.data());
  }
}

struct Post {
  const float *streams, *output, *post, *comb;
  float* out;
  i64 tokens, count, dim;
};

void mhc_post(const Post* a) {
  const i64 n = a->count, dim = a->dim;
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

struct Experts {
  const float* x;
  const int32_t* ids;
  const float *weights, *w13, *w2, *shared_w13, *shared_w2;
  float* out;
  i64 tokens, top_k, experts, first, dim, inner, shared_inner;
  double limit;
  i64 threads;
};

// An expert that some tokens take, and where its hidden states of `inner` each begin.
struct Chosen {
  const float *w13, *w2;
  i64 inner, hidden;
  std::vector<i64> tokens;
  std::vector<float> weights;
};

// Adds an expert to the results of its tokens, by all threads of a team; each row of a weight is read once.
static void add_expert(const Experts* a, const Chosen& own, float* hidden) {
  const i64 dim = a->dim, inner = own.inner, count = static_cast<i64>(own.tokens.size());
  const float limit = static_cast<float>(a->limit);
#pragma omp for schedule(static)
  for (i64 i = 0; i < inner; ++i)
    for (i64 n = 0; n < count; ++n) {
      const float* x = a->x + own.tokens[n] * dim;
      float gate = dot(own.w13 + i * dim, x, dim), up = dot(own.w13 + (inner + i) * dim, x, dim);
      gate = gate > limit ? limit : gate;
      up = up > limit ? limit : up < -limit ? -limit : up;
      hidden[n * inner + i] = gate * sigmoid(gate) * up;
    }
  // Columns of the results stay with a thread, so that experts are added in their order without a barrier.
#pragma omp for schedule(static) nowait
  for (i64 d = 0; d < dim; ++d)
    for (i64 n = 0; n < count; ++n)
      a->out[own.tokens[n] * dim + d] += own.weights[n] * dot(own.w2 + d * inner, hidden + n * inner, inner);
}

void moe_experts(const Experts* a) {
  std::vector<Chosen> chosen;
  i64 hidden = 0;
  [[maybe_unused]] i64 work = 0;
  const auto add = [&](const float* w13, const float* w2, i64 inner, std::vector<i64> tokens,
                       std::vector<float> weights) {
    const i64 count = static_cast<i64>(tokens.size());
    chosen.push_back({w13, w2, inner, hidden, std::move(tokens), std::move(weights)});
    hidden += count * inner;
    work += 3 * count * inner * a->dim;
  };
  std::memset(a->out, 0, sizeof(float) * a->tokens * a->dim);
  for (i64 e = 0; e < a->experts; ++e) {
    std::vector<i64> tokens;
    std::vector<float> weights;
    for (i64 place = 0; place < a->tokens * a->top_k; ++place)
      if (a->ids[place] - a->first == e) {
        tokens.push_back(place / a->top_k);
        weights.push_back(a->weights[place]);
      }
    if (!tokens.empty())
      add(a->w13 + e * 2 * a->inner * a->dim, a->w2 + e * a->inner * a->dim, a->inner, std::move(tokens),
          std::move(weights));
  }
  if (a->shared_inner > 0) {
    std::vector<i64> tokens(a->tokens);
    for (i64 t = 0; t < a->tokens; ++t) tokens[t] = t;
    add(a->shared_w13, a->shared_w2, a->shared_inner, std::move(tokens), std::vector<float>(a->tokens, 1.0f));
  }
  std::vector<float> states(hidden);
#pragma omp parallel num_threads(static_cast<int>(a->threads)) if (work >= MANY)
  for (const Chosen& own : chosen) add_expert(a, own, states.data() + own.hidden);
}

struct Route {
  const float *x, *gate, *bias;
  const i64 *token_ids, *table;
  int32_t* ids;
  float* weights;
  i64 tokens, experts, dim, top_k, vocabulary;
  double scale;
};

void moe_route(const Route* a) {
  std::vector<float> scores(a->experts), order(a->experts);
  for (i64 t = 0; t < a->tokens; ++t) {
    int32_t* ids = a->ids + t * a->top_k;
    float *weights = a->weights + t * a->top_k, total = 0.0f;
    for (i64 e = 0; e < a->experts; ++e) {
      const float logit = dot(a->x + t * a->dim, a->gate + e * a->dim, a->dim);
      scores[e] = std::sqrt(logit > 20.0f ? logit : std::log1p(std::exp(logit)));  // softplus as torch has it
      order[e] = a->bias == nullptr ? scores[e] : scores[e] + a->bias[e];
      if (order[e] != order[e]) order[e] = std::numeric_limits<float>::infinity();  // NaN counts as the largest
    }
    for (i64 k = 0; k < a->top_k; ++k) {
      i64 best = -1;
      if (a->table != nullptr) {
        const i64 token = a->token_ids[t];
        best = inside(token, a->vocabulary) ? a->table[token * a->top_k + k] : -1;
        if (!inside(best, a->experts)) best = -1;
      } else {
        for (i64 e = 0; e < a->experts; ++e)
          if (std::find(ids, ids + k, e) == ids + k && (best < 0 || order[e] > order[best])) best = e;
      }
      ids[k] = static_cast<int32_t>(best);
      weights[k] = best < 0 ? 0.0f : scores[best];
      total += weights[k];
    }
    for (i64 k = 0; k < a->top_k; ++k) weights[k] = weights[k] / (total + 1e-20f) * static_cast<float>(a->scale);
  }
}

struct TopK {
  const float *q, *weights, *cache;
  const int32_t *block_table, *requests, *lens;
  int32_t* out;
  i64 tokens, heads, dim, rows, columns, block, pages, top_k;
};

void indexer_topk(const TopK* a) {
  std::vector<int32_t> entries;
  std::vector<float> logits;
  for (i64 t = 0; t < a->tokens; ++t) {
    const i64 request = a->requests[t];
    const int32_t* table = a->block_table + request * a->columns;
    entries.clear();
    if (inside(request, a->rows))
      for (i64 j = 0; j < a->lens[t] && j < a->columns * a->block; ++j)
        if (inside(table[j / a->block], a->pages)) entries.push_back(static_cast<int32_t>(j));
    if (static_cast<i64>(entries.size()) > a->top_k) {
      logits.assign(entries.back() + 1, 0.0f);
      for (const int32_t j : entries) {
        const float* key = a->cache + (table[j / a->block] * a->block + j % a->block) * a->dim;
        for (i64 h = 0; h < a->heads; ++h) {
          const float score = dot(a->q + (t * a->heads + h) * a->dim, key, a->dim);
          logits[j] += a->weights[t * a->heads + h] * (score > 0.0f || score != score ? score : 0.0f);
        }
      }
      // The larger first, of equal ones the smaller index; NaN last.
      const auto before = [&](int32_t i, int32_t j) {
        const float x = logits[i], y = logits[j];
        const bool no_x = x != x, no_y = y != y;
        if (no_x != no_y) return no_y;
        return no_x || x == y ? i < j : x > y;
      };
      std::nth_element(entries.begin(), entries.begin() + a->top_k, entries.end(), before);
      entries.resize(a->top_k);
      std::sort(entries.begin(), entries.end());
    }
    int32_t* out = a->out + t * a->top_k;
    std::fill(std::copy(entries.begin(), entries.end(), out), out + a->top_k, -1);
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

// Threads of a team that is asked for `wanted`: one without OpenMP.
i64 team_of(const i64* wanted) {
  i64 size = 1;
#pragma omp parallel num_threads(static_cast<int>(*wanted))
  {
#pragma omp single
    size = team();
  }
  return size;
}

}  // extern "C"
