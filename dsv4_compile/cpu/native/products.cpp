// CPU kernels whose time is that of their sums of products: attention, the indexer's scores, experts, the router, mixes
// of hyper-connections and GEMMs of few rows. Rows of results are shared out among `threads` threads where OpenMP is
// there; a sum is always of one thread. Structs are as in kernels.cpp.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "common.h"
#include "sums.h"

namespace {

// Addresses of `count` rows.
void rows_from(const float** rows, const float* first, i64 stride, i64 count) {
  for (i64 i = 0; i < count; ++i) rows[i] = first + i * stride;
}

}  // namespace

extern "C" {

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

// Attention of `heads` heads of token t from head h on, over `count` keys.
static void attend_heads(const Attend* a, i64 t, i64 h, i64 heads, const float* const* keys, i64 count,
                         float* weights) {
  const float none = -std::numeric_limits<float>::infinity(), scale = static_cast<float>(a->scale);
  const i64 width = a->width[0] + a->width[1], first = t * a->heads + h;
  const float* q[WIDE_BLOCK];
  float *out[WIDE_BLOCK], norm[WIDE_BLOCK];
  rows_from(q, a->q + first * a->dim, a->dim, heads);
  dots(q, heads, keys, count, a->dim, weights, width);
  for (i64 r = 0; r < heads; ++r) {
    float* own = weights + r * width;
    out[r] = a->out + (first + r) * a->dim;
    for (i64 n = 0; n < count; ++n) own[n] *= scale;
    const float top = largest(own, count);
#pragma omp simd
    for (i64 n = 0; n < count; ++n) own[n] = exponential(own[n] - top);
    const float sum = total(own, count), lse = top == none ? -none : top + std::log(sum);
    a->lse[first + r] = lse;
    norm[r] = top == none ? 0.0f : (a->sink == nullptr ? 1.0f : 1.0f / (1.0f + std::exp(a->sink[h + r] - lse))) / sum;
  }
  weighted(weights, width, heads, keys, count, a->dim, out);
  for (i64 r = 0; r < heads; ++r)
    for (i64 d = 0; d < a->dim; ++d) out[r][d] = norm[r] == 0.0f ? 0.0f : out[r][d] * norm[r];
}

void attend(const Attend* a) {
  const i64 width = a->width[0] + a->width[1];
  // Heads of a token read its keys together, unless threads would have nothing to do.
  const i64 together = a->tokens < a->threads ? BLOCK : WIDE_BLOCK, groups = (a->heads + together - 1) / together;
  [[maybe_unused]] const bool many = a->tokens * a->heads * width * a->dim >= MANY;
#pragma omp parallel num_threads(static_cast<int>(a->threads)) if (many)
  {
    std::vector<const float*> keys(width);
    std::vector<float> weights(together * width);
    i64 read = -1, count = 0;
    for (i64 item = thread(); item < a->tokens * groups; item += team()) {
      const i64 t = item / groups, h = item % groups * together;
      if (t != read) {
        read = t, count = 0;
        for (int c = 0; c < 2; ++c)
          for (i64 n = 0; n < a->width[c] && n < a->lens[c][t]; ++n) {
            const i64 slot = a->slots[c][t * a->stride[c] + n];
            if (inside(slot, a->capacity[c])) keys[count++] = a->caches[c] + slot * a->dim;
          }
      }
      attend_heads(a, t, h, std::min<i64>(together, a->heads - h), keys.data(), count, weights.data());
    }
  }
}

// Without `post` and `comb` the mix ends after the weights of the streams.
struct Mix {
  const float *streams, *fn, *base, *scale, *norm_weight;
  float *y, *post, *comb;
  i64 tokens, count, dim, iterations;
  double norm_eps, hc_eps;
  i64 threads;
};

// Coefficients of token t and what they make of its streams; `mix` is the token's row of streams times fn.
static void mix_token(const Mix* a, i64 t, float* mix, i64 rows, float* sums) {
  const i64 n = a->count, dim = a->dim;
  const float eps = static_cast<float>(a->hc_eps), norm_eps = static_cast<float>(a->norm_eps);
  const float* x = a->streams + t * n * dim;
  const float factor = rms(x, n * dim, norm_eps);
  for (i64 r = 0; r < rows; ++r) mix[r] = mix[r] * factor * a->scale[r < n ? 0 : r < 2 * n ? 1 : 2] + a->base[r];
  float* y = a->y + t * dim;
  std::memset(y, 0, sizeof(float) * dim);
  for (i64 k = 0; k < n; ++k) {
    const float pre = sigmoid(mix[k]) + eps;
#pragma omp simd
    for (i64 d = 0; d < dim; ++d) y[d] = std::fma(pre, x[k * dim + d], y[d]);
  }
  const float norm = rms(y, dim, norm_eps);
  for (i64 d = 0; d < dim; ++d) y[d] = y[d] * norm * a->norm_weight[d];
  if (a->comb == nullptr) return;
  for (i64 k = 0; k < n; ++k) a->post[t * n + k] = 2.0f * sigmoid(mix[n + k]);
  float* comb = a->comb + t * n * n;
  for (i64 i = 0; i < n; ++i) {
    const float* logits = mix + (2 + i) * n;
    const float top = largest(logits, n);
    float sum = 0.0f;
    for (i64 j = 0; j < n; ++j) sum += comb[i * n + j] = std::exp(logits[j] - top);
    for (i64 j = 0; j < n; ++j) comb[i * n + j] = comb[i * n + j] / sum + eps;
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
  const i64 n = a->count, rows = a->comb == nullptr ? n : (n + 2) * n, groups = (a->tokens + BLOCK - 1) / BLOCK;
  std::vector<const float*> fn(rows);
  rows_from(fn.data(), a->fn, n * a->dim, rows);
  [[maybe_unused]] const bool many = a->tokens * n * a->dim >= MANY;
#pragma omp parallel num_threads(static_cast<int>(a->threads)) if (many)
  {
    std::vector<float> mix(BLOCK * rows), sums(n);
    for (i64 g = thread(); g < groups; g += team()) {
      const i64 first = g * BLOCK, count = std::min<i64>(BLOCK, a->tokens - first);
      const float* x[BLOCK];
      rows_from(x, a->streams + first * n * a->dim, n * a->dim, count);
      dots(x, count, fn.data(), rows, n * a->dim, mix.data(), rows);
      for (i64 t = 0; t < count; ++t) mix_token(a, first + t, mix.data() + t * rows, rows, sums.data());
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

// An expert that some tokens take: their rows of x and of the result, and where its hidden states begin.
struct Chosen {
  const float *w13, *w2;
  i64 inner, hidden;
  std::vector<const float*> x;
  std::vector<float*> out;
  std::vector<float> weights;
};

// Adds an expert to the results of its tokens, by all threads of a team. Each block of a weight's rows meets all tokens
// while it is in the first cache.
static void add_expert(const Experts* a, const Chosen& own, float* hidden) {
  const i64 dim = a->dim, inner = own.inner, count = static_cast<i64>(own.x.size());
  const float limit = static_cast<float>(a->limit);
  std::vector<const float*> states(count);
  rows_from(states.data(), hidden, inner, count);
  std::vector<float> sums(count * 2 * BLOCK);
  const float* rows[2 * BLOCK];
#pragma omp for schedule(static)
  for (i64 i = 0; i < inner; i += BLOCK) {
    const i64 wide = std::min<i64>(BLOCK, inner - i);
    rows_from(rows, own.w13 + i * dim, dim, wide);
    rows_from(rows + wide, own.w13 + (inner + i) * dim, dim, wide);
    dots(own.x.data(), count, rows, 2 * wide, dim, sums.data(), 2 * wide);
    for (i64 n = 0; n < count; ++n)
      for (i64 j = 0; j < wide; ++j)
        hidden[n * inner + i + j] = swiglu(sums[n * 2 * wide + j], sums[n * 2 * wide + wide + j], limit);
  }
  // Columns of the results stay with a thread, so that experts are added in their order without a barrier.
#pragma omp for schedule(static) nowait
  for (i64 d = 0; d < dim; d += BLOCK) {
    const i64 wide = std::min<i64>(BLOCK, dim - d);
    rows_from(rows, own.w2 + d * inner, inner, wide);
    dots(states.data(), count, rows, wide, inner, sums.data(), wide);
    for (i64 n = 0; n < count; ++n)
      for (i64 j = 0; j < wide; ++j) own.out[n][d + j] += own.weights[n] * sums[n * wide + j];
  }
}

void moe_experts(const Experts* a) {
  std::vector<Chosen> chosen(a->experts + 1);
  i64 hidden = 0;
  [[maybe_unused]] i64 work = 0;
  const auto take = [&](Chosen& own, i64 token, float weight) {
    own.x.push_back(a->x + token * a->dim);
    own.out.push_back(a->out + token * a->dim);
    own.weights.push_back(weight);
  };
  std::memset(a->out, 0, sizeof(float) * a->tokens * a->dim);
  for (i64 e = 0; e < a->experts; ++e) {
    chosen[e].w13 = a->w13 + e * 2 * a->inner * a->dim, chosen[e].w2 = a->w2 + e * a->inner * a->dim;
    chosen[e].inner = a->inner;
  }
  for (i64 place = 0; place < a->tokens * a->top_k; ++place) {
    const i64 expert = a->ids[place] - a->first;
    if (inside(expert, a->experts)) take(chosen[expert], place / a->top_k, a->weights[place]);
  }
  Chosen& shared = chosen[a->experts];
  shared.w13 = a->shared_w13, shared.w2 = a->shared_w2, shared.inner = a->shared_inner;
  for (i64 t = 0; t < a->tokens && a->shared_inner > 0; ++t) take(shared, t, 1.0f);
  for (Chosen& own : chosen) {
    own.hidden = hidden;
    hidden += static_cast<i64>(own.x.size()) * own.inner;
  }
  work = 3 * hidden * a->dim;
  std::vector<float> states(hidden);
#pragma omp parallel num_threads(static_cast<int>(a->threads)) if (work >= MANY)
  for (const Chosen& own : chosen)
    if (!own.x.empty()) add_expert(a, own, states.data() + own.hidden);
}

struct Route {
  const float *x, *gate, *bias;
  const i64 *token_ids, *table;
  int32_t* ids;
  float* weights;
  i64 tokens, experts, dim, top_k, vocabulary;
  double scale;
  i64 threads;
};

// The experts of token t and their weights, from the token's logits, which become scores.
static void route_token(const Route* a, i64 t, float* scores, float* order) {
  int32_t* ids = a->ids + t * a->top_k;
  float *weights = a->weights + t * a->top_k, total = 0.0f;
  for (i64 e = 0; e < a->experts; ++e) {
    const float logit = scores[e];
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

void moe_route(const Route* a) {
  const i64 groups = (a->tokens + BLOCK - 1) / BLOCK;
  std::vector<const float*> gate(a->experts);
  rows_from(gate.data(), a->gate, a->dim, a->experts);
  [[maybe_unused]] const bool many = a->tokens * a->experts * a->dim >= MANY;
#pragma omp parallel num_threads(static_cast<int>(a->threads)) if (many)
  {
    std::vector<float> scores(BLOCK * a->experts), order(a->experts);
    for (i64 g = thread(); g < groups; g += team()) {
      const i64 first = g * BLOCK, count = std::min<i64>(BLOCK, a->tokens - first);
      const float* x[BLOCK];
      rows_from(x, a->x + first * a->dim, a->dim, count);
      dots(x, count, gate.data(), a->experts, a->dim, scores.data(), a->experts);
      for (i64 t = 0; t < count; ++t) route_token(a, first + t, scores.data() + t * a->experts, order.data());
    }
  }
}

struct TopK {
  const float *q, *weights, *cache;
  const int32_t *block_table, *requests, *lens;
  int32_t* out;
  i64 tokens, heads, dim, rows, columns, block, pages, top_k, threads;
};

// Logits of token t at its `entries`, whose keys are given.
static void index_token(const TopK* a, i64 t, const std::vector<int32_t>& entries, const float* const* keys,
                        std::vector<float>& logits) {
  constexpr i64 KEYS = 64;
  float scores[BLOCK * KEYS], sums[KEYS];
  const float* q[BLOCK];
  for (i64 n = 0; n < static_cast<i64>(entries.size()); n += KEYS) {
    const i64 count = std::min<i64>(KEYS, static_cast<i64>(entries.size()) - n);
    std::fill(sums, sums + count, 0.0f);
    for (i64 h = 0; h < a->heads; h += BLOCK) {
      const i64 tall = std::min<i64>(BLOCK, a->heads - h);
      rows_from(q, a->q + (t * a->heads + h) * a->dim, a->dim, tall);
      dots(q, tall, keys + n, count, a->dim, scores, KEYS);
      for (i64 r = 0; r < tall; ++r) {
        const float weight = a->weights[t * a->heads + h + r], *row = scores + r * KEYS;
#pragma omp simd
        for (i64 j = 0; j < count; ++j) sums[j] += weight * (row[j] > 0.0f || row[j] != row[j] ? row[j] : 0.0f);
      }
    }
    for (i64 j = 0; j < count; ++j) logits[entries[n + j]] = sums[j];
  }
}

void indexer_topk(const TopK* a) {
  [[maybe_unused]] const bool many = a->tokens * a->heads * a->columns * a->block * a->dim >= MANY;
#pragma omp parallel num_threads(static_cast<int>(a->threads)) if (many)
  {
    std::vector<int32_t> entries;
    std::vector<const float*> keys;
    std::vector<float> logits;
    for (i64 t = thread(); t < a->tokens; t += team()) {
      const i64 request = a->requests[t];
      const int32_t* table = a->block_table + request * a->columns;
      entries.clear();
      if (inside(request, a->rows))
        for (i64 j = 0; j < a->lens[t] && j < a->columns * a->block; ++j)
          if (inside(table[j / a->block], a->pages)) entries.push_back(static_cast<int32_t>(j));
      if (static_cast<i64>(entries.size()) > a->top_k) {
        keys.clear();
        for (const int32_t j : entries)
          keys.push_back(a->cache + (table[j / a->block] * a->block + j % a->block) * a->dim);
        logits.resize(entries.back() + 1);
        index_token(a, t, entries, keys.data(), logits);
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
}

struct MatMul {
  const float* x;
  i64 stride;
  const float* weight;
  float* out;
  i64 out_stride, tokens, dim, columns, threads;
};

void matmul(const MatMul* a) {
  std::vector<const float*> x(a->tokens);
  rows_from(x.data(), a->x, a->stride, a->tokens);
  [[maybe_unused]] const bool many = a->tokens * a->dim * a->columns >= MANY;
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(a->threads)) if (many)
  for (i64 c = 0; c < a->columns; c += BLOCK) {
    const i64 wide = std::min<i64>(BLOCK, a->columns - c);
    const float* rows[BLOCK];
    rows_from(rows, a->weight + c * a->dim, a->dim, wide);
    dots(x.data(), a->tokens, rows, wide, a->dim, a->out + c, a->out_stride);
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
